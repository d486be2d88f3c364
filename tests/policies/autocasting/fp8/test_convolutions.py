"""Convolutions in 8 bits beside float64, and where autocast's rule "fp8" puts them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_train as jt
from jmp_train.policies.autocasting.fp8 import convolution_in_few_bits
from tests.helpers import fp8_reference as reference

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
CURRENT = jt.policies.Float8CurrentScaling()
IMAGES = ("NHWC", "HWIO", "NHWC")
PLAIN = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": IMAGES}
WINDOWS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "strides": ((2, 7, 6, 4), (3, 3, 4, 5), {**PLAIN, "window_strides": (2, 1)}),
    "groups": ((2, 5, 5, 4), (3, 3, 2, 6), {**PLAIN, "feature_group_count": 2}),
    "each channel": ((2, 5, 5, 4), (3, 3, 1, 4), {**PLAIN, "feature_group_count": 4}),
    "transposed": ((2, 4, 4, 3), (2, 2, 3, 5), {**PLAIN, "lhs_dilation": (2, 2), "padding": ((1, 0), (1, 0))}),
    "dilated": ((1, 3, 9), (4, 3, 3), {"window_strides": (1,), "padding": "VALID", "rhs_dilation": (2,)}),
    "batch groups": ((4, 5, 5, 3), (3, 3, 3, 4), {**PLAIN, "batch_group_count": 2}),
}


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def quantized(x: Any, dtype: Any) -> Any:
    found = reference.shared(x, tuple(range(x.ndim)), dtype)
    return found.numbers * np.asarray(found.inverse, np.float64)


def image_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, **PLAIN)


def with_gradients(run: Any, *arrays: Any) -> list[Any]:
    lhs, rhs, cotangent = arrays
    out, pullback = jax.vjp(run, lhs, rhs)
    return [out, *pullback(cotangent)]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", WINDOWS)
def test_a_convolution_and_its_gradients_are_those_of_quantized_operands(name: str) -> None:
    shape, kernel, window = WINDOWS[name]
    lhs, rhs = normal(*shape) * 1000, normal(*kernel) / 100
    run = lambda x, w: convolution_in_few_bits(x, w, window, CURRENT)
    cotangent = normal(*jax.eval_shape(run, lhs, rhs).shape)
    got = jax.jit(lambda *arrays: with_gradients(run, *arrays))(lhs, rhs, cotangent)
    types = reference.E4M3, reference.E4M3, reference.E5M2
    pairs = zip((lhs, rhs, cotangent), types, strict=True)
    with jax.enable_x64(True):
        exact = [jnp.asarray(quantized(np.asarray(x), dtype)) for x, dtype in pairs]
        of_quantized = lambda x, w: lax.conv_general_dilated(x, w, **window)
        wanted = jax.tree.map(np.asarray, with_gradients(of_quantized, *exact))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


def test_the_backward_pass_stores_8_bits_and_an_overflow_is_seen() -> None:
    x, w = normal(2, 5, 5, 3), normal(3, 3, 3, 4)
    run = lambda x, w: convolution_in_few_bits(x, w, PLAIN, CURRENT, jnp.bfloat16)
    out, pullback = jax.jit(lambda x, w: jax.vjp(run, x, w))(x.astype(jnp.bfloat16), w)
    assert out.dtype == jnp.bfloat16
    stored = [leaf for leaf in jax.tree.leaves(pullback) if leaf.size > 3]
    assert sorted(leaf.size for leaf in stored) == sorted((x.size, w.size))
    assert {leaf.dtype for leaf in stored} == {jnp.dtype(jnp.float8_e4m3fn)}
    assert [g.dtype for g in jax.eval_shape(pullback, out)] == [jnp.bfloat16, jnp.float32]
    infinite, of_zeros = jax.jit(lambda x, w: (run(x.at[0, 0, 0, 0].set(jnp.inf), w), run(jnp.zeros_like(x), w)))(x, w)
    assert not np.isfinite(infinite[0, 0, 0]).any()
    np.testing.assert_array_equal(of_zeros, 0)
    assert run(x[:0], w).shape == (0, 5, 5, 4)
    with pytest.raises(TypeError, match="no second derivatives"):
        jax.eval_shape(jax.grad(lambda x: jax.grad(lambda x: (run(x, w).astype(jnp.float32) ** 2).sum())(x).sum()), x)


@pytest.mark.full
def test_each_example_of_vmap_has_scales_of_its_own() -> None:
    images, w = normal(3, 1, 5, 5, 2) * jnp.array([1.0, 1e3, 1e-3]).reshape(3, 1, 1, 1, 1), normal(3, 3, 2, 4)
    run = jax.value_and_grad(lambda w, x: (convolution_in_few_bits(x, w, PLAIN, CURRENT) ** 2).sum())
    got = jax.jit(jax.vmap(run, (None, 0)))(w, images)
    wanted = jax.tree.map(lambda *xs: jnp.stack(xs), *(run(w, x) for x in images))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))


def test_the_rule_applies_with_recipes_of_one_scale() -> None:
    x, w = normal(1, 4, 4, 2), normal(3, 3, 2, 2)
    rules = jt.TORCH_CUDA.replace(paths={"": "fp8"})
    policy = jt.autocast(image_layer, jnp.bfloat16, rules=rules, fp8=CURRENT)
    (row,) = jt.explain_autocast(policy, x, w).operations
    assert (row.rule, row.dtypes_in) == ("fp8", ("float8_e4m3fn",) * 2)
    wanted = convolution_in_few_bits(x, w, PLAIN, CURRENT, jnp.bfloat16)
    np.testing.assert_array_equal(policy(x, w), wanted)
    in_blocks = jt.autocast(image_layer, jnp.bfloat16, rules=rules, fp8=jt.policies.MXFP8BlockScaling())
    with pytest.warns(jt.policies.UnmetRulesWarning, match="what it matches cannot be 'fp8'"):
        half = in_blocks(x, w)
    np.testing.assert_array_equal(half, image_layer(*(a.astype(jnp.bfloat16) for a in (x, w))))


def test_delayed_scales_come_from_the_steps_before() -> None:
    delayed = jt.DelayedScaling(amax_history_len=4)
    rules = jt.TORCH_CUDA.replace(primitives={"conv_general_dilated": "fp8"})
    policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=delayed)
    optimizer = optax.sgd(0.0)
    step = jt.train_step(jt.stateless(lambda w, x: (image_layer(x, w) ** 2).mean()), optimizer, policy=policy)
    x, w = normal(2, 5, 5, 3) * 8, normal(3, 3, 3, 4)
    state = jt.steps.with_fp8_state(step, jt.TrainState.create(w, optimizer), x)
    run = jax.jit(step)
    state, _ = run(state, x)
    (scale,) = jax.tree.leaves(state.model_state.fp8.value.scale)
    np.testing.assert_allclose(scale[:2], [448 / jnp.abs(x).max(), 448 / jnp.abs(w).max()], rtol=1e-6)
    assert 0 < scale[2] < jnp.inf
    again, metrics = run(state, 2 * x)  # beyond the scale: the largest numbers are clipped
    clipped = jnp.clip(2 * x, -jnp.abs(x).max(), jnp.abs(x).max())
    wanted = (image_layer(clipped, w) ** 2).mean()
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=0.1)
    (history,) = jax.tree.leaves(again.model_state.fp8.value.amax_history)
    np.testing.assert_allclose(history[0, :2], [2 * jnp.abs(x).max(), jnp.abs(x).max()], rtol=1e-6)
