"""Measures one graph convolution of bags of words, forward and backward, with dense and sparse features.

    python benchmarks/sparse_features.py [--rounds 20] [--json FILE]

Papers and words are random, as many as Citeseer's: 3,327 papers, 3,703 words, 32 words per paper. Times are the
minimum over the rounds, in which both kinds take turns.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from result_files import write_results

from jmp_train import graphs

NODES, WORDS, WORDS_OF_A_PAPER, CITATIONS, HIDDEN = 3327, 3703, 32, 4600, 16


def drawn_words(random: np.random.Generator) -> np.ndarray:
    """Returns float32 [nodes, words], rows that add up to 1."""
    words = np.zeros((NODES, WORDS), np.float32)
    np.put_along_axis(words, random.integers(0, WORDS, (NODES, WORDS_OF_A_PAPER)), 1, axis=1)
    return graphs.normalize_rows(words)


@jax.jit
def step(graph: graphs.Graph, features: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a loss of a graph convolution, and its gradient by the weight."""

    def loss(weight: jax.Array) -> jax.Array:
        return (graphs.graph_conv(graph, features, weight).astype(jnp.float32) ** 2).sum()

    return jax.value_and_grad(loss)(weight)


def measure(dtype: str, rounds: int) -> dict[str, Any]:
    """Returns the milliseconds of either kind, and how much their gradients differ, relative to the largest entry."""
    random = np.random.default_rng(0)
    words, weight = drawn_words(random), jnp.asarray(random.normal(size=(WORDS, HIDDEN)), dtype)
    graph = graphs.add_self_loop(graphs.to_bidirected(graphs.rand_graph(NODES, CITATIONS)))
    kinds = {"dense": jnp.asarray(words, dtype), "sparse": graphs.sparse_features(words).astype(dtype)}
    gradients = {name: np.asarray(step(graph, x, weight)[1], np.float64) for name, x in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, features in kinds.items():
            start = time.perf_counter()
            jax.block_until_ready(step(graph, features, weight))
            times[name].append(time.perf_counter() - start)
    differ = np.abs(gradients["sparse"] - gradients["dense"]).max() / np.abs(gradients["dense"]).max()
    return {name: round(1000 * min(several), 2) for name, several in times.items()} | {"differ": float(differ)}


def main() -> None:
    """Prints a line for each dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results = {dtype: measure(dtype, args.rounds) for dtype in ("float32", "float16", "bfloat16")}
    print(f"{'ms a step':10}{'dense':>10}{'sparse':>10}  gradients differ by")
    for dtype, row in results.items():
        print(f"{dtype:10}{row['dense']:10.2f}{row['sparse']:10.2f}  {row['differ']:.1e}")
    if args.json is not None:
        write_results(args.json, results)


if __name__ == "__main__":
    main()
