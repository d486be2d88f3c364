"""Ahead-of-time (AOT) compilation for a target NVIDIA GPU, and the memory that the program would need on it.

XLA's compiler for CUDA needs only a description of the device. So memory, fusions and the dtypes of
collectives can be read on any Linux machine with the packages that `install_compiler` installs.
"""

import importlib
import importlib.util
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jmp_train.tools.aot.compiled import CompiledProgram
from jmp_train.tools.aot.compiler_packages import PluginError, compiler_path
from jmp_train.tools.aot.compiling import compiling_environment, run_process
from jmp_train.tools.aot.exported_process import mesh_of, sizes_of
from jmp_train.tools.aot.gpus import GPU, GPUS


def compile_for_gpu(
    target: str,
    *arguments: str,
    gpu: str | GPU = "V100-16GB",
    devices: int = 1,
    python: str | Path = sys.executable,
    timeout: float = 600,
) -> CompiledProgram:
    """Compiles a function for a GPU in a separate process, and returns its memory and costs.

    `target` names a builder: a function that gets `arguments`, all strings, and returns `(function,
    arguments)` or `(function, arguments, jit_kwargs)`. The function must not be jitted. `arguments` is
    a tuple of trees whose leaves are `jax.ShapeDtypeStruct` or arrays, of which only shape and dtype
    are used; `jit_kwargs` are passed to `jax.jit`. A builder with a parameter `mesh` gets the mesh of the
    target GPUs, whose one axis is "data", for shardings; leaves without one are replicated.

        def build(rows, mesh):
            x = jax.ShapeDtypeStruct(
                (int(rows), 64), jnp.float16, sharding=NamedSharding(mesh, PartitionSpec("data"))
            )
            return jnp.sum, (x,)

        compiled = compile_for_gpu("bench/sums.py:build", "4096", gpu="A100-40GB", devices=8)

    Args:
      target: "module:function" or "path/to/file.py:function".
      *arguments: arguments of the builder.
      gpu: the name of one of `GPUS`, or a `GPU`, for example from `read_gpus`.
      devices: number of such GPUs, in one host.
      python: the interpreter of an environment with the compiler; None for this one.
      timeout: seconds after which the compilation is killed.

    Raises:
      ValueError: no such GPU, fewer than one device, or a target without a function.
      PluginError: the environment lacks the compiler for CUDA, or it does not match jaxlib.
      RuntimeError: the builder or the compiler failed; the text has the traceback.
      TimeoutError: it took longer than `timeout`.

    Example:
      >>> compile_for_gpu("bench.sums:build", gpu="V100")  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      ValueError: gpu='V100' must be a GPU or one of P100-16GB, V100-16GB, V100-32GB, ...
    """
    target_gpu = _check(target, gpu, devices)
    packages = compiler_path() if str(python) == sys.executable else None
    with tempfile.TemporaryDirectory(prefix="jmp_train_") as directory:
        folder = Path(directory)
        (folder / "topology.json").write_text(json.dumps(target_gpu.topology(devices)))
        command = (
            str(python),
            "-m",
            "jmp_train.tools.aot.compilation",
            directory,
            str(devices),
            target,
        )
        what = f"compiling {target} for {target_gpu.name}"
        run_process(what, (*command, *arguments), folder / "log", compiling_environment(packages), timeout)
        if (folder / "no_plugin").exists():
            raise PluginError((folder / "no_plugin").read_text())
        sizes = json.loads((folder / "sizes.json").read_text())
        return CompiledProgram(**sizes, hlo=(folder / "hlo").read_text())


def target_mesh(gpu: str | GPU = "V100-16GB", devices: int = 1) -> Mesh:
    """Returns a mesh of target GPUs, which may be absent; its one axis is "data".

    Args:
      gpu: the name of one of `GPUS`, or a `GPU`.
      devices: number of GPUs, in one host.

    Raises:
      ValueError: no such GPU, or fewer than one device.
      PluginError: the environment lacks the compiler for CUDA, or it does not match jaxlib.
    """
    return _mesh(_check_gpu(gpu, devices).topology(devices), devices)


def _mesh(topology: Mapping[str, Any], devices: int) -> Mesh:
    compiler_path()
    return mesh_of(topology, [("data", devices)])


def compile_here(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    jit_kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mesh,
) -> CompiledProgram:
    """Compiles a function for a GPU in this process, and returns its memory and costs.

    The process must have been started with the settings of `compile_for_gpu`:
    `JAX_PLATFORMS=cpu`, so that the plugin does not look for CUDA, and `XLA_FLAGS` with
    `--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false`, because nothing can be timed.

    Args:
      function: a function that is not jitted.
      arguments: its arguments, trees of `jax.ShapeDtypeStruct` or arrays; those without a
        sharding over `mesh` are replicated.
      jit_kwargs: arguments of `jax.jit`: `donate_argnums`, `out_shardings`.
      mesh: a `target_mesh`, or one of its devices in another arrangement. The mesh of sharded arguments
        takes precedence.

    Raises:
      TypeError: `function` is jitted, and would lose the arguments of its `jit`.
    """
    if hasattr(function, "lower"):
        raise TypeError(f"function must not be jitted, got {function}; pass jit_kwargs instead")
    mesh = next((x.sharding.mesh for x in jax.tree.leaves(arguments) if _is_placed(x)), mesh)
    structs = jax.tree.map(lambda leaf: _on(mesh, leaf), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas reads its target there
        lowered = jax.jit(function, **(jit_kwargs or {})).lower(*structs)
    compiled = lowered.compile()
    return CompiledProgram(**sizes_of(compiled), hlo=compiled.as_text() or "")


def _is_placed(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(leaf.sharding, NamedSharding)


def _on(mesh: Mesh, leaf: ArrayLike | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a leaf's shape, dtype and sharding, on the mesh if it has no other."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and _is_placed(leaf):
        return leaf
    struct = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.eval_shape(lambda: leaf)
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=replicated, weak_type=struct.weak_type)


def _check(target: str, gpu: str | GPU, devices: int) -> GPU:
    """Returns the GPU of a name, after checking the other arguments."""
    found = _check_gpu(gpu, devices)
    module, _, name = target.rpartition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"target={target!r} must be 'module:function' or 'path/to/file.py:function'")
    return found


def _check_gpu(gpu: str | GPU, devices: int) -> GPU:
    found = gpu if isinstance(gpu, GPU) else GPUS.get(gpu)
    if found is None:
        raise ValueError(f"gpu={gpu!r} must be a GPU or one of {', '.join(GPUS)}")
    if devices < 1:
        raise ValueError(f"devices={devices!r} must be at least 1")
    return found


def _main(directory: str, devices: str, target: str, *arguments: str) -> None:
    """Compiles the result of a builder and writes the result to a directory."""
    folder = Path(directory)
    try:
        mesh = _mesh(json.loads((folder / "topology.json").read_text()), int(devices))
    except PluginError as error:
        (folder / "no_plugin").write_text(str(error))
        return
    compiled = asdict(compile_here(*_build(target, arguments, mesh), mesh=mesh))
    (folder / "hlo").write_text(compiled.pop("hlo"))
    (folder / "sizes.json").write_text(json.dumps(compiled))


def _build(target: str, arguments: tuple[str, ...], mesh: Mesh) -> tuple[Any, ...]:
    """Returns the result of a builder, two or three things."""
    place, _, name = target.rpartition(":")
    builder = getattr(_load(place), name)
    wants_mesh = "mesh" in inspect.signature(builder).parameters
    built = builder(*arguments, mesh=mesh) if wants_mesh else builder(*arguments)
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[1], tuple):
        raise TypeError(
            f"{target} must return (function, arguments tuple) or (function, arguments tuple, "
            f"jit_kwargs), got {type(built).__name__}: {built!r:.200}"
        )
    return built


def _load(place: str) -> ModuleType:
    """Returns the module of a name, or of a file, which may import its neighbors."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    file = Path(place).resolve(strict=True)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _main(*sys.argv[1:])
