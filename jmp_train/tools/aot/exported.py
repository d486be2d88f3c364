"""Traces programs here, and compiles them for absent devices in a process with only jax and the compiler.

    function, shapes -> `export_program` -> `compile_program` -> `CompiledProgram`

Compiled programs are cached on disk, by the program, the device and the versions.
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
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any, TypeGuard

import jax
from jax import export
from jax.sharding import NamedSharding

from jmp_train.extras import extra_packages
from jmp_train.policies.autocasting import user_line_of
from jmp_train.policies.files import cache_folder, write_atomically
from jmp_train.policies.programs import walk
from jmp_train.policies.pytrees import is_array, is_nnx
from jmp_train.tools.aot import exported_process
from jmp_train.tools.aot.allocations import tpu_sizes
from jmp_train.tools.aot.compiling import compiler_path, compiling_environment, run_process, with_deep_stack
from jmp_train.tools.aot.networks import Device

_NUMBERS = bool | int | float | complex


def shapes_of(tree: Any) -> Any:
    """Returns a tree with its arrays and numbers as `jax.ShapeDtypeStruct`; all other leaves stay.

    Other leaves, such as the activation functions and names in equinox modules, are constants for the
    program; so are numbers in such modules, as in `eqx.filter_jit`.

    Args:
      tree: a pytree.

    Example:
      >>> import numpy as np
      >>> shapes_of({"w": np.zeros((2, 3), np.float32), "activation": max})
      {'activation': <built-in function max>, 'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    return jax.tree.map(_shapes_of_node, tree, is_leaf=_is_equinox)


def is_shape(leaf: object) -> TypeGuard[jax.ShapeDtypeStruct]:
    """Returns whether a leaf of the result of `shapes_of` is an argument of the program.

    Example:
      >>> is_shape(shapes_of(3.0)), is_shape(shapes_of("train"))
      (True, False)
    """
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _shapes_of_node(node: Any) -> Any:
    if _is_equinox(node):
        return jax.tree.map(lambda x: x if isinstance(x, _NUMBERS) else _shape_of(x), node)
    return _shape_of(node)


def _shape_of(leaf: Any) -> Any:
    if not (is_shape(leaf) or isinstance(leaf, _NUMBERS) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
        return leaf
    struct: Any = leaf if is_shape(leaf) else jax.eval_shape(lambda: leaf)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, weak_type=struct.weak_type)  # without its placement here


def _is_equinox(node: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


_CONSTANT = re.compile(r"^allocation \d+: size (\d+),.*\bconstant\b", re.MULTILINE)


@dataclass(frozen=True)
class CompiledProgram:
    """The needs of a compiled program on each of its devices.

    Attributes:
      peak_bytes: the largest number of bytes alive at one time, arguments and results included.
      argument_bytes: bytes of the arguments.
      output_bytes: bytes of the results.
      alias_bytes: bytes of the results that reuse the memory of donated arguments.
      temp_bytes: bytes of everything else, one common allocation.
      hlo: the text of the optimized HLO.
      buffer_assignment: XLA's text about the placement of values, only from `compile_program`.
      live_range: XLA's text about the live ranges of values, only from `compile_program`.
      reported_bytes: for TPUs, arguments, results and temporaries by libtpu's own analysis, the memory of donated
        arguments counted once; None if libtpu refused the program because it does not fit, and for GPUs.
      refusal: libtpu's message about a program that does not fit; otherwise "".
      coordinates: the coordinates of each TPU's chip, in the order of the mesh; only from `compile_program`.
    """

    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    hlo: str = field(repr=False)
    buffer_assignment: str = field(default="", repr=False)
    live_range: str = field(default="", repr=False)
    reported_bytes: int | None = None
    refusal: str = ""
    coordinates: Sequence[Sequence[int]] = field(default=(), repr=False)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that a device allocates for a run: arguments, results that do not reuse their memory, and temporaries.

        Constants are included if `buffer_assignment` has them. If temporaries do not fit together without gaps, it
        exceeds `peak_bytes`.
        """
        constants = sum(map(int, _CONSTANT.findall(self.buffer_assignment)))
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + constants


_TEXTS = ("hlo", "buffer_assignment", "live_range")
_DUMPED = {"cuda": "gpu_after_optimizations", "tpu": "after_optimizations"}  # in the names of XLA's dumps
_MOST_CACHED = 2**30  # bytes


class ExportError(ValueError):
    """A program cannot be compiled in another process, for example because it calls back to Python.

    Example:
      >>> export_program(lambda x: None, (jax.ShapeDtypeStruct((), "float32"),), names=("x",))  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      jmp_train.tools.aot.exported.ExportError: the step returns no array, so there is nothing to compile; ...
    """


@dataclass(frozen=True)
class ExportedProgram:
    """A function of given shapes, traced and serialized.

    Attributes:
      serialized: the result of `jax.export`.
      devices: number of devices.
      donated: the numbers of the arguments whose memory the results may reuse.
      paths: the path of each argument, "state.params['kernel']".
      mesh: the axes of the mesh of devices, and their lengths.
    """

    serialized: bytes
    devices: int
    donated: tuple[int, ...]
    paths: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...] = ()


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
    """Traces a function for a platform and serializes it; it needs no device, and creates no array.

    Args:
      function: a jitted or plain function; donations of an inner jit are ignored. If it changes flax nnx objects in
        place, their values after the call are results too.
      arguments: pytrees of arrays or `jax.ShapeDtypeStruct`, of which only shape and dtype are used. Other leaves are
        constants, see `shapes_of`.
      names: names of the arguments; `paths` begin with them.
      donated: the numbers of the donated arguments.
      shardings: for each argument a tree like it of `NamedSharding`s over an abstract mesh; None on one device.
      devices: the size of that mesh.
      platform: "cuda", "tpu" or "cpu".

    Raises:
      ModuleNotFoundError: the package flatbuffers is missing.
      ExportError: the function calls back to Python, returns no array, or is for other devices; or jax cannot serialize
        it. The message has the reason.

    Example:
      >>> state, batch = {"w": jax.ShapeDtypeStruct((4,), "float32")}, jax.ShapeDtypeStruct((8, 4), "float32")
      >>> def step(state, batch):
      ...     return {"w": state["w"] - batch.sum(0)}
      >>> program = export_program(step, (state, batch), names=("state", "batch"), donated=(0,))
      >>> program.paths, program.donated, program.devices
      (("state['w']", 'batch'), (0,), 1)
    """
    with extra_packages():
        import flatbuffers  # noqa: F401 - needed by jax.export
    shapes = [shapes_of(argument) for argument in arguments]
    leaves, structure = jax.tree.flatten(shapes)
    given = [i for i, leaf in enumerate(leaves) if is_shape(leaf)]
    owners = [i for i, argument in enumerate(shapes) for leaf in jax.tree.leaves(argument) if is_shape(leaf)]
    numbers = tuple(number for number, owner in enumerate(owners) if owner in donated)

    def flat(*values: Any) -> list[Any]:
        changed = dict(zip(given, values, strict=True))
        called_with = jax.tree.unflatten(structure, [changed.get(i, leaf) for i, leaf in enumerate(leaves)])
        return _results(function(*called_with), called_with, values)

    options: dict[str, Any] = {}
    mesh = {"data": devices}
    if shardings is not None:
        is_sharding = lambda x: isinstance(x, NamedSharding)
        of_leaves = jax.tree.leaves(list(shardings), is_leaf=is_sharding)
        mesh = dict(next((x.mesh.shape for x in of_leaves if is_sharding(x)), mesh))
        options["in_shardings"] = tuple(of_leaves[i] for i in given)
    jitted = jax.jit(flat, donate_argnums=numbers, **options)
    exported = _export(jitted, [leaves[i] for i in given], devices, platform)
    paths = [path for name, argument in zip(names, shapes, strict=True) for path in _paths(name, argument)]
    return ExportedProgram(bytes(exported.serialize()), devices, numbers, tuple(paths), tuple(mesh.items()))


def compile_program(
    program: ExportedProgram, device: Device, *, hosts: int = 1, timeout: float = 1800, stop: Event | None = None
) -> CompiledProgram:
    """Compiles an exported program for devices, which may be absent, in a separate process.

    Args:
      program: from `export_program`.
      device: a GPU, if the hosts have `program.devices` of them, or a slice with that many TPUs.
      hosts: number of hosts with GPUs.
      timeout: seconds after which the compilation is killed.
      stop: ends the compilation when another thread sets it.

    Raises:
      PluginError: the compiler is missing, see `compiler_packages`.
      RuntimeError: compiling failed; the message has the end of its output.
      TimeoutError: it took longer than `timeout`.
      InterruptedError: `stop` was set.
    """
    packages = compiler_path(device.platform)
    environment = compiling_environment(packages, device.platform)
    request = json.dumps(
        {
            "topology": device.topology(program.devices, hosts),
            "mesh": program.mesh or [("data", program.devices)],
            "donated": program.donated,
            "dumped": _DUMPED[device.platform],
        }
    )
    cached = cache_folder() / "programs" / _key(program, request, environment, packages)
    if (known := _read(cached)) is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="jmp_train_") as scratch:
        folder = Path(scratch)
        (folder / "program").write_bytes(program.serialized)
        (folder / "request.json").write_text(request)
        environment["XLA_FLAGS"] += f" --xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
        command = (sys.executable, exported_process.__file__, scratch)
        command = with_deep_stack(command) if device.platform == "tpu" else command
        run_process(f"compiling for {device.name}", command, folder / "log", environment, timeout, stop)
        texts = {name: (folder / name).read_text() for name in _TEXTS}
        content = {**_sizes(device, json.loads((folder / "sizes.json").read_text()), texts), **texts}
    cached.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(cached, zlib.compress(json.dumps(content).encode(), 1))
    _forget_the_oldest(cached.parent)
    return CompiledProgram(**content)


def _sizes(device: Device, found: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Returns the sizes of `CompiledProgram`: those that XLA reports, for TPUs those of its buffer assignment.

    libtpu's peak includes the vector memory of its cores, and it reports nothing about programs that do not fit.
    """
    if device.platform != "tpu":
        return {**found, "coordinates": ()}
    found["coordinates"] = tuple(map(tuple, found["coordinates"]))
    sizes = tpu_sizes(texts["buffer_assignment"], texts["live_range"])
    if "refusal" in found:
        return {**sizes, **found, "temp_bytes": sizes["temp_bytes"] + _more_needed(sizes, found["refusal"])}
    parts = (found[f"{name}_bytes"] for name in ("argument", "output", "temp"))
    sizes["temp_bytes"] = max(sizes["temp_bytes"], found["temp_bytes"])  # libtpu adds some of its own
    total = sum(parts) - found["alias_bytes"]
    return {**sizes, "reported_bytes": total, "coordinates": found["coordinates"]}


def _more_needed(sizes: dict[str, int], refusal: str) -> int:
    """Returns the bytes that a program needs beyond its buffers, by libtpu's message: "... required ... (40.25G)"."""
    needed = re.search(r"\((\d+\.\d+)G\)", refusal)
    known = sizes["argument_bytes"] + sizes["output_bytes"] - sizes["alias_bytes"] + sizes["temp_bytes"]
    return max(0, int(float(needed[1]) * 2**30) - known) if needed else 0


def _results(returned: Any, called_with: Any, values: Sequence[Any]) -> list[Any]:
    """Returns the arrays of a function's result, preceded by those of nnx objects that it changed in place."""
    objects = [x for x in jax.tree.leaves(called_with, is_leaf=is_nnx) if is_nnx(x)]
    held = [x for x in jax.tree.leaves(objects) if is_array(x)]
    given, is_held = {id(x) for x in values}, {id(x) for x in held}
    arrays = [x for x in jax.tree.leaves(returned) if is_array(x) or isinstance(x, bool | int | float)]
    if is_held <= given:
        return arrays
    return [*held, *(x for x in arrays if id(x) not in is_held)]


def _export(jitted: Any, shapes: Sequence[jax.ShapeDtypeStruct], devices: int, platform: str) -> export.Exported:
    traced = jitted.trace(*shapes)
    if not traced.jaxpr.out_avals:
        raise ExportError("the step returns no array, so there is nothing to compile; return the next state")
    if found := sorted(_callbacks(traced.jaxpr)):
        raise ExportError(
            f"the step calls back to Python, which cannot be compiled without the GPU: {', '.join(found)}. "
            "Remove the callbacks from the planned step; they need almost no memory"
        )
    try:
        exported = export.export(jitted, platforms=(platform,))(*shapes)
    except (ValueError, NotImplementedError) as error:
        raise ExportError(f"jax cannot serialize the step for {platform}: {error}") from error
    if exported.nr_devices != devices:
        raise ExportError(
            f"the step runs on {exported.nr_devices} devices by itself (pmap, or arrays and meshes of these "
            f"devices), but a program for {devices} is needed; pass the step of one device, and devices=... to "
            "the plan"
        )
    return exported


def _callbacks(program: Any) -> set[str]:
    """Returns the primitives that call Python, with their lines of code."""
    named = ((place.equation.primitive.name, place.equations) for place in walk(program))
    return {f"{name} at {user_line_of(at)}" for name, at in named if "callback" in name or name == "debug_print"}


def _paths(name: str, argument: Any) -> list[str]:
    leaves = jax.tree_util.tree_flatten_with_path(argument)[0]
    return [name + jax.tree_util.keystr(path) for path, leaf in leaves if is_shape(leaf)]


def _key(program: ExportedProgram, request: str, environment: dict[str, str], packages: Path | None) -> str:
    """Returns the name of the compiled program in the cache."""
    found = metadata.distributions(path=[str(packages)]) if packages else metadata.distributions()
    names = ((d.metadata["Name"] or "", d.version) for d in found)
    compilers = sorted(f"{name}=={version}" for name, version in names if re.search("cuda|nvcc|nvvm|libtpu", name))
    own = Path(exported_process.__file__).read_text()
    parts = (request, environment["XLA_FLAGS"], jax.__version__, metadata.version("jaxlib"), *compilers, own)
    return hashlib.sha256(program.serialized + "\0".join(parts).encode()).hexdigest()


def _read(cached: Path) -> CompiledProgram | None:
    """Returns a program from the cache; None if it is missing or cannot be read."""
    try:
        content = json.loads(zlib.decompress(cached.read_bytes()))
        content["coordinates"] = tuple(map(tuple, content["coordinates"]))
        os.utime(cached, (time.time(), time.time()))
        return CompiledProgram(**content)
    except (OSError, ValueError, TypeError, KeyError, zlib.error):
        return None


def _forget_the_oldest(folder: Path) -> None:
    """Removes the least recently used programs if the cache takes more than a gibibyte."""
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
