"""Compiles an exported program for absent devices in a process of its own, with jax as its only dependency.

    python exported_process.py FOLDER

The folder has `program`, serialized by `jax.export`, and `request.json`: the donated arguments, the arguments of
`get_topology_desc`, the mesh of devices and the beginning of the names of XLA's dumps. The process writes `sizes.json`,
`hlo`, `buffer_assignment` and `live_range` to the folder. It must be started with the environment that
`compiling_environment` returns, and with dumps in the folder `dump`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def compile_program(folder: Path) -> None:
    """Compiles the program in a folder.

    Args:
      folder: see the module.
    """
    request = json.loads((folder / "request.json").read_text())
    mesh = mesh_of(request["topology"], request["mesh"])
    exported = export.deserialize(bytearray((folder / "program").read_bytes()))
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


if __name__ == "__main__":
    compile_program(Path(sys.argv[1]))
