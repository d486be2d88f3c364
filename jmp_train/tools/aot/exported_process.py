"""Compiles or runs an exported program in a process of its own, with jax as its only dependency.

    python exported_process.py compile FOLDER
    python exported_process.py measure FOLDER

The folder has `program`, serialized by `jax.export`, and `request.json`. Both requests name the donated arguments.

To compile for absent devices, the request also has the arguments of `get_topology_desc`, the mesh of devices and the
beginning of the names of XLA's dumps. The process writes `sizes.json`, `hlo`, `buffer_assignment` and `live_range` to
the folder. It must be started with the environment that `compiling_environment` returns, and with dumps in the folder
`dump`.

To run on this machine's devices, the request also has the number of devices and of timed runs. The process writes
`measured.json`. Without a program, it lists the devices.
"""

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def compile_program(folder: Path) -> None:
    """Compiles the program in a folder.

    Args:
      folder: see the module.
    """
    request = json.loads((folder / "request.json").read_text())
    mesh = mesh_of(request["topology"], request["mesh"])
    exported = _program(folder)
    replicated = NamedSharding(mesh, PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or replicated)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas reads its target there
        lowered = jax.jit(exported.call, donate_argnums=request["donated"], keep_unused=True).lower(*arguments)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory on HBM" not in str(error):  # what libtpu says of a program that does not fit
            raise
        _copy(folder, request["dumped"], "", "hlo")
        sizes: dict[str, Any] = {"refusal": str(error).splitlines()[0]}
    else:
        (folder / "hlo").write_text(compiled.as_text() or "")
        sizes = sizes_of(compiled)
    sizes["coordinates"] = [[*device.coords] for device in mesh.devices.flat if hasattr(device, "coords")]
    for name in ("buffer-assignment", "live-range"):
        _copy(folder, request["dumped"], f"-{name}", name.replace("-", "_"))
    (folder / "sizes.json").write_text(json.dumps(sizes))


def _copy(folder: Path, dumped: str, of: str, name: str) -> None:
    """Copies the largest dump of a kind, that of the program."""
    found = [file for file in folder.glob(f"dump/*{dumped}{of}.txt") if file.is_file()]
    (folder / name).write_text(max(found, key=lambda file: file.stat().st_size).read_text())


def mesh_of(topology: Mapping[str, Any], axes: Sequence[tuple[str, int]]) -> Mesh:
    """Returns a mesh of devices, which may be absent.

    Args:
      topology: the arguments of `get_topology_desc`.
      axes: the names and lengths of the mesh's axes.
    """
    description = topologies.get_topology_desc(**topology)
    return topologies.make_mesh(description, [n for _, n in axes], tuple(name for name, _ in axes))


def sizes_of(compiled: Any) -> dict[str, Any]:
    """Returns the bytes that a compiled program needs, by the names of `CompiledProgram`.

    Args:
      compiled: a program compiled by jax.
    """
    sizes = compiled.memory_analysis()
    return {
        "peak_bytes": sizes.peak_memory_in_bytes,
        "argument_bytes": sizes.argument_size_in_bytes,
        "output_bytes": sizes.output_size_in_bytes,
        "alias_bytes": sizes.alias_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
    }


def measure_program(folder: Path) -> None:
    """Runs the program in a folder, and describes the devices.

    Args:
      folder: see the module.
    """
    device = jax.devices()[0]
    found: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
    }
    if (folder / "program").exists():
        found |= _measured(_program(folder), **json.loads((folder / "request.json").read_text()))
    (folder / "measured.json").write_text(json.dumps(found))


def _measured(exported: export.Exported, donated: Sequence[int], devices: int, runs: int) -> dict[str, Any]:
    """Returns the time of a run and the memory."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = [sharding or replicated for sharding in exported.in_shardings_jax(mesh)]
    arguments = [_zeros(aval, sharding) for aval, sharding in zip(exported.in_avals, shardings, strict=True)]
    run = jax.jit(exported.call, donate_argnums=donated, keep_unused=True)
    compiled = run.lower(*arguments).compile()
    seconds = []
    for _ in range(runs + 1):  # the first is a warm-up
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
        for number, result in zip(donated, results, strict=False):  # the state comes first in both
            arguments[number] = result
    stats = jax.devices()[0].memory_stats() or {}
    peak_bytes = stats.get("peak_bytes_in_use")
    return {**sizes_of(compiled), "peak_bytes": peak_bytes, "seconds": statistics.median(seconds[1:])}


def _zeros(aval: Any, sharding: Sharding) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        implementation = _KEYS.get(str(aval.dtype), "threefry2x32")
        return jax.device_put(jax.random.split(jax.random.key(0, impl=implementation), aval.shape), sharding)
    return jax.device_put(jnp.zeros(aval.shape, aval.dtype), sharding)


def _program(folder: Path) -> export.Exported:
    return export.deserialize(bytearray((folder / "program").read_bytes()))


if __name__ == "__main__":
    {"compile": compile_program, "measure": measure_program}[sys.argv[1]](Path(sys.argv[2]))
