"""Messages over edges of which some are dropped are those of the graph without these edges, in float64."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import MESSAGES, make_message
from odd_graphs import without_dropped

from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.kernels import implementations

pytestmark = pytest.mark.quick

ARRAYS = ("x", "y", "w")


def large_graph(kind: str) -> graphs.Graph:
    """Returns a graph of 70 nodes with hubs in both directions, self-loops, parallel edges and isolated nodes."""
    random = np.random.default_rng(0)
    ends = random.integers(0, 60, (2, 500))
    ends[0, :90], ends[1, 90:180] = 7, 9
    if kind == "symmetric":
        ends = np.concatenate([ends, ends[::-1]], axis=1)
    count = ends.shape[1]
    nodes = {"x": random.normal(size=(70, 2, 3)), "y": random.normal(size=(70, 2, 3))}
    graph = graphs.from_edges(ends[0], ends[1], 70, nodes, {"w": random.normal(size=(count, 2, 3))})
    return graphs.pad(graph, 80, count + 20) if kind == "padded" else graph


REDUCTIONS = [getattr(fn, name)("m", name) for name in ("sum", "mean", "max", "min", "var", "std", "softmax")]


def per_edge_message(edge: Any) -> Any:
    return {"m": jnp.tanh(edge.src["x"] * edge.dst["y"]) + edge.data["w"]}


def passed(graph: graphs.Graph, implementation: str, functions: Sequence[Any]) -> dict[str, jax.Array]:
    """Returns what messages and reductions make of a graph."""
    found = {}
    ends = {"u": "x", "v": "y", "e": "w"}
    messages: list[Any] = [graphs.per_edge(per_edge_message)]
    for message in map(make_message, functions):
        messages.append(dataclasses.replace(message, operands=tuple((end, ends[end]) for end, _ in message.operands)))
    for number, message in enumerate(messages):
        result = graphs.update_all(graph, message, REDUCTIONS, implementation=implementation)
        found |= {f"{number} {message}"[:40] + each.out: result.nodes[each.out] for each in REDUCTIONS}
    left, right = graph.nodes["x"][..., 0], graph.nodes["y"][..., 0]
    found["gat"] = graphs.gat_attention(graph, graph.nodes["x"], left, right, implementation=implementation)
    return found


def gradients(run: Callable[..., dict[str, jax.Array]], graph: graphs.Graph) -> Any:
    """Returns results, and the gradients of a sum of them with different factors."""

    def loss(x: jax.Array, y: jax.Array, w: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        found = run(graph.with_nodes(x=x, y=y).with_edges(w=w))
        factors = (jnp.cos(jnp.arange(rows.size).reshape(rows.shape) + i) for i, rows in enumerate(found.values()))
        total = [(rows * factor).sum() for rows, factor in zip(found.values(), factors, strict=True)]
        return jnp.stack(total).sum(), found

    arrays = graph.nodes["x"], graph.nodes["y"], graph.edges["w"]
    return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)


KINDS = {"symmetric": (fn.u_mul_e,), "padded": (fn.copy_u, fn.u_mul_e), "parallel": (fn.copy_e, fn.u_dot_v)}


@pytest.mark.full
@pytest.mark.parametrize("implementation", implementations.IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_those_of_the_graph_without_the_edges(kind: str, implementation: str) -> None:
    run = functools.partial(passed, implementation=implementation, functions=KINDS[kind])
    with jax.enable_x64(True):
        graph = large_graph(kind)
        smaller = graphs.drop_edges(graph, 0.4, jax.random.key(0))
        found = jax.jit(lambda graph, key: gradients(run, graphs.drop_edges(graph, 0.4, key)))
        of_dropped, actual = found(graph, jax.random.key(0))
        kept = np.flatnonzero(graphs.edge_mask(smaller))
        run = functools.partial(passed, implementation="xla", functions=KINDS[kind])
        of_removed, wanted = jax.jit(functools.partial(gradients, run))(without_dropped(graph, smaller))
        assert 0.5 < len(kept) / graph.num_edges < 0.7
        for name, rows in wanted.items():
            np.testing.assert_allclose(actual[name], rows, rtol=1e-9, atol=1e-9, err_msg=name)
        for name, mine, its in zip(ARRAYS, of_dropped, of_removed, strict=True):
            whole = np.zeros_like(mine)
            whole[kept if name == "w" else slice(None)] = its
            np.testing.assert_allclose(mine, whole, rtol=1e-9, atol=1e-9, err_msg=name)


GROUPS = [MESSAGES[:3], *(pytest.param(MESSAGES[i : i + 8], marks=pytest.mark.full) for i in range(3, 32, 8))]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("implementation", implementations.IMPLEMENTATIONS)
@pytest.mark.parametrize("functions", GROUPS)
def test_all_messages_are_of_the_kept_edges(functions: Sequence[Any], implementation: str) -> None:
    def results(graph: graphs.Graph, implementation: str) -> tuple[list[jax.Array], list[jax.Array]]:
        x, y, w = graph.nodes["x"], graph.nodes["y"], graph.edges["w"]
        graph = graph.with_nodes(l=x, r=y).with_edges(l=w, r=2 * w)
        messages = [*map(make_message, functions)]
        of_edges = [graphs.apply_edges(graph, message).edges["m"] for message in messages]
        means = [
            graphs.update_all(graph, message, fn.mean("m", "o"), implementation=implementation).nodes["o"]
            for message in messages
        ]
        return of_edges, means

    with jax.enable_x64(True):
        graph = large_graph("parallel")
        smaller = graphs.drop_edges(graph, 0.4, jax.random.key(0))
        found, means = jax.jit(functools.partial(results, implementation=implementation))(smaller)
        wanted, exact = jax.jit(functools.partial(results, implementation="xla"))(without_dropped(graph, smaller))
        is_kept = np.asarray(graphs.edge_mask(smaller))
        for actual, rows, mean, its in zip(found, wanted, means, exact, strict=True):
            np.testing.assert_allclose(actual[is_kept], rows, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(mean, its, rtol=1e-9, atol=1e-9)
