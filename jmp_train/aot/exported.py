"""Programs that are traced here, and compiled for a GPU in a process that has nothing but jax and the compiler.

    function, shapes -> `export_program` -> `compile_program` -> `CompiledForGPU`

What was compiled once is kept on disk, by the program, the GPU and the versions.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding

from jmp_train.aot import compile_process
from jmp_train.aot.compilation import CompiledForGPU
from jmp_train.aot.compiler_packages import cache_folder, compiler_path
from jmp_train.aot.compiling import compiling_environment, from_traceback, run_process
from jmp_train.aot.gpus import GPU
from jmp_train.extras import extra_packages
from jmp_train.policies.files import write_atomically

_TEXTS = ("hlo", "buffer_assignment", "live_range")
_MOST_CACHED = 2**30  # bytes


@dataclass(frozen=True)
class ExportedProgram:
    """A function of given shapes, traced and serialized.

    Attributes:
      serialized: what `jax.export` made.
      devices: for how many devices.
      donated: the numbers of the arguments whose memory the results may take.
      paths: of each argument, "state.params['kernel']".
    """

    serialized: bytes
    devices: int
    donated: tuple[int, ...]
    paths: tuple[str, ...]


def export_program(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    names: Sequence[str],
    donated: Sequence[int] = (),
    shardings: Sequence[Any] | None = None,
    devices: int = 1,
    platform: str = "cuda",
) -> ExportedProgram:
    """Traces a function for a platform and serializes it; no device is needed, and no array is made.

    Args:
      function: jitted or not; what an inner jit donates does not count.
      arguments: pytrees of arrays or `jax.ShapeDtypeStruct`, of which only shape and dtype count.
      names: of the arguments, with which `paths` begin.
      donated: the numbers of the arguments that are donated.
      shardings: for each argument a tree like it of `NamedSharding`s over an abstract mesh; None on one device.
      devices: the size of that mesh.
      platform: "cuda" or "cpu".

    Raises:
      ModuleNotFoundError: the package flatbuffers is missing.
      ValueError: jax cannot serialize the function, for example since it calls back to Python; the message says why.
    """
    with extra_packages():
        import flatbuffers  # noqa: F401 - jax.export wants it
    leaves, structure = jax.tree.flatten(tuple(arguments))
    counts = [len(jax.tree.leaves(argument)) for argument in arguments]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    numbers = tuple(j for i in donated for j in range(starts[i], starts[i] + counts[i]))

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    options: dict[str, Any] = {}
    if shardings is not None:
        is_sharding = lambda x: isinstance(x, NamedSharding)
        options["in_shardings"] = tuple(jax.tree.leaves(tuple(shardings), is_leaf=is_sharding))
    jitted = jax.jit(flat, donate_argnums=numbers, **options)
    exported = export.export(jitted, platforms=(platform,))(*(_shape_of(leaf) for leaf in leaves))
    paths = [_paths(name, argument) for name, argument in zip(names, arguments, strict=True)]
    return ExportedProgram(bytes(exported.serialize()), devices, numbers, tuple(p for some in paths for p in some))


def compile_program(program: ExportedProgram, gpu: GPU, *, timeout: float = 1800) -> CompiledForGPU:
    """Compiles an exported program for a GPU that need not be there, in a process of its own.

    Args:
      program: what `export_program` returned.
      gpu: of which there are `program.devices`, in one host.
      timeout: seconds after which the compilation is killed.

    Raises:
      PluginError: the compiler is not there, see `compiler_packages`.
      RuntimeError: compiling failed; the text has the end of what it printed.
      TimeoutError: it took longer than `timeout`.
    """
    packages = compiler_path()
    environment = compiling_environment(packages)
    request = json.dumps({"target_config": gpu.target_config, "devices": program.devices, "donated": program.donated})
    cached = cache_folder() / "programs" / _key(program, request, environment, packages)
    if (known := _read(cached)) is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="jmp_train_") as scratch:
        folder = Path(scratch)
        (folder / "program").write_bytes(program.serialized)
        (folder / "request.json").write_text(request)
        environment["XLA_FLAGS"] += f" --xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
        command = (sys.executable, compile_process.__file__, scratch)
        code = run_process(command, folder / "log", environment, timeout)
        if code is None:
            raise TimeoutError(f"compiling for {gpu.name} took more than timeout={timeout} s")
        if code != 0:
            text = from_traceback((folder / "log").read_text(errors="replace"))
            raise RuntimeError(f"compiling for {gpu.name} failed (exit code {code}):\n{text}")
        content = json.loads((folder / "sizes.json").read_text())
        content |= {name: (folder / name).read_text() for name in _TEXTS}
    cached.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(cached, zlib.compress(json.dumps(content).encode(), 1))
    _forget_the_oldest(cached.parent)
    return CompiledForGPU(**content)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    struct = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.eval_shape(lambda: leaf)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, weak_type=struct.weak_type)


def _paths(name: str, argument: Any) -> list[str]:
    return [name + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(argument)[0]]


def _key(program: ExportedProgram, request: str, environment: dict[str, str], packages: Path | None) -> str:
    """Returns the name under which the compiled program is kept."""
    found = metadata.distributions(path=[str(packages)]) if packages else metadata.distributions()
    names = ((d.metadata["Name"] or "", d.version) for d in found)
    compilers = sorted(f"{name}=={version}" for name, version in names if re.search("cuda|nvcc|nvvm", name))
    own = Path(compile_process.__file__).read_text()
    parts = (request, environment["XLA_FLAGS"], jax.__version__, metadata.version("jaxlib"), *compilers, own)
    return hashlib.sha256(program.serialized + "\0".join(parts).encode()).hexdigest()


def _read(cached: Path) -> CompiledForGPU | None:
    """Returns what was compiled before; None if there is nothing, or it cannot be read."""
    try:
        content = json.loads(zlib.decompress(cached.read_bytes()))
        os.utime(cached, (time.time(), time.time()))
        return CompiledForGPU(**content)
    except (OSError, ValueError, TypeError, zlib.error):
        return None


def _forget_the_oldest(folder: Path) -> None:
    """Removes what was not used for longest, where all of it takes more than a gibibyte."""
    files = []
    for file in folder.iterdir():
        try:
            files.append((file.stat().st_mtime, file.stat().st_size, file))
        except FileNotFoundError:  # another process has removed it
            continue
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files, key=lambda entry: entry[0]):
        if total <= _MOST_CACHED:
            return
        file.unlink(missing_ok=True)
        total -= size
