"""Layers of a graph with dropped edges are those of the graph without these edges, in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import CASES, OfEdges, hub_graph, parameters
from odd_graphs import without_dropped

from jmp_train import graphs
from jmp_train.graphs.kernels import implementations

pytestmark = pytest.mark.full


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if "lstm" not in name])
def test_layers_are_those_of_the_graph_without_the_edges(
    name: str, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementations, "CHUNKED_ELEMENTS", 0 if is_chunked else 2**40)
    with jax.enable_x64(True):
        case, (whole, _, count) = CASES[name], hub_graph()
        graph = graphs.from_edges(whole.senders, whole.receivers, count)
        definition, state = parameters(case.make(rngs=nnx.Rngs(0), param_dtype=jnp.float64))
        random = np.random.default_rng(1)
        x = random.normal(size=(count, case.width))
        shape = (graph.num_edges,) if case.edge_width is None else (graph.num_edges, case.edge_width)
        w = random.uniform(0.2, 1, shape) if case.is_weighted else None
        factor = random.normal(size=count)
        smaller = graphs.drop_edges(graph, 0.4, jax.random.key(2))
        kept = np.flatnonzero(graphs.edge_mask(smaller))

        def run(graph: graphs.Graph, state: Any, x: Any, w: Any, kept: Any = slice(None)) -> Any:
            def loss(state: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                layer = nnx.merge(definition, state)
                if isinstance(layer, OfEdges):
                    of_edges = layer.of_edges(whole.num_edges)[kept]
                    layer.of_edges = lambda _: of_edges
                rows = layer(graph, x, *(() if w is None else (w,))).reshape(count, -1)
                return jnp.asarray(factor) @ jnp.tanh(rows).sum(1), rows

            return jax.grad(loss, (0, 1), has_aux=True)(state, x)

        gradient, found = jax.jit(run)(smaller, state, x, w)
        monkeypatch.setattr(implementations, "CHUNKED_ELEMENTS", 2**40)
        reference = jax.jit(functools.partial(run, kept=kept))
        wanted_gradient, wanted = reference(without_dropped(graph, smaller), state, x, None if w is None else w[kept])
        assert jnp.abs(wanted).max() > 0.1
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8), gradient, wanted_gradient)


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_layers_of_graphs_without_single_edges(is_symmetric: bool) -> None:
    random = np.random.default_rng(0)
    ends = np.unique(random.integers(0, 40, (2, 300)), axis=1)  # without parallel edges, which are dropped together
    if is_symmetric:
        ends = np.unique(np.concatenate([ends, ends[::-1]], axis=1), axis=1)

    def run(graph: graphs.Graph, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        rows = graphs.gat_attention(graph, x[:, None], x[:, :1], x[:, 1:2])[:, 0]
        rows = [rows, graphs.graph_conv(graph, x, allow_zero_in_degree=True), graphs.gin_conv(graph, x)]
        rows.append(graphs.propagate(graph, x, 3, alpha=0.1))
        return jnp.stack([(jnp.tanh(each) * (i + 1)).sum() for i, each in enumerate(rows)]).sum(), rows

    results = jax.jit(lambda graph, x: jax.grad(run, 1, has_aux=True)(graph, x))
    with jax.enable_x64(True):
        x = random.normal(size=(40, 4))
        smaller = graphs.drop_edges(graphs.from_edges(ends[0], ends[1], 40, formats=("csr",)), 0.5, jax.random.key(3))
        assert smaller.connections.neighbors is not None
        csr = jax.tree.map(np.asarray, smaller.connections.neighbors.by_target)
        receivers = np.repeat(np.arange(40), csr.degrees)
        left = graphs.from_edges(csr.others[: len(receivers)], receivers, 40)
        assert 0.4 < left.num_edges / ends.shape[1] < 0.6
        for mine, its in zip(jax.tree.leaves(results(smaller, x)), jax.tree.leaves(results(left, x)), strict=True):
            np.testing.assert_allclose(mine, its, rtol=1e-9, atol=1e-9)
