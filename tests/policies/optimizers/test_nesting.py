"""Wrappers in an order in which they compute something else are refused, the others train as ever."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies import LossScaledState

pytestmark = pytest.mark.quick

SCALE = 256.0
LABELS = {"w": "a", "b": "b"}


def scaled(inner: Any = None) -> Any:
    return jt.with_loss_scale(inner or optax.sgd(1.0), jt.StaticLossScale(SCALE))


class OwnState(NamedTuple):
    steps: jax.Array
    inner: Any


def own(inner: Any, change: Callable[[Any], Any] = lambda g: g, jit: bool = False) -> Any:
    """Returns a user's wrapper, which optax does not know, and which changes the gradients."""
    inner = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, after = inner.update(jax.tree.map(change, updates), state.inner, params, **extra)
        return updates, OwnState(state.steps + 1, after)

    return optax.GradientTransformationExtraArgs(
        lambda params: OwnState(jnp.zeros(()), inner.init(params)), jax.jit(update) if jit else update
    )


def bare(inner: Any, before: Callable[[Any], Any] = lambda g: g, after: Callable[[Any], Any] = lambda g: g) -> Any:
    """Returns a user's wrapper whose state is that of the optimizer in it."""
    inner = optax.with_extra_args_support(inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = inner.update(jax.tree.map(before, updates), state, params, **extra)
        return jax.tree.map(after, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    y = batch @ params["w"].astype(jnp.float32) + params["b"].astype(jnp.float32)
    return (y**2).mean()


def one_step(optimizer: Any, dtype: Any = jnp.float32) -> tuple[Any, jt.TrainState]:
    params = {"w": jnp.ones(3, dtype), "b": jnp.ones((), dtype)}
    state = jt.TrainState.create(params, optimizer)
    step = jt.train_step(jt.stateless(loss_fn), optimizer)
    batch = jnp.full((4, 3), 0.5)
    return jax.grad(loss_fn)(params, batch), step(state, batch)[0]


BEFORE = "optimizer: a transformation before with_loss_scale changes the scaled gradients, such as clipping"
CHANGING: dict[str, Callable[[], Any]] = {
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "clip": lambda: optax.clip(0.1),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "weight decay": lambda: optax.add_decayed_weights(0.1),
    "momentum": lambda: optax.trace(0.9),
    "adam": lambda: relaxed(optax.scale_by_adam()),
    "noise": lambda: relaxed(optax.add_noise(0.1, 0.1, 0)),
    "zero_nans": optax.zero_nans,
    "sign": optax.scale_by_sign,
    "scale": lambda: optax.scale(0.5),
    "masked clip": lambda: optax.masked(optax.clip(0.1), {"w": True, "b": False}),
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", CHANGING)
def test_what_changes_gradients_before_the_loss_scale_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=BEFORE):
        one_step(optax.chain(CHANGING[name](), scaled()))


@pytest.mark.parametrize(
    "nest",
    [
        lambda bad: optax.named_chain(("clip", bad), ("sgd", scaled())),
        lambda bad: optax.chain(optax.chain(bad, optax.identity()), optax.chain(scaled())),
        lambda bad: jt.with_master_weights(optax.chain(bad, scaled())),
        lambda bad: optax.chain(bad, scaled(optax.MultiSteps(optax.sgd(1.0), 2))),
        lambda bad: optax.flatten(optax.chain(bad, scaled())),
        lambda bad: optax.masked(optax.chain(bad, scaled()), {"w": True, "b": True}),
        lambda bad: optax.multi_transform({"a": optax.chain(bad, scaled())}, {"w": "a", "b": "a"}),
        lambda bad: optax.inject_hyperparams(lambda rate: optax.chain(bad, scaled()))(rate=0.1),
        lambda bad: optax.chain(bad, jt.with_master_weights(scaled())),
        lambda bad: jt.with_state_dtypes(optax.chain(bad, scaled(optax.trace(0.9))), {".*": "int8"}, min_size=1),
        lambda bad: own(optax.chain(bad, scaled())),
        lambda bad: own(scaled(), lambda g: jnp.clip(g, -0.1, 0.1)),
        lambda bad: own(scaled(), lambda g: jnp.clip(g, -0.1, 0.1), jit=True),
        lambda bad: bare(optax.chain(scaled()), lambda g: jnp.clip(g, -0.1, 0.1)),
    ],
)
def test_it_is_found_in_any_combinator(nest: Any) -> None:
    with pytest.raises(ValueError, match=BEFORE):
        one_step(nest(optax.clip_by_global_norm(0.1)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (lambda: optax.chain(scaled()), 1),
        (lambda: optax.chain(optax.identity(), scaled(), optax.scale(0.5)), 0.5),
        (lambda: optax.flatten(scaled()), 1),
        (lambda: own(scaled()), 1),
        (lambda: own(optax.chain(scaled()), jit=True), 1),
        (lambda: bare(optax.chain(scaled()), after=lambda u: 0.5 * u), 0.5),
        (lambda: jt.with_state_dtypes(optax.chain(scaled(optax.trace(0.9))), {"trace": "bfloat16"}, min_size=1), -1),
        (lambda: optax.masked(scaled(), {"w": True, "b": True}), 1),
        (lambda: optax.multi_transform({"a": scaled()}, {"w": "a", "b": "a"}), 1),
        (lambda: jt.with_master_weights(optax.chain(scaled(), optax.scale(0.5))), 0.5),
        (lambda: optax.chain(jt.with_master_weights(scaled()), optax.identity()), 1),
        (lambda: optax.inject_hyperparams(lambda rate: scaled(optax.sgd(rate)))(rate=1.0), 1),
        (lambda: scaled(optax.multi_transform({"a": optax.sgd(1.0)}, {"w": "a", "b": "a"})), 1),
    ],
)
def test_what_is_in_order_steps_as_the_bare_optimizer(optimizer: Any, factor: float) -> None:
    grads, state = one_step(optimizer())
    np.testing.assert_allclose(state.params["w"], 1 - factor * grads["w"], rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], 1 - factor * grads["b"], rtol=1e-6)


def run_steps(optimizer: Any, run: Any, scales: list[float]) -> Any:
    """Returns parameters and optimizer state, without counts of skips, after steps with batches of these scales."""
    state = jt.TrainState.create({"w": jnp.ones(3), "b": jnp.ones(())}, optimizer)
    for scale in scales:
        state, _ = run(state, jnp.full((8, 3), scale))
    return jax.tree.map(
        lambda x: x.inner_state if isinstance(x, LossScaledState) else x,
        (state.params, state.opt_state),
        is_leaf=lambda x: isinstance(x, LossScaledState),
    )


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.chain(scaled(optax.clip(1.0)), relaxed(optax.adam(0.1))),
        lambda: optax.named_chain(("clip", scaled(optax.clip(1.0))), ("momentum", optax.trace(0.9))),
        lambda: optax.chain(optax.identity(), scaled(), relaxed(optax.scale_by_schedule(lambda count: 1.0 + count))),
        lambda: relaxed(
            optax.inject_hyperparams(lambda rate: scaled(optax.sgd(rate)))(rate=lambda count: 0.1 * (1 + count))
        ),
        lambda: relaxed(optax.contrib.schedule_free(scaled(), 0.1)),
        lambda: own(scaled()),
        lambda: jt.with_master_weights(optax.chain(scaled(optax.clip(1.0)), relaxed(optax.adam(0.1)))),
        lambda: jt.with_state_dtypes(optax.chain(scaled(), relaxed(optax.ema(0.9))), {"ema": "bfloat16"}, min_size=1),
        lambda: optax.multi_transform({"a": optax.chain(scaled(), relaxed(optax.ema(0.9)))}, {"w": "a", "b": "a"}),
        lambda: optax.chain(
            jt.with_loss_scale(optax.sgd(0.1), jt.StaticLossScale(SCALE), skip=jt.spikes(warmup=2)),
            relaxed(optax.ema(0.9)),
        ),
    ],
)
def test_a_skipped_step_changes_nothing_around_the_loss_scale(optimizer: Any) -> None:
    tx = optimizer()
    step = jt.train_step(jt.stateless(loss_fn), tx)
    found, wanted = (run_steps(tx, jax.jit(step), [0.5, *skipped, 0.5]) for skipped in ([np.inf, np.nan], []))
    assert_bitwise_equal(found, wanted)


def test_flax_states_and_devices_keep_what_is_around_the_loss_scale() -> None:
    tx = optax.chain(scaled(optax.clip(1.0)), relaxed(optax.adam(0.1)))
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    run = jt.data_parallel(jt.train_step(jt.stateless(loss_fn), tx), mesh)
    assert_bitwise_equal(run_steps(tx, run, [0.5, np.inf, 0.5]), run_steps(tx, run, [0.5, 0.5]))
    states: list[Any] = [jt.FlaxTrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx)]
    for last in (1.0, jnp.inf):
        states.append(states[-1].apply_gradients(grads={"w": SCALE * jnp.array([1.0, 1.0, last])}))
    assert int(states[2].opt_state[0].skipped_steps) == 1
    assert_bitwise_equal(states[2].opt_state[1], states[1].opt_state[1])


def test_a_clip_inside_clips_the_true_gradient() -> None:
    grads, state = one_step(scaled(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))))
    norm = np.sqrt(float((grads["w"] ** 2).sum() + grads["b"] ** 2))
    np.testing.assert_allclose(state.params["w"], 1 - grads["w"] * 0.1 / norm, rtol=1e-6)


def test_parameters_whose_gradients_reach_no_loss_scale_are_named() -> None:
    split = optax.multi_transform({"a": scaled(), "b": optax.sgd(1.0)}, LABELS)
    with pytest.raises(ValueError, match=r"optimizer: the gradients of these parameters are.*\n  b$"):
        one_step(split)
    masked = optax.masked(scaled(), {"w": True, "b": False})
    for optimizer in (masked, own(masked), optax.chain(masked, optax.scale(0.5)), jt.with_master_weights(split)):
        with pytest.raises(ValueError, match=r"optimizer: the gradients of these parameters are.*\n  b$"):
            one_step(optimizer)
    frozen = optax.multi_transform({"a": scaled(), "b": optax.set_to_zero()}, LABELS)
    for optimizer in (frozen, jt.with_master_weights(frozen)):
        grads, state = one_step(optimizer)
        np.testing.assert_allclose(state.params["w"], 1 - grads["w"], rtol=1e-6)
        assert float(state.params["b"]) == 1


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (lambda: optax.apply_if_finite(scaled(), 3), "apply_if_finite"),
        (lambda: optax.chain(optax.apply_if_finite(scaled(), 3)), "apply_if_finite"),
        (lambda: optax.MultiSteps(optax.apply_if_finite(scaled(), 3), 2), "apply_if_finite"),
        (
            lambda: optax.MultiSteps(scaled(), 2, should_skip_update_fn=optax.skip_not_finite),
            r"MultiSteps\(should_skip_update_fn=...\)",
        ),
    ],
)
def test_what_hides_overflows_from_the_loss_scale_is_refused(optimizer: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}, at .* of its state, drops gradients that overflowed"):
        one_step(optimizer())


def test_multi_steps_that_skip_nothing_stay() -> None:
    _, state = one_step(relaxed(optax.MultiSteps(scaled(), 2).gradient_transformation()))
    assert int(state.opt_state.mini_step) == 1


AFTER = "optimizer: a transformation after with_master_weights or"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("store", [jt.with_master_weights, lambda x: jt.with_stochastic_rounding(x, jax.random.key(0))])
def test_what_changes_the_updates_of_stored_parameters_is_refused(store: Any) -> None:
    """Master weights and parameters would diverge: 0.5875 and 0.703125 after three steps of 0.1."""
    for optimizer in (
        optax.chain(store(optax.sgd(0.1)), optax.scale(0.5)),
        optax.chain(store(scaled()), optax.clip(0.1)),
        optax.chain(optax.masked(store(scaled()), {"w": True, "b": True}), optax.scale(0.5)),
        bare(store(scaled()), after=lambda u: 0.5 * u),
        optax.named_chain(("sgd", optax.chain(store(optax.sgd(0.1)))), ("half", optax.scale(0.5))),
    ):
        with pytest.raises(ValueError, match=AFTER):
            one_step(optimizer, jnp.bfloat16)
    one_step(optax.chain(store(scaled())), jnp.bfloat16)
    one_step(optax.multi_transform({"a": store(optax.sgd(0.1)), "b": optax.sgd(1.0)}, LABELS))


def test_what_stores_parameters_goes_once() -> None:
    def rounding(inner: Any) -> Any:
        return jt.with_stochastic_rounding(inner, jax.random.key(0))

    sgd, params = optax.sgd(0.1), jnp.ones(2, jnp.bfloat16)
    for optimizer, message in (
        (jt.with_master_weights(rounding(sgd)), "with_stochastic_rounding has no effect on float32"),
        (jt.with_master_weights(optax.chain(rounding(sgd))), "with_stochastic_rounding has no effect on float32"),
        (
            jt.with_master_weights(jt.with_master_weights(sgd)),
            "optimizer already has master weights; call with_master_weights once",
        ),
        (rounding(optax.chain(jt.with_master_weights(sgd))), "optimizer already stores the parameters; use only"),
        (rounding(rounding(sgd)), "optimizer already stores the parameters; use only"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.init(params)


def test_over_devices_it_is_the_same() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    params = {"w": jnp.ones(3), "b": jnp.ones(())}
    batch = jnp.full((4, 3), 0.5)
    for before, wrong in ((optax.identity(), False), (optax.clip(0.1), True)):
        optimizer = optax.chain(before, scaled())
        step = jt.train_step(jt.stateless(loss_fn), optimizer)
        state = jt.TrainState.create(params, optimizer)
        for run in (jt.data_parallel(step, mesh), jt.sharded_step(step, mesh)):
            if wrong:
                with pytest.raises(ValueError, match=BEFORE):
                    run(state, batch)
            else:
                after, _ = run(state, batch)
                expected = 1 - jax.grad(loss_fn)(params, batch)["w"]
                np.testing.assert_allclose(after.params["w"], expected, rtol=1e-6)
