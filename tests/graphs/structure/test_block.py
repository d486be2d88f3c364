"""Layers and message passing on blocks: what they make of all edges of some nodes is what graphs make of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import CASES, hub_graph, parameters

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.structure import padded_block

pytestmark = pytest.mark.quick

TARGETS = np.array([5, 0, 1, 12, 7])
ON_BLOCKS = (
    "graph both expanding, weighted",
    "graph left",
    "sage mean",
    "sage gcn expanding, weighted",
    "sage pool, weighted",
    "gat residual, weighted",
    "gatv2 residual, weighted",
    "gin mean, weighted",
    "transformer gated, mean of heads",
)


def whole_and_block() -> tuple[graphs.Graph, graphs.MiniBatch]:
    """The graph with hubs, and the block of all edges that enter some of its nodes, hubs among them."""
    graph, _, count = hub_graph()
    edges = graphs.host_edges(graph.senders, graph.receivers, count, keep_edge_ids=True)
    sampler = graphs.neighbor_sampler(edges, (-1,), TARGETS, batch_size=8)
    return graph, sampler.sample(TARGETS, np.random.default_rng(0))


@pytest.mark.full
@pytest.mark.parametrize("name", ON_BLOCKS)
def test_layers_make_of_a_block_what_they_make_of_the_graph(name: str) -> None:
    with jax.enable_x64(True):
        case, (graph, batch) = CASES[name], whole_and_block()
        definition, state = parameters(case.make(rngs=nnx.Rngs(0), param_dtype=jnp.float64))
        random = np.random.default_rng(1)
        x = random.normal(size=(graph.num_nodes, case.width))
        w = random.uniform(0.2, 1, graph.num_edges) if case.is_weighted else None
        block = batch.blocks[0]
        of_edges = None if w is None else graphs.take_rows(w, block.edge_ids)
        cotangent = np.random.default_rng(2).normal(size=len(TARGETS))

        def total(result: jax.Array) -> tuple[Any, jax.Array]:
            rows = result.reshape(len(result), -1)
            return cotangent @ rows.sum(-1), rows

        def on_graph(state: Any, x: Any) -> Any:
            return total(nnx.merge(definition, state)(graph, x, w)[TARGETS])

        def on_block(state: Any, x: Any) -> Any:
            rows = x[batch.inputs].at[batch.inputs < 0].set(0)
            return total(nnx.merge(definition, state)(block, rows, of_edges)[: len(TARGETS)])

        def on_pair(state: Any, x: Any) -> Any:
            rows = x[batch.inputs]
            pair = rows, rows[: block.num_targets]
            return total(nnx.merge(definition, state)(block, pair, of_edges)[: len(TARGETS)])

        def results(state: Any, x: Any) -> Any:
            gradients = [jax.grad(run, (0, 1), has_aux=True)(state, x) for run in (on_graph, on_block)]
            return *gradients, on_pair(state, x)[1]

        (grads, wanted), (found, actual), of_pair = jax.jit(results)(state, x)
        np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-11)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, grads)
        np.testing.assert_allclose(of_pair, wanted, rtol=1e-11, atol=1e-11)


def test_autocast_and_policies_have_blocks_in_half() -> None:
    graph, batch = whole_and_block()
    layer = graphs.SAGEConv(4, 3, rngs=nnx.Rngs(0))
    definition, params = nnx.split(layer)
    rows = graphs.take_rows(np.ones((graph.num_nodes, 4), np.float32), batch.inputs)

    def run(params: Any, block: Any, rows: Any) -> jax.Array:
        return nnx.merge(definition, params)(block, rows)

    assert jax.eval_shape(jt.autocast(run), params, batch.blocks[0], rows).dtype == jnp.float16
    policy = jt.get_policy("mixed_bfloat16")
    arguments = policy.cast_to_compute((params, batch.blocks[0], rows))
    assert jax.eval_shape(run, *arguments).dtype == jnp.bfloat16
    is_same = jax.tree.map(np.array_equal, arguments[1], batch.blocks[0])
    assert all(jax.tree.leaves(is_same))  # indices are not cast


def test_messages_pass_along_a_block() -> None:
    block = padded_block(np.array([0, 2, 3]), np.array([0, 0, 1]), 4, 2, num_edges=8)
    graph = block.graph({"h": jnp.arange(1.0, 5)}, edges={"w": jnp.full(8, 2.0)})
    passed = jax.jit(lambda g: graphs.update_all(g, fn.u_mul_e("h", "w", "m"), fn.sum("m", "x")))
    assert passed(graph).nodes["target"]["x"].tolist() == [8, 8]


def test_softmax_goes_over_the_edges_of_a_target() -> None:
    block = padded_block(np.array([0, 2, 3]), np.array([0, 0, 1]), 4, 2, num_edges=5)
    weights = jax.jit(lambda x: graphs.edge_softmax(block, x))(np.zeros((5, 1), np.float16))
    assert weights.ravel().tolist() == [0.5, 0.5, 1, 0, 0]


def test_what_does_not_fit_a_block_is_refused() -> None:
    _, batch = whole_and_block()
    block = batch.blocks[0]
    rows = jnp.ones((block.num_sources, 4))
    with pytest.raises(ValueError, match=rf"features must be \[{block.num_sources}, 4\]"):
        graphs.SAGEConv(4, 3, rngs=nnx.Rngs(0))(block, rows[:-1])
    with pytest.raises(ValueError, match=rf"features\[1\] must be \[{block.num_targets}, 4\]"):
        graphs.SAGEConv(4, 3, rngs=nnx.Rngs(0))(block, (rows, rows))
    three: Any = (rows, rows, rows)
    with pytest.raises(ValueError, match=r"features must be one array, or a pair \(of senders, of receivers\), got 3"):
        graphs.gin_conv(block, three)
    with pytest.raises(TypeError, match='"lstm" needs a Graph: blocks have no mailboxes'):
        graphs.SAGEConv(4, 3, aggregator="lstm", rngs=nnx.Rngs(0))(block, rows)
    with pytest.raises(TypeError, match=r"got Block; block\.graph\(\.\.\.\) makes one of it"):
        graphs.update_all(block, fn.copy_u("h", "m"), fn.sum("m", "x"))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="some nodes have no incoming edges, so their"):
        graphs.GATConv(4, 3, 1, rngs=nnx.Rngs(0))(block, rows)
