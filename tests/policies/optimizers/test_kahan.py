"""Half parameters with a compensation in 16 or 8 bits: as good as said, by either way, and nothing lost to a skip."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies import KahanState
from jmp_train.policies.optimizers.stored_parameters import StoringOptimizer

pytestmark = [pytest.mark.quick, pytest.mark.newest]

HALVES = ["bfloat16", "float16"]
FORMS = ["exact", "own dtype", "int8", "int8, nearest"]


def with_form(optimizer: Any, form: str, dtype: str = "bfloat16") -> Any:
    """Returns the optimizer with compensations of a form, for parameters of a dtype."""
    options: Any = {
        "exact": {},
        "own dtype": {"compensation_dtype": dtype},
        "int8": {"compensation_dtype": "int8"},
        "int8, nearest": {"compensation_dtype": "int8", "rounding": "nearest"},
    }
    return jt.with_kahan(optimizer, **options[form])


def in_half(tree: Any, dtype: str = "bfloat16") -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def run_of(optimizer: Any, params: Any, grads: Any, steps: int) -> Any:
    """Returns parameters and state after steps with the same gradients."""

    def step(carry: Any, _: None) -> Any:
        return optimizer.update(grads, carry[1], carry[0], return_params=True), None

    run = jax.jit(lambda params, state: jax.lax.scan(step, (params, state), None, steps)[0])
    return run(params, optimizer.init(params))


def sums_of(params: Any, state: Any) -> np.ndarray:
    return np.asarray(jt.policies.compensated_params(params, state)).astype(np.float64)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALVES)
def test_tiny_updates_add_up_as_in_float64(dtype: str, form: str) -> None:
    """Updates of 2**-13 to 2**-15, of which plain rounding loses each; beside the compensated sum in numpy."""
    grads = jnp.asarray(2.0 ** np.linspace(-15, -13, 64), jnp.float32)
    params = jnp.linspace(1, 2, 64).astype(dtype)
    start = np.asarray(params).astype(np.float64)
    params, state = run_of(with_form(optax.sgd(1.0), form, dtype), params, grads, 1000)
    exact = start - 1000 * np.asarray(grads).astype(np.float64)
    sums = sums_of(params, state)
    eps = float(jnp.finfo(dtype).eps)
    # The compensation is rounded to one part in 1 / eps of at most eps / 2, or to eps / 256, each step and either way;
    # at random it walks, and the whole float32 loses what float32 loses.
    each = {"exact": 2.0**-24, "own dtype": eps * eps / 8, "int8": eps / 256, "int8, nearest": eps / 512 + 2.0**-24}[
        form
    ]
    assert np.abs(sums - exact).max() < each * (5 / 2 * 1000**0.5 if form == "int8" else 1000)
    np.testing.assert_allclose(np.asarray(params).astype(np.float64), sums, rtol=eps)
    assert (np.abs(start - exact) > 10 * eps / 4).all()


@pytest.mark.full
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", HALVES)
def test_in_int8_the_least_updates_are_right_on_average(dtype: str, sign: float) -> None:
    """An eighth of what int8 counts, so often that parameters pass the middle to the next number, and powers of two."""
    unit, steps = float(jnp.finfo(dtype).eps) / 256, 3000
    start = np.repeat(np.asarray([1 - 64 * unit, 1.0, 1.5, -1.0, -1.5]).astype(dtype), 1024)
    grads = jnp.full(len(start), -sign * unit / 8)
    moved = sums_of(*run_of(with_form(optax.sgd(1.0), "int8"), jnp.asarray(start), grads, steps)) - start.astype(float)
    expected = unit / 8 * steps * sign
    # A step's rounding has a variance of at most unit**2 / 8; twice the unit next to a power of two.
    spread = 2 * unit * (steps / 8) ** 0.5
    assert np.abs(moved.reshape(5, 1024).mean(1) - expected).max() < 5 * spread / 1024**0.5
    assert np.abs(moved - expected).max() < 6 * spread
    nearest = sums_of(*run_of(with_form(optax.sgd(1.0), "int8, nearest"), jnp.asarray(start), grads, 2))
    np.testing.assert_array_equal(nearest, start.astype(float))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("form", "dtype", "least"),
    [
        ("own dtype", "bfloat16", 2.0**-17),
        ("own dtype", "float16", 2.0**-23),
        ("int8, nearest", "bfloat16", 2.0**-16),
        ("int8, nearest", "float16", 2.0**-19),
    ],
)
def test_lossy_compensations_lose_updates_below_what_docs_say(form: str, dtype: str, least: float) -> None:
    optimizer = with_form(optax.sgd(-1.0), form, dtype)
    # A compensation near its largest number has the largest errors.
    params = jnp.ones(1, dtype)
    rest = jnp.full(1, 0.75 * float(jnp.finfo(dtype).eps) / 2)
    params, state = optimizer.update(rest, optimizer.init(params), params, return_params=True)
    before = sums_of(params, state)
    for factor in (0.9, 1.6):  # in float16, an update of a few units of float32
        moved = sums_of(*optimizer.update(jnp.full(1, factor * least), state, params, return_params=True))
        assert (moved > before) == (factor > 1)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_gradients_make_updates_in_float32(dtype: str) -> None:
    optimizer: Any = jt.with_kahan(optax.sgd(0.1), compensation_dtype=dtype)
    params, grads = jnp.ones(8, dtype), jnp.linspace(1, 4, 8).astype(dtype)
    step = jax.jit(lambda grads, state, params: optimizer.update(grads, state, params, return_params=True))
    params, state = step(grads, optimizer.init(params), params)
    exact = 1 - 0.1 * np.asarray(grads).astype(np.float64)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(jt.policies.compensated_params(params, state), exact, rtol=eps * eps, atol=1e-7)


@pytest.mark.full
@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(HALVES),
    st.sampled_from(["own dtype", "int8, nearest"]),
    st.lists(st.tuples(*[st.floats(-4.0, 4.0, width=32)] * 2, st.integers(-30, 4)), min_size=1, max_size=8),
)
def test_apply_updates_gives_what_the_step_gives_and_sums_are_kept(
    dtype: str, form: str, cases: list[tuple[float, float, int]]
) -> None:
    """Also where a parameter falls by a factor of millions, whose difference float32 does not have."""
    cases = (cases * 8)[:8]
    params = jnp.asarray([case[0] for case in cases], dtype)
    wanted = np.asarray([x * 2.0**exponent for _, x, exponent in cases], np.float32)
    updates, params_by_step, params_by_updates, state = _steps[dtype, form](params, wanted - params.astype(jnp.float32))
    del updates
    assert_bitwise_equal(params_by_step, params_by_updates)
    sums = np.asarray(jt.policies.compensated_params(params_by_step, state)).astype(np.float64)
    total = np.asarray(params.astype(jnp.float32) + (wanted - params.astype(jnp.float32)))  # as float32 adds them
    eps = float(jnp.finfo(dtype).eps)
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    flushed = float(jnp.finfo(jnp.float32).smallest_normal)  # XLA takes smaller numbers for zeros
    if form == "own dtype":
        np.testing.assert_allclose(sums, total, rtol=eps * eps, atol=max(smallest, flushed))
    else:  # half of a 256th, and what float32 loses of the update
        before = np.asarray(params).astype(np.float64)
        allowed = np.abs(total) * eps / 512 * 1.01 + np.abs(before) * 2.0**-24 + max(smallest / 256, flushed)
        assert (np.abs(sums - total) <= allowed).all()


def test_an_int8_compensation_is_float64s_for_every_parameter() -> None:
    """Sums anywhere between a bfloat16 and the next: the rest is rounded, ties up, and the parameter the nearest."""
    bits = np.arange(0x0F00, 0x7F00, dtype=np.uint16)  # from 2**-97 up
    numbers = np.concatenate([bits, bits | 0x8000]).view(ml_dtypes.bfloat16)
    whole = numbers.astype(np.float32)
    shares = np.random.default_rng(0).choice(np.arange(-512, 512) / 1024, len(whole)).astype(np.float32)
    distance = np.ldexp(np.float32(2.0**-7), np.frexp(whole)[1] - 1)
    sums = whole + shares * distance
    optimizer: Any = with_form(optax.sgd(-1.0), "int8, nearest")
    state = optimizer.init(jnp.asarray(numbers))
    params, state = jax.jit(optimizer.update, static_argnames="return_params")(
        jnp.asarray(sums - whole), state, jnp.asarray(numbers), return_params=True
    )
    nearest = sums.astype(ml_dtypes.bfloat16).astype(np.float64)
    unit = np.ldexp(2.0**-15, np.frexp(nearest)[1] - 1)
    rest = np.floor((sums.astype(np.float64) - nearest) / unit + 0.5)
    total = nearest + rest * unit
    kept = np.asarray(jt.policies.compensated_params(params, state))
    np.testing.assert_array_equal(kept, total)
    # Of the two nearest numbers, the upper one.
    np.testing.assert_array_equal(np.asarray(params), (total + unit / 2).astype(ml_dtypes.bfloat16))
    assert state.compensation.dtype == jnp.int8


def _both_ways(dtype: str, form: str) -> Any:
    optimizer: Any = with_form(optax.sgd(-1.0), form, dtype)

    def both(params: Any, grads: Any) -> Any:
        state = optimizer.init(params)
        by_step, state = optimizer.update(grads, state, params, return_params=True)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        with jax.numpy_dtype_promotion("standard"):
            return updates, by_step, optax.apply_updates(params, updates), state

    return jax.jit(both)


_steps = {(dtype, form): _both_ways(dtype, form) for dtype in HALVES for form in FORMS}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) * params["scale"]
    return ((hidden - 0.5) ** 2).mean()


PARAMS = {"w": jax.random.normal(jax.random.key(0), (8, 4)).astype(jnp.bfloat16), "scale": jnp.ones(4)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_in_a_train_step_a_skip_changes_no_bit_and_float32_stays(form: str) -> None:
    inner = jt.with_loss_scale(relaxed(optax.adam(1e-2)), jt.torch_loss_scale(2.0**8))
    optimizer = with_form(inner, form)
    assert isinstance(optimizer, StoringOptimizer)
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), optimizer), donate_argnums=0)
    state = jt.TrainState.create(jax.tree.map(jnp.copy, PARAMS), optimizer)
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    losses = []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]
    kept: Any = state.opt_state
    assert isinstance(kept, KahanState)
    assert kept.compensation["w"].dtype == {"exact": "uint16", "own dtype": "bfloat16"}.get(form, "int8")
    assert (kept.key is not None) == (form == "int8")
    assert bool((kept.compensation["w"] != 0).any())
    assert kept.compensation["scale"].shape == ()
    before = jax.tree.map(jnp.copy, state)
    state, metrics = step(state, batch.at[0, 0].set(jnp.inf))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(state.params, before.params)
    assert_bitwise_equal(state.opt_state.compensation, before.opt_state.compensation)
    assert_bitwise_equal(state.opt_state.key, before.opt_state.key)
    assert_bitwise_equal(state.opt_state.inner_state.inner_state, before.opt_state.inner_state.inner_state)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_infinite_values_leave_no_nan_behind_and_a_nan_is_its_parameters_alone(form: str) -> None:
    optimizer: Any = with_form(optax.sgd(1.0), form, "float16")
    step = jax.jit(lambda grads, state, params: optimizer.update(grads, state, params, return_params=True))
    params = jnp.asarray([6e4, -0.0, jnp.inf], jnp.float16)
    params, state = step(jnp.asarray([-6e4, 0.0, 0.0]), optimizer.init(params), params)
    assert np.asarray(params).tolist() == [np.inf, 0.0, np.inf]
    assert np.signbit(np.asarray(params)[1])
    assert not bool(jnp.isnan(jt.policies.compensated_params(params, state)).any())

    optimizer = with_form(optax.sgd(1.0), form)
    step = jax.jit(lambda grads, state, params: optimizer.update(grads, state, params, return_params=True))
    params = jnp.ones(4096, jnp.bfloat16)
    params, state = step(jnp.full(4096, 1e-3).at[100].set(jnp.nan), optimizer.init(params), params)
    params, state = step(jnp.full(4096, 1e-3), state, params)
    for found in (params, jt.policies.compensated_params(params, state)):
        assert np.argwhere(np.isnan(np.asarray(found, np.float32))).tolist() == [[100]]


def test_wrong_calls_are_named() -> None:
    optimizer: Any = jt.with_kahan(optax.sgd(0.1))
    half = {"w": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match="with_kahan: no parameter is in bfloat16 or float16; cast the parameters"):
        optimizer.init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="compensation_dtype='int4' must be 'int8', 'bfloat16' or 'float16', or None"):
        jt.with_kahan(optax.sgd(0.1), compensation_dtype="int4")
    with pytest.raises(ValueError, match=r"compensation_dtype=array.* must be 'int8'"):
        jt.with_kahan(optax.sgd(0.1), compensation_dtype=np.ones(1, np.int8))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="key is only for compensation_dtype='int8'"):
        jt.with_kahan(optax.sgd(0.1), key=jax.random.key(0))
    with pytest.raises(ValueError, match="'w' is bfloat16, its compensation float16"):
        jt.with_kahan(optax.sgd(0.1), compensation_dtype="float16").init(half)
    with pytest.raises(ValueError, match="params must be given"):
        optimizer.update(half, optimizer.init(half))
    with pytest.raises(ValueError, match="'w' is float16, its compensation uint16"):
        optimizer.update(half, optimizer.init(half), in_half(half, "float16"))
    with pytest.raises(ValueError, match="params must have the structure of the compensation"):
        jt.policies.compensated_params({"v": half["w"]}, optimizer.init(half))
    with pytest.raises(ValueError, match="has no compensation; wrap the optimizer in with_kahan"):
        jt.policies.compensated_params(half, optax.sgd(0.1).init(half))
    with pytest.raises(ValueError, match="optimizer already stores the parameters; use only one of"):
        jt.with_kahan(jt.with_master_weights(optax.sgd(0.1))).init(half)
    with pytest.raises(TypeError, match="optimizer must not store the parameters"):
        jt.with_loss_scale(optimizer, jt.NoOpLossScale())
    with pytest.raises(ValueError, match="with_kahan: no parameter is in bfloat16 or float16"):
        jt.with_master_weights(optimizer).init(half)
