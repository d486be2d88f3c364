"""A loss scale for each loss: Apex's `num_losses` and `loss_id`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from promotion import relaxed
from pytrees import assert_bitwise_equal, poison_gradient

import jmp_train as jt

pytestmark = pytest.mark.quick

MESH = Mesh(np.array(jax.devices()), ("data",))


def scales(*numbers: float) -> jt.policies.PerLossScale:
    return jt.policies.PerLossScale(tuple(jt.torch_loss_scale(x, growth_interval=3) for x in numbers))


def two_losses(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    del rng
    y = jnp.tanh(batch["x"] @ poison_gradient(params["w"], batch["first"][0]))
    z = jnp.tanh(batch["x"] @ poison_gradient(params["w"], batch["second"][0]))
    first = ((y.astype(jnp.float32) - 0.5) ** 2).mean()
    second = (z.astype(jnp.float32) ** 2).mean()
    return (first, second), (model_state, {"first": first})


def batch(first: float = 1.0, second: float = 1.0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    return {"x": x, "first": np.full(16, first, np.float32), "second": np.full(16, second, np.float32)}


def params() -> dict[str, jax.Array]:
    return {"w": jnp.linspace(-0.5, 0.5, 8).reshape(4, 2)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("route", ["jit", "data_parallel"])
def test_the_step_follows_the_gradients_of_all(route: str, accumulate_steps: int) -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), scales(2.0**6, 2.0**10))
    step = jt.train_step(two_losses, optimizer, accumulate_steps=accumulate_steps)
    step = jax.jit(step if route == "jit" else jt.data_parallel(step, MESH))
    state, metrics = step(jt.TrainState.create(params(), optimizer), batch())

    def total(params: Any) -> jax.Array:
        first, second = two_losses(params, None, batch(), None)[0]
        return first + second

    loss, grads = jax.value_and_grad(total)(params())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], params()["w"] - 0.1 * grads["w"], rtol=1e-5)
    np.testing.assert_array_equal(metrics["loss_scale"], [2.0**6, 2.0**10])


def test_a_bad_loss_backs_off_its_own_scale_and_the_step_is_skipped() -> None:
    optimizer = jt.with_loss_scale(relaxed(optax.adam(0.1)), scales(256.0, 256.0))
    step = jax.jit(jt.train_step(two_losses, optimizer))
    state = jt.TrainState.create(params(), optimizer)
    bad = float("inf")
    # (first, second) loss overflows; apex's rule by hand: halved on its own overflow, doubled after three
    # non-overflow steps of its own.
    pattern = [(0, 0), (1, 0), (0, 0), (0, 1), (0, 0), (0, 0), (1, 1), (0, 0)]
    seen = []
    for first, second in pattern:
        before = state
        state, metrics = step(state, batch(bad if first else 1.0, bad if second else 1.0))
        seen.append([float(x) for x in metrics["loss_scale"]])
        assert bool(metrics["grads_finite"]) == (not (first or second))
        if first or second:
            assert_bitwise_equal(state.params, before.params)
            assert_bitwise_equal(state.opt_state.inner_state, before.opt_state.inner_state)
    assert [s[0] for s in seen] == [256, 128, 128, 128, 256, 256, 128, 128]
    assert [s[1] for s in seen] == [256, 256, 512, 256, 256, 256, 128, 128]
    assert int(state.opt_state.skipped_steps) == 3


def test_each_scale_is_found_by_its_loss() -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), scales(2.0, 4.0))
    state = optimizer.init(params())
    assert float(jt.get_loss_scale(state, loss_id=1).loss_scale) == 4.0
    assert [float(x) for x in jt.get_loss_scale(state).loss_scale] == [2.0, 4.0]
    single = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(8.0)).init(params())
    assert float(jt.get_loss_scale(single, loss_id=0).loss_scale) == 8.0
    for loss_id in (2, -1, True, 0.5):
        with pytest.raises(ValueError, match=f"loss_id={loss_id} must be a whole .* num_losses=2"):
            jt.get_loss_scale(state, loss_id=loss_id)  # pyright: ignore[reportArgumentType]
    other = jt.set_loss_scale(state, scales(16.0, 32.0))
    assert [float(x) for x in jt.get_loss_scale(other).loss_scale] == [16.0, 32.0]
    with pytest.raises(ValueError, match="for 2 losses, not 3"):
        jt.set_loss_scale(state, scales(1.0, 2.0, 4.0))
    longer = jt.policies.PerLossScale((jt.torch_loss_scale(2.0, growth_interval=3), jt.torch_loss_scale()))
    with pytest.raises(ValueError, match="period=3, not 2000"):
        jt.set_loss_scale(state, longer)


def test_pieces_of_a_step_of_ones_own() -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), scales(2.0**6, 2.0**10))
    state: Any = optimizer.init(params())

    def losses(params: Any, batch: Any) -> Any:
        return two_losses(params, None, batch, None)[0]

    found, grads = jt.scaled_value_and_grad(losses)(jt.get_loss_scale(state), params(), batch())
    for loss_id in range(2):
        scale = jt.get_loss_scale(state, loss_id=loss_id)
        loss, alone = jt.scaled_value_and_grad(lambda p, b, i=loss_id: losses(p, b)[i])(scale, params(), batch())
        np.testing.assert_allclose(grads[loss_id]["w"], alone["w"], rtol=1e-6)
        np.testing.assert_allclose(found[loss_id], loss, rtol=1e-6)
    updates: Any = optimizer.update(grads, state, params())[0]
    assert updates["w"].shape == (4, 2)
    with pytest.raises(ValueError, match="updates is 1 losses, but there are 2 loss scales: a tuple of 2 is needed"):
        optimizer.update(grads[:1], state, params())


def test_losses_and_scales_that_do_not_fit_are_named() -> None:
    several = jt.with_loss_scale(optax.sgd(0.1), scales(2.0, 4.0))
    step = jt.train_step(jt.stateless(lambda params, batch: params["w"].sum()), several)
    with pytest.raises(ValueError, match="but there are 2 loss scales: a tuple of 2 is needed"):
        jax.eval_shape(step, jt.TrainState.create(params(), several), batch())
    with pytest.raises(TypeError, match="loss_fn returned 2 losses, which need an optimizer with a PerLossScale"):
        losses = jt.scaled_value_and_grad(lambda p, b: two_losses(p, None, b, None)[0])
        losses(jt.torch_loss_scale(), params(), batch())
    for wrong, error, message in (
        (jt.torch_loss_scale(), TypeError, "loss_scales must be a tuple of loss scales, got Dynamic"),
        ((), ValueError, r"loss_scales=\(\) must have at least one"),
        ((jt.torch_loss_scale(), 2), TypeError, "loss_scale must be a LossScale, got 2"),
    ):
        with pytest.raises(error, match=message):
            jt.with_loss_scale(optax.sgd(0.1), jt.policies.PerLossScale(wrong))  # pyright: ignore[reportArgumentType]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("scale", [jt.NoOpLossScale(), jt.torch_loss_scale(2.0**8), None])
def test_one_scale_or_none_for_the_sum_of_the_losses(scale: Any) -> None:
    optimizer = optax.sgd(0.1) if scale is None else jt.with_loss_scale(optax.sgd(0.1), scale)
    separate = jt.with_loss_scale(optax.sgd(0.1), scales(2.0**6, 2.0**10))
    ends = []
    for tx in (optimizer, separate):
        step = jax.jit(jt.train_step(two_losses, tx))
        state, metrics = step(jt.TrainState.create(params(), tx), batch())
        ends.append((state.params["w"], metrics["loss"]))
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-6)
    np.testing.assert_allclose(ends[0][1], ends[1][1], rtol=1e-6)


def test_a_list_is_a_tuple_and_nothing_is_traced_twice() -> None:
    listed = jt.policies.PerLossScale([jt.torch_loss_scale(), jt.torch_loss_scale()])  # pyright: ignore[reportArgumentType]
    optimizer = jt.with_loss_scale(optax.sgd(0.1), listed)
    step: Any = jax.jit(jt.train_step(two_losses, optimizer))
    state = jt.TrainState.create(params(), optimizer)
    for _ in range(3):
        state, _ = step(state, batch())
    assert step._cache_size() == 1


def test_progress_looks_at_all_of_them() -> None:
    both = scales(2.0**4, 2.0**8)
    assert jt.policies.skips_to_floor(both) == jt.policies.skips_to_floor(both.loss_scales[1]) > 100
    optimizer = jt.with_loss_scale(optax.sgd(0.1), both)
    state = optimizer.init(params())
    _, state = optimizer.update(({"w": jnp.full((4, 2), jnp.nan)}, params()), state, params())
    with pytest.raises(jt.policies.StalledTrainingError, match=r"is now 8 .* and 256 "):
        jt.check_progress(state, stop_after=1)
