"""Compiles an exported program for absent GPUs: `python compile_process.py FOLDER`, with jax as only dependency.

The folder has `program`, serialized by `jax.export`, and `request.json`: XLA's description of the GPU, the number
of devices, and the donated arguments. The process writes `sizes.json`, `hlo`, `buffer_assignment` and `live_range` to
the folder. It must be started with the environment that `compiling_environment` returns.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def main(folder: Path) -> None:
    """Compiles the program in a folder.

    Args:
      folder: see the module.
    """
    request = json.loads((folder / "request.json").read_text())
    mesh = mesh_of(request["target_config"], request["devices"])
    exported = export.deserialize(bytearray((folder / "program").read_bytes()))
    replicated = NamedSharding(mesh, PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or replicated)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas reads its target there
        lowered = jax.jit(exported.call, donate_argnums=request["donated"], keep_unused=True).lower(*arguments)
    compiled = lowered.compile()
    (folder / "hlo").write_text(compiled.as_text() or "")
    for name in ("buffer-assignment", "live-range"):
        dumped = sorted(folder.glob(f"dump/*gpu_after_optimizations-{name}.txt"), key=lambda file: file.stat().st_size)
        (folder / name.replace("-", "_")).write_text(dumped[-1].read_text())
    (folder / "sizes.json").write_text(json.dumps(sizes_of(compiled)))


def mesh_of(target_config: str, devices: int) -> Mesh:
    """Returns a mesh of GPUs, which need not exist; its one axis is "data".

    Args:
      target_config: XLA's description of the GPU.
      devices: number of GPUs, in one host.
    """
    description = topologies.get_topology_desc(platform="cuda", target_config=target_config, topology=f"1x1x{devices}")
    return topologies.make_mesh(description, (devices,), ("data",))


def sizes_of(compiled: Any) -> dict[str, Any]:
    """Returns the bytes that a compiled program needs, by the names of `CompiledForGPU`.

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
    main(Path(sys.argv[1]))
