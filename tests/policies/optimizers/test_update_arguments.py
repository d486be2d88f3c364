"""Every optimizer of optax.contrib, and those that evaluate the loss again, step as by hand and skip."""

import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from optax import contrib
from optax_optimizers import CONTRIB, OTHERS
from promotion import promoting
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.quick

PARAMS = {"w": jnp.asarray([[1.0, -2.0], [0.5, -0.25]]), "b": jnp.asarray([0.25, 3.0])}

HERE = {name: make for name, make in {**CONTRIB, **OTHERS}.items() if make() is not None}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    y = jnp.tanh(batch @ params["w"]) + params["b"]
    return ((y - 1.0).astype(jnp.float32) ** 2).mean()


def batch_of(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(4, 2)), jnp.float32)


def test_no_optimizer_of_contrib_is_forgotten() -> None:
    there = {name for name, thing in vars(contrib).items() if inspect.isfunction(thing)}
    parts = {
        "schedule_free_eval_params", "hutchinson_estimator_diag_hessian",
        *(name for name in there if name.startswith("scale_by_")),
    }  # fmt: skip
    assert there - parts == set(CONTRIB)


def by_hand(optimizer: Any, name: str) -> Any:
    @jax.jit
    @promoting
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)

        def value_fn(params: Any) -> jax.Array:
            return loss_fn(params, batch)

        extra: dict[str, Any] = {"value": loss}
        if name in ("lbfgs", "backtracking"):
            extra = {**extra, "grad": grads, "value_fn": value_fn}
        if name == "sophia":
            extra = {**extra, "obj_fn": value_fn}
        if name == "opaque sam":
            extra = {"grad_fn": lambda params, _: jax.grad(value_fn)(params)}
        if name in ("sam", "sam in a chain"):
            extra = {}
        update = optax.with_extra_args_support(optimizer).update
        updates, state = update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", HERE)
def test_steps_are_those_by_hand_and_a_skip_leaves_no_trace(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        bare = HERE[name]()
        optimizer = jt.with_loss_scale(bare, jt.torch_loss_scale(2.0**8))
        state = jt.TrainState.create(PARAMS, optimizer)
        step = jax.jit(promoting(jt.train_step(jt.stateless(loss_fn), optimizer)))
        hand, params, opt_state = by_hand(bare, name), PARAMS, bare.init(PARAMS)
        for seed in range(3):
            state, _ = step(state, batch_of(seed))
            params, opt_state = hand(params, opt_state, batch_of(seed))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), state.params, params)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-4), state.opt_state.inner_state, opt_state
    )
    assert not np.array_equal(state.params["w"], PARAMS["w"])
    skipped, metrics = step(state, batch_of(3).at[0, 0].set(jnp.nan))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(skipped.params, state.params)
    assert_bitwise_equal(skipped.opt_state.inner_state, state.opt_state.inner_state)


def test_a_line_search_in_half_precision_sees_small_gradients() -> None:
    """Gradients of 2**-27 are zero in float16 without the scale; the search has to see them at each of its points."""

    def small(params: Any, batch: Any) -> jax.Array:
        return ((params * batch - 1) ** 2).sum().astype(jnp.float32) * 2.0**-27

    found = {}
    for policy in ("float32", "mixed_float16"):
        search = optax.chain(optax.scale(-(2.0**29)), optax.scale_by_zoom_linesearch(max_linesearch_steps=10))
        optimizer = jt.with_loss_scale(search, jt.StaticLossScale(2.0**14))
        step = jax.jit(promoting(jt.train_step(jt.stateless(small), optimizer, policy=policy)))
        state = jt.TrainState.create(jnp.asarray([0.5, 2.0]), optimizer)
        state, _ = step(state, jnp.ones(2))
        found[policy] = np.asarray(state.params)
    np.testing.assert_allclose(found["float32"], [1, 1], atol=0.3)
    np.testing.assert_allclose(found["mixed_float16"], found["float32"], rtol=1e-2)


def test_several_devices_evaluate_no_loss_again() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    for optimizer, name in ((optax.lbfgs(), "a line search"), (contrib.sophia(0.1), "sophia")):
        step = jt.train_step(jt.stateless(loss_fn), jt.with_loss_scale(optimizer, jt.NoOpLossScale()))
        state = jt.TrainState.create(PARAMS, step.optimizer)
        for parallel in (jt.data_parallel(step, mesh), jt.sharded_step(step, mesh)):
            with pytest.raises(ValueError, match=f"optimizer: {name} evaluates the loss at other"):
                jax.eval_shape(parallel, state, batch_of(0))


def test_what_inner_states_keep_is_found_by_name() -> None:
    """As the page of recipes says; `schedule_free_eval_params` takes the state within."""
    steps = jt.with_loss_scale(
        optax.MultiSteps(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5), 2), jt.torch_loss_scale()
    )
    state = jt.with_master_weights(steps).init(PARAMS)
    assert int(optax.tree.get(state, "gradient_step")) == 0
    assert float(optax.tree.get(state, "learning_rate")) == 0.5
    changed = optax.tree.set(state, learning_rate=jnp.asarray(0.25))
    assert float(optax.tree.get(changed, "hyperparams")["learning_rate"]) == 0.25
    free: Any = jt.with_loss_scale(contrib.schedule_free_sgd(0.1), jt.torch_loss_scale())
    averaged = contrib.schedule_free_eval_params(free.init(PARAMS).inner_state, PARAMS)
    assert_bitwise_equal(averaged, PARAMS)
