"""`--rules`, `--state-dtypes`, `--parameters`, `--fp8` of commands: who takes them, what is refused."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from example_tasks import load_task
from made_runs import make_run

import jmp_train as jt
import jmp_train.app.runs
from jmp_train.app.cli import compare as compare_command
from jmp_train.app.cli import train as train_module
from jmp_train.app.cli.compare import call_as_text, call_from_text
from jmp_train.app.cli.entry import main
from jmp_train.app.cli.jobs import read_rules
from jmp_train.app.cli.options import SetupOptions
from jmp_train.app.cli.train import TrainOptions
from jmp_train.app.runs import FewBits, RunSettings, prepare_run
from jmp_train.app.runs.events import Run
from jmp_train.policies import Fp8State, KahanState, StateDtypesState
from jmp_train.policies.optimizers import StochasticRoundingState
from jmp_train.policies.pytrees import find_nodes

pytestmark = pytest.mark.quick

HALF = "params=bfloat16,compute=bfloat16"
RULES = jt.AutocastRules(primitives=(("dot_general", "float32"),), paths=(("head", "keep"),))


@pytest.fixture(autouse=True)
def files_of_rules(folder: Path) -> None:
    RULES.save("rules.toml")
    jt.TORCH_CUDA.save("torch.toml")
    jt.TORCH_CUDA.replace(paths={"head": "fp8"}).save("few_bits.toml")
    Path("bad.toml").write_text('format = "jmp_train autocast rules"\nversion = 1\npaths = [["a", "half"]]')
    Path("broken.toml").write_text("[")
    Path("config.toml").write_text('[fp16]\nmode = "torch"')


REFUSED = {
    "train karate:task --rules none.toml": "--rules none.toml: No such file or directory",
    "train karate:task --rules .": "--rules . is not a regular file",
    "train karate:task --rules /dev/zero": "--rules /dev/zero is not a regular file",
    "train karate:task --rules=": "argument --rules: '' is not a path",
    "train karate:task --rules broken.toml": "--rules broken.toml is not a TOML file: ",
    "train karate:task --rules config.toml": "--rules config.toml is not a file of autocast rules: format must be",
    "train karate:task --rules bad.toml": (
        "--rules bad.toml: paths: the rule of 'a' must be one of lower, float32, promote, demote, keep, fp8"
    ),
    "train karate:task --policy mixed_float16 --rules rules.toml": (
        "--rules rules.toml: mixed_float16 does not autocast; use autocast_float16, autocast_bfloat16, torch and"
    ),
    "train karate:task --mode apex-O2 --rules none.toml": "--rules none.toml: apex-O2 does not autocast; ",
    "train karate:task --policy half --rules rules.toml": "--rules rules.toml: half does not autocast; ",
    "diagnose karate:task --mode naive --rules rules.toml": "--rules rules.toml: naive does not autocast; ",
    "diagnose karate:task --rules bad.toml": "--rules bad.toml: paths: the rule of 'a'",
    "compare karate:task --rules bad.toml": "--rules bad.toml: paths: the rule of 'a'",
    "compare karate:task --modes float32 apex-O3 --rules rules.toml": (
        "--rules rules.toml: float32, apex-O3 do not autocast; use autocast_float16, "
    ),
    "train karate:task --state-dtypes nu": "argument --state-dtypes: 'nu' is not FIELD=DTYPE, such as nu=bfloat16",
    "train karate:task --state-dtypes nu=int4": "argument --state-dtypes: dtypes['nu']='int4' must be one of bfloat16",
    "train karate:task --state-dtypes nu=int8 nu=uint8": "--state-dtypes names nu more than once",
    "train karate:task --state-dtypes trace=int8": (
        "--state-dtypes trace=int8: with_state_dtypes: 'trace' matches no floating array of the optimizer's state"
    ),
    "diagnose karate:task --state-dtypes trace=int8": "--state-dtypes trace=int8: with_state_dtypes: 'trace' matches",
    "train karate:task --parameters half": "argument --parameters: invalid choice: 'half' (choose from",
    "train karate:task --policy mixed_bfloat16 --parameters kahan": (
        "--parameters kahan is for policies with parameters in half precision, which mixed_bfloat16 is not; "
    ),
    "compare karate:task --modes float32 apex-O2 --parameters kahan-int8": (
        "--parameters kahan-int8 is for policies with parameters in half precision, which float32, apex-O2 are not"
    ),
    "train karate:task --fp8 fast": "argument --fp8: invalid choice: 'fast' (choose from",
    "train karate:task --policy autocast_bfloat16 --rules few_bits.toml": (
        "--rules few_bits.toml has entries 'fp8': name their recipe too, as --fp8 Float8CurrentScaling"
    ),
    "train karate:task --mode torch --fp8 DelayedScaling": (
        "--fp8 DelayedScaling: torch does not autocast as policies; use autocast_bfloat16 or autocast_float16"
    ),
    "diagnose karate:task --policy autocast_bfloat16,0.5:float32 --fp8 DelayedScaling": (
        "--fp8 DelayedScaling has a state, which the phases of autocast_bfloat16,0.5:float32 cannot share"
    ),
}


@pytest.mark.parametrize("call", REFUSED)
def test_what_cannot_be_is_told_before_anything_is_written(
    call: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = call.split()
    out = ("--checkpoint-dir", "new") if command == "train" else ("--out", "new")
    assert main([command, *rest, *out]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.count("\n") == 1 or "trace" in call, "but for the names of the state's arrays"
    assert error.startswith(f"jmp-train: error: {REFUSED[call]}")
    assert not (folder / "new").exists()


def test_the_name_of_a_file_can_be_printed_anywhere(folder: Path) -> None:
    file = Path("a\n\x1b[31m\udcff.toml")
    RULES.save(file)
    rules = read_rules(SetupOptions(rules=file))
    assert rules is not None
    assert (rules.name, rules.rules) == (r"a\n\x1b[31m\udcff.toml", RULES)
    assert read_rules(SetupOptions()) is None


def test_train_hands_the_rules_on_and_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(prepared: Any, state: object, *, on_event: Any, **others: object) -> Run:
        rules = prepared.settings.rules
        assert rules.rules == RULES
        run = dataclasses.replace(make_run(prepared.name), rules=rules.name)
        on_event(run)
        return run

    monkeypatch.setattr(train_module, "train_prepared", train)
    call = ("train", "karate:task", "--mode", "apex-O1", "--rules", "rules.toml")
    assert main(call) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "apex-O1: autocast by the rules of rules.toml"
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rules"] == "rules.toml"


def test_compare_gives_options_to_those_that_take_them_and_the_report_names_the_rules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = Path("rules.toml")
    wanted = {
        "float32": {},
        "autocast_bfloat16": {"fp8": "Float8CurrentScaling", "rules": rules},
        HALF: {"parameters": "kahan-int8"},
        "torch": {"rules": rules},
    }
    ruled = [name for name in wanted if "rules" in wanted[name]]
    options = {}

    def run_in_process(call: Any, name: str, display: object) -> Run:
        options[name] = call_from_text(call_as_text(call, name)).options
        return dataclasses.replace(make_run(name), rules="rules.toml" if name in ruled else None)

    monkeypatch.setattr(compare_command, "_run_in_process", run_in_process)
    given = ("--state-dtypes", "nu=bfloat16", "--parameters", "kahan-int8", "--fp8", "Float8CurrentScaling")
    assert main(["compare", "karate:task", "--policies", *wanted, *given, "--rules", "rules.toml", "--out", "out"]) == 0
    both = {"state_dtypes": ("nu=bfloat16",)}
    assert options == {name: TrainOptions(policy=name, **both, **wanted[name]) for name in wanted}
    said = [line for line in capsys.readouterr().out.splitlines() if "by the rules" in line]
    assert said == [f"{name}: autocast by the rules of rules.toml" for name in ruled]
    page = Path("out/report.html").read_text()
    assert all(f"<p>{line}</p>" in page for line in said)
    runs = json.loads(Path("out/report.json").read_text())["runs"]
    assert [run["policy"] for run in runs if run.get("rules") == "rules.toml"] == ruled


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::jmp_train.policies.UnmetRulesWarning")  # karate has no head
def test_a_run_with_rules_goes_on_with_the_same_rules_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("train", "karate:task", "--epochs", "2", "--checkpoint-dir", "run", "--json")
    assert main([*run, "--rules", "rules.toml"]) == 0
    final = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert final["rules"] == "rules.toml"
    assert final["costs"]["half_flops_share"] < 0.1
    metadata = json.loads(Path("run/run.json").read_text())
    assert metadata["rules_file"] == str(folder / "rules.toml")
    for other, said in (("torch.toml", "this call [0-9a-f]{16}"), (None, "this call the default")):
        assert main([*run, "--resume", *(("--rules", other) if other else ())]) == 2
        pattern = rf"is of another run:\n  rules: the run has {metadata['run']['rules']}, {said}\n"
        assert re.search(pattern, capsys.readouterr().err)
    Path("rules.toml").rename("moved.toml")
    assert main([*run, "--resume", "--rules", "moved.toml"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rules"] == "moved.toml"

    diagnose = ("diagnose", "karate:task", "--epochs", "2", "--rules", "moved.toml")
    assert main([*diagnose, "--checkpoint-dir", "run", "--json"]) in (0, 3)
    found = json.loads(capsys.readouterr().out)
    assert list(found)[:4] == ["task", "policy", "rules", "step"]
    assert (found["rules"], found["step"]) == ("moved.toml", 2)
    products = [row for row in found["rows"] if row["primitive"] == "dot_general"]
    assert {row["dtype"] for row in products} == {"float32"}
    assert main([*diagnose]) in (0, 3)
    assert capsys.readouterr().out.startswith("karate:task, autocast_float16, rules of moved.toml, step 0:\n")


def test_train_hands_few_bits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def train(prepared: Any, state: object, **others: object) -> Any:
        given.append(prepared.settings.few_bits)
        return make_run(prepared.name)

    monkeypatch.setattr(train_module, "train_prepared", train)
    call = ("train", "karate:task", "--policy", HALF, "--state-dtypes", "mu=int8", "nu=uint8", "--parameters", "kahan")
    assert main(call) == 0
    assert given == [FewBits(("mu=int8", "nu=uint8"), "kahan")]


@pytest.mark.parametrize(
    ("parameters", "kind"), [("kahan", KahanState), ("kahan-int8", KahanState), ("stochastic-rounding", None)]
)
def test_a_run_keeps_its_state_so(parameters: str, kind: type[Any] | None, folder: Path) -> None:
    few_bits = FewBits(("mu=int8",), parameters)
    prepared, state = prepare_run(load_task("karate"), HALF, RunSettings(few_bits=few_bits), with_metadata=True)
    assert len(find_nodes(state.opt_state, kind or StochasticRoundingState)) == 1
    (_, kept), *_ = find_nodes(state.opt_state, StateDtypesState)
    assert kept.inner_state is not None
    if kind is KahanState:
        compensation = jax.tree.leaves(state.opt_state.compensation)[0]
        assert compensation.dtype == (jnp.int8 if parameters == "kahan-int8" else jnp.uint16)
    assert prepared.metadata["run"]["state_dtypes"] == ["mu=int8"]
    assert prepared.metadata["run"]["parameters"] == parameters
    assert "fp8" not in prepared.metadata["run"]


def test_dense_layers_are_in_8_bits_or_what_rules_name() -> None:
    policy: Any = jt.get_policy("autocast_bfloat16")
    few_bits = FewBits(fp8="MXFP8BlockScaling")
    own: Any = few_bits.policy(policy, has_rules=False)
    assert (own.fp8, dict(own.rules.primitives)["dot_general"]) == (jt.policies.MXFP8BlockScaling(), "fp8")
    given: Any = few_bits.policy(policy, has_rules=True)
    assert (given.fp8, given.rules) == (jt.policies.MXFP8BlockScaling(), policy.rules)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "DelayedScaling"])
def test_the_language_model_trains_in_8_bits_and_goes_on(
    recipe: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ("train", "lm:task", "--train-size", "64", "--epochs", "2", "--policy", "autocast_bfloat16", "--fp8", recipe)
    options = ("--checkpoint-dir", "run", "--state-dtypes", "nu=bfloat16", "--json")
    assert main([*call, *options]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert run["epochs"][-1]["loss"] < run["epochs"][0]["loss"]
    assert json.loads(Path("run/run.json").read_text())["run"]["fp8"] == recipe
    assert main([*call, *options, "--resume"]) == 0
    assert main([*call[:-2], *options, "--resume"]) == 2
    assert f"fp8: the run has {recipe}, this call the default" in capsys.readouterr().err
    _, state = prepare_run(load_task("lm"), "autocast_bfloat16", RunSettings(few_bits=FewBits(fp8=recipe)))
    assert isinstance(state.model_state, Fp8State) == (recipe == "DelayedScaling")
