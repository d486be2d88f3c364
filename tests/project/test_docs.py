"""Every public name is documented by an example that runs, and so are the pages."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from dist import check_changelog
from process_helpers import run_python

import jmp_train as jt
import jmp_train.graphs
import jmp_train.policies

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
ALIASES = {"Batch", "Grads", "Metrics", "ModelState", "OptState", "Params", "PyTree"}  # of types
PUBLIC = {
    name: thing
    for module in (jt, jmp_train.policies, jmp_train.graphs)
    for name, thing in ((name, getattr(module, name)) for name in dir(module))
    if not name.startswith("_") and not inspect.ismodule(thing) and name not in ALIASES
}
# Names that other interfaces offer beside those that the top level has.
PUBLIC |= {
    name: getattr(interface, name)
    for interface, names in {
        jt.steps: ("StepCosts", "TrainStep", "step_costs", "with_fp8_state"),
        jt.parallel: ("Stages", "specs_by_path", "state_shardings"),
        jt.tuning: ("Tolerance", "TunedRules"),
        jt.planning: ("Allowances", "Machine", "Plan", "PlanRow", "PlanSearch", "Workload"),
        jt.distributed: ("broadcast_state", "check_agreement", "initialize", "is_main_process"),
    }.items()
    for name in names
}
# A logger, and what stability.md names as not offered.
NOT_OFFERED = ("jmp_train.amp", "jmp_train.parallel.parallel_steps")
GUIDES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md"))]
RECIPES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs" / "recipes").glob("*.md"))]
HOW_IT_WORKS = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs" / "how_it_works").glob("*.md"))]
MIGRATION = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs" / "migration").glob("*.md"))]
PAGES = ("README.md", *GUIDES, *RECIPES, *HOW_IT_WORKS, *MIGRATION)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_public_names_are_those_of_the_design() -> None:
    assert {
        "amp_mode", "amp_from_config", "with_master_weights",
        "Policy", "get_policy", "half_dtype", "cast_to_full", "cast_to_half", "apply_policy",
        "policy_by_path", "NoOpLossScale", "StaticLossScale", "DynamicLossScale",
        "torch_loss_scale", "apex_loss_scale", "megatron_loss_scale", "deepspeed_loss_scale",
        "with_loss_scale", "LossScaledState", "get_loss_scale", "all_finite", "select_tree",
        "nonfinite_report", "scaled_value_and_grad", "reduce_gradients", "train_step", "stateless",
        "TrainState", "autocast", "autocast_as", "AutocastRules", "TORCH_CUDA", "TORCH_CPU",
        "APEX_O1", "explain_autocast", "segment_sum", "segment_mean", "segment_max", "segment_min",
        "segment_softmax", "gather", "data_parallel", "pmap_step", "Graph",
        "from_edges", "from_jraph", "to_jraph", "rand_graph",
        "update_all", "apply_edges", "edge_softmax", "gat_attention", "GraphConv", "SAGEConv",
        "GATConv", "GATv2Conv", "GINConv", "broadcast_state", "initialize",
        "CheckpointStore",
        "save_weights", "load_weights", "set_loss_scale", "loss_scale_from_torch",
        "loss_scale_to_torch", "spikes", "SkipRule",
    } <= set(PUBLIC)  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert ">>>" in text
    if inspect.isfunction(PUBLIC[name]):
        signature: Any = inspect.signature(PUBLIC[name])
        assert re.search(r"\AReturns |^Returns:", text, re.MULTILINE) or signature.return_annotation is None
        for parameter in signature.parameters:
            assert re.search(rf"^  \*{{0,2}}{parameter}: ", text, re.MULTILINE), parameter


def test_the_top_level_has_at_most_74_names_beside_modules() -> None:
    names = {name for name in dir(jt) if not name.startswith("_") and not inspect.ismodule(getattr(jt, name))}
    assert len(names) <= 74


def test_scripts_that_train_do_not_wait_for_imports_of_the_tools_and_flax_knows_the_states() -> None:
    found = run_python(
        "-c",
        "import sys, flax.serialization, jmp_train\n"
        "print('jmp_train.tools' in sys.modules, 'diagnose' in dir(jmp_train))\n"
        "print(*flax.serialization.to_state_dict(jmp_train.torch_loss_scale()))",
    )
    assert found.split("\n")[:2] == ["False True", "loss_scale counter"]


def test_the_readme_example_is_short() -> None:
    assert blocks("README.md")[0].count("\n") <= 15


@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [page for page in ("README.md", *GUIDES, *RECIPES, *HOW_IT_WORKS) if blocks(page) and page != "docs/plan.md"],
)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_python("-c", "\n".join(blocks(page)), cwd=tmp_path)


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_the_code_of_the_page_about_plans_runs(tmp_path: Path) -> None:
    run_python("-c", "\n".join(blocks("docs/plan.md")), cwd=tmp_path)


def test_the_index_names_every_page() -> None:
    named = re.findall(r"^\d+\. \[[^]]+\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text(), re.MULTILINE)
    assert sorted(f"docs/{page}" for page in ["README.md", "index.md", *named]) == GUIDES


def test_the_index_of_recipes_names_every_page() -> None:
    index = (ROOT / "docs/recipes/index.md").read_text()
    linked = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert {f"docs/recipes/{page}" for page in linked} | {"docs/recipes/index.md"} == set(RECIPES)


def test_every_name_in_docs_and_examples_is_reachable_from_a_interface() -> None:
    files = [ROOT / page for page in PAGES] + sorted((ROOT / "examples").rglob("*.*"))
    found = set()
    for path in (path for path in files if path.suffix in (".md", ".py")):
        for match in re.finditer(r"(?<![\w./])(?:jt|jmp_train)((?:\.[A-Za-z_]\w*)+)", path.read_text()):
            if match[0] not in NOT_OFFERED:
                found.add((path.name, match[1]))
    assert len(found) > 100
    for page, name in sorted(found):
        thing: Any = jt
        for part in name[1:].split("."):
            assert not _is_private_module(thing), f"{page}: {name}"
            if inspect.ismodule(thing) and not hasattr(thing, part):
                importlib.import_module(f"{thing.__name__}.{part}")
            thing = getattr(thing, part)
        assert not _is_private_module(thing), f"{page}: {name}"


def _is_private_module(thing: Any) -> bool:
    """A module that is not a folder's interface; `fn` is offered as one."""
    return inspect.ismodule(thing) and not hasattr(thing, "__path__") and thing is not jt.graphs.fn


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*PAGES, "CONTRIBUTING.md", "SUPPORT.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md"):
        prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)  # without x[0](y)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_changelog_and_the_version_agree() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text
    check_changelog(text, jt.__version__)
