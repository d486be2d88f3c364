"""`jmp-train plan`: tasks and scripts, what it prints and returns, and calls that cannot be planned."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plan_rows import planned_row

import jmp_train as jt
from jmp_train.app.cli.entry import main
from jmp_train.tools import planning
from jmp_train.tools.planning import Machine, PlanSearch

pytestmark = [pytest.mark.quick, pytest.mark.timeout(500)]

SCRIPT = """
import jax, jax.numpy as jnp, optax
import jmp_train as jt
from sizes_of_the_user import WIDTH

def make_step():
    def step(state, batch):
        loss = lambda w: jnp.tanh(batch @ w).mean()
        return state - 0.1 * jax.grad(loss)(state), loss(state)
    return step, jnp.zeros((WIDTH, WIDTH)), jnp.zeros((64, WIDTH))

def with_default(depth=3):
    assert depth == 3
    return make_step()

def of_policy(policy="float32"):
    loss = jt.stateless(lambda w, batch: (batch @ w).astype(jnp.float32).mean())
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    step = jt.train_step(loss, optimizer, policy=policy)
    create = lambda: jt.TrainState.create(jnp.zeros((WIDTH, WIDTH)), optimizer)
    return step, jax.eval_shape(create), jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)

def prints():
    def step(state, batch):
        jax.debug.print("step")
        return state, batch.sum()
    return step, jnp.zeros(3), jnp.zeros((64, 3))

def number():
    return 3

def fails(policy):
    return {}["no key"]

if __name__ == "__main__":
    raise SystemExit("was run")
"""


@pytest.fixture(autouse=True)
def scripts(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Writes scripts; unless a test wants the compiler, none is found."""
    if "compiler" not in request.fixturenames:
        monkeypatch.setenv("JMP_TRAIN_CACHE", str(folder / "cache"))
        monkeypatch.setattr("jmp_train.tools.aot.compiling.CUDA_VERSIONS", ())
    Path("scripts").mkdir()
    Path("scripts/sizes_of_the_user.py").write_text("WIDTH = 256")
    Path("scripts/model.py").write_text(SCRIPT)
    Path("own.toml").write_text('[Mine]\nlike = "V100-16GB"\nmemory_bytes = 2_000_000_000\n')


@pytest.fixture(name="calls")
def fixture_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments with which `plan` was called, which then returns two made-up rows, of which one does not fit."""
    calls: list[Any] = []

    def plan(workload: Any, machines: Any, search: Any) -> jt.planning.Plan:
        calls.append((workload, machines, search))
        rows = (planned_row(), planned_row("T4-16GB", kinds={"parameters": 2 * 10**10 + 10**9}))
        return jt.planning.Plan(rows[: 1 + ("T4-16GB" in [machine.kind.name for machine in machines])])

    monkeypatch.setattr(planning, "plan", plan)
    return calls


def test_a_task_is_planned_with_the_options(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--gpus",
        "T4-16GB",
        "Mine",
        "--gpu-file",
        "own.toml",
        "--policies",
        "float32",
        "torch",
        "--devices",
        "2",
    )
    more = ("--shardings", "zero1", "fsdp", "--batch-size", "64", "--memory-fraction", "0.9", "--no-largest")
    assert main(["plan", "digits", *options, *more, "--buffers", "3", "--page", "made/plan.html"]) == 3
    ((workload, machines, search),) = calls
    assert [machine.kind.name for machine in machines] == ["T4-16GB", "Mine"]
    assert {(machine.gpus, machine.hosts, machine.allowances.memory_fraction) for machine in machines} == {(2, 1, 0.9)}
    assert search == PlanSearch(False, ("zero1", "fsdp"))
    assert (workload.policies, workload.batch_size) == (("float32", "torch"), 64)
    step, _, batches = workload.step("float32")
    assert isinstance(step, jt.steps.TrainStep)
    assert {x.shape[0] for x in batches(8).values()} == {8}
    out = capsys.readouterr().out
    assert out.startswith("digits:\ndevice ")
    assert "\n--find-placement tries to make steps fit" in out
    assert "of 21.00 GB:\nbytes " in out
    assert out.endswith("wrote made/plan.html\n")
    assert "<title>digits</title>" in Path("made/plan.html").read_text()


def test_the_defaults(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    ((workload, machines, search),) = calls
    assert machines == [Machine(name) for name in ("V100-16GB", "A100-40GB", "H100-80GB")]
    assert workload.policies == ("float32", "autocast_float16", "autocast_bfloat16")
    assert search == PlanSearch()


def test_json_is_all_that_standard_output_gets(calls: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "karate:task", "--json", "--page", "plan.html"]) == 0
    out, error = capfd.readouterr()
    assert json.loads(out)["step"] == "karate:task"
    assert error == "wrote plan.html\n"
    assert not calls[0][2].largest_batch, "a whole graph does not grow"


def test_a_script_whose_function_takes_no_policy(calls: list[Any]) -> None:
    for function in ("make_step", "with_default"):
        assert main(["plan", f"scripts/model.py:{function}", "--policies", "float32"]) == 0
        workload, _, _ = calls.pop()
        shapes = (workload.state.shape, workload.batch.shape)
        assert (callable(workload.step), *shapes) == (True, (256, 256), (64, 256))
        assert (workload.policies, workload.batch_size) == (("float32",), None)


def test_a_script_whose_function_takes_a_policy(calls: list[Any]) -> None:
    assert main(["plan", "scripts/model.py:of_policy", "--batch-size", "32"]) == 0
    ((workload, _, _),) = calls
    assert workload.step.__name__ == "of_policy"
    assert workload.policies == ("float32", "autocast_float16", "autocast_bfloat16")
    assert workload.batch_size == 32


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("digits", "--gpus", "V100"), 2, "--gpus 'V100' must be one of P100-16GB, V100-16GB"),
        (("digits", "--gpus", "Mine"), 2, "--gpus 'Mine' must be one of"),
        (("digits", "--gpu-file", "none.toml"), 2, "none.toml"),
        (("digits", "--shardings", "zero3"), 2, "zero3"),
        (("digits", "--policies", "float33"), 2, "float33"),
        (("digits", "--memory-fraction", "1.5"), 2, "--memory-fraction"),
        (("digits", "--devices", "2", "--batch-size", "3"), 2, "batch_size=3 must be a multiple of 2 for 2 devices"),
        (("digits", "--accumulate-steps", "2"), 2, "--accumulate-steps 2: the search for the largest batch needs 1"),
        (("cora:task", "--sparse", "--devices", "2"), 2, "devices=2: all batches share arrays, such as a whole graph"),
        (("scripts/model.py:number",), 2, "scripts/model.py:number returned a value of type int; it must"),
        (("scripts/model.py:make_step", "--policies", "float32"), 1, "TypeError: policies can be given for"),
        (("scripts/model.py:fails",), 1, "scripts/model.py:33: KeyError: 'no key'"),
        (("scripts/model.py:of_policy",), 1, "CUDA is not installed for jaxlib .*; install it with jmp-train"),
        (
            ("scripts/model.py:prints",), 1,
            "scripts/model.py: policy as it is, 1 device: the step calls back to Python.*: debug_print at .*model.py",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_one_line(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == code
    out, error = capsys.readouterr()
    assert out == ""
    last = error.rstrip("\n").splitlines()[-1]
    assert re.search(message.replace("(", r"\(") if "(" in message else message, last), last
    assert "Traceback" not in error


# Through real processes


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jmp_train", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.full
def test_a_task_as_json(compiler: None) -> None:
    done = run("digits", "--gpus", "V100-16GB", "--policies", "float32", "--no-largest", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing of CUDA"
    found = json.loads(done.stdout)
    (row,) = found["rows"]
    assert (found["step"], row["device"], row["policy"], row["fits"]) == ("digits", "V100-16GB", "float32", True)
    assert sum(row["bytes_by_kind"].values()) == row["peak_bytes"] < row["usable_bytes"]
    assert {"parameters", "optimizer state", "batch"} <= set(row["bytes_by_kind"])
    assert row["largest_batch"] is None


@pytest.mark.full
def test_scripts_in_both_forms_on_a_gpu_of_ones_own(compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("scripts")
    options = ("--gpu-file", "../own.toml", "--no-largest")
    done = run("model.py:make_step", *options, "--buffers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "model.py:make_step:"
    assert re.match(r"Mine +as it is +64 +\S+ GB +1\.08 GB +yes ", lines[2])
    assert any("model.py:" in line for line in lines[4:]), "a line of the script"
    done = run("model.py:of_policy", *options, "--policies", "float32", "mixed_float16", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["rows"]
    assert [row["policy"] for row in rows] == ["float32", "mixed_float16"]
    assert rows[0]["operations"].keys() == {"f32"} != rows[1]["operations"].keys()
    done = run("model.py:make_step", *options, "--batch-size", str(2**22))
    assert done.returncode == 3, done.stderr
    assert " no " in done.stdout.splitlines()[2], "what does not fit has its exit code"
