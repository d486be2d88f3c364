"""`jmp-train launch`: one script as several processes on this machine, that start and end together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

_RUNNER = Path(__file__).with_name("launched.py")
_SETTLE_SECONDS = 1.0  # after a failure, in which others may fail of the same cause


def launch(
    command: Sequence[str],
    count: int,
    *,
    devices_per_process: int = 1,
    logdir: Path | None = None,
    restarts: int = 0,
    grace: float = 5.0,
) -> None:
    """Runs a Python script as several processes that `jmp_train.distributed.initialize` joins.

    Each line that they print is printed with the number of its process in front. When one fails, the others
    are stopped, and if there are restarts left, all are started anew: a script that saves checkpoints goes on
    from the last.

    Args:
      command: a script and its arguments, or `-m`, a module and its arguments.
      count: how many processes.
      devices_per_process: how many GPUs each gets, counted through, or on a CPU virtual devices.
      logdir: where to write what each prints, as `rank_0.log` and so on; None for nowhere.
      restarts: how many times to start all anew after a failure.
      grace: seconds between asking a process to end and killing it.

    Raises:
      ValueError: a number is too small, or there is no script.
      ChildProcessError: a process failed; the message says which ones.
    """
    check_launch(command, count, devices_per_process, restarts)
    if logdir is not None:
        logdir.mkdir(parents=True, exist_ok=True)
        for rank in range(count):
            _log_path(logdir, rank).write_text("")
    for number in range(restarts + 1):
        failure = _run(command, count, devices_per_process, logdir, grace)
        if failure is None:
            return
        if number == restarts:
            raise ChildProcessError(failure)
        again = f"starting all anew, {number + 1} of {restarts} times"
        print(f"jmp-train: {failure}; {again}", file=sys.stderr, flush=True)


def _run(
    command: Sequence[str], count: int, devices_per_process: int, logdir: Path | None, grace: float
) -> str | None:
    """Runs the processes once; returns who failed, None if all is well."""
    address = f"127.0.0.1:{_free_port()}"
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    lock = threading.Lock()
    with ExitStack() as stack:
        logs = [stack.enter_context(_log(logdir, rank)) for rank in range(count)]
        stack.enter_context(_terminable())
        stack.callback(_join, readers)
        stack.callback(_stop, processes, grace)  # the first to be called
        for rank, log in enumerate(logs):
            environment = _environment(address, count, rank, devices_per_process)
            processes.append(_start([sys.executable, str(_RUNNER), *command], environment))
            arguments = (processes[-1].stdout, rank, log, lock)
            readers.append(threading.Thread(target=_copy_lines, args=arguments, daemon=True))
            readers[-1].start()
        failed = _wait(processes)
        running = [rank for rank, process in enumerate(processes) if process.poll() is None]
    if not failed:
        return None
    codes = [(rank, processes[rank].returncode) for rank in failed]
    where = "" if logdir is None else f" (see {logdir}/rank_*.log)"
    return _reason(codes, running) + where


def check_launch(
    command: Sequence[str], count: int, devices_per_process: int = 1, restarts: int = 0
) -> None:
    """Raises ValueError if `launch` cannot start that; see there."""
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    if devices_per_process < 1:
        raise ValueError(f"devices_per_process={devices_per_process} must be at least 1")
    if restarts < 0:
        raise ValueError(f"restarts={restarts} must be at least 0")
    if not command:
        raise ValueError("launch needs a script: jmp-train launch -n 2 -- script.py")
    if command[0] != "-m" and not Path(command[0]).is_file():
        raise ValueError(f"launch needs a Python script, {command[0]!r} is no file")


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


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
    }
    if devices > 1:
        environment.setdefault("NPROC", str(threads_for(devices)))
    return environment


def threads_for(devices: int) -> int:
    """Returns NPROC for a CPU's virtual devices: with few threads they wait for each other for ever."""
    return max(32, 2 * devices, os.cpu_count() or 1)


def _log(logdir: Path | None, rank: int) -> AbstractContextManager[IO[str] | None]:
    return nullcontext() if logdir is None else _log_path(logdir, rank).open("a")


def _log_path(logdir: Path, rank: int) -> Path:
    return logdir / f"rank_{rank}.log"


@contextmanager
def _terminable() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that the processes are stopped before this one ends."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what a process starts is stopped with it
    )


def _copy_lines(lines: IO[str], rank: int, log: IO[str] | None, lock: threading.Lock) -> None:
    with lines:
        for line in lines:
            # The lock keeps lines apart; and who reads them may leave (`| head`) before the processes do.
            with lock, suppress(BrokenPipeError):
                print(f"[{rank}] {line.rstrip()}", flush=True)
            if log is not None:
                log.write(line)
                log.flush()


def _wait(processes: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Waits until all have ended, or some have failed; returns these, in the order in which they did."""
    failed: list[int] = []
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed += [rank for rank, code in enumerate(codes) if code and rank not in failed]
        if None not in codes:
            break
        if failed:
            deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
        time.sleep(0.05)
    return failed


def _stop(processes: Sequence[subprocess.Popen[str]], grace: float) -> None:
    """Ends the processes that still run, and what they have started."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[str], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _join(readers: Sequence[threading.Thread]) -> None:
    for reader in readers:
        reader.join(timeout=5.0)  # longer if something keeps the pipe open that left the session


def _reason(failed: list[tuple[int, int]], running: list[int]) -> str:
    """Returns who failed, in order, and who was stopped for that."""
    parts = [
        f"process {rank} "
        + (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
        for rank, code in failed
    ]
    if running:
        one = len(running) == 1
        numbers = ", ".join(map(str, running))
        parts.append(
            f"process{'' if one else 'es'} {numbers} still ran and {'was' if one else 'were'} stopped"
        )
    return ", then ".join(parts)
