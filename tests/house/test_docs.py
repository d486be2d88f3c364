"""Every public name is documented by an example that runs, and so are the pages."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dist import check_changelog
from image_files import write_cifar, write_image_folder, write_mnist

import jmp_train as jt
import jmp_train.graphs
import jmp_train.policies

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
ALIASES = {"Batch", "Grads", "Metrics", "ModelState", "OptState", "Params", "PyTree"}  # of types
PUBLIC = {
    name: thing
    for module in (jt, jmp_train.policies, jmp_train.graphs)
    for name, thing in vars(module).items()
    if not name.startswith("_") and not inspect.ismodule(thing) and name not in ALIASES
} | {"plan": jt.plan}
# Names that other faces offer beside those that the top level has.
PUBLIC |= {
    name: getattr(face, name)
    for face, names in {
        jt.steps: ("StepCosts", "TrainStep", "step_costs", "with_fp8_state"),
        jt.parallel: ("Stages", "specs_by_path", "state_shardings"),
        jt.tuning: ("Tolerance", "TunedRules"),
        jt.planning: ("Allowances", "Plan", "PlanRow"),
        jt.distributed: ("broadcast_state", "check_agreement", "initialize", "is_main_process"),
    }.items()
    for name in names
}
# A logger, and what stability.md names as not offered.
NOT_OFFERED = ("jmp_train.amp", "jmp_train.parallel.parallel_steps")
GUIDES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md"))]
RECIPES = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs" / "recipes").glob("*.md"))]
MIGRATION = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs" / "migration").glob("*.md"))]
QUICK_PAGE = "docs/recipes/scan.md"  # small: it shows that blocks are found and run
PAGES = ("README.md", *GUIDES, *RECIPES, *MIGRATION)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run_script(code_or_file: str, *arguments: str, cwd: Path, timeout: float = 200) -> str:
    start = ("-c", code_or_file) if "\n" in code_or_file else (code_or_file,)
    result = subprocess.run(
        (sys.executable, *start, *arguments),
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


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


def test_the_top_level_has_at_most_80_names() -> None:
    lazy = set(jmp_train._LAZY) | {"plan"}
    imported = re.findall(r"^from [\w.]+ import (\w+) as \1$", Path(jmp_train.__file__).read_text(), re.MULTILINE)
    assert len(lazy | set(imported)) <= 80


def test_the_readme_example_is_short() -> None:
    assert blocks("README.md")[0].count("\n") <= 15


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page == QUICK_PAGE else pytest.mark.full)
        for page in ("README.md", *GUIDES, *RECIPES)
        if blocks(page) and page != "docs/plan.md"
    ],
)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_script("\n".join(blocks(page)), cwd=tmp_path)


@pytest.mark.full
@pytest.mark.usefixtures("compiler")
def test_the_code_of_the_page_about_plans_runs(tmp_path: Path) -> None:
    run_script("\n".join(blocks("docs/plan.md")), cwd=tmp_path)


def test_the_index_names_every_page() -> None:
    named = re.findall(r"^\d+\. \[[^]]+\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text(), re.MULTILINE)
    assert sorted(f"docs/{page}" for page in ["README.md", "index.md", *named]) == GUIDES


def test_the_index_of_recipes_names_every_page() -> None:
    index = (ROOT / "docs/recipes/index.md").read_text()
    linked = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert {f"docs/recipes/{page}" for page in linked} | {"docs/recipes/index.md"} == set(RECIPES)


def test_every_name_in_docs_and_examples_is_reachable_from_a_face() -> None:
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
    """A module that is not a folder's face; `fn` is offered as one."""
    return inspect.ismodule(thing) and not hasattr(thing, "__path__") and thing is not jt.graphs.fn


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*PAGES, "CONTRIBUTING.md", "SUPPORT.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md"):
        prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)  # without x[0](y)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("digits.py", "autocast_float16"),
        *(("amp_modes.py", mode) for mode in ("torch", "apex-O2", "apex-O3", "config.toml")),
    ],
)
def test_the_digits_examples_reach_their_accuracy(name: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[fp16]\nmode = "naive"\ninitial_scale = 65536.0\n')
    output = run_script(str(ROOT / "examples" / name), option, cwd=tmp_path)
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 97


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_precision_schedule_that_is_stopped_in_both_phases_ends_with_the_same_bits(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "precision_schedule.py")
    whole = run_script(example, "whole", cwd=tmp_path)
    for stop, compiled in (("130", 1), ("370", 2)):  # the switch is after step 360
        output = run_script(example, "parts", stop, cwd=tmp_path)
        assert output.count("compiling") == compiled
        assert output.splitlines()[-1].startswith(f"step {stop}  loss ")
    last = run_script(example, "parts", cwd=tmp_path).splitlines()[-1]
    assert last == whole.splitlines()[-1]
    accuracy = re.match(r"test accuracy ([\d.]+)%  parameters \w{16}$", last)
    assert accuracy is not None
    assert float(accuracy[1]) > 95


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_nan_hunt_finds_the_line_and_its_rule_mends_it(tmp_path: Path) -> None:
    example = ROOT / "examples" / "nan_hunt.py"
    output = run_script(str(example), cwd=tmp_path)
    before, after = (float(loss) for loss in re.findall(r"^loss ([\d.]+),", output, re.MULTILINE))
    assert before > 3.4
    assert after < 0.1
    line = next(i for i, code in enumerate(example.read_text().splitlines(), 1) if "jnp.mean(x * x" in code)
    assert re.search(rf"^problem: overflow, forward pass,\s+.*nan_hunt.py:{line}\b", output, re.MULTILINE)
    assert max(map(len, output.splitlines())) <= 100


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_reward_rises_in_float16_whose_mismatch_is_at_most_a_quarter_of_bfloat16s(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "grpo_float16.py")
    output = run_script(example, "--dtypes", "bfloat16", "float16", "--steps", "70", cwd=tmp_path, timeout=500)
    row = r"^(b?float16) +([\d.]+) to ([\d.]+) +([\d.e-]+) +([\d.]+)%"
    rows = {name: list(map(float, row)) for name, *row in re.findall(row, output, re.MULTILINE)}
    first, last, mismatch, within = rows["float16"]
    assert last > first + 0.08
    assert mismatch <= rows["bfloat16"][2] / 4
    assert within > rows["bfloat16"][3]


@pytest.mark.full
def test_the_message_passing_example_agrees_with_itself_and_the_hub_is_right(
    tmp_path: Path,
) -> None:
    example = str(ROOT / "examples" / "message_passing.py")
    output = run_script(
        f"import runpy, warnings\nwarnings.simplefilter('error')\nrunpy.run_path({example!r}, run_name='__main__')",
        cwd=tmp_path,
    )
    *lines, hub = output.splitlines()
    assert hub == "hub 13160, by jax.ops.segment_sum 2048"
    found = [
        re.fullmatch(r"(\w+) +\((.*)\) float16, float16  largest ([\d.]+), difference ([\d.]+)", line) for line in lines
    ]
    assert [match and match.group(1, 2) for match in found] == [
        ("x", "30, 16"),
        ("hx", "100, 1"),
        ("gradient", "100, 1"),
    ]
    for match in found:
        assert match is not None
        largest, difference = float(match[3]), float(match[4])
        assert largest > 1
        assert difference < 2e-3 * largest


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options", "epochs"),
    [
        ("basic.py", (), 10),
        pytest.param("pmap_mnist.py", ("--train-size", "2048"), 2, marks=pytest.mark.full),
        pytest.param("model_parallel.py", (), 10, marks=pytest.mark.full),
        pytest.param("model_parallel.py", ("tensor",), 10, marks=pytest.mark.full),
        pytest.param("sharded.py", ("zero1", "naive"), 10, marks=pytest.mark.full),
        pytest.param("sharded.py", ("fsdp", "torch"), 10, marks=pytest.mark.full),
        pytest.param("pipeline.py", (), 10, marks=pytest.mark.full),
    ],
)
def test_a_data_parallel_example_loses_the_same_on_eight_devices_and_in_two_processes(
    name: str, options: tuple[str, ...], epochs: int, tmp_path: Path
) -> None:
    example = str(ROOT / "examples" / "data_parallel" / name)
    launch = ("-m", "jmp_train", "launch", "-n", "2", "--", example)
    losses = []
    for command in ((example,), launch):
        output = run_script(*command, *options, cwd=tmp_path)
        losses.append([float(loss) for loss in re.findall(r"epoch \d+  loss ([\d.]+)", output)])
        assert len(losses[-1]) == epochs, output  # by process 0 alone
    assert losses[0][-1] < 0.7 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=2e-3)


@pytest.mark.full
def test_the_skewed_example_waits_or_gives_up(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "data_parallel" / "skewed.py")
    launch = ("-m", "jmp_train", "launch", "-n", "2", "--", example, "--delay", "20")
    output = run_script(*launch, cwd=tmp_path)
    assert float(re.findall(r"process 0 waited ([\d.]+) s", output)[0]) > 19
    with pytest.raises(AssertionError, match="jmp-train: error: process 0 ended with exit code 1"):
        run_script(*launch, "--timeout", "5", cwd=tmp_path)


@pytest.mark.full
def test_the_reddit_example_learns_in_float16_as_in_float32(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "gat_reddit.py")
    losses = []
    for flag in ("--use-fp16", "--no-use-fp16"):
        output = run_script(example, flag, "--scale", "0.001", "--epochs", "20", cwd=tmp_path)
        *lines, last = output.splitlines()
        found = [re.fullmatch(r"epoch (\d+)  loss ([\d.]+|nan)  loss scale (\d+)  [\d.]+ s", line) for line in lines]
        assert [match and int(match[1]) for match in found] == list(range(1, 21))
        numbers = [(float(match[2]), int(match[3])) for match in found if match]
        losses.append([loss for loss, _ in numbers])
        assert (numbers[-1][1] > 1) == (flag == "--use-fp16")
        accuracy = re.fullmatch(r"test accuracy ([\d.]+)%", last)
        assert accuracy is not None
        assert float(accuracy[1]) > 60  # chance level: 25
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.01)
    assert max(run[-1] for run in losses) < 0.5 * losses[1][0]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_graph_classification_example_is_as_accurate_in_float16_as_in_float32(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "gin_proteins.py")
    accuracies = []
    for flag in ("--use-fp16", "--no-use-fp16"):
        output = run_script(example, flag, "--count", "600", "--epochs", "6", cwd=tmp_path)
        *lines, traces, last = output.splitlines()
        found = [re.fullmatch(r"loss ([\d.]+)", line) for line in lines]
        losses = [float(match[1]) for match in found if match]
        assert len(losses) == 6 and losses[-1] < losses[0]
        assert traces == "2 traces for 2 sizes"
        accuracy = re.fullmatch(r"test accuracy ([\d.]+)%", last)
        assert accuracy is not None
        accuracies.append(float(accuracy[1]))
    assert min(accuracies) > 80
    assert abs(accuracies[0] - accuracies[1]) < 9  # of 60 graphs, 5


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "options", "least", "apart"),
    [
        ("appnp_cora.py", ("--epochs", "20"), 85, 3),
        ("edgeconv_shapes.py", ("--count", "320", "--epochs", "8"), 45, 15),
        ("pna_networks.py", ("--count", "320", "--epochs", "8"), 75, 10),
    ],
)
def test_examples_of_layers_are_as_accurate_in_float16_as_in_float32(
    name: str, options: tuple[str, ...], least: float, apart: float, tmp_path: Path
) -> None:
    """Test sets are small: of 64 networks or 80 clouds, 6 or 12 may be others."""
    accuracies = []
    for flag in ("--use-fp16", "--no-use-fp16"):
        output = run_script(str(ROOT / "examples" / name), flag, *options, cwd=tmp_path)
        *lines, traces, last = output.splitlines()
        found = [re.fullmatch(r"epoch \d+  loss ([\d.]+)", line) for line in lines]
        losses = [float(match[1]) for match in found if match]
        assert len(losses) == len(lines) and losses[-1] < losses[0]
        assert traces == "1 trace"
        accuracy = re.fullmatch(r"test accuracy ([\d.]+)%", last)
        assert accuracy is not None
        accuracies.append(float(accuracy[1]))
    assert min(accuracies) > least
    assert abs(accuracies[0] - accuracies[1]) < apart


@pytest.mark.full
def test_the_minibatch_example_learns_in_float16_as_in_float32(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "sage_minibatch.py")
    for flag in ("--use-fp16", "--no-use-fp16"):
        output = run_script(example, flag, "--scale", "0.005", "--epochs", "4", cwd=tmp_path)
        *lines, last = output.splitlines()
        found = [re.fullmatch(r"epoch \d  loss ([\d.]+)  [\d.]+ s", line) for line in lines]
        losses = [float(match[1]) for match in found if match]
        assert len(losses) == 4
        assert losses[-1] < 0.5 * losses[0]
        accuracy = re.fullmatch(r"test accuracy ([\d.]+)%", last)
        assert accuracy is not None
        assert float(accuracy[1]) > 90


@pytest.mark.full
def test_the_edge_example_learns_in_float16_as_in_float32_with_one_trace(tmp_path: Path) -> None:
    example, found = str(ROOT / "examples" / "edge_classification.py"), []
    for flag in ("--use-fp16", "--no-use-fp16"):
        last = run_script(example, flag, "--epochs", "4", cwd=tmp_path).splitlines()[-1]
        match = re.fullmatch(r"accuracy ([\d.]+)  traces 1", last)
        assert match is not None
        found.append(float(match[1]))
    assert min(found) > 0.85
    assert found[0] == pytest.approx(found[1], abs=0.02)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_relational_example_is_as_accurate_in_float16_as_in_float32(tmp_path: Path) -> None:
    example, accuracies = str(ROOT / "examples" / "rgcn_entities.py"), []
    for flag in ("--use-fp16", "--no-use-fp16"):
        *losses, traces, last = run_script(example, flag, cwd=tmp_path).splitlines()
        first, *_, final = (float(line.removeprefix("loss ")) for line in losses)
        assert final < first
        assert traces == "1 trace"
        match = re.fullmatch(r"test accuracy ([\d.]+)%", last)
        assert match is not None
        accuracies.append(float(match[1]))
    assert min(accuracies) > 80
    assert accuracies[0] == pytest.approx(accuracies[1], abs=2)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arguments", "score", "least", "apart"),
    [
        (("node2vec.py", "--epochs", "40"), "probe", 85, 5),
        (("node2vec.py", "--graph", "cora", "--epochs", "12"), "probe", 60, 3),
        (("saint_reddit.py", "--synthetic", "--scale", "0.005", "--epochs", "2"), "accuracy", 90, 3),
        (("gps_skip_links.py",), "accuracy", 95, 3),
        (("tgn_stream.py", "--events", "100000"), "AUC", 0.75, 0.03),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_graph_examples_learn_in_float16_as_in_float32(
    arguments: tuple[str, ...], score: str, least: float, apart: float, tmp_path: Path
) -> None:
    name, *options = arguments
    found = []
    for flag in ("--use-fp16", "--no-use-fp16"):
        last = run_script(str(ROOT / "examples" / name), flag, *options, cwd=tmp_path, timeout=280).splitlines()[-1]
        match = re.search(rf"{score} ([\d.]+)%?$", last)
        assert match is not None, last
        found.append(float(match[1]))
    assert min(found) > least
    assert found[0] == pytest.approx(found[1], abs=apart)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_memory_of_a_temporal_graph_network_beats_none(tmp_path: Path) -> None:
    found = {}
    for flag in ("--memory", "--no-memory"):
        last = run_script(
            str(ROOT / "examples" / "tgn_stream.py"), flag, "--events", "100000", cwd=tmp_path, timeout=280
        ).splitlines()[-1]
        found[flag] = float(last.split()[-1])
    assert found["--memory"] > found["--no-memory"] + 0.15


@pytest.mark.full
def test_the_link_example_learns_in_float16_as_in_float32(tmp_path: Path) -> None:
    example, found = str(ROOT / "examples" / "link_prediction.py"), []
    for flag in ("--use-fp16", "--no-use-fp16"):
        last = run_script(example, flag, "--epochs", "8", cwd=tmp_path).splitlines()[-1]
        match = re.fullmatch(r"AUC ([\d.]+)  MRR ([\d.]+)", last)
        assert match is not None
        found.append((float(match[1]), float(match[2])))
    assert min(auc for auc, _ in found) > 0.9
    assert found[0] == pytest.approx(found[1], abs=0.02)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_mnist_example_is_float32s_but_for_three_lines(tmp_path: Path) -> None:
    half = (ROOT / "examples" / "mnist_amp.py").read_text()
    full, replaced = re.subn(r"# float32: (.*)\n.*# AMP$", r"\1", half, flags=re.MULTILINE)
    full, removed = re.subn(r"^.*# AMP; float32 does without\n", "", full, flags=re.MULTILINE)
    assert (replaced, removed, half.count("# AMP")) == (2, 1, 3)
    assert not re.search("float16|half|loss_scale", full.partition('"""\n\nimport')[2])
    write_mnist(tmp_path, train=520, test=50)
    losses = []
    for name, code in (("half.py", half), ("full.py", full)):
        (tmp_path / name).write_text(code)
        output = run_script(name, str(tmp_path), "1", cwd=tmp_path)
        result = re.fullmatch(r"epoch 1  loss ([\d.]+)  test accuracy [\d.]+%\n", output)
        assert result is not None, output
        losses.append(float(result[1]))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert 0 < losses[1] < 2.6


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_resnet_example_trains_in_a_mode_and_by_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[fp16]\nmode = "naive"\ninitial_scale = 1024.0\n')
    write_cifar(tmp_path, examples=8)
    example = str(ROOT / "examples" / "resnet34_cifar10.py")
    sizes = ("--data-dir", ".", "--epochs", "1", "--batch-size", "8", "--train-size", "16")
    losses = []
    for precision in (("--mode", "float32"), ("--config", "config.toml")):
        output = run_script(example, *sizes, *precision, cwd=tmp_path)
        result = re.fullmatch(
            r"epoch 1  loss ([\d.]+)  loss scale ([\d.]+)  skipped 0  [\d.]+ s  "
            r"test accuracy [\d.]+%\n",
            output,
        )
        assert result is not None, output
        losses.append(float(result[1]))
        assert float(result[2]) == (1 if precision[0] == "--mode" else 1024)
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["float32", "apex-O2"])
def test_the_vit_example_trains_on_a_folder(mode: str, tmp_path: Path) -> None:
    write_image_folder(tmp_path, train=16, val=4)
    example = str(ROOT / "examples" / "vit_imagenet.py")
    options = ("--data-dir", ".", "--image-size", "16", "--batch-size", "8", "--epochs", "6")
    output = run_script(example, *options, "--mode", mode, cwd=tmp_path, timeout=850)
    losses = [float(loss) for loss in re.findall(r"epoch \d  loss ([\d.]+)  loss scale", output)]
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0] < 0.5
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) == 100


def test_the_changelog_and_the_version_agree() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text
    check_changelog(text, jt.__version__)
