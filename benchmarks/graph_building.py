"""Measures the CPU time of `from_edges`, compared with numpy's stable sort and scipy's way from coordinates to CSR.

    python benchmarks/graph_building.py [--nodes 232965] [--edges 20000000] [--rounds 3] [--json FILE]

The edges are uniformly random, in random order. numpy only sorts both ends; scipy makes CSR and CSC of the same edges,
with the edge of each entry. All ways take turns. The figures are medians of CPU seconds, which depend less on other
load than wall-clock time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.sparse
from result_files import write_results

from jmp_train.graphs import from_edges

GOAL = 6.0  # CPU seconds of 20 million edges with both formats


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


def main() -> None:
    """Prints the table."""
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
    if args.json:
        write_results(args.json, {"nodes": args.nodes, "edges": args.edges, "seconds": seconds})


if __name__ == "__main__":
    main()
