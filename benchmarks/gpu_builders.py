"""Compiles functions of builders for absent GPUs, each in a process of its own: for benchmarks and tests.

Unlike `jmp_train.aot.compile_program`, it compiles without `jax.export`, in any environment with the compiler for CUDA,
and gives the builder the mesh of the absent GPUs.
"""

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jmp_train.aot import GPU, GPUS, CompiledProgram, install_compiler, read_hlo

_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"  # nothing can be timed
_RUNS_OTHERS = frozenset({"while", "call", "conditional", "async-start", "call-start"})


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
      RuntimeError: the builder or the compiler failed; the text has the traceback.
      subprocess.TimeoutExpired: it took longer than `timeout`.
    """
    target_gpu = GPUS[gpu] if isinstance(gpu, str) else gpu
    has_compiler = str(python) != sys.executable or importlib.util.find_spec("jax_cuda12_plugin") is not None
    path = [
        *([] if has_compiler else [str(install_compiler())]),
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "JAX_PLATFORMS": "cpu",  # the plugin loads without CUDA's libraries
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip(),
    }
    with tempfile.TemporaryDirectory(prefix="jmp_train_") as directory:
        folder = Path(directory)
        (folder / "topology.json").write_text(json.dumps(target_gpu.topology(devices)))
        code = "import sys, gpu_builders; gpu_builders.write_compiled(*sys.argv[1:])"
        command = (str(python), "-c", code, directory, str(devices), target, *arguments)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise RuntimeError(f"compiling {target} for {target_gpu.name} failed:\n{done.stderr}")
        sizes = json.loads((folder / "sizes.json").read_text())
        return CompiledProgram(**sizes, hlo=(folder / "hlo").read_text())


def target_mesh(gpu: str | GPU = "V100-16GB", devices: int = 1) -> Mesh:
    """Returns a mesh of target GPUs, which may be absent; its one axis is "data".

    Args:
      gpu: the name of one of `GPUS`, or a `GPU`.
      devices: number of GPUs, in one host.

    Raises:
      RuntimeError: the environment lacks the compiler for CUDA.
    """
    return _mesh((GPUS[gpu] if isinstance(gpu, str) else gpu).topology(devices), devices)


def _mesh(topology: Mapping[str, Any], devices: int) -> Mesh:
    return topologies.make_mesh(topologies.get_topology_desc(**topology), [devices], ("data",))


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
    sizes: Any = compiled.memory_analysis()
    return CompiledProgram(
        peak_bytes=sizes.peak_memory_in_bytes,
        argument_bytes=sizes.argument_size_in_bytes,
        output_bytes=sizes.output_size_in_bytes,
        alias_bytes=sizes.alias_size_in_bytes,
        temp_bytes=sizes.temp_size_in_bytes,
        hlo=compiled.as_text() or "",
    )


def _is_placed(leaf: object) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(leaf.sharding, NamedSharding)


def _on(mesh: Mesh, leaf: ArrayLike | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a leaf's shape, dtype and sharding, on the mesh if it has no other."""
    if isinstance(leaf, jax.ShapeDtypeStruct) and _is_placed(leaf):
        return leaf
    struct = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.eval_shape(lambda: leaf)
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=replicated, weak_type=struct.weak_type)


def write_compiled(directory: str, devices: str, target: str, *arguments: str) -> None:
    """Compiles the result of a builder and writes the result to a directory, in a process of its own."""
    folder = Path(directory)
    mesh = _mesh(json.loads((folder / "topology.json").read_text()), int(devices))
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


@dataclass(frozen=True)
class StoredArray:
    """An array that an instruction of the optimized HLO leaves in memory.

    Attributes:
      name: the instruction's name in the HLO.
      opcode: the instruction's; "all-reduce" for the pair "all-reduce-start" and "all-reduce-done" too, and so on.
      dtype: XLA's name: "f16", "bf16", "f32", "s32", "pred".
      shape: the lengths of the axes, on one device.
      n_bytes: bytes of the array, without padding.
    """

    name: str
    opcode: str
    dtype: str
    shape: tuple[int, ...]
    n_bytes: int


def stored_arrays(hlo: str) -> tuple[StoredArray, ...]:
    """Returns the arrays that a program stores, one for each array of each instruction's result.

    Instructions that only pass arrays on (tuples, bitcasts, loops) are left out, and an asynchronous
    operation is listed once. The sum of all is not the memory in use, because arrays that are alive at different times
    share memory.

    Args:
      hlo: the text of a compiled program, `jax.jit(f).lower(...).compile().as_text()`.

    Raises:
      ValueError: `hlo` is not a whole HLO module.

    Example:
      >>> arrays = stored_arrays('''
      ... %fused (p: f32[9]) -> f32[] {
      ...   %p = f32[9]{0} parameter(0)
      ...   %square = f32[9]{0} multiply(%p, %p)
      ...   ROOT %first = f32[] slice(%square)
      ... }
      ... ENTRY %main (x: f32[9]) -> f32[] {
      ...   %x = f32[9]{0} parameter(0)
      ...   ROOT %out = f32[] fusion(%x), kind=kLoop, calls=%fused
      ... }''')
      >>> [(array.name, array.opcode, array.dtype, array.shape) for array in arrays]
      [('x', 'parameter', 'f32', (9,)), ('out', 'fusion', 'f32', ())]
    """
    program = read_hlo(hlo)
    return tuple(
        StoredArray(instruction.name, instruction.opcode.removesuffix("-done"), array.dtype, array.shape, array.n_bytes)
        for name in program.unfused
        for instruction in program.computations[name]
        if _stores(instruction.opcode, in_entry=name == program.entry)
        for array in instruction.arrays
    )


_HANDS_ON = _RUNS_OTHERS | {"tuple", "get-tuple-element", "bitcast", "optimization-barrier", "async-done", "call-done"}


def _stores(opcode: str, *, in_entry: bool) -> bool:
    if opcode == "parameter":
        return in_entry
    # The type of a start includes operands; that of the end is the result's.
    return opcode not in _HANDS_ON and not opcode.endswith(("-start", "-update"))
