"""Compiles `native_kernels.cc` for the machine that it runs on, once, into the folder of what can be made again."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

import jax

from jmp_train.policies.files import cache_folder

SOURCE = Path(__file__).with_name("native_kernels.cc")
TARGETS = ("jmp_weighted_sum", "jmp_edge_dot", "jmp_gat_forward", "jmp_gat_of_receivers", "jmp_gat_of_senders")
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-DNDEBUG", "-w")


@functools.cache
def register_kernels() -> None:
    """Compiles the kernels, unless that was done before, and makes them known to jax.

    Raises:
      RuntimeError: there is no compiler for C++, or it fails; the message has what it prints.
    """
    library = ctypes.CDLL(str(built_library()))
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")


def built_library() -> Path:
    """Returns the file of the compiled kernels, which it compiles if need be; see `register_kernels`."""
    compiler = _compiler()
    file = cache_folder() / f"native_kernels-{_key(compiler)}.so"
    if file.exists():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [*compiler, *OPTIONS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"native kernels cannot be compiled: {shlex.join(command)}\n{result.stderr.strip()}")
        os.replace(made, file)  # other processes may make the same file
    return file


def _compiler() -> list[str]:
    """Returns the command of the compiler: `$CXX`, or the first that is there."""
    if own := os.environ.get("CXX"):
        command = shlex.split(own)
        if shutil.which(command[0]) is None:
            raise RuntimeError(f"CXX={own} is not a program: native kernels need a C++ compiler")
        return command
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise RuntimeError(
        f"native kernels need a C++ compiler: none of {', '.join(COMPILERS)} was found; install one or set CXX"
    )


def _key(compiler: list[str]) -> str:
    """Returns a name for all that the compiled file depends on, the instructions that the CPU has among it."""
    cpu = Path("/proc/cpuinfo")
    flags = (
        [line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))]
        if cpu.exists()
        else []
    )
    parts = (
        SOURCE.read_text(),
        metadata.version("jaxlib"),
        compiler,
        platform.platform(),
        platform.processor(),
        flags[:1],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
