"""Processes that compile for absent GPUs: their environment, their end, their errors."""

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


# libtpu looks for the TPUs of this host by asking Google's cloud, and complains on stderr of what it does not find. It
# also lets only one process of a machine load it, which several may do where there is no TPU to share.
_WITHOUT_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",
}


def compiling_environment(packages: Path | None, platform: str = "cuda") -> dict[str, str]:
    """Returns the environment of a compiling process.

    Args:
      packages: the folder of the compiler, see `compiler_path`.
      platform: "cuda" or "tpu".
    """
    path = [*filter(None, [packages and str(packages), os.environ.get("PYTHONPATH")])]
    # With the CPU as jax's only platform, the plugin loads without CUDA's libraries.
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(filter(None, (os.environ.get("XLA_FLAGS"), *(_FLAGS if platform == "cuda" else ())))),
        **(_WITHOUT_TPU if platform == "tpu" else {}),
    }


def with_deep_stack(command: Sequence[str]) -> tuple[str, ...]:
    """Returns a command that runs with the largest stack that is allowed.

    libtpu recurses over the instructions of large programs, and a stack of 8 MiB ends it (exit code -11).

    Args:
      command: the command and its arguments.

    Example:
      >>> with_deep_stack(("python", "x.py"))[-2:]
      ('python', 'x.py')
    """
    return ("sh", "-c", 'ulimit -s "$(ulimit -H -s)"; exec "$@"', "sh", *command)


def run_process(
    what: str,
    command: Sequence[str],
    log: Path,
    environment: dict[str, str],
    timeout: float,
    stop: Event | None = None,
) -> None:
    """Runs a command with its output in `log`.

    Args:
      what: a description for errors: "compiling for T4-16GB".
      command: the command and its arguments.
      log: the file.
      environment: the environment of the process.
      timeout: seconds after which it is killed.
      stop: kills it too, when another thread sets it.

    Raises:
      RuntimeError: the process failed; the message has the traceback, or the end of its output.
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
    """Returns the text from the first traceback on, or the end of a log without one."""
    start = log.find("Traceback (most recent call last)")
    return log[start:] if start >= 0 else log[-4000:]
