"""Steps of random walks per second: uniform ones and node2vec's, compared with plain Python and with networkx.

    python benchmarks/walks.py [--nodes 200000] [--edges 4000000] [--walks 50000] [--length 40] [--json FILE]

The graph is random and undirected. Plain Python walks on lists of neighbors, like the reference code of node2vec
before it makes tables for each edge; networkx looks up the neighbors of each node. Both take fewer walks. Each figure
is the best of the rounds: steps per second of wall-clock time, and per CPU second of this process, which depends less
on other load. All of it runs in one thread.
"""

import argparse
import random as standard_random
import time
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np
from result_files import write_results

from jmp_train import graphs

GOAL = 1e6  # steps per second
PEERS = 100  # times fewer walks


def plain_walks(
    neighbors: list[list[int]], sets: list[set[int]], starts: list[int], length: int, p: float, q: float
) -> int:
    """Returns the number of steps of node2vec's walks, one after the other."""
    steps = 0
    for start in starts:
        before, now = -1, start
        for _ in range(length):
            near = neighbors[now]
            if not near:
                break
            after = standard_random.choice(near)
            if before >= 0 and not p == q == 1:
                near_before, largest = sets[before], max(1 / p, 1.0, 1 / q)
                while True:
                    weight = 1 / p if after == before else 1.0 if after in near_before else 1 / q
                    if standard_random.random() * largest < weight:
                        break
                    after = standard_random.choice(near)
            before, now = now, after
            steps += 1
    return steps


def networkx_walks(network: nx.Graph, starts: list[int], length: int) -> int:
    """Returns the number of steps of uniform walks, one after the other."""
    steps = 0
    for start in starts:
        now = start
        for _ in range(length):
            near = list(network.neighbors(now))
            if not near:
                break
            now = standard_random.choice(near)
            steps += 1
    return steps


def rates(run: Callable[[], int], rounds: int) -> dict[str, float]:
    """Returns the largest numbers of steps per second by the clock, and per CPU second."""
    by_clock, by_cpu = [], []
    for _ in range(rounds):
        clock, cpu = time.perf_counter(), time.process_time()
        steps = run()
        by_cpu.append(steps / (time.process_time() - cpu))
        by_clock.append(steps / (time.perf_counter() - clock))
    return {"by the clock": max(by_clock), "per CPU second": max(by_cpu)}


def main() -> None:
    """Prints and stores the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=4_000_000)
    parser.add_argument("--walks", type=int, default=50_000)
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    standard_random.seed(0)
    one, other = random.integers(0, args.nodes, (2, args.edges // 2))
    senders, receivers = np.append(one, other), np.append(other, one)
    edges = graphs.host_edges(senders, receivers, args.nodes)
    starts = random.integers(0, args.nodes, args.walks)
    few = starts[: max(1, args.walks // PEERS)].tolist()
    leaving = edges.leaving
    neighbors = [part.tolist() for part in np.split(leaving.sources, leaving.starts[1:-1])]
    sets = [set(near) for near in neighbors]
    network = nx.Graph()
    network.add_nodes_from(range(args.nodes))
    network.add_edges_from(zip(senders.tolist(), receivers.tolist(), strict=True))

    def uniform() -> int:
        return int((graphs.random_walk(edges, starts, random, length=args.length)[:, 1:] >= 0).sum())

    def second_order(p: float, q: float) -> int:
        return int((graphs.node2vec_walk(edges, starts, args.length, random, p=p, q=q)[:, 1:] >= 0).sum())

    runs = {
        "random_walk": uniform,
        "node2vec_walk, p=0.5, q=2": lambda: second_order(0.5, 2.0),
        "node2vec_walk, p=4, q=0.25": lambda: second_order(4.0, 0.25),
        "plain Python, uniform": lambda: plain_walks(neighbors, sets, few, args.length, 1.0, 1.0),
        "plain Python, p=0.5, q=2": lambda: plain_walks(neighbors, sets, few, args.length, 0.5, 2.0),
        "plain Python, p=4, q=0.25": lambda: plain_walks(neighbors, sets, few, args.length, 4.0, 0.25),
        "networkx, uniform": lambda: networkx_walks(network, few, args.length),
    }
    second_order(0.5, 2.0)  # makes the indices
    found = {name: rates(run, args.rounds) for name, run in runs.items()}
    print(f"steps per second, in millions; {args.nodes:,} nodes, {args.edges:,} edges, walks of {args.length} steps")
    for name, each in found.items():
        print(f"{name:28}" + "".join(f"  {value / 1e6:8.2f} {kind}" for kind, value in each.items()))
    if args.json:
        write_results(args.json, {"steps_per_second": found, "goal": GOAL})


if __name__ == "__main__":
    main()
