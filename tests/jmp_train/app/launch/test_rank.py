"""A script that is launched runs as Python itself runs it."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from jmp_train.app.launch.launcher import launch

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

SHOW = """
'''A script.'''
from __future__ import annotations
import json, os, pathlib, subprocess, sys
import beside
lines = {name: globals()[name] for name in ("__name__", "__file__", "__package__", "__doc__")}
lines["spec"] = __spec__ and __spec__.name
lines["loader"] = type(__loader__).__name__
lines["builtins"] = type(__builtins__).__name__ if __spec__ is None else None
lines["main"] = sys.modules["__main__"].__dict__ is globals()
lines["path"], lines["argv"], lines["flags"] = sys.path, sys.argv, str(sys.flags)
lines["variable"] = os.environ.get("PYTHONSAFEPATH")
below = [sys.executable, "-c", "import sys; print(sys.flags.safe_path, sys.path)"]
lines["below"] = subprocess.run(below, capture_output=True, text=True, check=True).stdout
def annotated(x: undefined): pass
lines["annotations"] = annotated.__annotations__
print(json.dumps(lines))
"""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(
    "command",
    [["folder/show.py", "-a", "b"], ["linked/link.py"], ["-m", "folder.show", "-m", "b"]],
    ids=["script", "link", "module"],
)
def test_a_script_sees_what_python_shows_it(
    command: list[str], safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "folder" / "show.py").write_text(SHOW)
    (tmp_path / "linked" / "link.py").symlink_to("../folder/show.py")
    modules = tmp_path / "modules"
    modules.mkdir()
    for folder in (tmp_path, modules) if safe or command[0] == "-m" else (tmp_path / "folder",):
        (folder / "beside.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{modules}:{tmp_path}" if safe else str(modules))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # as the launcher has it, for lines in time
    if safe:
        monkeypatch.setenv("PYTHONSAFEPATH", "1")
    plain = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    launch(command, 1)
    assert capfd.readouterr().out == f"[0] {plain.stdout}"


HOSTILE = (
    "atexit", "collections", "contextlib", "ctypes", "importlib", "jax", "networkx", "os", "pkgutil", "re",
    "runpy", "select", "signal", "socket", "subprocess", "sys", "traceback", "types", "typing",
)  # fmt: skip


def plant_modules(folder: Path, names: Iterable[str], marks: Path) -> None:
    """Writes modules that leave a mark when they are imported."""
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(marks / name)!r} + '.ran', 'w')")


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("command", [["folder/script.py"], ["-m", "script"]], ids=["script", "module"])
@pytest.mark.parametrize("text", ["pass", "raise SystemExit(3)", "raise LookupError"])
def test_nothing_of_the_folder_runs_that_python_would_not_run(
    command: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path if command[0] != "-m" else folder)
    for place in {folder, Path.cwd()}:
        plant_modules(place, HOSTILE, tmp_path)
    (folder / "script.py").write_text(text)
    subprocess.run([sys.executable, *command], capture_output=True, check=False)
    plain = {path.unlink() or path.name for path in tmp_path.glob("*.ran")}
    if text == "pass":
        launch(command, 1)
    else:
        with pytest.raises(ChildProcessError):
            launch(command, 1)
    assert {path.name for path in tmp_path.glob("*.ran")} == plain


def test_a_script_may_start_processes_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, multiprocessing, threading, time\n"
        "class Task:\n"
        "    def __call__(self, x):\n"
        "        return x + 1\n"
        "def later():\n"
        "    time.sleep(0.2)\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print('pool', pool.map(Task(), [1, 2]))\n"
        "if __name__ == '__main__':\n"
        "    atexit.register(lambda: print('end', Task()(6), __name__))\n"
        "    threading.Thread(target=later).start()\n"
    )
    launch([str(script)], 1)
    assert capfd.readouterr() == ("[0] pool [2, 3]\n[0] end 7 __main__\n", "")


def test_a_file_in_the_place_of_the_launcher_s_pipe_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "os.closerange(3, 100)\n"
        "files = [os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT) for _ in range(60)]\n"
    )
    launch([str(script), str(tmp_path / "data")], 1)
    assert (tmp_path / "data").read_bytes() == b""


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("text", "code", "lines"),
    [
        ("import sys; sys.exit(300)", 44, []),
        ("import sys; sys.exit('no more')", 1, ["no more"]),
        ("raise SystemExit([1])", 1, ["[1]"]),
        ("print('so far', end=''); 1 / 0", 1, ["so far"]),
        ("import sys; sys.excepthook = lambda kind, *_: print(kind); 1 / 0", 1, None),
        ("import sys; sys.stdout.close(); 1 / 0", 1, None),
        ("def", 1, None),
    ],
)
def test_a_failing_script_ends_as_python_ends_it(text: str, code: int, lines: list[str] | None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    with pytest.raises(ChildProcessError, match=f"process 0 ended with exit code {code} "):
        launch([str(script)], 1, logdir=tmp_path)
    plain = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert plain.returncode == code
    assert (tmp_path / "rank_0.log").read_text() == plain.stdout
    assert lines is None or plain.stdout.split("Traceback")[0].splitlines() == lines


@pytest.mark.full
def test_the_command_runs_nothing_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "script.py").write_text("print('trained')")
    plant_modules(tmp_path, {*HOSTILE, "argparse", "numpy", "flax"} - {"sys"}, tmp_path)
    command = [sys.executable, "-m", "jmp_train", "launch", "-n", "1", "--", "scripts/script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] trained\n", "")
    assert list(tmp_path.glob("*.ran")) == []
