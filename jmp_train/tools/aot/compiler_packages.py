"""XLA's compilers for CUDA and for TPUs, in folders of their own that only compiling processes use.

In an environment with a compiler but without its devices, every process that imports jax prints a warning. So the
packages are not installed next to jax but into private folders, one for each version of jaxlib.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

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
