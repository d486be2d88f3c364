"""The figures of a traced step, beside what `jax.vjp` saves and what is counted by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jmp_train as jt
from jmp_train.steps.traced_costs import StepCosts, step_costs

pytestmark = pytest.mark.quick

ROWS, WIDTH = 64, 16
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
PARAMS = (jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),) * 2
ACTIVATION = ROWS * WIDTH  # elements


def mlp(params: Any, batch: Any) -> Any:
    for weights in params:
        batch = jnp.sin(batch @ weights)
    return jnp.mean(batch.astype(jnp.float32))


def mlp_by_scan(params: Any, batch: Any) -> Any:
    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        return jnp.sin(x @ weights), None

    return jnp.mean(jax.lax.scan(layer, batch, jnp.stack(params))[0].astype(jnp.float32))


def mlp_by_jit(params: Any, batch: Any) -> Any:
    return jax.jit(mlp)(params, batch)


def rematerialized(params: Any, batch: Any) -> Any:
    first = jax.checkpoint(lambda w, x: jnp.sin(jnp.cos(x @ w)))
    return mlp(params[1:], first(params[0], batch))


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    return jnp.sin(x @ w)


def _product_forward(x: Any, w: Any) -> Any:
    y = x @ w
    return jnp.sin(y), (x, w, y)


def _product_backward(saved: Any, g: Any) -> Any:
    x, w, y = saved
    g = g * jnp.cos(y)
    return g @ w.T, x.T @ g


product.defvjp(_product_forward, _product_backward)


def by_custom_rule(params: Any, batch: Any) -> Any:
    return jnp.mean(product(product(batch, params[0]), params[1]))


def gradient_penalty(params: Any, batch: Any) -> Any:
    slopes = jax.grad(lambda x: mlp(params, x) ** 2)(batch)
    return mlp(params, batch) + jnp.sum(slopes**2)


def costs_of(
    loss_fn: Any,
    policy: str | None = "float32",
    *,
    wrap: Callable[[Any], Any] = lambda step: step,
    accumulate_steps: int = 1,
) -> StepCosts:
    optimizer = jt.with_loss_scale(optax.sgd(0.1, momentum=0.9), jt.torch_loss_scale())
    state = jax.eval_shape(
        lambda params, key: jt.TrainState.create(params, optimizer, rng=key), PARAMS, jax.random.key(0)
    )
    step = jt.train_step(loss_fn, optimizer, policy=policy, accumulate_steps=accumulate_steps)
    return step_costs(jax.jit(wrap(step)).trace(state, BATCH), state)


def saved_by_vjp(loss_fn: Callable[[Any, Any], Any]) -> int:
    """Returns the bytes of what `jax.vjp` keeps beside its arguments."""
    pullback = jax.make_jaxpr(lambda w, x: jax.vjp(lambda w: loss_fn(w, x), w)[1])(PARAMS, BATCH)
    kept = {x for x in pullback.jaxpr.outvars if not isinstance(x, jex.Literal)}
    kept -= {*pullback.jaxpr.invars, *pullback.jaxpr.constvars}
    return sum(x.aval.size * x.aval.dtype.itemsize for x in kept)


@pytest.mark.parametrize(
    "loss_fn",
    [mlp, mlp_by_scan, mlp_by_jit, rematerialized, by_custom_rule, gradient_penalty],
    ids=lambda fn: fn.__name__,
)
def test_what_is_saved_is_what_vjp_saves(loss_fn: Callable[[Any, Any], Any]) -> None:
    saved = costs_of(jt.stateless(loss_fn)).residual_bytes
    assert saved == saved_by_vjp(loss_fn)
    assert saved is not None
    assert saved >= 4 * ACTIVATION


def test_half_precision_saves_halves_and_casts() -> None:
    # Of each layer the slope of the sine, and what the second layer takes.
    assert costs_of(jt.stateless(mlp)).residual_bytes == 4 * 3 * ACTIVATION
    # And casts, of the batch and of the second layer's weights: the gradient of the first reads only the batch.
    half = costs_of(jt.stateless(mlp), "mixed_float16").residual_bytes
    assert half == 2 * (3 * ACTIVATION + ACTIVATION + WIDTH * WIDTH)


def test_masks_count_too() -> None:
    def dropped(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        kept = jax.random.bernoulli(rng, 0.5, batch.shape)
        return jnp.sum(jnp.where(kept, batch @ params[0], 0)), (model_state, None)

    assert costs_of(dropped).residual_bytes == ACTIVATION  # booleans


def test_a_micro_batch_saves_its_part() -> None:
    whole = costs_of(jt.stateless(mlp)).residual_bytes
    quarter = costs_of(jt.stateless(mlp), accumulate_steps=4).residual_bytes
    assert whole is not None
    assert quarter == whole / 4


def test_under_shard_map_a_device_saves_its_part() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    parallel = costs_of(jt.stateless(mlp), wrap=lambda step: jt.data_parallel(step, mesh))
    whole = costs_of(jt.stateless(mlp))
    assert whole.residual_bytes is not None
    assert parallel.residual_bytes == whole.residual_bytes / 4
    assert parallel.params_bytes == whole.params_bytes


def test_a_step_without_a_backward_pass_saves_nothing_that_is_known() -> None:
    costs = costs_of(jt.stateless(lambda params, batch: jnp.sum(batch)))
    assert costs.residual_bytes is None


def test_flops_are_in_half_where_their_operands_are() -> None:
    def half_of_it(params: Any, batch: Any) -> Any:
        # Two products of equal size forward, and their two gradients by the weights.
        low = batch.astype(jnp.float16) @ params[0].astype(jnp.float16)
        return jnp.sum(low.astype(jnp.float32)) + jnp.sum(batch @ params[1])

    assert costs_of(jt.stateless(mlp)).half_flops_share == 0
    assert costs_of(jt.stateless(mlp), "mixed_bfloat16").half_flops_share > 0.9
    assert costs_of(jt.stateless(half_of_it)).half_flops_share == pytest.approx(0.5, abs=0.05)


def test_the_state_is_counted_in_its_dtypes() -> None:
    elements = 2 * WIDTH * WIDTH
    full = costs_of(jt.stateless(mlp))
    assert full.params_bytes == 4 * elements
    assert full.opt_state_bytes == pytest.approx(4 * elements, abs=64)  # momentum, scale, counters
    assert full.model_state_bytes == 0
    assert full.state_bytes == full.params_bytes + full.opt_state_bytes

    amp = jt.amp_mode("naive")
    loss_fn, optimizer = amp.transform(jt.stateless(mlp), optax.sgd(0.1))
    params = amp.cast_params((jnp.ones((WIDTH, WIDTH)),) * 2)
    statistics = {"mean": jnp.zeros(8), "count": jnp.zeros(2, jnp.int32)}
    state = jt.TrainState.create(params, optimizer, model_state=statistics)
    traced = jax.jit(jt.train_step(loss_fn, optimizer)).trace(state, jnp.ones((ROWS, WIDTH)))
    half = step_costs(traced, state)
    assert half.params_bytes == 2 * elements
    assert half.opt_state_bytes == pytest.approx(4 * elements, abs=64)  # master weights
    assert half.model_state_bytes == 4 * 8 + 4 * 2


@pytest.mark.parametrize(("policy", "size"), [("float32", 4), ("mixed_float16", 2)])
def test_what_devices_exchange_is_counted_forward_and_backward(policy: str, size: int) -> None:
    devices = 4

    def loss_fn(params: Any, batch: Any) -> Any:
        def layer(x: Any, _: Any) -> tuple[Any, None]:
            sent = jax.lax.all_to_all(jnp.sin(x * params), "data", 0, 0)
            return jnp.cos(sent), None

        return jax.lax.scan(layer, batch, length=3)[0].astype(jnp.float32).mean()

    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    step = jt.data_parallel(
        jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy), Mesh(jax.devices()[:devices], ("data",))
    )
    state = jt.TrainState.create(jnp.ones(()), optimizer)
    costs = step_costs(jax.jit(step).trace(state, jnp.ones((devices**2, 5))), state)
    # Of 4 rows of 5 a device keeps one and sends three; three times forward, and backward.
    assert costs.exchanged_bytes == 3 * 5 * size * (3 + 3)
