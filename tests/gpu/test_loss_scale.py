"""The loss scale, and steps that are skipped, to the bit: no sum's order has a say in them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import relaxed
from pytrees import assert_bitwise_equal, host_copy, poison_gradient

import jmp_train as jt

pytestmark = pytest.mark.gpu
INTERVAL, START = 3, 2.0**12
POISONED = (2, 3, 8)  # the steps whose gradient is infinite


def make_step(loss_scale: Any) -> tuple[Any, jt.TrainState]:
    """Returns a step of a dense layer with running statistics, and its state."""

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del rng
        y = poison_gradient(batch["x"] @ params["w"], batch["poison"]).astype(jnp.float32)
        return jnp.mean(y**2), ({"mean": 0.9 * model_state["mean"] + 0.1 * y.mean(0)}, None)

    optimizer = jt.with_loss_scale(relaxed(optax.adam(1e-2)), loss_scale)
    step = jt.train_step(loss_fn, optimizer, policy="mixed_float16")
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(32, 16)), jnp.float32)}
    return jax.jit(step), jt.TrainState.create(params, optimizer, model_state={"mean": jnp.zeros(16)})


def batch(poison: float) -> dict[str, jax.Array]:
    rows = np.random.default_rng(1).normal(size=(8, 32)) / 8
    return {"x": jnp.asarray(rows, jnp.float32), "poison": jnp.asarray(poison, jnp.float32)}


def test_scales_and_skips_follow_torchs_rule() -> None:
    """The rule of torch's GradScaler, in Python: half after an overflow, twice after some steps without one."""
    step, state = make_step(jt.torch_loss_scale(START, growth_interval=INTERVAL))
    scale, counter, skips = START, 0, 0
    for number in range(12):
        before = host_copy(state)
        state, metrics = step(state, batch(np.inf if number in POISONED else 1.0))
        assert bool(metrics["grads_finite"]) == (number not in POISONED)
        if number in POISONED:
            scale, counter, skips = scale / 2, 0, skips + 1
            after = host_copy(state)
            assert_bitwise_equal(after.params, before.params)
            assert_bitwise_equal(after.model_state, before.model_state)
            assert_bitwise_equal(after.opt_state.inner_state, before.opt_state.inner_state)
        else:
            counter += 1
            if counter == INTERVAL:
                scale, counter = 2 * scale, 0
            assert (np.asarray(state.params["w"]) != before.params["w"]).any()
        assert float(jt.get_loss_scale(state.opt_state).loss_scale) == scale
        assert int(metrics["skipped_steps"]) == skips
    assert int(state.step) == 12


def test_float16_itself_overflows_until_the_scale_fits() -> None:
    """The gradient of the loss is about 2**-5 and more times the scale, of which float16 holds less than 2**16."""
    step, state = make_step(jt.torch_loss_scale(2.0**30))
    finite = []
    for _ in range(20):
        state, metrics = step(state, batch(1.0))
        finite.append(bool(metrics["grads_finite"]))
    skips = finite.index(True)
    assert 8 < skips < 20 and all(finite[skips:])
    assert float(jt.get_loss_scale(state.opt_state).loss_scale) == 2.0 ** (30 - skips)
    assert jt.all_finite(state.params)


def test_a_schedule_of_policies_reads_nothing_from_the_device_and_keeps_the_loss_scale() -> None:
    schedule = jt.PolicySchedule({0: "mixed_float16", 0.5: "float32", 0.75: "mixed_float16"})
    optimizer = jt.with_loss_scale(relaxed(optax.adam(1e-2)), jt.torch_loss_scale(START, growth_interval=INTERVAL))
    loss_fn = jt.stateless(lambda w, x: jnp.mean((x @ w).astype(jnp.float32) ** 2))
    state = jt.TrainState.create(jnp.ones((32, 16)), optimizer)
    rows = batch(1.0)["x"]
    scales = []

    def make_step(policy: Any) -> Any:
        return jax.jit(jt.train_step(loss_fn, optimizer, policy=policy), donate_argnums=0)

    with jax.transfer_guard_device_to_host("disallow"):
        for step in schedule.steps(make_step, 8):
            state, metrics = step(state, rows)
            scales.append(metrics["loss_scale"])
    assert [float(scale) / START for scale in scales] == [1, 1, 2, 2, 2, 4, 4, 4]
    assert int(state.opt_state.skipped_steps) == 0
