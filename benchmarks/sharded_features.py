"""Measures the bytes that devices exchange to read rows of sharded features, by three programs.

    python benchmarks/sharded_features.py [--devices 8] [--reads 8000] [--rounds 10] [--json FILE]

`shard_features` sends ids and rows by all-to-all. The others are `array[ids]` of a sharded array, with collectives
from jax, and a gather of all ids with a reduce-scatter of the rows. Bytes are those of the compiled program's
collectives, for one round of `shard_features`. Without several devices, they are virtual CPU devices. Times are the
minimum over the rounds, in which all programs take turns.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=8)
parser.add_argument("--nodes", type=int, default=80_000)
parser.add_argument("--reads", type=int, default=8_000, help="of each device")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--rounds", type=int, default=10)
parser.add_argument("--json", type=Path)
options = parser.parse_args()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(options.devices))
os.environ.setdefault("NPROC", str(4 * options.devices))  # with fewer threads virtual devices wait for one another

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from result_files import write_results

from jmp_train import graphs
from jmp_train.aot import GPUS, program_costs, read_hlo


def programs(mesh: Mesh) -> dict[str, Any]:
    """Returns functions from sharded rows and ids [devices, reads] to rows [devices, reads, width]."""
    sharded = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}

    def by_take(store: graphs.ShardedFeatures, ids: jax.Array) -> jax.Array:
        return store.take(ids[0])[None]

    def by_reduce_scatter(rows: jax.Array, ids: jax.Array) -> jax.Array:
        places = lax.all_gather(ids[0], "data") - lax.axis_index("data") * len(rows)
        is_own = (places >= 0) & (places < len(rows))
        found = rows.at[jnp.where(is_own, places, len(rows))].get(mode="fill", fill_value=0)
        return lax.psum_scatter(found, "data")[None]

    return {
        "shard_features": jax.shard_map(by_take, **sharded),
        "array[ids]": lambda rows, ids: lax.with_sharding_constraint(rows[ids], NamedSharding(mesh, P("data"))),
        "reduce-scatter": jax.shard_map(by_reduce_scatter, **sharded),
    }


def sent_bytes(compiled: jax.stages.Compiled) -> float:
    """Returns what a device has to send in one run of a program, of each loop one round."""
    program = read_hlo(compiled.as_text() or "")
    return sum(item.sent_bytes for item in program_costs(program, GPUS["A100-40GB"]).communication)  # on any GPU


def measure(mesh: Mesh, dtype: str) -> dict[str, dict[str, float]]:
    """Returns the megabytes that a device sends, and the milliseconds, of each program."""
    random, apart = np.random.default_rng(0), NamedSharding(mesh, P("data"))
    features = random.normal(size=(options.nodes, options.width)).astype(dtype)
    ids = np.stack([random.permutation(options.nodes)[: options.reads] for _ in range(mesh.size)]).astype(np.int32)
    store, rows = graphs.shard_features(features, mesh), jax.device_put(features, apart)
    given = {"shard_features": store, "array[ids]": rows, "reduce-scatter": rows}
    places = jax.device_put(ids, apart)
    runs = {name: jax.jit(run).lower(given[name], places).compile() for name, run in programs(mesh).items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        np.testing.assert_array_equal(run(given[name], places), features[ids])
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(given[name], places))
            times[name].append(time.perf_counter() - start)
    return {
        name: {"sent_mb": sent_bytes(run) / 1e6, "milliseconds": 1e3 * min(times[name])} for name, run in runs.items()
    }


def main() -> None:
    """Measures in both precisions, and prints what was found."""
    mesh = Mesh(np.array(jax.devices()[: options.devices]), ("data",))
    least = options.reads * (mesh.size - 1) / mesh.size * options.width * 4 / 1e6
    print(
        f"{mesh.size} devices, {options.reads} reads each of {options.width} numbers; of other devices {least:.2f} MB"
    )
    results = {dtype: measure(mesh, dtype) for dtype in ("float32", "float16")}
    for dtype, found in results.items():
        for name, row in found.items():
            print(f"{dtype:8} {name:15} sends {row['sent_mb']:6.2f} MB  {row['milliseconds']:7.1f} ms")
    if options.json:
        write_results(options.json, {"devices": mesh.size, "least_mb": least, "results": results})


if __name__ == "__main__":
    main()
