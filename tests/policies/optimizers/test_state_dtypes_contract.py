"""What `with_state_dtypes` holds for every optimizer of optax: it steps, it does not retrace, and a skip is bitwise."""

import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_optimizers import ALIASES, CONTRIB, OTHERS
from promotion import promoting
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies.pytrees import is_float_array

pytestmark = pytest.mark.quick

OPTIMIZERS = {name: make for name, make in {**ALIASES, **CONTRIB, **OTHERS}.items() if make() is not None}
PARAMS = {"w": jnp.asarray([[1.0, -2.0], [0.5, -0.25]]), "b": jnp.asarray([0.25, 3.0])}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    y = jnp.tanh(batch @ params["w"]) + params["b"]
    return ((y - 1.0).astype(jnp.float32) ** 2).mean()


def batch_of(seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(4, 2)), jnp.float32)


def test_no_alias_of_optax_is_forgotten() -> None:
    there = {name for name, thing in vars(optax).items() if inspect.isfunction(thing) and "alias" in thing.__module__}
    assert there <= set(ALIASES)


# Each in blocks, inside of the loss scale; every third in bfloat16 outside of it, too.
CASES = [*((name, "int8") for name in OPTIMIZERS), *((name, "bfloat16") for name in list(OPTIMIZERS)[::3])]


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_optimizer_steps_with_all_of_its_state_in_few_bits(name: str, dtype: str) -> None:
    """All floating arrays of the state are kept so, numbers too; the loss scale is outside or inside, by the dtype."""

    def wrapped(optimizer: Any) -> Any:
        return jt.with_state_dtypes(optimizer, {"^(?!loss_scale).*": dtype}, min_size=1)

    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        bare, scale = OPTIMIZERS[name](), jt.torch_loss_scale(2.0**8)
        has_floats = any(map(is_float_array, jax.tree.leaves(bare.init(PARAMS))))
        if not has_floats:
            with pytest.raises(ValueError, match="matches no floating array of the optimizer's state; the fields are"):
                wrapped(bare).init(PARAMS)
            return
        inside = dtype == "int8"
        optimizer = jt.with_loss_scale(wrapped(bare), scale) if inside else wrapped(jt.with_loss_scale(bare, scale))
        state = jt.TrainState.create(PARAMS, optimizer)
        kinds = jax.tree.map(lambda x: (x.shape, x.dtype), state)
        step: Any = jax.jit(promoting(jt.train_step(jt.stateless(loss_fn), optimizer)))
        for seed in range(3):
            state, metrics = step(state, batch_of(seed))
            assert bool(metrics["grads_finite"])
            assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == kinds
    assert step._cache_size() == 1
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.params))
    assert not np.array_equal(state.params["w"], PARAMS["w"])
    skipped, metrics = step(state, batch_of(3).at[0, 0].set(jnp.nan))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(skipped.params, state.params)
    outer, before = skipped.opt_state, state.opt_state
    if inside:
        assert_bitwise_equal(outer.inner_state, before.inner_state)
    else:
        assert_bitwise_equal(outer.key, before.key)
        assert_bitwise_equal(outer.inner_state.inner_state, before.inner_state.inner_state)
