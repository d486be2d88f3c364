"""Ids of any integer dtype mean the same nodes; those beyond int32 are out of range, and no other nodes."""

from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest

from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = pytest.mark.quick

DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
NODES = 300  # more than 8 bits count


@pytest.mark.parametrize("dtype", DTYPES)
def test_traced_ids_of_every_integer_dtype(dtype: str) -> None:
    with jax.enable_x64(True):
        senders, receivers = jnp.array([0, 1, 2], dtype), jnp.array([1, 2, 2], dtype)
        counts = {"n_node": jnp.array([100, 200], "uint8"), "n_edge": jnp.array([2, 1], "uint8")}
        graph = jraph.GraphsTuple(
            nodes=jnp.arange(300.0) + 1, edges=None, senders=senders, receivers=receivers, globals=None, **counts
        )

        @jax.jit
        def run(graph: Any) -> Any:
            rows = graphs.gather(graph.nodes, graph.senders)
            sums = graphs.segment_sum(rows, graph.receivers, NODES)
            passed = graphs.update_all(graph, fn.copy_u("x", "m"), fn.sum("m", "y"))
            return passed.nodes["y"][:3], sums[:3], graphs.sum_nodes(graph, "x")

        passed, sums, totals = run(graph)
        assert passed.tolist() == sums.tolist() == [0, 1, 2 + 3]
        assert totals.tolist() == [100 * 101 / 2, 300 * 301 / 2 - 100 * 101 / 2]


@pytest.mark.parametrize(("beyond", "dtype"), [(2**32, "int64"), (-(2**32), "int64"), (2**63 + 1, "uint64")])
def test_ids_beyond_int32_are_out_of_range(beyond: int, dtype: str) -> None:
    array = np.array([beyond, 1], dtype)
    assert graphs.segment_sum(jnp.ones(2), array, 2).tolist() == [0, 1]
    assert graphs.gather(jnp.array([5.0, 6.0]), array).tolist() == [0, 6]


@pytest.mark.parametrize(("beyond", "dtype"), [(2**32 + 1, "int64"), (2**63 + 1, "uint64"), (2**32 - 1, "uint32")])
def test_traced_places_beyond_int32_are_no_other_places(beyond: int, dtype: str) -> None:
    with jax.enable_x64(True):
        x, types = jnp.array([1.0, 2.0, 4.0]), jnp.array([0, beyond, 0], dtype)
        graph = graphs.from_edges([0, 1, 2], [1, 2, 2], 3, nodes={"x": x, "y": -x})
        pull = jax.jit(lambda nodes: graphs.pull(graph, nodes, fn.copy_u("x", "m"), fn.sum("m", "y")).nodes["y"])
        assert pull(jnp.array([1, beyond], dtype)).tolist() == [-1, 1, -4]
        relate = jax.jit(lambda types: graphs.rel_graph_conv(graph, x[:, None], types, jnp.array([[[1.0]], [[8.0]]])))
        assert relate(types).ravel().tolist() == [0, 1, 4]


def test_a_sorted_id_beyond_int32_stays_the_last() -> None:
    ids = np.array([0, 1, 2**32])
    assert graphs.segment_mean(jnp.array([3.0, 5.0, 7.0]), ids, 2, indices_are_sorted=True).tolist() == [3, 5]


NO_INT32 = np.array([2**32, 1])
GRAPH = graphs.from_edges([0, 1], [1, 0], 2)
REFUSALS = {
    "segments": lambda: graphs.segment_sum(NO_INT32, np.array([0, 0]), 1),
    "gather": lambda: graphs.gather(NO_INT32, np.array([0, 0])),
    "readout": lambda: graphs.max_nodes(GRAPH, NO_INT32),
    "top k": lambda: graphs.topk_edges(GRAPH, NO_INT32, 1),
    "broadcast": lambda: graphs.broadcast_nodes(GRAPH, NO_INT32[:1]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_data_beyond_int32_are_refused_as_in_a_graph(name: str) -> None:
    with pytest.raises(ValueError, match=r"from .* to 4294967296, where int32 ends at 2147483647"):
        REFUSALS[name]()


@pytest.mark.parametrize(
    "draw", [graphs.uniform_negatives, lambda key, ends, _: graphs.in_batch_negatives(key, ends, ends)]
)
def test_ends_of_negatives_are_integers(draw: Any) -> None:
    with pytest.raises(TypeError, match="senders must be integers, got float32"):
        draw(jax.random.key(0), np.array([0.5, 1.5], np.float32), 3)
