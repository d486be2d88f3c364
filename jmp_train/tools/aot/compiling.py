"""XLA's compilers for absent GPUs and TPUs, and the processes that compile: their environment, end and errors.

The compilers are in folders of their own that only compiling processes use.
In an environment with a compiler but without its devices, every process that imports jax prints a warning. So the
packages are not installed next to jax but into private folders, one for each version of jaxlib.
"""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from threading import Event

from jmp_train.policies.files import cache_folder, sync

CUDA_VERSIONS = ("12", "13")
INSTALL = "jmp_train.aot.install_compiler()"
INSTALL_TPU = "jmp_train.aot.install_tpu_compiler()"
_ON_LINUX = sys.platform == "linux"


class PluginError(RuntimeError):
    """One of JAX's compilers is not installed, or its version does not match jaxlib."""


def compiler_folder(cuda: str = "12") -> Path:
    """Returns the folder in which `install_compiler` puts the compiler for this jaxlib and this Python.

    Args:
      cuda: "12" or "13".
    """
    return _folder(f"cuda{cuda}")


def tpu_compiler_folder() -> Path:
    """Returns the folder in which `install_tpu_compiler` puts libtpu for this jaxlib and this Python."""
    return _folder("tpu")


def install_compiler(cuda: str = "12") -> Path:
    """Installs XLA's compiler for CUDA into its private folder by pip, about 600 MB, and returns the folder.

    An existing folder is kept. CUDA 13's compiler does not support the V100 and older GPUs.

    Args:
      cuda: "12" or "13".

    Raises:
      ValueError: no such `cuda`.
      PluginError: not on Linux, pip is missing, or pip fails; the message has its output.
    """
    if cuda not in CUDA_VERSIONS:
        raise ValueError(f"cuda={cuda!r} must be one of {', '.join(CUDA_VERSIONS)}")
    return _install("XLA's compiler for CUDA", compiler_folder(cuda), _packages(cuda))


def install_tpu_compiler() -> Path:
    """Installs libtpu, XLA's compiler for TPUs, into its private folder by pip, about 700 MB, and returns the folder.

    An existing folder is kept. The version is the one that the installed jax asks for on TPUs, in its extra "tpu".

    Raises:
      PluginError: not on Linux, pip is missing, or pip fails; the message has its output.
    """
    return _install("libtpu", tpu_compiler_folder(), (libtpu_requirement(),))


def libtpu_requirement() -> str:
    """Returns the libtpu that the installed jax asks for on TPUs, such as "libtpu==0.0.42.*" for jax 0.10.2.

    Raises:
      PluginError: jax's metadata names none.
    """
    for requirement in metadata.requires("jax") or ():
        if match := re.match(r"(libtpu[^;\s]*)\s*;.*extra == ['\"]tpu['\"]", requirement):
            return match[1]
    raise PluginError(f"jax {metadata.version('jax')} names no libtpu in its extra tpu")


def compiler_path(platform: str = "cuda") -> Path | None:
    """Returns the folder in which a process finds a compiler; None if the environment has it.

    Args:
      platform: "cuda" or "tpu".

    Raises:
      PluginError: neither the folder nor the environment has the compiler, or the environment's does not match jaxlib;
        the message has the command that installs it.
    """
    return _tpu_path() if platform == "tpu" else _cuda_path()


def _cuda_path() -> Path | None:
    wrong = None
    jaxlib = metadata.version("jaxlib")
    for cuda in CUDA_VERSIONS:
        try:
            version = metadata.version(f"jax-cuda{cuda}-plugin")
        except metadata.PackageNotFoundError:
            continue
        if version == jaxlib:
            return None
        wrong = (
            f"jaxlib {jaxlib} needs jax-cuda{cuda}-plugin of the same version, not {version}: "
            f"pip install 'jax-cuda{cuda}-plugin=={jaxlib}'"
        )
    for cuda in CUDA_VERSIONS:
        if compiler_folder(cuda).exists():
            return compiler_folder(cuda)
    raise PluginError(
        wrong or f"XLA's compiler for CUDA is not installed for jaxlib {jaxlib}; install it with {INSTALL}"
    )


def _tpu_path() -> Path | None:
    try:
        metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        folder = tpu_compiler_folder()
        if folder.exists():
            return folder
        jaxlib = metadata.version("jaxlib")
        text = f"libtpu, XLA's compiler for TPUs, is not installed for jaxlib {jaxlib}; install it with {INSTALL_TPU}"
        raise PluginError(text) from None
    return None  # on a TPU's host, the one that jax[tpu] has brought


def _folder(kind: str) -> Path:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder() / f"compiler-jaxlib-{metadata.version('jaxlib')}-{kind}-python{python}"


def _install(what: str, folder: Path, packages: tuple[str, ...]) -> Path:
    """Installs packages into a folder that does not exist yet; another process may be faster."""
    if not _ON_LINUX:
        raise PluginError(f"{what} exists only for Linux, not for {sys.platform}")
    if folder.exists():
        return folder
    if importlib.util.find_spec("pip") is None:
        by_hand = f"uv pip install --no-deps --target {folder} {' '.join(map(repr, packages))}"
        raise PluginError(f"the environment of {sys.executable} has no pip; run instead: {by_hand}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".installing-") as scratch:
        target = Path(scratch) / "packages"
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check")
        done = subprocess.run((*pip, "--target", str(target), *packages), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PluginError(f"pip could not install {' '.join(packages)}:\n{done.stdout}{done.stderr}".rstrip())
        try:
            target.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    sync(folder.parent)
    return folder


def _packages(cuda: str) -> tuple[str, ...]:
    """Returns the packages needed for compiling; cuDNN, cuBLAS and NCCL are only needed for running."""
    jaxlib = metadata.version("jaxlib")
    own = (f"jax-cuda{cuda}-plugin=={jaxlib}", f"jax-cuda{cuda}-pjrt=={jaxlib}")
    if cuda == "12":
        return (*own, "nvidia-cuda-nvcc-cu12>=12.9")  # older ones do not support all of Blackwell
    return (*own, "nvidia-cuda-nvcc>=13", "nvidia-nvvm>=13", "nvidia-cuda-crt>=13")


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
