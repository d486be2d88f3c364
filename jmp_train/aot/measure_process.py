"""Runs an exported program on this machine's devices: `python measure_process.py FOLDER`, with jax alone.

The folder has `program`, serialized by `jax.export`, and `request.json`: the donated arguments, and the number of
timed runs. The process writes `measured.json` there. Without a program, it lists the devices.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def main(folder: Path) -> None:
    """Runs the program in a folder.

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
        found |= measured(folder)
    (folder / "measured.json").write_text(json.dumps(found))


def measured(folder: Path) -> dict[str, Any]:
    """Returns the time of a run and the peak memory."""
    request = json.loads((folder / "request.json").read_text())
    exported = export.deserialize(bytearray((folder / "program").read_bytes()))
    mesh = Mesh(np.array(jax.devices()[: request["devices"]]), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = [sharding or replicated for sharding in exported.in_shardings_jax(mesh)]
    arguments = [_zeros(aval, sharding) for aval, sharding in zip(exported.in_avals, shardings, strict=True)]
    run = jax.jit(exported.call, donate_argnums=request["donated"], keep_unused=True)
    compiled = run.lower(*arguments).compile()
    sizes: Any = compiled.memory_analysis()
    donated, seconds = request["donated"], []
    for _ in range(request["runs"] + 1):  # the first is a warm-up
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
        for number, result in zip(donated, results, strict=False):  # the state comes first in both
            arguments[number] = result
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": statistics.median(seconds[1:]),
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "argument_bytes": sizes.argument_size_in_bytes,
        "output_bytes": sizes.output_size_in_bytes,
        "alias_bytes": sizes.alias_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
    }


def _zeros(aval: Any, sharding: Sharding) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        implementation = _KEYS.get(str(aval.dtype), "threefry2x32")
        return jax.device_put(jax.random.split(jax.random.key(0, impl=implementation), aval.shape), sharding)
    return jax.device_put(jnp.zeros(aval.shape, aval.dtype), sharding)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
