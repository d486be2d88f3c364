"""Time per batch of small graphs: `graph_batches`, its pipeline with grain's shuffle, and jraph's `batch`.

    python benchmarks/graph_batches.py [--graphs 188] [--batch-size 32] [--batches 200] [--json FILE]

The graphs have the sizes of MUTAG: 10 to 28 nodes, 2.2 edges per node, labels of nodes and edges. The second row is
`graph_batches` before it computed the order of an epoch at once, with bitwise the same batches. jraph's rows batch and
pad lists of graphs on the host, in order, without shuffling; `jraph.batch` runs jax operation by operation. CPU time
of all threads depends less on other load than wall-clock time.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jraph
import numpy as np
from grain.experimental import device_put
from result_files import write_results

from jmp_train.data import graph_batches
from jmp_train.graphs import GraphData, PaddedSize, padded_batch, padded_sizes

GOAL = 3.0  # CPU milliseconds of a batch of 32 graphs


def made_graphs(count: int) -> GraphData:
    """Returns graphs of the sizes of MUTAG, with random edges."""
    random = np.random.default_rng(0)
    n_node = random.integers(10, 29, count, np.int32)
    n_edge = (2 * np.round(1.1 * n_node)).astype(np.int32)
    ends = random.integers(0, np.repeat(n_node, n_edge), (2, n_edge.sum()), np.int32)
    labels = random.integers(0, 2, count, np.int32)
    nodes = {"label": random.integers(0, 7, n_node.sum(), np.int32)}
    edges = {"label": random.integers(0, 4, n_edge.sum(), np.int32)}
    return GraphData(n_node, n_edge, ends[0], ends[1], labels, 2, nodes, edges)


def with_grains_shuffle(data: GraphData, size: PaddedSize, batch_size: int) -> Iterator[Any]:
    """Returns batches whose order grain makes graph by graph."""

    def fetch(places: np.ndarray) -> Any:
        labels = np.append(data.labels[places], np.int32(0))
        return {"graph": padded_batch(data, places, size), "label": labels}

    order = grain.MapDataset.range(len(data)).shuffle(seed=0)
    batches = order.batch(batch_size, drop_remainder=True, batch_fn=np.asarray).repeat(None).map(fetch)
    return iter(device_put(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)), None))


def by_jraph(data: GraphData, size: PaddedSize, batch_size: int, batch: Callable[[Any], Any]) -> Iterator[Any]:
    """Returns batches, in order, of jraph's graphs."""
    graphs = []
    for place in range(len(data)):
        nodes, edges = (slice(*starts[place : place + 2]) for starts in (data.node_starts, data.edge_starts))
        of_graph: Any = (data.senders[edges], data.receivers[edges], data.n_node[[place]], data.n_edge[[place]])
        senders, receivers, n_node, n_edge = of_graph  # jraph's fields are annotated as jax's arrays
        graphs.append(
            jraph.GraphsTuple(
                nodes={"label": data.nodes["label"][nodes]},
                edges={"label": data.edges["label"][edges]},
                senders=senders,
                receivers=receivers,
                n_node=n_node,
                n_edge=n_edge,
                globals=None,
            )
        )
    starts = range(0, len(graphs) - batch_size + 1, batch_size)
    for start in itertools.cycle(starts):
        padded = jraph.pad_with_graphs(batch(graphs[start : start + batch_size]), *vars(size).values())
        yield jax.device_put(padded)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--graphs", type=int, default=188)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()

    data, count = made_graphs(args.graphs), args.batch_size
    (size,) = padded_sizes(data, count, buckets=1)
    ways = {
        "graph_batches": graph_batches(data, count, sizes=[size], epochs=None, drop_remainder=True),
        "with grain's shuffle": with_grains_shuffle(data, size, count),
        "jraph.batch_np": by_jraph(data, size, count, jraph.batch_np),
        "jraph.batch": by_jraph(data, size, count, jraph.batch),
    }
    figures = {}
    print(f"milliseconds per batch of {count} graphs, padded: medians of {args.batches}, CPU time is a mean")
    for name, batches in ways.items():
        number = args.batches if name != "jraph.batch" else max(1, args.batches // 20)  # it takes long
        jax.block_until_ready(next(batches))
        clock, cpu = [], time.process_time()
        for _ in range(number):
            start = time.perf_counter()
            jax.block_until_ready(next(batches))
            clock.append(1e3 * (time.perf_counter() - start))
        figures[name] = {
            "clock_ms": statistics.median(clock),
            "cpu_ms": 1e3 * (time.process_time() - cpu) / number,
        }
        print(f"  {name:<24}{figures[name]['clock_ms']:9.2f} by the clock{figures[name]['cpu_ms']:9.2f} of CPU")
    goal, found = GOAL * count / 32, figures["graph_batches"]["cpu_ms"]
    print(f"graph_batches in at most {goal:.2g} ms of CPU: {'met' if found <= goal else 'MISSED'}, {found:.2f}")
    if args.json:
        write_results(args.json, {"graphs": args.graphs, "batch_size": count, "ways": figures})


if __name__ == "__main__":
    main()
