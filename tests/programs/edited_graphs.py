"""Runs the kernels in C++ on graphs whose index leaves were edited, as `jax.tree.map` over a whole graph does.

    JMP_TRAIN_CACHE=FOLDER python tests/programs/edited_graphs.py SEED COUNT

Prints JSON: how many edits each operation refused, and how many it computed. An edit that reads or writes beyond an
array may end the process, and is why this is one of its own.
"""

import collections
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train import graphs
from jmp_train.graphs import fn

NODES, EDGES, HEADS, WIDTH = 300, 5_000, 2, 16
REFUSED = "index arrays are not those that it was made with"
LARGEST = np.iinfo(np.int32).max

Edit = Callable[[np.ndarray, np.random.Generator], np.ndarray]
EDITS: dict[str, Edit] = {
    "doubled": lambda ids, random: ids * 2,
    "plus one": lambda ids, random: ids + 1,
    "minus one": lambda ids, random: ids - 1,
    "negative": lambda ids, random: -ids,
    "zero": lambda ids, random: np.zeros_like(ids),
    "as of floats": lambda ids, random: ids.astype(np.float16).astype(np.int32),
    "shuffled": lambda ids, random: random.permutation(ids),
    "random": lambda ids, random: random.integers(-LARGEST - 1, LARGEST, ids.shape, np.int32, endpoint=True),
    "one of them": lambda ids, random: np.where(np.arange(ids.size) == random.integers(ids.size), LARGEST, ids),
}


def a_graph() -> graphs.Graph:
    """Returns a graph with a hub, and nodes without edges."""
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, NODES - 5, (2, EDGES))
    receivers[:1_000] = 7
    return graphs.from_edges(senders, receivers, NODES)


def operations() -> dict[str, Callable[[graphs.Graph], Any]]:
    """Returns programs with kernels in C++, forward and backward, of a graph."""
    random = np.random.default_rng(1)
    x = jnp.asarray(random.normal(size=(NODES, HEADS, WIDTH)), jnp.float32)
    end = jnp.asarray(random.normal(size=(NODES, HEADS)), jnp.float32)
    w = jnp.asarray(random.normal(size=(EDGES, HEADS, 1)), jnp.float32)

    def update(message: Any, reduce: Any, graph: graphs.Graph) -> jax.Array:
        return graphs.update_all(graph, message, reduce, implementation="chunked").nodes["r"]

    def total(graph: graphs.Graph, x: jax.Array, w: jax.Array) -> jax.Array:
        graph = graph.with_nodes(x=x).with_edges(w=w)
        return (update(fn.u_mul_e("x", "w", "m"), fn.mean("m", "r"), graph) ** 2).sum()

    def product(graph: graphs.Graph, x: jax.Array) -> jax.Array:
        graph = graph.with_nodes(x=x)
        return (graphs.apply_edges(graph, fn.u_dot_v("x", "x", "r"), implementation="chunked").edges["r"] ** 2).sum()

    def attended(graph: graphs.Graph, x: jax.Array, end: jax.Array) -> jax.Array:
        return (graphs.gat_attention(graph, x, end, end, implementation="chunked") ** 2).sum()

    return {
        "sum": lambda graph: jax.value_and_grad(total, (1, 2))(graph, x, w),
        "dot": lambda graph: jax.value_and_grad(product, 1)(graph, x),
        "gat": lambda graph: jax.value_and_grad(attended, (1, 2))(graph, x, end),
    }


def edited(graph: graphs.Graph, edit: Edit, random: np.random.Generator) -> graphs.Graph:
    """Returns the graph with one of its index leaves edited, or, once in three times, all of them."""
    leaves, structure = jax.tree.flatten(graph)
    chosen = range(len(leaves)) if random.integers(3) == 0 else [int(random.integers(len(leaves)))]
    for place in chosen:
        leaves[place] = jnp.asarray(edit(np.asarray(leaves[place]).ravel(), random).reshape(leaves[place].shape))
    return jax.tree.unflatten(structure, leaves)


def main() -> None:
    """Prints how many edits were refused, and how many computed."""
    random, count = np.random.default_rng(int(sys.argv[1])), int(sys.argv[2])
    graph, outcomes = a_graph(), {}
    with graphs.native_kernels():
        for name, operation in operations().items():
            program = jax.jit(operation).lower(graph).compile()
            assert 'custom_call_target="jmp_' in (program.as_text() or "")
            wanted = jax.device_get(program(graph))
            found = collections.Counter()
            for _ in range(count):
                edit = EDITS[str(random.choice(list(EDITS)))]
                try:
                    jax.block_until_ready(program(edited(graph, edit, random)))
                    found["computed"] += 1
                except jax.errors.JaxRuntimeError as error:
                    if REFUSED not in str(error):
                        raise
                    found["refused"] += 1
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(program(graph)), wanted)
            outcomes[name] = found
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
