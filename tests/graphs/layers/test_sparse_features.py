import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from flax import nnx
from refusals import assert_refused

import jmp_train as jt
from jmp_train import graphs

pytestmark = pytest.mark.quick

NODES, WIDTH = 60, 50
RANDOM = np.random.default_rng(0)
WORDS = np.where(RANDOM.random((NODES, WIDTH)) < 0.1, RANDOM.normal(size=(NODES, WIDTH)), 0).astype(np.float32)
GRAPH = graphs.add_self_loop(graphs.rand_graph(NODES, 200))
LAYERS: dict[str, Callable[..., Any]] = {
    "gcn, width falls": functools.partial(graphs.GraphConv, WIDTH, 8),
    "gcn, width grows": functools.partial(graphs.GraphConv, WIDTH, 64, norm="right"),
    "sage": functools.partial(graphs.SAGEConv, WIDTH, 64),
    "sage gcn": functools.partial(graphs.SAGEConv, WIDTH, 8, aggregator="gcn"),
    "gat": functools.partial(graphs.GATConv, WIDTH, 8, 2, residual=True),
    "gatv2": functools.partial(graphs.GATv2Conv, WIDTH, 8, 2),
    "sg": functools.partial(graphs.SGConv, WIDTH, 64, 2),
    "tag": functools.partial(graphs.TAGConv, WIDTH, 8, 2),
    "cheb": functools.partial(graphs.ChebConv, WIDTH, 8, 3),
}


def layer_of(name: str) -> Any:
    return LAYERS[name](rngs=nnx.Rngs(0))


def loss_and_gradient(layer: Any, features: Any) -> tuple[Any, Any]:
    structure, params = nnx.split(layer, nnx.Param)

    @jax.jit
    def run(params: Any, features: Any) -> Any:
        def loss(params: Any) -> Any:
            rows = nnx.merge(structure, params)(GRAPH, features)
            return (rows.astype("float32") ** 2).mean(), rows

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, rows), gradient = run(params, features)
    return rows, gradient


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_they_do_of_all_zeros(name: str) -> None:
    layer = layer_of(name)
    rows, gradient = loss_and_gradient(layer, graphs.sparse_features(WORDS))
    wanted, wanted_gradient = loss_and_gradient(layer, jnp.asarray(WORDS))
    np.testing.assert_allclose(rows, wanted, atol=2e-6)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("sg", "tag", "cheb")])
def test_layers_of_blocks_compute_what_they_do_of_all_zeros(name: str) -> None:
    """Three mini-batches, one of them incomplete, and one program for both kinds of features each."""
    layer, matrix, traced = layer_of(name), scipy.sparse.csr_matrix(WORDS), []
    edges = graphs.host_edges(np.asarray(GRAPH.senders), np.asarray(GRAPH.receivers), NODES)
    sampler = graphs.neighbor_sampler(edges, (-1,), np.arange(NODES), 16)

    @jax.jit
    def run(block: Any, features: Any) -> Any:
        traced.append(features)
        return layer(block, features)

    random = np.random.default_rng(3)
    for seeds in (np.arange(16), np.arange(20, 36), np.arange(50, 60)):
        batch = sampler.sample(seeds, random)
        words = graphs.take_sparse_rows(matrix, batch.inputs)
        rows = graphs.take_rows(WORDS, batch.inputs)
        np.testing.assert_array_equal(words.toarray(), rows)
        one, other = (run(batch.blocks[0], features)[: len(seeds)] for features in (words, rows))
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert len(traced) == 2


def test_rows_of_sparse_matrices_are_padded_as_is_asked() -> None:
    matrix = scipy.sparse.csr_matrix(WORDS)
    ids = np.array([7, -1, 7, 3])
    assert graphs.take_sparse_rows(matrix, ids).num_entries == np.sort(np.diff(matrix.indptr))[-4:].sum()
    half = graphs.take_sparse_rows(matrix, ids, np.float16, num_entries=99)
    assert (half.num_entries, half.shape, half.dtype) == (99, (4, WIDTH), np.float16)
    assert graphs.take_sparse_rows(matrix, np.array([], np.int32)).shape == (0, WIDTH)
    refusals = {
        "TypeError: matrix must be a floating csr matrix of scipy, got": lambda: graphs.take_sparse_rows(WORDS, ids),
        "TypeError: matrix must be a floating csr matrix": lambda: graphs.take_sparse_rows(matrix.tocsc(), ids),
        "ids[.*] = .* is out of range for 60 rows": lambda: graphs.take_sparse_rows(matrix, ids + 60),
        "num_entries=1 is less than the": lambda: graphs.take_sparse_rows(matrix, ids, num_entries=1),
    }
    assert_refused(refusals)


def test_half_precision_is_added_in_float32() -> None:
    """Of 20,000 words that all nodes have, a float16 sum would end at 2,048."""
    words = graphs.sparse_features(np.ones((3, 20_000), np.float16))
    graph, weight = graphs.from_edges([0, 1, 2], [0, 1, 2], 3), jnp.full((20_000, 1), 0.5, jnp.float16)

    def loss(weight: Any) -> Any:
        rows = graphs.graph_conv(graph, words, weight)
        return rows.astype("float32").sum(), rows

    gradient, rows = jax.jit(jax.grad(loss, has_aux=True))(weight)
    assert (rows.dtype, rows.ravel().tolist()) == (jnp.float16, [10_000] * 3)
    assert (gradient.dtype, np.unique(gradient).tolist()) == (jnp.float16, [3])


@pytest.mark.parametrize("policy", ["mixed_float16", "autocast_float16"])
def test_under_a_policy_the_result_is_half(policy: str) -> None:
    layer = layer_of("gcn, width falls")
    structure, params = nnx.split(layer, nnx.Param)
    run = jt.apply_policy(lambda params, words: nnx.merge(structure, params)(GRAPH, words), jt.get_policy(policy))
    shape = jax.eval_shape(run, params, graphs.sparse_features(WORDS))
    plain = jax.eval_shape(run, params, jnp.asarray(WORDS))
    assert shape.dtype == plain.dtype


def test_dropout_drops_entries_and_scales_the_others() -> None:
    words = graphs.sparse_features(np.ones((4, 500), np.float32))
    graph, weight = graphs.from_edges([0, 1, 2, 3], [0, 1, 2, 3], 4), np.ones((500, 1), np.float32)
    run = jax.jit(
        lambda key: graphs.sage_conv(graph, words, weight, aggregator="gcn", feature_dropout=0.75, dropout_key=key)
    )
    rows = np.concatenate([run(jax.random.key(seed)) for seed in range(20)])
    np.testing.assert_array_equal(rows % 4, 0)  # each entry is 0 or 4
    assert 480 < rows.mean() < 520
    assert rows.std() == pytest.approx(1_500**0.5, rel=0.3)


def test_matrices_of_any_kind_give_the_same() -> None:
    wanted = graphs.sparse_features(WORDS)
    np.testing.assert_array_equal(wanted.toarray(), WORDS)
    twice = scipy.sparse.coo_array(WORDS)
    rows, columns = twice.row[::-1], twice.col[::-1]
    halves = (np.tile(twice.data[::-1] / 2, 2), (np.tile(rows, 2), np.tile(columns, 2)))
    stored = scipy.sparse.csr_matrix(WORDS)
    stored.data[0] = 0
    for matrix in (jnp.asarray(WORDS), scipy.sparse.csr_array(WORDS), scipy.sparse.coo_matrix(halves, WORDS.shape)):
        found = graphs.sparse_features(matrix)
        assert (found.shape, found.num_entries) == ((NODES, WIDTH), np.count_nonzero(WORDS))
        np.testing.assert_array_equal(found.values, wanted.values)
        np.testing.assert_array_equal(found.toarray(), WORDS)
    assert graphs.sparse_features(stored).num_entries == np.count_nonzero(WORDS) - 1
    half = graphs.sparse_features(WORDS.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert graphs.sparse_features(np.zeros((3, 4))).num_entries == 0


def test_what_is_refused() -> None:
    words, weight = graphs.sparse_features(WORDS), jnp.ones((WIDTH, 8))
    few = graphs.add_self_loop(graphs.rand_graph(3, 1))
    refusals = {
        "TypeError: matrix must be floating, got int64": lambda: graphs.sparse_features(np.eye(3, dtype=int)),
        "matrix must have shape [nodes, width], got": lambda: graphs.sparse_features(np.ones(3)),
        "TypeError: features must be an array, got sparse rows: only": [
            lambda: graphs.graph_conv(GRAPH, words),
            lambda: graphs.gin_conv(GRAPH, words),
        ],
        "features must be [60, 9], got": lambda: graphs.graph_conv(GRAPH, words, jnp.ones((9, 8))),
        "features must be [3, 50], got shape (60, 50)": lambda: graphs.graph_conv(few, words, weight),
        "TypeError: matrix is traced": lambda: jax.jit(lambda x: graphs.sparse_features(x).values)(WORDS),
    }
    assert_refused(refusals)
