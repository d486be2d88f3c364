"""Pooling layers and norms beside their formulas in float64 by numpy, which are DGL's and PyTorch Geometric's."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import ONE_HALF
from jax.sharding import Mesh, PartitionSpec
from promotion import promoting
from pytrees import compiled_vjp

from jmp_train import graphs

pytestmark = pytest.mark.quick

SIZES, WIDTH = (5, 1, 40), 4
DTYPES = [*ONE_HALF, pytest.param("float32", marks=pytest.mark.full)]
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}


def a_batch() -> graphs.Graph:
    """Returns graphs without edges, padded."""
    return graphs.pad(graphs.batch([graphs.from_edges([], [], size) for size in SIZES]), 64, 8)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def parts(rows: Any) -> list[np.ndarray]:
    return np.split(np.asarray(rows, np.float64)[: sum(SIZES)], np.cumsum(SIZES)[:-1])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(0))
    return powers / powers.sum(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_pooling_is_its_formula(dtype: str) -> None:
    rows, logits = (jnp.asarray(normal(seed, 64, width), dtype) for seed, width in ((0, WIDTH), (1, 1)))
    cotangent = jnp.asarray(normal(2, 4, WIDTH), dtype)
    found, grads = compiled_vjp(partial(graphs.attention_pooling, a_batch()), cotangent, rows, logits)
    assert found.dtype == grads[0].dtype == dtype
    bound = TOLERANCES[dtype]
    lists = zip(parts(rows), parts(logits), *map(parts, grads), np.asarray(cotangent, np.float64), found, strict=False)
    for x, s, of_rows, of_logits, g, result in lists:
        weights = softmax(s)
        np.testing.assert_allclose(result, (weights * x).sum(0), rtol=bound, atol=bound)
        np.testing.assert_allclose(of_rows, weights * g, rtol=bound, atol=bound)
        products = (x * g).sum(1, keepdims=True)
        np.testing.assert_allclose(of_logits, weights * (products - (weights * products).sum()), rtol=bound, atol=bound)
    assert not np.asarray(found[3]).any() and not np.asarray(grads[0][46:]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_set2set_is_its_formula(dtype: str) -> None:
    layer = graphs.Set2Set(WIDTH, steps=2, layers=2, rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)
    half = jax.tree.map(lambda x: x.astype(dtype), state)
    rows, batch = jnp.asarray(normal(0, 64, WIDTH), dtype), a_batch()

    def run(state: Any, rows: jax.Array) -> jax.Array:
        return nnx.merge(definition, state)(batch, rows)

    found, grads = compiled_vjp(run, jnp.ones((4, 2 * WIDTH), dtype), half, rows)
    assert found.dtype == dtype and all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(grads))
    weights = [[np.asarray(array[...], np.float64) for array in layer] for layer in nnx.merge(definition, half).weights]
    for result, x in zip(found, parts(rows), strict=False):
        states = [(np.zeros(WIDTH), np.zeros(WIDTH))] * 2
        enters = np.zeros(2 * WIDTH)
        for _ in range(2):
            for i, (of_input, of_hidden, input_bias, hidden_bias) in enumerate(weights):
                hidden, cell = states[i]
                gates = enters @ of_input + input_bias + hidden @ of_hidden + hidden_bias
                enter, forget, new, leave = np.split(gates, 4)
                cell = sigmoid(forget) * cell + sigmoid(enter) * np.tanh(new)
                enters = sigmoid(leave) * np.tanh(cell)
                states[i] = (enters, cell)
            enters = np.append(enters, softmax(x @ enters) @ x)
        np.testing.assert_allclose(result, enters, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_sort_pooling_is_dgls() -> None:
    rows = jnp.asarray(normal(0, 64, WIDTH), "float16")
    found = jax.jit(graphs.SortPooling(3))(a_batch(), rows)
    for result, x in zip(found, parts(rows), strict=False):
        x = np.sort(x, axis=1)
        best = x[np.argsort(-x[:, -1])][:3]
        np.testing.assert_array_equal(result, np.append(best, np.zeros(((3 - len(best)), WIDTH))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_norm_is_pytorch_geometrics(dtype: str) -> None:
    rows = jnp.asarray(20 + normal(0, 64, WIDTH), dtype).at[46:].set(6e4)
    scale, bias, share = (jnp.asarray(1 + 0.1 * normal(seed, WIDTH), dtype) for seed in (1, 2, 3))
    run = partial(graphs.graph_norm, a_batch())
    found, grads = compiled_vjp(run, jnp.zeros((64, WIDTH), dtype).at[:46].set(1), rows, scale, bias, share)
    assert found.dtype == dtype and all(np.isfinite(np.asarray(x, float)).all() for x in grads)
    w, b, a = (np.asarray(x, np.float64) for x in (scale, bias, share))
    for result, x in zip(parts(found), parts(rows), strict=True):
        rest = x - a * x.mean(0)
        wanted = w * rest / np.sqrt((rest**2).mean(0) + 1e-5) + b
        np.testing.assert_allclose(result, wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert not np.asarray(grads[0][46:]).any()
    np.testing.assert_allclose(np.asarray(grads[2], float), 46)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_is_that_of_the_real_rows(dtype: str) -> None:
    rows = jnp.asarray(300 + 2 * normal(0, 64, WIDTH), dtype).at[46:].set(6e4)
    mask = graphs.node_mask(a_batch())
    norm = graphs.BatchNorm(WIDTH, momentum=0.5, rngs=nnx.Rngs(0))
    run = nnx.jit(lambda norm, rows, mask: norm(rows, mask=mask))
    found = run(norm, rows, mask)
    real = np.asarray(rows, np.float64)[:46]
    wanted = (real - real.mean(0)) / np.sqrt(real.var(0) + 1e-5)
    assert found.dtype == dtype and norm.mean[...].dtype == norm.var[...].dtype == "float32"
    bound = max(TOLERANCES[dtype], 1e-4)  # float32 has numbers about 300 to 3e-5
    np.testing.assert_allclose(np.asarray(found, float)[:46], wanted, rtol=bound, atol=bound)
    np.testing.assert_allclose(norm.mean[...], real.mean(0) / 2, rtol=1e-6)
    np.testing.assert_allclose(norm.var[...], 0.5 + real.var(0) / 2, rtol=1e-5)
    run(norm, rows, np.zeros(64, bool))  # no row, nothing learned
    np.testing.assert_allclose(norm.mean[...], real.mean(0) / 2, rtol=1e-6)
    norm.eval()
    running = (real - real.mean(0) / 2) / np.sqrt(0.5 + real.var(0) / 2 + 1e-5)
    found = nnx.jit(lambda norm, rows: norm(rows))(norm, rows)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, float)[:46], running, rtol=TOLERANCES[dtype])


@pytest.mark.full
def test_batch_norm_without_a_mask_is_flaxs() -> None:
    ours, theirs = (kind(WIDTH, rngs=nnx.Rngs(0)) for kind in (graphs.BatchNorm, nnx.BatchNorm))
    rows = jnp.asarray(normal(0, 64, WIDTH))
    np.testing.assert_allclose(ours(rows), promoting(theirs)(rows), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.mean[...], theirs.mean[...], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(ours.var[...], theirs.var[...], rtol=1e-5)


def test_batch_norm_over_devices_counts_each_row_once() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, mask = jnp.asarray(30 + normal(0, 64, WIDTH)), jnp.arange(64) % 16 < jnp.repeat(jnp.array([16, 1, 0, 7]), 16)
    definition, state = nnx.split(graphs.BatchNorm(WIDTH, axis_name="data", rngs=nnx.Rngs(0)))
    split, whole = PartitionSpec("data"), PartitionSpec()

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(whole, split, split), out_specs=(split, whole))
    def run(state: Any, rows: jax.Array, mask: jax.Array) -> Any:
        norm = nnx.merge(definition, state)
        return norm(rows, mask=mask), nnx.state(norm)

    found, after = run(state, rows, mask)
    real = np.asarray(rows, np.float64)[np.asarray(mask)]
    wanted = (np.asarray(rows, np.float64) - real.mean(0)) / np.sqrt(real.var(0) + 1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after["mean"][...], 0.01 * real.mean(0), rtol=1e-5)


def test_wrong_arguments_are_named() -> None:
    batch, rows = a_batch(), jnp.ones((64, WIDTH))
    with pytest.raises(ValueError, match=r"logits must broadcast to the shape of the features, .* got \(64, 2\)"):
        graphs.attention_pooling(batch, rows, jnp.ones((64, 2)))
    weights = jnp.ones((4, 16))
    with pytest.raises(ValueError, match=r"weights\[0\] must have shapes \[\(8, 16\), \(4, 16\), \(16,\), \(16,\)\]"):
        graphs.set2set(batch, rows, [(weights, weights, weights, weights)], 1)
    with pytest.raises(ValueError, match=r"scale must be \[4\], got shape \(3,\)"):
        graphs.graph_norm(batch, rows, jnp.ones(3))
    with pytest.raises(ValueError, match=r"mask must be bool \[64\], got int32 \(64,\)"):
        graphs.BatchNorm(WIDTH, rngs=nnx.Rngs(0))(rows, mask=jnp.ones(64, jnp.int32))
