"""Gradients within a float16 region or policy: they are named at their line, and `scaled_grad` is right."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_train as jt

pytestmark = [pytest.mark.newest, pytest.mark.quick]

MIXED = jt.get_policy("mixed_float16")


def quadratic(params: Any, x: jax.Array) -> jax.Array:
    return ((x @ params["w"]) ** 2).mean()


def float64_gradient(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    w, x = w.astype(np.float64), x.astype(np.float64)
    return 2 * x.T @ (x @ w) / len(x)


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "float16"])
@pytest.mark.parametrize("scale", [jt.NoOpLossScale(), jt.StaticLossScale(64.0)])
def test_gradients_are_float32_and_still_scaled(policy: str, scale: jt.LossScale) -> None:
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(4,)).astype(np.float32), rng.normal(size=(8, 4)).astype(np.float32)
    params = jt.get_policy(policy).cast_to_param({"w": jnp.asarray(w)})
    fn = jax.jit(jt.scaled_value_and_grad(quadratic, jt.get_policy(policy)))
    loss, grads = fn(scale, params, x)
    assert loss.dtype == grads["w"].dtype == jnp.float32
    tolerance = {"float32": 1e-5, "mixed_bfloat16": 0.1}.get(policy, 2e-2)
    expected = float64_gradient(w, x) * scale.loss_scale
    np.testing.assert_allclose(grads["w"], expected, rtol=tolerance, atol=tolerance * scale.loss_scale)
    expected_loss = np.mean((x.astype(np.float64) @ w) ** 2)
    np.testing.assert_allclose(loss, expected_loss, rtol=tolerance)


def test_a_policy_may_be_given_by_its_name() -> None:
    (_, grads), (_, expected) = (
        jt.scaled_value_and_grad(quadratic, policy)(jt.StaticLossScale(8.0), {"w": jnp.full(2, 0.3)}, jnp.ones((1, 2)))
        for policy in ("mixed_float16", jt.get_policy("mixed_float16"))
    )
    assert jnp.array_equal(grads["w"], expected["w"]) and grads["w"].dtype == jnp.float32
    with pytest.raises(TypeError, match=r"policy must be a Policy, a PathPolicy or a name such as .*, got 16"):
        jt.scaled_value_and_grad(quadratic, 16)  # pyright: ignore[reportArgumentType]


def test_half_loss_is_scaled_in_float32() -> None:
    fn = jt.scaled_value_and_grad(lambda w: w * 1.5, MIXED)
    loss, grad = fn(jt.StaticLossScale(2.0**15), jnp.float32(1))
    assert (float(loss), float(grad)) == (1.5, 1.5 * 2**15)  # f16(1.5) * 2**16 would be inf


def test_small_gradients_survive_by_the_scale() -> None:
    fn = jt.scaled_value_and_grad(lambda w: (w * 2.0**-13) ** 2, MIXED)
    _, lost = fn(jt.NoOpLossScale(), jnp.float32(1))
    _, kept = fn(jt.StaticLossScale(2.0**12), jnp.float32(1))
    assert float(lost) == 0  # 2**-25, below float16's smallest subnormal
    assert float(kept) / 2**12 == 2.0**-25


def test_aux_is_passed_on_and_closures_are_not_cast() -> None:
    targets = jnp.float32(70000.0)  # would be inf in float16

    def loss_fn(w: jax.Array, x: jax.Array, *, y: jax.Array) -> tuple[jax.Array, Any]:
        return (w * x * y).astype(jnp.float32) * targets, {"x": x, "y": y}

    fn = jt.scaled_value_and_grad(loss_fn, MIXED, has_aux=True)
    (loss, aux), _ = fn(jt.NoOpLossScale(), jnp.float32(1), jnp.float32(1), y=jnp.float32(1))
    assert float(loss) == 70000.0
    assert aux["x"].dtype == aux["y"].dtype == jnp.float32


def test_a_rule_that_returns_half_gradients_is_upcast() -> None:
    @jax.custom_vjp
    def half_rule(x: jax.Array) -> jax.Array:
        return x

    half_rule.defvjp(lambda x: (x, None), lambda _, g: (g.astype(jnp.float16),))
    fn = jt.scaled_value_and_grad(lambda w: half_rule(w).sum())
    assert fn(jt.NoOpLossScale(), jnp.ones(2))[1].dtype == jnp.float32


def test_path_policy_casts_parameters_by_path() -> None:
    policy = jt.policy_by_path({"norm": "float32"}, default="mixed_float16")
    seen = {}

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        seen.update(jax.tree.map(lambda a: a.dtype.name, {**params, "x": x}))
        return params["w"].sum().astype(jnp.float32) + params["norm"].sum()

    fn = jt.scaled_value_and_grad(loss_fn, policy)
    fn(jt.NoOpLossScale(), {"w": jnp.ones(2), "norm": jnp.ones(2)}, jnp.ones(2))
    assert seen == {"w": "float16", "norm": "float32", "x": "float16"}


def test_wrong_scale_and_wrong_loss_are_named() -> None:
    fn = jt.scaled_value_and_grad(lambda w: w)
    with pytest.raises(TypeError, match=r"loss_scale must be a LossScale, got 8\.0"):
        fn(8.0, jnp.float32(1))
    with pytest.raises(TypeError, match=r"floating scalar as loss, got float32\[2\]"):
        fn(jt.NoOpLossScale(), jnp.ones(2))
    with pytest.raises(TypeError, match=r"floating scalar as loss, got int32\[\]"):
        jt.scaled_value_and_grad(lambda w: jnp.int32(1))(jt.NoOpLossScale(), jnp.float32(1))


def test_a_gan_step_of_two_optimizers_with_a_scale_each() -> None:
    """The generator's overflow skips the generator alone, and the other way round."""
    make = lambda: jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(2.0**8))
    g_optimizer, d_optimizer = make(), make()
    d_fn = jt.scaled_value_and_grad(lambda d, g, z: (d * g * z).sum(), MIXED)
    g_fn = jt.scaled_value_and_grad(lambda g, d, z: -((d * g * z).sum()), MIXED)

    @jax.jit
    def step(g: Any, d: Any, g_state: Any, d_state: Any, g_noise: Any, d_noise: Any) -> Any:
        _, grads = d_fn(jt.get_loss_scale(d_state), d, g, d_noise)
        updates, d_state = d_optimizer.update(grads, d_state, d)
        d = optax.apply_updates(d, updates)
        _, grads = g_fn(jt.get_loss_scale(g_state), g, d, g_noise)
        updates, g_state = g_optimizer.update(grads, g_state, g)
        return optax.apply_updates(g, updates), d, g_state, d_state

    g, d = jnp.ones(2), jnp.ones(2)
    g_state, d_state = g_optimizer.init(g), d_optimizer.init(d)
    fine, bad = jnp.ones(2), jnp.full(2, 1e5)  # inf in float16
    g, d, g_state, d_state = step(g, d, g_state, d_state, bad, fine)
    np.testing.assert_array_equal(g, [1, 1])
    np.testing.assert_allclose(d, [0.9, 0.9], rtol=1e-3)
    scales = [float(jt.get_loss_scale(s).loss_scale) for s in (g_state, d_state)]
    assert scales == [2.0**7, 2.0**8]


@pytest.mark.full
def test_an_equinox_module_is_differentiated_in_its_arrays() -> None:
    model = eqx.nn.MLP(4, 1, 8, 1, activation=jax.nn.tanh, key=jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)

    def loss_fn(model: Any, x: jax.Array) -> jax.Array:
        return (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean()

    expected_loss, expected = eqx.filter_value_and_grad(loss_fn)(model, x)
    arrays, static = eqx.partition(model, eqx.is_array)
    of_arrays = jax.jit(jt.scaled_value_and_grad(lambda p, x: loss_fn(eqx.combine(p, static), x), MIXED))
    of_model = eqx.filter_jit(jt.scaled_value_and_grad(loss_fn, MIXED))
    for fn, params in ((of_model, model), (of_arrays, arrays)):
        loss, grads = fn(jt.StaticLossScale(8.0), params, x)
        assert jax.tree.structure(grads) == jax.tree.structure(expected)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-2)
        jax.tree.map(lambda g, e: np.testing.assert_allclose(g / 8, e, rtol=2e-2, atol=2e-3), grads, expected)


def test_whole_numbers_of_a_module_have_no_gradient_and_of_a_dict_are_named() -> None:
    class Counted(eqx.Module):
        w: jax.Array
        calls: jax.Array

    fn = jt.scaled_value_and_grad(lambda m: (m.w * m.calls.astype(jnp.float32)).sum())
    _, grads = fn(jt.NoOpLossScale(), Counted(jnp.ones(2), jnp.array(3)))
    assert grads.calls is None
    np.testing.assert_array_equal(grads.w, [3, 3])
    with pytest.raises(TypeError, match=r"params 'b/n' is int32\[3\], which has no gradient"):
        jt.scaled_value_and_grad(lambda p: p["w"].sum())(
            jt.NoOpLossScale(), {"w": jnp.ones(2), "b": {"n": jnp.arange(3)}}
        )


def test_aux_comes_back_in_the_output_dtype_or_a_higher_precision() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> Any:
        stats = x.astype(jnp.float32).mean()
        return (w * x).sum(), {"logits": x, "mean": stats, "n": jnp.arange(2)}

    for policy, dtype in (("mixed_float16", "float32"), ("float16", "float16")):
        fn = jt.scaled_value_and_grad(loss_fn, jt.get_policy(policy), has_aux=True)
        (_, aux), _ = fn(jt.NoOpLossScale(), jnp.ones(2), jnp.ones(2))
        assert aux["logits"].dtype == dtype
        assert aux["mean"].dtype == jnp.float32
        assert aux["n"].dtype == jnp.int32


@pytest.mark.parametrize("make", [jt.scaled_value_and_grad, jt.nnx_value_and_grad])
def test_aux_that_was_not_announced_or_is_missing_is_named(make: Any) -> None:
    scale, model = jt.StaticLossScale(8.0), nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    params = model if make is jt.nnx_value_and_grad else {"kernel": jnp.ones((2, 1))}

    def loss_fn(params: Any, x: jax.Array) -> Any:
        kernel = params["kernel"] if isinstance(params, dict) else params.kernel[...]
        return (x @ kernel).sum(), {"logits": x}

    with pytest.raises(TypeError, match=r"loss_fn returned \(float32\[\], dict\) with .* pass has_aux=True"):
        make(loss_fn)(scale, params, jnp.ones((3, 2)))
    with pytest.raises(TypeError, match=r"has_aux=True, but loss_fn returned float32\[\], not \(loss, aux\)"):
        make(lambda *args: loss_fn(*args)[0], has_aux=True)(scale, params, jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="must be a LossScale, got a dict"):
        make(loss_fn)({"w": jnp.ones((99, 9))}, params, jnp.ones((3, 2)))


RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.normal(size=(64, 16)), jnp.float32)
W = jnp.asarray(RANDOM.normal(size=(16, 8)), jnp.float32)
ROUTES: dict[str, Callable[[Any, Any], Any]] = {
    "autocast": lambda fn, dtype: jt.autocast(fn, dtype),
    "policy": lambda fn, dtype: jt.apply_policy(fn, f"mixed_{jnp.dtype(dtype)}"),
    "step": lambda fn, dtype: functools.partial(
        jt.scaled_value_and_grad(lambda w, x: fn(w, x).astype(jnp.float32).sum(), f"autocast_{jnp.dtype(dtype)}"),
        jt.NoOpLossScale(),
    ),
    "mixed step": lambda fn, dtype: functools.partial(
        jt.scaled_value_and_grad(lambda w, x: fn(w, x).astype(jnp.float32).sum(), f"mixed_{jnp.dtype(dtype)}"),
        jt.NoOpLossScale(),
    ),
}


def small_loss(w: Any, x: Any) -> Any:
    """Its gradients with respect to `x` are of about 1e-7, below float16's smallest normal number of 6e-5."""
    return 1e-5 * jnp.tanh(x @ w @ jnp.eye(8, dtype=x.dtype)).astype(jnp.float32).mean()


def by_grad(w: Any, x: Any) -> Any:
    return jax.grad(small_loss, 1)(w, x)


def by_value_and_grad_in_jit(w: Any, x: Any) -> Any:
    return jax.jit(lambda w, x: jax.value_and_grad(jax.jit(small_loss), 1)(w, x)[1])(w, x)


def by_vjp_in_a_loop(w: Any, x: Any) -> Any:
    def body(x: Any, _: None) -> Any:
        value, pull = jax.vjp(functools.partial(small_loss, w), x)
        return pull(jnp.ones_like(value))[0].astype(x.dtype), None

    return jax.lax.scan(body, x, None, 2)[0]


def by_nnx(w: Any, x: Any) -> Any:
    return nnx.grad(small_loss, argnums=1)(w, x)


def by_vmap_of_grad(w: Any, x: Any) -> Any:
    return jax.vmap(jax.grad(small_loss, 1), (None, 0))(w, x)


WAYS = (by_grad, by_value_and_grad_in_jit, by_vjp_in_a_loop, by_nnx, by_vmap_of_grad)


def said(fn: Any, *args: Any) -> list[Any]:
    with warnings.catch_warnings(record=True) as found, jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("always")
        jax.eval_shape(fn, *args)
        jax.eval_shape(fn, *args)  # once, not at each trace
    return [warning for warning in found if warning.category is jt.policies.InnerGradientWarning]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("way", WAYS)
def test_an_inner_gradient_is_named_once_at_its_line(way: Any, route: str) -> None:
    (warning,) = said(ROUTES[route](way, jnp.float16), W, X)
    first = way.__code__.co_firstlineno
    assert warning.filename == __file__
    assert first < warning.lineno <= first + 3
    assert f"{__file__}:{warning.lineno} runs in float16" in str(warning.message)
    assert "jt.scaled_grad" in str(warning.message)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("route", ROUTES)
def test_other_gradients_are_not(route: str) -> None:
    assert not said(ROUTES[route](by_grad, jnp.bfloat16), W, X)
    assert not said(ROUTES[route](lambda w, x: jt.scaled_grad(small_loss, 1)(w, x), jnp.float16), W, X)
    assert not said(ROUTES[route](small_loss, jnp.float16), W, X)
    assert not said(jax.grad(ROUTES["autocast"](small_loss, jnp.float16)), W, X)
    tangent = lambda w, x: jax.jvp(functools.partial(small_loss, w), (x,), (x,))[1]
    assert not said(ROUTES[route](tangent, jnp.float16), W, X)
    exact = lambda w, x: jax.grad(jt.autocast_as("float32")(small_loss), 1)(w, x)
    if "mixed" not in route and route != "policy":
        assert not said(ROUTES[route](exact, jnp.float16), W, X)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("route", ["autocast", "policy"])
def test_a_scaled_gradient_is_unscaled_and_right(route: str) -> None:
    wanted = np.asarray(jax.grad(small_loss, 1)(W, X))
    # Tenths of a percent are float16's rounding of the operands.
    fn = ROUTES[route](lambda w, x: jt.scaled_grad(small_loss, 1, scale=2.0**14)(w, x), jnp.float16)
    found = jax.jit(fn)(W, X)
    assert found.dtype == jnp.float32
    assert np.linalg.norm(found - wanted) < 3e-3 * np.linalg.norm(wanted)
    assert np.abs(wanted[np.asarray(found) == 0]).max(initial=0) < 1e-10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jt.policies.InnerGradientWarning)
        plain = np.float32(jax.jit(ROUTES[route](by_grad, jnp.float16))(W, X))
    assert np.linalg.norm(plain - wanted) > 0.05 * np.linalg.norm(wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("policy", ["autocast_float16", "mixed_float16"])
def test_a_step_with_an_input_gradient_learns_as_in_float32(policy: str) -> None:
    """Adversarial examples: the sign of each gradient, and the gradient through a penalty of it."""

    def loss_fn(w: Any, x: Any) -> Any:
        slope = jt.scaled_grad(small_loss, 1, scale=2.0**14)(w, x)
        near = x + 0.1 * jnp.sign(slope).astype(x.dtype)
        return (1e5 * small_loss(w, near) + 1e10 * (slope**2).sum()).astype(jnp.float32)

    def grads_of(policy: str) -> Any:
        scale = jt.StaticLossScale(2.0**4)
        return scale.unscale(jax.jit(jt.scaled_value_and_grad(loss_fn, policy))(scale, W, X)[1])

    found, wanted = grads_of(policy), grads_of("float32")
    # A few percent: rounding flips the signs of slopes near 0.
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_arguments_are_those_of_grad() -> None:
    fn = lambda w, x, power: ((w * x) ** power).sum()
    for argnums in (0, (0, 1)):
        found = jt.scaled_grad(fn, argnums)(jnp.ones(2), jnp.ones(2), power=3)
        assert jax.tree.structure(found) == jax.tree.structure(jax.grad(fn, argnums)(jnp.ones(2), jnp.ones(2), power=3))
        np.testing.assert_array_equal(jax.tree.leaves(found)[0], [3.0, 3.0])
    scale = jt.torch_loss_scale(8.0)
    grads, aux = jt.scaled_grad(lambda w: (w * 2.0, "aux"), has_aux=True, scale=scale)(jnp.ones(()))
    assert (float(grads), aux) == (2.0, "aux")
    overflow = jt.scaled_grad(lambda w: w * jnp.float16(100), scale=2.0**10)(jnp.ones((), jnp.float16))
    assert np.isinf(overflow)
    with pytest.raises(TypeError, match="floating scalar"):
        jt.scaled_grad(lambda w: w)(jnp.ones(2))
    with pytest.raises(ValueError, match="finite"):
        jt.scaled_grad(lambda w: w.sum(), scale=0.0)


def test_a_penalty_takes_a_step_that_overflows_with_it() -> None:
    """An inner overflow reaches the loss, so the step is skipped."""

    def loss_fn(w: Any, x: Any) -> Any:
        return (jt.scaled_grad(lambda x: (x @ w).sum(), scale=2.0**15)(x) ** 2).sum()

    tx = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    step = jt.train_step(jt.stateless(loss_fn), tx, policy="mixed_float16")
    _, metrics = jax.jit(step)(jt.TrainState.create(W, tx), X)
    assert not bool(metrics["grads_finite"])
