"""Processes that compile for GPUs that are not there: their environment, how they end, what they say."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from threading import Event

_FLAGS = (
    "--xla_gpu_autotune_level=0",  # kernels cannot be timed
    "--xla_gpu_enable_triton_gemm=false",  # its tiles come from timing
)


def compiling_environment(packages: Path | None) -> dict[str, str]:
    """Returns the environment of a process that compiles.

    Args:
      packages: the folder of the compiler, see `compiler_path`.
    """
    path = [*filter(None, [packages and str(packages), os.environ.get("PYTHONPATH")])]
    # With the CPU as jax's only platform, the plugin loads without CUDA's libraries.
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(filter(None, (os.environ.get("XLA_FLAGS"), *_FLAGS))),
    }


def run_process(
    what: str,
    command: Sequence[str],
    log: Path,
    environment: dict[str, str],
    timeout: float,
    stop: Event | None = None,
) -> None:
    """Runs a command; its output goes to `log`.

    Args:
      what: it does, for errors: "compiling for T4-16GB".
      command: and its arguments.
      log: the file.
      environment: the process's.
      timeout: seconds after which it is killed.
      stop: kills it too, when another thread sets it.

    Raises:
      RuntimeError: it failed; the text has the traceback, or the end of what it printed.
      TimeoutError: it took longer than `timeout`.
      InterruptedError: `stop` was set.
    """
    code = _exit_code(command, log, environment, timeout, stop)
    if code is None and stop is not None and stop.is_set():
        raise InterruptedError(f"{what} was stopped")
    if code is None:
        raise TimeoutError(f"{what} took more than timeout={timeout} s")
    if code != 0:
        raise RuntimeError(f"{what} failed (exit code {code}):\n{_from_traceback(log.read_text(errors='replace'))}")


def _exit_code(
    command: Sequence[str], log: Path, environment: dict[str, str], timeout: float, stop: Event | None
) -> int | None:
    """Runs a command and returns its exit code, None if it was killed."""
    end = time.monotonic() + timeout
    with log.open("wb") as output:
        process = Popen(
            command,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            env=environment,
            start_new_session=True,  # XLA's compiler starts processes; they are killed with it
        )
        try:
            while (left := end - time.monotonic()) > 0 and not (stop is not None and stop.is_set()):
                with contextlib.suppress(TimeoutExpired):
                    return process.wait(left if stop is None else min(left, 0.2))
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _from_traceback(log: str) -> str:
    """Returns the first traceback and what follows it, or the end of a log without one."""
    start = log.find("Traceback (most recent call last)")
    return log[start:] if start >= 0 else log[-4000:]
