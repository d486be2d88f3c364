"""`jmp-train launch`: one script as several processes on this machine that start and end together."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from jmp_train.app.launch.child_processes import ChildProcess, end, signals_as_exceptions
from jmp_train.app.launch.ranks import STOPPED, Endings, RankOutput, reason, say, wait_for

_RUNNER = Path(__file__).with_name("rank.py")
_COMMAND = "jmp-train"
_READER_SECONDS = 5.0  # for the last lines; a process that escaped may hold a pipe longer


class LaunchError(ChildProcessError):
    """Processes failed.

    Attributes:
      code: the exit code of the first, or 128 + the number of the signal that killed it.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def launch(
    command: Sequence[str],
    count: int,
    *,
    devices_per_process: int = 1,
    logdir: Path | None = None,
    restarts: int = 0,
    grace: float = 5.0,
    exit_timeout: float | None = None,
) -> None:
    """Runs a Python script as several processes that `jmp_train.distributed.initialize` connects.

    Each line that they print is printed with the number of its process in front; longer lines are split after 65,536
    characters. When one process fails, the others are stopped; what they print because of that is only logged. If
    restarts are left, all are restarted, and a script that saves checkpoints continues from the last one.

    The processes and their children end with this one, however it ends (see `jmp_train.app.launch.child_processes`).
    SIGTERM, SIGHUP, SIGQUIT and Ctrl-C ask them to end, and a second one kills them. Output that cannot be printed or
    logged is dropped with a warning, and training continues.

    Args:
      command: a script and its arguments, or `-m`, a module and its arguments; the script may be `jmp-train`.
      count: number of processes.
      devices_per_process: GPUs per process, numbered through, or on a CPU virtual devices.
      logdir: folder for the output of each process, as `rank_0.log` and so on; None for no logs.
      restarts: number of restarts of all processes after failures.
      grace: seconds between asking a process to end, or the first end of one that stopped at a signal, and killing it.
      exit_timeout: seconds that processes may run on after the first has ended well; then they are stopped, which
        counts as a failure. None for no limit: `initialize` has its own time-outs.

    Raises:
      ValueError: there is no script.
      LaunchError: a process failed; the message names the failed processes.
      SystemExit: all processes ended as asked by a signal, with its exit code; they are not restarted.
    """
    check_launch(command)
    command = [script_of(command[0]) or command[0], *command[1:]]
    logs = None if logdir is None else [logdir / f"rank_{rank}.log" for rank in range(count)]
    for log in logs or ():
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
    for number in range(restarts + 1):
        failure = _run(command, count, devices_per_process, logs, grace, exit_timeout)
        if failure is None:
            return
        if number == restarts:
            raise failure
        say(f"{failure}; restarting all, {number + 1} of {restarts} times")


def _run(
    command: Sequence[str],
    count: int,
    devices_per_process: int,
    logs: Sequence[Path] | None,
    grace: float,
    exit_timeout: float | None,
) -> LaunchError | None:
    """Runs the processes once; returns the failure, or None."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    children: list[ChildProcess] = []
    readers: list[threading.Thread] = []
    output = RankOutput(logs)
    endings = Endings()
    try:
        with ExitStack() as stack:
            messages, write = os.pipe()
            stack.callback(os.close, messages)
            stack.callback(os.close, write)
            os.set_blocking(messages, False)
            stack.enter_context(signals_as_exceptions())
            stack.callback(_join, readers)
            stack.callback(end, children)  # runs first
            for rank in range(count):
                child = ChildProcess(
                    [sys.executable, str(_RUNNER), str(write), str(rank), *command],
                    environment=_environment(address, count, rank, devices_per_process),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    grace=grace,
                    pass_files=[write],
                )
                children.append(child)
                readers.append(threading.Thread(target=output.copy, args=(child.stdout, rank), daemon=True))
                readers[-1].start()
            endings = wait_for(children, messages, exit_timeout, grace)
    finally:
        wrong = output.conclude(endings.failed)
    failure, codes = reason(endings, exit_timeout), list(endings.failed.values())
    if failure is None:
        return None
    if set(codes) <= STOPPED and not endings.running and not endings.late:
        sys.exit(codes[0])
    if logs:
        failure += f" (see {logs[0].parent}/rank_*.log)"
    code = next(iter(codes), 1)
    return LaunchError(wrong or failure, code if code > 0 else 128 - code)


def check_launch(command: Sequence[str]) -> None:
    """Raises ValueError if there is no Python script to launch."""
    if not command:
        raise ValueError("launch needs a script: jmp-train launch -n 2 -- script.py")
    if command[0] != "-m" and script_of(command[0]) is None:
        raise ValueError(f"launch needs a Python script, but {command[0]!r} is not a file")


def script_of(name: str) -> str | None:
    """Returns the file of a script, or of the command `jmp-train`, even if not on the path; None if there is none.

    Args:
      name: the name of the script on the command line.
    """
    if Path(name).is_file():
        return name
    beside = Path(sys.executable).with_name(name)
    return str(beside) if name == _COMMAND and beside.is_file() else None


def _environment(address: str, count: int, rank: int, devices: int) -> dict[str, str]:
    own = range(rank * devices, (rank + 1) * devices)
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(rank),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own)),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONUNBUFFERED": "1",
        "JMP_TRAIN_LAUNCHED": "1",  # see jmp_train.distributed.StopSignals
    }
    if devices > 1:
        environment.setdefault("NPROC", str(threads_for(devices)))
    return environment


def threads_for(devices: int) -> int:
    """Returns NPROC for a CPU's virtual devices, which would wait for each other forever with too few threads."""
    return max(32, 2 * devices, os.cpu_count() or 1)


def _join(readers: Sequence[threading.Thread]) -> None:
    deadline = time.monotonic() + _READER_SECONDS
    for reader in readers:
        reader.join(max(0.0, deadline - time.monotonic()))
