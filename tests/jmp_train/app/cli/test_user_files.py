"""Commands on a user's file: its options, its errors with exit codes, its runs, and what `kill -9` leaves."""

import datetime
import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_helpers import jmp_train_command as command
from sealed_files import entry

from jmp_train.app.cli.compare import CompareOptions, call_as_text, call_from_text
from jmp_train.app.cli.entry import main
from jmp_train.app.cli.jobs import Call, load_job
from jmp_train.app.cli.train import TrainOptions
from jmp_train.app.tasks import find_task

pytestmark = pytest.mark.quick

PROGRAMS = Path(__file__).resolve().parents[3] / "programs"
JOBS = PROGRAMS / "user_jobs.py"
# A file whose functions each fail in a way of their own.
FAILING = """
import dataclasses
import sys
from typing import Any
sys.path.append({programs!r})
import numpy as np
import jmp_train as jt
from user_jobs import batches, make_task

@dataclasses.dataclass(frozen=True)
class Options:
    table: dict[str, int] = dataclasses.field(default_factory=dict)

@dataclasses.dataclass(frozen=True)
class Clashing:
    policy: str = "x"

@dataclasses.dataclass(frozen=True)
class Strict:
    width: int = 1
    def __post_init__(self):
        if self.width < 1:
            raise ValueError("width must be at least 1")

def no_option(options: Options): return make_task()
def clashing(options: Clashing): return make_task()
def strict(options: Strict): return make_task(width=options.width)
def unannotated(options): return make_task()
def nothing(): return None
def raises():
    return [][3]
def wrong_task(): return make_task("arrays", epochs=0)
def bad_init():
    def init(key):
        raise RuntimeError("no weights")
    return make_task(init=init)
def bad_loss():
    def loss_fn(params, model_state, batch, rng):
        return batch["z"]
    return make_task(loss_fn=loss_fn)
def bad_train(): return make_task(train=lambda epoch: open("no such file"))
def bad_later():
    def train(epoch):
        yield from batches(epoch)
        if epoch:
            raise OSError("the disk is gone")
    return make_task(train=train)
def bad_metrics():
    return make_task(metrics=lambda params, state, batch: {{"x": batch["nothing"]}})
def of_neighbor():
    import neighbor
    return make_task(loss_fn=neighbor.loss_fn)
@dataclasses.dataclass(frozen=True)
class Unresolved:
    width: "Nothing" = 1
def unresolved(options: Unresolved): return make_task()
def unresolved_parameter(options: "Nothing"): return make_task()
def two_clashes(options: dataclasses.make_dataclass("Two", [("json", int, 1), ("mode", int, 1)])): return make_task()
def no_return(): return make_task(loss_fn=lambda params, model_state, batch, rng: (None, (model_state, None)))
def dict_of_arrays(): return make_task(train=lambda epoch: dict(x=np.ones(3)))
def evaluate_of_one(): return make_task(metrics=None, test=None, evaluate=lambda params: {{}})
def silent():
    assert not make_task
"""


@pytest.fixture(autouse=True)
def files_of_a_user(folder: Path) -> None:
    (folder / "failing.py").write_text(FAILING.format(programs=str(PROGRAMS)))
    (folder / "neighbor.py").write_text("def loss_fn(params, model_state, batch, rng):\n    return batch['z']\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            "train failing.py:no_option",
            2,
            "Options.table cannot be an option because its type is dict[str, int]; supported types are int, float",
        ),
        ("train failing.py:clashing", 2, "failing.py:clashing: --policy is an option of the command; rename the field"),
        (
            "train failing.py:two_clashes",
            2,
            "two_clashes: --json and --mode are options of the command; rename the field",
        ),
        ("train failing.py:unresolved", 2, "Unresolved: name 'Nothing' is not defined, in the type of a field"),
        ("train failing.py:unresolved_parameter", 2, "failing.py:unresolved_parameter: name 'Nothing' is not defined"),
        ("train failing.py:of_neighbor", 2, "error: neighbor.py:2: KeyError: 'z'"),
        ("train failing.py:no_return", 2, "loss_fn returned None as loss; it must be a floating scalar"),
        ("plan failing.py:dict_of_arrays", 2, "train(0) must return an iterable of batches, got a dict"),
        ("plan failing.py:bad_init", 2, "failing.py:35: RuntimeError: no weights"),
        ("train failing.py:evaluate_of_one", 2, "failing.py:61: TypeError: Task: evaluate is called as evaluate("),
        ("train failing.py:silent", 2, "failing.py:63: AssertionError"),
        ("train failing.py:bad_loss --checkpoint-dir new/saved --logdir new/log --capsules new/c", 2, "39: KeyError"),
        ("train failing.py:strict --width 0", 2, "width must be at least 1"),
        ("train failing.py:strict --width x", 2, "argument --width: 'x' is not a whole number"),
        ("train failing.py:strict --depth 2", 2, "unrecognized arguments: --depth 2"),
        ("train failing.py:unannotated", 2, "must annotate its parameter with a dataclass of options"),
        ("train failing.py:nothing", 2, "failing.py:nothing must return a jt.Task, got None"),
        ("diagnose failing.py:nothing", 2, "failing.py:nothing returned None; it must return a jt.Task, or a tuple of"),
        ("train failing.py:raises", 2, "failing.py:31: IndexError: list index out of range"),
        ("train failing.py:wrong_task", 2, "failing.py:32: ValueError: Task: epochs=0 must be at least 1"),
        ("train failing.py:bad_init", 2, "failing.py:35: RuntimeError: no weights"),
        ("tune failing.py:bad_loss", 1, "failing.py:39: KeyError: 'z'"),
        ("train failing.py:bad_train", 2, "failing.py:41: FileNotFoundError: [Errno 2] No such file or directory"),
        ("train failing.py:bad_later", 1, "failing.py:46: OSError: the disk is gone"),
        ("train failing.py:bad_metrics", 1, "failing.py:49: KeyError: 'nothing'"),
        ("train failing.py:strict --train-size 8", 2, "--train-size 8: the task's train creates its own batches"),
        ("train digits --model gat", 2, "unrecognized arguments: --model gat"),
        ("train cora:task", 2, "--data-dir is missing: the folder of ind.cora.x and the other seven files"),
        ("train cora:task --data-dir . --synthetic", 2, "--data-dir and --synthetic exclude each other"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(
    arguments: str, code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments.split(), *(["--policy", "float32"] if arguments.startswith("train") else [])]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, error
    assert [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")] == []


def test_help_shows_the_options_of_the_task_and_of_no_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, shown, hidden in (
        (f"{JOBS}:task", ("--width N", "of the hidden layer; default: 8", "{generator,list,grain,arrays}"), "--heads"),
        ("lm:task", ("--text-file PATH", "{tiny,small,gpt2-small}", "options of lm:task:"), "--heads"),
        ("reddit:task", ("--heads N N N", "--scale X"), "--text-file"),
    ):
        with pytest.raises(SystemExit):
            main(["train", text, "--help"])
        page = " ".join(capsys.readouterr().out.split())
        assert all(part in page for part in shown), page
        assert hidden not in page
        assert page.count("--learning-rate") == 1  # the task's own option is the command's


def test_options_may_stand_before_the_task(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--width", "4", "--policy", "float32", "--source", "list", f"{JOBS}:task", "--steps", "2", "--json"]
    assert main(["train", *arguments]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(run["steps"]) == 2
    assert run["costs"]["params_bytes"] == 4 * (3 * 4 + 4)
    assert list(run["metrics"]) == ["loss", "rows", "mean_x"]
    assert run["higher_is_better"] is False
    assert "test_accuracy" not in run


def test_options_that_are_the_commands_too_have_its_values(folder: Path) -> None:
    given = {"learning_rate": 0.5, "seed": 3}
    text = f"{JOBS}:task"
    job = load_job(Call(text, find_task(text), TrainOptions(**given), given))
    found = job.settings
    assert (found.learning_rate, found.seed) == (None, 3)  # the task has the rate, and scales nothing
    assert found.identity["task"] == "user_jobs.py:task"
    assert found.identity["options"] == {"width": 8, "source": "generator", "learning_rate": 0.5}
    assert job.task.epochs == 3
    assert "make_task" in found.identity["definitions"]


OPTIONS_OF_ALL_TYPES = """
import dataclasses
import datetime
import enum
from pathlib import Path
from typing import Any, Literal

Color = enum.StrEnum("Color", ["red", "blue"])

def read_by(reader, default):
    return dataclasses.field(default=default, metadata={"type": reader})

@dataclasses.dataclass(frozen=True)
class Options:
    width: int = 1
    rate: float = 0.1
    name: str = ""
    fast: bool = False
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    file: Path = Path("x")
    files: tuple[Path, ...] = ()
    day: datetime.date = read_by(datetime.date.fromisoformat, datetime.date(2020, 1, 1))
    color: Any = read_by(Color, Color.red)

def task(options: Options): ...
"""


def test_a_run_in_its_own_process_gets_the_values_and_types_of_the_tasks_options(folder: Path) -> None:
    (folder / "typed.py").write_text(OPTIONS_OF_ALL_TYPES)
    source = find_task("typed.py:task")
    given = {
        "width": 2, "rate": math.inf, "name": "1", "fast": True, "kind": "b", "sizes": (1, 2), "file": Path("1"),
        "files": (Path("1"), Path("2")), "day": datetime.date(2026, 11, 28),
        "color": sys.modules["typed"].Color.blue,
    }  # fmt: skip
    sent = call_as_text(Call("typed.py:task", source, CompareOptions(), given), "float32")
    del sys.modules["typed"]  # as in another process
    call = call_from_text(sent)
    assert call.of_task == given
    types = {name: type(value).__qualname__ for name, value in call.of_task.items()}
    assert types == {name: type(value).__qualname__ for name, value in given.items()}


def test_a_changed_file_goes_on_with_a_line_and_other_options_do_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"import sys\nsys.path.append({str(PROGRAMS)!r})\nfrom user_jobs import Options, make_task\n"
    text += "def task(options: Options):\n    return make_task(options.source, options.width)\n"
    file = folder / "mine.py"
    file.write_text(text)
    call = ["train", "mine.py:task", "--policy", "float32", "--checkpoint-dir", "saved", "--steps", "5"]
    assert main(call) == 0
    assert "epoch 1  loss" in capsys.readouterr().out  # of how many is not known
    file.write_text(text.replace("def task", "ONE = 1\ndef task").replace("options.width)", "options.width, epochs=3)"))
    del sys.modules["mine"]
    capsys.readouterr()
    assert main([*call, "--resume"]) == 0
    assert "mine.py has changed since step 5 was saved: task, ONE" in capsys.readouterr().out
    assert main([*call, "--resume", "--width", "4"]) == 2
    assert "saved is of another run:\n  width: the run has 8, this call 4" in capsys.readouterr().err
    assert main([*call, "--resume", "--learning-rate", "0.5"]) == 2
    assert "learning_rate: the run has 0.01, this call 0.5" in capsys.readouterr().err
    metadata = json.loads((folder / "saved/run.json").read_text())
    assert metadata["definitions"]["file"] == "mine.py"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_compare_runs_a_users_file_whose_neighbors_it_imports(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/user_jobs.py").write_text(JOBS.read_text())
    (tmp_path / "jobs/mine.py").write_text("from user_jobs import make_task\ndef task(): return make_task('list')\n")
    (tmp_path / "user_jobs.py").write_text("raise ImportError('of the current folder')")
    call = ("compare", "jobs/mine.py:task", "--policies", "float32", "mixed_float16", "--out", "out", "--steps", "6")
    result = command(*call, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "mean x" in result.stdout
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["task"] == "mine.py:task"
    assert [list(run["metrics"]) for run in report["runs"]] == [["loss", "rows", "mean_x"]] * 2
    assert "times as fast" not in (tmp_path / "out/report.html").read_text()  # on a CPU
    one = command("compare", "jobs/mine.py:task", "--policies", "float32", "--steps", "2", cwd=tmp_path)
    assert one.returncode == 0
    assert "ratio" not in one.stdout
    assert "1.00x" not in one.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_launch_trains_one_run_in_two_processes(tmp_path: Path) -> None:
    call = ["train", f"{JOBS}:task", "--source", "list", "--policy", "float32", "--json"]
    alone = command(*call, "--devices", "2", cwd=tmp_path)
    both = command("launch", "-n", "2", "--", "jmp-train", *call, "--checkpoint-dir", "saved", cwd=tmp_path)
    assert both.returncode == 0, both.stderr + both.stdout
    runs = [
        json.loads(line[line.index("{") :])
        for result in (alone, both)
        for line in result.stdout.splitlines()
        if '"event": "run"' in line
    ]
    assert len(runs) == 2
    assert [step["loss"] for step in runs[1]["steps"]] == pytest.approx([s["loss"] for s in runs[0]["steps"]], rel=1e-6)
    assert runs[0]["metrics"] == pytest.approx(runs[1]["metrics"], rel=1e-6)
    assert runs[1]["device"] == "2 x cpu"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("generator", "--policy mixed_float16"),
        ("generator", "--policy mixed_float16 --accumulate-steps 2"),
        ("list", "--policy mixed_float16 --devices 2"),
        ("grain", "--policy mixed_float16"),
        ("arrays", "--policy mixed_float16,0.5:float32"),
    ],
)
def test_a_run_that_is_killed_again_and_again_ends_as_the_unbroken_one(
    source: str, options: str, tmp_path: Path
) -> None:
    # A slow loader, so that there is something to kill.
    (tmp_path / "mine.py").write_text(
        f"import sys, time\nsys.path.append({str(PROGRAMS)!r})\nimport user_jobs\nfrom user_jobs import *\n"
        "def slow(epoch):\n    for batch in user_jobs.SOURCES[SOURCE]['train'](epoch):\n"
        "        time.sleep(0.1)\n        yield batch\n"
        f"SOURCE = {source!r}\n"
        "def task():\n    changes = {} if SOURCE in ('arrays', 'grain') else {'train': slow, 'steps_per_epoch': 5}\n"
        "    return make_task(SOURCE, **changes, epochs=6)\n"
    )
    call = [sys.executable, "-m", "jmp_train", "train", "mine.py:task", "--json"]
    call += [*options.split(), "--checkpoint-every", "2", "--resume", "--checkpoint-dir"]
    whole = subprocess.run([*call, "whole"], capture_output=True, text=True, cwd=tmp_path, check=True, timeout=200)
    call += ["saved"]
    delays = random.Random(0)
    for _ in range(3):
        process = subprocess.Popen(call, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if '"compiled"' in line:
                break
        before = finished_steps(tmp_path / "saved")
        while process.poll() is None and finished_steps(tmp_path / "saved") == before:
            time.sleep(0.01)
        time.sleep(delays.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    end = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, check=True, timeout=200)
    first, last = (json.loads(result.stdout.splitlines()[-1]) for result in (whole, end))
    assert last["steps"] == first["steps"]
    assert last["metrics"] == first["metrics"]
    assert [epoch["loss"] for epoch in last["epochs"]] == [epoch["loss"] for epoch in first["epochs"]]
    assert digests(tmp_path / "saved") == digests(tmp_path / "whole")


def finished_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step_*") if path.suffix == ".safetensors")


def digests(folder: Path) -> dict[str, str]:
    """Returns the digest of each array of the last checkpoint, but for the epochs' seconds."""
    sums = entry(folder / finished_steps(folder)[-1], "sha256_of_arrays")
    return {path: digest for path, digest in sums.items() if "['epochs']" not in path}
