"""A run that began without wrappers goes on with them, and Adam's count goes on, too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.quick

PARAMS = {"dense": {"w": jnp.ones((2, 4))}, "b": jnp.zeros(4)}
GRADS = jax.tree.map(lambda x: jnp.full_like(x, 0.5), PARAMS)


def adam() -> Any:
    return relaxed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))


def scaled(**kwargs: Any) -> Any:
    return jt.with_loss_scale(adam(), jt.torch_loss_scale(64.0, **kwargs))


def trained(optimizer: Any, steps: int = 3, scale: float = 1.0) -> Any:
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        grads = jax.tree.map(lambda g: g * scale, GRADS)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.full
def test_the_next_step_is_that_of_the_old_optimizer() -> None:
    params, old = trained(adam())
    expected, _ = adam().update(GRADS, old, params)
    for wrap in (
        scaled,
        lambda: jt.with_master_weights(scaled()),
        lambda: jt.with_stochastic_rounding(scaled(), jax.random.key(0)),
    ):
        optimizer = wrap()
        for read in (old, serialization.to_state_dict(old), jax.tree.map(np.asarray, old)):
            state = jt.adopt_opt_state(optimizer.init(params), read)
            assert int(optax.tree.get(state, "count")) == 3
            grads = jax.tree.map(lambda g: 64 * g, GRADS)
            updates, _ = optimizer.update(grads, state, params)
            jax.tree.map(lambda u, e: np.testing.assert_allclose(u, e, rtol=1e-5, atol=1e-8), updates, expected)


@pytest.mark.full
def test_common_wrappers_are_taken_over_and_others_taken_off() -> None:
    _, old = trained(scaled(growth_interval=2), steps=3, scale=64.0)
    assert float(jt.get_loss_scale(old).loss_scale) == 128
    new = jt.with_master_weights(scaled(growth_interval=2)).init(PARAMS)
    state = jt.adopt_opt_state(new, old)
    assert_bitwise_equal(state.inner_state, old)
    assert_bitwise_equal(jt.get_master_weights(state), PARAMS)
    # A scale with another rule stays, as do its wrapper's counters where there is none.
    other = jt.adopt_opt_state(scaled(growth_interval=5).init(PARAMS), old)
    assert float(jt.get_loss_scale(other).loss_scale) == 64
    assert_bitwise_equal(jt.adopt_opt_state(adam().init(PARAMS), state), old.inner_state)


def test_dtypes_and_placement_are_those_of_the_new_state() -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    old = adam().init(half)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P())
    new = jax.device_put(scaled().init(half), sharding)
    state = jt.adopt_opt_state(new, old)
    assert_bitwise_equal(state, new)
    assert {x.sharding for x in jax.tree.leaves(state)} == {sharding}


def test_what_does_not_fit_is_listed() -> None:
    _, old = trained(adam())
    new = scaled().init({"dense": {"w": jnp.ones((2, 5))}, "c": jnp.zeros(4)})
    with pytest.raises(ValueError, match="old is not a state of new's optimizer") as raised:
        jt.adopt_opt_state(new, old)
    for line in (
        "'1/0/mu/b' is in old only",
        "'1/0/nu/c' is in new only",
        "'1/0/mu/dense/w' is float32[2, 4] in old and float32[2, 5] in new",
    ):
        assert line in str(raised.value)
    counted = jax.tree.map(lambda x: x.astype(jnp.float32), old)
    with pytest.raises(ValueError, match=r"'1/0/count' is float32\[\] in old and int32\[\] in new"):
        jt.adopt_opt_state(scaled().init(PARAMS), counted)


def test_moments_are_quantized_decoded_and_taken_as_they_are() -> None:
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(4)}
    grads = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)

    def state_after(optimizer: Any) -> Any:
        return jax.jit(optimizer.update)(grads, optimizer.init(params), params)[1]

    plain = relaxed(optax.adam(1e-2))
    quantized = jt.with_state_dtypes(plain, {"mu": "int8", "nu": "bfloat16"}, rounding="nearest")
    found = jt.adopt_opt_state(quantized.init(params), state_after(plain))
    assert_bitwise_equal(found, state_after(quantized))
    assert_bitwise_equal(jt.adopt_opt_state(quantized.init(params), found), found)
    back = jt.adopt_opt_state(plain.init(params), found)
    assert_bitwise_equal(back, jt.policies.decode_opt_state(found))
    with pytest.raises(ValueError, match=r"'0/mu/w' is float32\[3\] in old and int8 in blocks, \[64, 64\] in new"):
        jt.adopt_opt_state(quantized.init(params), plain.init({**params, "w": jnp.ones(3)}))


CODES = {"int8": 0.07, "uint8": 0.04, "float8_e4m3fn": 0.07, "float8_e5m2": 0.13}  # the documented errors


@pytest.mark.parametrize("new", CODES)
@pytest.mark.parametrize("old", CODES)
def test_codes_of_another_dtype_are_decoded(old: str, new: str) -> None:
    """Codes in blocks of one shape are no numbers that a cast could convert."""
    params = {"w": jnp.ones((64, 64))}
    numbers = np.linspace(0.2, 1, 4096, dtype=np.float32).reshape(64, 64)
    first, second = (jt.with_state_dtypes(optax.trace(0.9), {"trace": x}, rounding="nearest") for x in (old, new))
    _, state = first.update({"w": jnp.asarray(numbers)}, first.init(params), params)
    adopted = jt.policies.decode_opt_state(jt.adopt_opt_state(second.init(params), state))
    np.testing.assert_allclose(optax.tree.get(adopted, "trace")["w"], numbers, rtol=CODES[old] + CODES[new])


@pytest.mark.parametrize(("old", "new"), [(None, "int8"), ("int8", None)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_compensation_in_other_units_is_refused(dtype: str, old: str | None, new: str | None) -> None:
    params = {"w": jnp.full((2, 4), 1.5, dtype)}
    first, second = (jt.with_kahan(relaxed(optax.adam(1e-2)), compensation_dtype=x) for x in (old, new))
    _, state = first.update({"w": jnp.ones((2, 4))}, first.init(params), params)
    with pytest.raises(ValueError, match=r"'compensation/w' is u?int(8|16)\[2, 4\] in old.*\nset_compensated_params"):
        jt.adopt_opt_state(second.init(params), state)
