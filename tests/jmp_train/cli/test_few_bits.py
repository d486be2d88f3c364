"""`--state-dtypes`, `--parameters` and `--fp8` of `train`, `compare`, `diagnose`: who takes them, what is refused."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from made_runs import make_run

import jmp_train as jt
import jmp_train.runs
from jmp_train.cli import compare as compare_command
from jmp_train.cli import train as train_module
from jmp_train.cli.entry import main
from jmp_train.policies import Fp8State, KahanState, StateDtypesState
from jmp_train.policies.optimizers import StochasticRoundingState
from jmp_train.policies.pytrees import find_nodes
from jmp_train.runs import FewBits, RunSettings, prepare_run
from jmp_train.tasks import load_task

pytestmark = pytest.mark.quick

HALF = "params=bfloat16,compute=bfloat16"


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # As tests of what the commands do with their process' environment.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    return tmp_path


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("train karate --state-dtypes nu", "argument --state-dtypes: 'nu' is not FIELD=DTYPE, such as nu=bfloat16"),
        ("train karate --state-dtypes nu=int4", "argument --state-dtypes: dtypes['nu']='int4' must be one of bfloat16"),
        ("train karate --state-dtypes nu=int8 nu=uint8", "--state-dtypes names nu more than once"),
        (
            "train karate --state-dtypes trace=int8",
            "--state-dtypes trace=int8: with_state_dtypes: 'trace' matches no floating array of the optimizer's state",
        ),
        ("diagnose karate --state-dtypes trace=int8", "--state-dtypes trace=int8: with_state_dtypes: 'trace' matches"),
        ("train karate --parameters half", "argument --parameters: 'half' is not one of kahan, kahan-int8, stochastic"),
        (
            "train karate --policy mixed_bfloat16 --parameters kahan",
            "--parameters kahan is for policies with parameters in half precision, which mixed_bfloat16 is not; ",
        ),
        (
            "compare karate --modes float32 apex-O2 --parameters kahan-int8",
            "--parameters kahan-int8 is for policies with parameters in half precision, which float32, apex-O2 are not",
        ),
        ("train karate --fp8 fast", "argument --fp8: 'fast' is not one of Float8CurrentScaling, DelayedScaling, MXFP8"),
        (
            "train karate --mode torch --fp8 DelayedScaling",
            "--fp8 DelayedScaling: torch does not autocast as policies; use autocast_bfloat16 or autocast_float16",
        ),
        (
            "diagnose karate --policy autocast_bfloat16,0.5:float32 --fp8 DelayedScaling",
            "--fp8 DelayedScaling has a state, which the phases of autocast_bfloat16,0.5:float32 cannot share",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    call: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = call.split()
    out = ("--checkpoint-dir", "new") if command == "train" else ("--out", "new")
    with jax.numpy_dtype_promotion("standard"):  # as in a user's process
        assert main([command, *rest, *out]) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith(f"jmp-train: error: {message}")
    assert not (folder / "new").exists()


def test_train_hands_them_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def train(prepared: Any, state: object, **others: object) -> Any:
        given.append(prepared.settings.few_bits)
        return make_run(prepared.name)

    monkeypatch.setattr(train_module, "train_prepared", train)
    call = ("train", "karate", "--policy", HALF, "--state-dtypes", "mu=int8", "nu=uint8", "--parameters", "kahan")
    with jax.numpy_dtype_promotion("standard"):
        assert main(call) == 0
    assert given == [FewBits(("mu=int8", "nu=uint8"), "kahan")]


def test_compare_gives_them_to_those_that_take_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {}

    def run_in_process(args: argparse.Namespace, name: str, display: object) -> Any:
        commands[name] = compare_command._command(args, name)
        return make_run(name)

    monkeypatch.setattr(compare_command, "_run_in_process", run_in_process)
    names = ("float32", "autocast_bfloat16", HALF, "torch")
    options = ("--state-dtypes", "nu=bfloat16", "--parameters", "kahan-int8", "--fp8", "Float8CurrentScaling")
    assert main(["compare", "karate", "--policies", *names, *options]) == 0
    wanted = {"--state-dtypes", "nu=bfloat16", "--parameters=kahan-int8", "--fp8=Float8CurrentScaling"}
    given = {name: wanted.intersection(command) for name, command in commands.items()}
    both = {"--state-dtypes", "nu=bfloat16"}
    assert given == {
        "float32": both,
        "autocast_bfloat16": both | {"--fp8=Float8CurrentScaling"},
        HALF: both | {"--parameters=kahan-int8"},
        "torch": both,
    }


@pytest.mark.parametrize(
    ("parameters", "kind"), [("kahan", KahanState), ("kahan-int8", KahanState), ("stochastic-rounding", None)]
)
def test_a_run_keeps_its_state_so(parameters: str, kind: type[Any] | None) -> None:
    few_bits = FewBits(("mu=int8",), parameters)
    with jax.numpy_dtype_promotion("standard"):
        prepared, state = prepare_run(load_task("karate"), HALF, RunSettings(few_bits=few_bits), with_metadata=True)
    assert len(find_nodes(state.opt_state, kind or StochasticRoundingState)) == 1
    (_, kept), *_ = find_nodes(state.opt_state, StateDtypesState)
    assert kept.inner_state is not None
    if kind is KahanState:
        compensation = jax.tree.leaves(state.opt_state.compensation)[0]
        assert compensation.dtype == (jnp.int8 if parameters == "kahan-int8" else jnp.bfloat16)
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
    call = ("train", "lm", "--train-size", "64", "--epochs", "2", "--policy", "autocast_bfloat16", "--fp8", recipe)
    options = ("--checkpoint-dir", "run", "--state-dtypes", "nu=bfloat16", "--json")
    with jax.numpy_dtype_promotion("standard"):
        assert main([*call, *options]) == 0
        run = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert run["epochs"][-1]["loss"] < run["epochs"][0]["loss"]
        assert json.loads(Path("run/run.json").read_text())["run"]["fp8"] == recipe
        assert main([*call, *options, "--resume"]) == 0
        assert main([*call[:-2], *options, "--resume"]) == 2
    assert f"fp8: the run has {recipe}, this call the default" in capsys.readouterr().err
    _, state = prepare_run(load_task("lm"), "autocast_bfloat16", RunSettings(few_bits=FewBits(fp8=recipe)))
    assert isinstance(state.model_state, Fp8State) == (recipe == "DelayedScaling")
