"""Means over counted tokens: any micro-batches and devices give the loss and gradients of the whole batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import relaxed

import jmp_train as jt

pytestmark = pytest.mark.quick

MESH = Mesh(np.array(jax.devices()), ("data",))
RANDOM = np.random.default_rng(0)
LENGTHS = np.array([9, 1, 5, 1, 0, 0, 12, 2, 3, 7, 1, 1, 4, 8, 6, 10])  # of 16 sequences; two of one micro-batch are 0
BATCH = {
    "x": RANDOM.normal(size=(16, 12, 3)).astype(np.float32),
    "y": RANDOM.normal(size=(16, 12)).astype(np.float32),
    "counts": np.arange(12) < LENGTHS[:, None],
}
W = np.array([0.5, -1.0, 2.0], np.float32)


def token_loss(w: Any, batch: Any) -> Any:
    errors = ((batch["x"] @ w - batch["y"]) ** 2).astype(jnp.float32)
    return jnp.where(batch["counts"], errors, 0.0).sum(), batch["counts"].sum()


def expected(batch: Any = BATCH) -> tuple[float, np.ndarray]:
    """Returns the mean over all tokens and its gradient, in float64."""
    x, y = (np.float64(batch[name][batch["counts"]]) for name in ("x", "y"))
    errors = x @ W - y
    return (errors**2).mean(), 2 * (errors[:, None] * x).mean(0)


def ran(route: str, step: Any, batch: Any = BATCH) -> Any:
    """Returns metrics and gradients of one step of SGD with a learning rate of 1."""
    state = jt.TrainState.create(W, step.optimizer)
    if route == "shard_map":
        run = jax.jit(jax.shard_map(step.with_axes("data"), mesh=MESH, in_specs=(P(), P("data")), out_specs=P()))
    else:
        forms: dict[str, Any] = {
            "jit": jax.jit,
            "data_parallel": lambda step: jt.data_parallel(step, MESH),
            "pmap_step": jt.pmap_step,
            "sharded_step": lambda step: jt.sharded_step(step, MESH),
            "fsdp": lambda step: jt.sharded_step(step, MESH, shardings=jt.fsdp_shardings(state, MESH, min_size=10**9)),
        }
        run = forms[route](step)
    new, metrics = run(state, jax.tree.map(jnp.asarray, batch))
    return metrics, W - np.asarray(new.params)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("route", "accumulate_steps"),
    [("jit", 1), ("jit", 4), ("jit", 16), *((r, 2) for r in ("data_parallel", "pmap_step", "shard_map")), ("fsdp", 1)],
)
def test_every_token_counts_alike(route: str, accumulate_steps: int) -> None:
    """Some micro-batches and devices count nothing."""
    loss, grads = expected()
    optimizer = jt.with_loss_scale(optax.sgd(1.0), jt.torch_loss_scale(2.0**8))
    step = jt.train_step(jt.weighted(token_loss), optimizer, accumulate_steps=accumulate_steps)
    metrics, found = ran(route, step)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(found, grads, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grads), rtol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("policy", ["mixed_float16", "autocast_bfloat16", "float16"])
def test_policies_leave_weights_in_float32(policy: str) -> None:
    """70,001 tokens in two parts: neither half type has this number, and one policy returns aux in float16."""
    counts = np.arange(70_002) < 70_001
    batch = {"x": np.ones((70_002, 3), np.float32), "y": np.zeros(70_002, np.float32), "counts": counts}
    optimizer = jt.with_loss_scale(optax.sgd(1.0), jt.torch_loss_scale(2.0**4))
    step = jt.train_step(jt.weighted(token_loss), optimizer, policy=policy, accumulate_steps=2)
    metrics, grads = ran("jit", step, batch)
    np.testing.assert_allclose(metrics["loss"], 2.25, rtol=1e-5)
    np.testing.assert_allclose(grads, [3.0] * 3, rtol=1e-2)
    assert bool(metrics["grads_finite"])


def test_a_weight_that_overflows_is_not_a_loss_of_zero() -> None:
    def overflowing(w: Any, batch: Any) -> Any:
        total, _ = token_loss(w, batch)
        return total, jnp.float16(60000) * jnp.float16(2) + 0 * batch["y"].astype(jnp.float16).sum()

    step = jt.train_step(jt.weighted(overflowing), jt.with_loss_scale(optax.sgd(1.0), jt.NoOpLossScale()))
    metrics, grads = ran("jit", step)
    assert np.isnan(metrics["loss"])
    assert not bool(metrics["grads_finite"])
    assert not grads.any()


def test_a_batch_that_counts_nothing_has_no_gradient() -> None:
    batch = {**BATCH, "counts": np.zeros_like(BATCH["counts"])}
    for route, parts in (("jit", 1), ("jit", 4), ("data_parallel", 2)):
        step = jt.train_step(jt.weighted(token_loss), optax.sgd(1.0), accumulate_steps=parts)
        metrics, grads = ran(route, step, batch)
        assert (float(metrics["loss"]), grads.any()) == (0.0, False)


def test_losses_with_state_keys_and_aux() -> None:
    """The aux is the loss function's own, and what a total has besides tokens is divided too."""

    def loss_fn(w: Any, steps: Any, batch: Any, rng: Any) -> Any:
        assert rng is not None
        total, weight = token_loss(w, batch)
        return (total + (w**2).sum(), weight), (steps + 1, {"weight": weight})

    optimizer = relaxed(optax.sgd(1.0))
    step = jt.train_step(jt.weighted(loss_fn), optimizer, accumulate_steps=4)
    state = jt.TrainState.create(W, optimizer, model_state=jnp.int32(0), rng=jax.random.key(0))
    state, metrics = jax.jit(step)(state, jax.tree.map(jnp.asarray, BATCH))
    total = LENGTHS.sum()
    np.testing.assert_allclose(metrics["loss"], expected()[0] + 4 * (W**2).sum() / total, rtol=1e-5)
    np.testing.assert_array_equal(metrics["aux"]["weight"], LENGTHS.reshape(4, 4).sum(1))
    assert int(state.model_state) == 4
    fn = jt.weighted(lambda w, batch: (token_loss(w, batch), "aux"), has_aux=True)
    assert fn(W, None, BATCH, None)[1][1].aux == "aux"


def test_wrong_functions_are_named() -> None:
    with pytest.raises(TypeError, match=r"loss_fn takes \(a, b, c\)"):
        jt.weighted(lambda a, b, c: None)
    for result in (jnp.ones(()), (jnp.ones(()), jnp.ones(3)), ((jnp.ones(()), jnp.ones(())), None)):
        with pytest.raises(TypeError, match=r"must return \(total, weight\)"):
            jt.weighted(lambda w, x, result=result: result)(1.0, None, 1.0, None)
