"""Measures the CPU time of `from_edges`, compared with numpy's stable sort and scipy's way from coordinates to CSR.

    python benchmarks/graph_building.py [--nodes 232965] [--edges 20000000] [--rounds 3] [--json FILE]

The edges are uniformly random, in random order. numpy only sorts both ends; scipy makes CSR and CSC of the same edges,
with the edge of each entry. All ways take turns. The figures are medians of CPU seconds, which depend less on other
load than wall-clock time.

A second table has small graphs of sizes that were not there before, for which a library may have to compile: the time
to make one, to batch two and to pad the batch. jraph makes no index; it batches arrays of jax or of numpy.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jraph
import numpy as np
import scipy.sparse
from result_files import write_results

from jmp_train.graphs import batch, from_edges, pad

GOAL = 6.0  # CPU seconds of 20 million edges with both formats
NEW_SIZES = 20


def ways(num_nodes: int, num_edges: int) -> dict[str, Callable[[], Any]]:
    """Returns what is timed, by name."""
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, num_nodes, (2, num_edges), np.int32)

    def ours(*formats: str) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(from_edges(senders, receivers, num_nodes, formats=formats))

    def by_scipy() -> Any:
        edges = np.arange(num_edges, dtype=np.int32)
        matrix = scipy.sparse.coo_array((edges, (receivers, senders)), (num_nodes, num_nodes))
        return matrix.tocsr(), matrix.tocsc()

    return {
        'from_edges, ("coo", "csr")': ours("coo", "csr"),
        'from_edges, ("csr",)': ours("csr"),
        'from_edges, ("coo",)': ours("coo"),
        "numpy's stable argsort, twice": lambda: [np.argsort(x, kind="stable") for x in (senders, receivers)],
        "scipy's tocsr and tocsc": by_scipy,
    }


def new_sizes(count: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of each of `count` times that graphs of new sizes are made, batched and padded."""
    random = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = time.process_time()
        result = jax.block_until_ready(run(*args, **options))
        seconds.setdefault(name, []).append(time.process_time() - start)
        return result

    for num_nodes in range(30, 30 + count):
        senders, receivers = random.integers(0, num_nodes, (2, 3 * num_nodes))
        nodes, size = np.ones((num_nodes, 4), np.float32), (2 * num_nodes + 8, 6 * num_nodes + 8)
        graph = timed("from_edges", from_edges, senders, receivers, num_nodes, nodes={"x": nodes})
        both = timed("batch", batch, [graph, graph])
        timed("pad", pad, both, *size, n_graph=3)
        counts: list[Any] = [np.array([num_nodes]), np.array([len(senders)])]
        plain = jraph.GraphsTuple(nodes, None, receivers, senders, None, *counts)
        timed("jraph.batch", jraph.batch, [jax.device_put(plain)] * 2)
        pair = timed("jraph.batch_np", jraph.batch_np, [plain, plain])
        timed("jraph.pad_with_graphs, of numpy's arrays", jraph.pad_with_graphs, pair, *size, 3)
    return seconds


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=232_965)
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()

    runs = ways(args.nodes, args.edges)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    print(f"{args.nodes:,} nodes, {args.edges:,} edges: medians of CPU seconds")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"  {name:<32}{median:8.2f}")
    goal = GOAL * args.edges / 20_000_000
    worst = medians['from_edges, ("coo", "csr")']
    print(f"from_edges in at most {goal:.2g} s: {'met' if worst <= goal else 'MISSED'}, {worst:.2f}")
    small = new_sizes(NEW_SIZES)
    print("small graphs of new sizes: medians of milliseconds of CPU")
    for name, times in small.items():
        print(f"  {name:<40}{statistics.median(times) * 1e3:8.2f}")
    if args.json:
        sizes = {"nodes": args.nodes, "edges": args.edges}
        write_results(args.json, {**sizes, "seconds": seconds, "seconds_of_new_sizes": small})


if __name__ == "__main__":
    main()
