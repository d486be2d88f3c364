"""Processes that do not want to end, and looks at who still lives."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# Says who it is in a folder, and stays: with a subprocess, which ignores SIGTERM, and a daemon in a session of its own.
# With a second argument, it ends with that exit code.
STUBBORN = """
import os, pathlib, signal, sys, time
folder, prefix = pathlib.Path(sys.argv[1]), os.environ.get("JAX_PROCESS_ID", "")
def stay(name, *ignored):
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    note(name)
    time.sleep(100)
def note(name):
    (folder / (prefix + name + ".new")).write_text(str(os.getpid()))
    (folder / (prefix + name + ".new")).rename(folder / (prefix + name))
if not os.fork():
    stay("subprocess", signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    stay("daemon", signal.SIGTERM)
while not all((folder / (prefix + name)).exists() for name in ("subprocess", "daemon")):
    time.sleep(0.01)
if len(sys.argv) > 2:
    note("leader")
    sys.exit(int(sys.argv[2]))
stay("leader")
"""


def lives(pid: int) -> bool:
    """Returns whether a process is there, and no zombie."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return sys.platform != "linux" and subprocess.call(["ps", "-p", str(pid)]) == 0
    return stat.rpartition(")")[2].split()[0] != "Z"


def noted(folder: Path, count: int = 3) -> dict[str, int]:
    """Returns the ids of processes by their names when so many have noted them in a folder."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [file for file in folder.iterdir() if file.suffix != ".new"]
        if len(found) == count:
            return {file.name: int(file.read_text()) for file in found}
        time.sleep(0.02)
    raise AssertionError(f"only {sorted(folder.iterdir())} came")


def survivors(pids: Mapping[str, int], seconds: float) -> list[str]:
    """Returns who still lives after so many seconds, or as soon as nobody does.

    Daemons that have left their session can only be found on Linux.
    """
    wanted = {name: pid for name, pid in pids.items() if sys.platform == "linux" or "daemon" not in name}
    deadline = time.monotonic() + seconds
    while True:
        living = [name for name, pid in wanted.items() if lives(pid)]
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(0.05)


def kill_all(pids: Sequence[int]) -> None:
    """Kills those that still live."""
    for pid in pids:
        if lives(pid):
            os.kill(pid, signal.SIGKILL)


def user_environment() -> dict[str, str]:
    """Returns the environment without conftest.py's virtual devices, as users have it."""
    return {k: v for k, v in os.environ.items() if k not in ("NPROC", "JAX_NUM_CPU_DEVICES")}


def jmp_train_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `jmp-train` as a process."""
    command = [sys.executable, "-m", "jmp_train", *arguments]
    environment = user_environment()
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd, env=environment, check=False)


def shell(command: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """Returns a shell command's code, output and error; $PYTHON is this one, without conftest.py's devices."""
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=cwd,
        env={**user_environment(), "PYTHON": sys.executable, **environment},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=240,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


def launched(*command: object, count: int = 2, options: Sequence[str] = ()) -> tuple[int, str]:
    """Returns the exit code of `jmp-train launch`, and what the processes and then the launcher printed."""
    launch = [sys.executable, "-m", "jmp_train", "launch", "-n", str(count), *options, "--", *map(str, command)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=180, check=False)
    return done.returncode, done.stdout + done.stderr


def run_python(
    *arguments: str | Path,
    cwd: Path | None = None,
    timeout: float = 280,
    python: str | Path = sys.executable,
    **environment: str,
) -> str:
    """Returns what a Python process on the CPU prints, and asserts that it ends well."""
    result = subprocess.run(
        (python, *arguments),
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
