"""Products in few bits under jax's transformations: values and gradients beside the plain form, and random bits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jmp_train as jt
from jmp_train.policies.autocasting import RECIPES, rounding_key

pytestmark = pytest.mark.quick

KEYS = jax.random.split(jax.random.key(0), 4)
X, TARGET = (jax.random.normal(key, (8, 64)) for key in KEYS[:2])
WS = jax.random.normal(KEYS[2], (3, 64, 64)) / 8
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
P = PartitionSpec


def cast_by(recipe: Any) -> Callable[[Any], Any]:
    rules = jt.TORCH_CUDA.replace(primitives={"dot_general": "fp8"})
    return functools.partial(jt.autocast, dtype=jnp.bfloat16, rules=rules, fp8=recipe)


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


@jax.custom_jvp
def with_tangents(x: Any, w: Any) -> Any:
    return layer(x, w)


@with_tangents.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, w), (of_x, of_w), y = primals, tangents, with_tangents(*primals)
    return y, (1 - y * y) * (of_x @ w + x @ of_w)


@jax.custom_vjp
def with_gradient(x: Any, w: Any) -> Any:
    return layer(x, w)


def _pull(saved: Any, g: Any) -> Any:
    x, w, y = saved
    g = g * (1 - y**2)
    return g @ w.T, x.T @ g


with_gradient.defvjp(lambda x, w: (layer(x, w), (x, w, layer(x, w))), _pull)


def error_of(x: Any) -> Any:
    return ((x - TARGET).astype(jnp.float32) ** 2).sum()


def by(layer: Any) -> Callable[[Any, Any], Any]:
    return lambda ws, x: error_of(functools.reduce(layer, ws, x))


def scanned(layer: Any) -> Callable[[Any, Any], Any]:
    return lambda ws, x: error_of(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0])


def vmapped(ws: Any, x: Any) -> Any:
    return error_of(jax.vmap(lambda x: functools.reduce(layer, ws, x[None])[0])(x))


def with_weights_of_each(ws: Any, x: Any) -> Any:
    run = jax.vmap(lambda ws, x: functools.reduce(layer, ws, x))
    return error_of(run(jnp.stack([ws, ws]), x.reshape(2, 4, 64)).reshape(8, 64))


def mapped(ws: Any, x: Any) -> Any:
    specs = P(), P("data")
    run = lambda ws, x: functools.reduce(layer, ws, x)
    return error_of(jax.shard_map(run, mesh=MESH, in_specs=specs, out_specs=specs[1])(ws, x))


def by_examples(run: Any) -> Callable[[Any, Any], Any]:
    return lambda ws, x: error_of(jax.vmap(run, (0, None))(x[:, None], ws)[:, 0].astype(jnp.float32))


WITHIN: dict[str, Any] = {
    "custom_jvp": by(with_tangents),
    "custom_vjp": by(with_gradient),
    "remat": by(jax.checkpoint(layer)),
    "jit": by(jax.jit(layer)),
    "scan": scanned(layer),
    "scan of remat": scanned(jax.checkpoint(layer)),
    "scan of custom_jvp": scanned(with_tangents),
    "scan of custom_vjp": scanned(with_gradient),
    "vmap": vmapped,
    "vmap over weights": with_weights_of_each,
    "shard_map": mapped,
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "remat": lambda cast: jax.checkpoint(cast(by(layer))),
    "scan": lambda cast: scanned(lambda x, w: cast(layer)(x, w).astype(jnp.float32)),
    "jit": lambda cast: by(jax.jit(lambda x, w: cast(layer)(x, w).astype(jnp.float32))),
    "vmap": lambda cast: by_examples(cast(lambda x, ws: functools.reduce(layer, ws, x))),
}


def assert_near(found: Any, wanted: Any, recipe: str) -> None:
    bound = 0.5 if recipe == "NVFP4BlockScaling" else 0.2
    np.testing.assert_allclose(found[0], wanted[0], rtol=bound / 10)
    assert jnp.linalg.norm(found[1] - wanted[1]) < bound * jnp.linalg.norm(wanted[1])


@functools.cache
def unrolled(recipe: str) -> Any:
    return jax.jit(jax.value_and_grad(cast_by(RECIPES[recipe]())(by(layer))))(WS, X)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", WITHIN)
def test_forms_within_a_region(form: str, recipe: str) -> None:
    run = cast_by(RECIPES[recipe]())(WITHIN[form])
    assert_near(jax.jit(jax.value_and_grad(run))(WS, X), unrolled(recipe), recipe)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", AROUND)
def test_forms_around_a_region(form: str, recipe: str) -> None:
    run = AROUND[form](cast_by(RECIPES[recipe]()))
    assert_near(jax.jit(jax.value_and_grad(run))(WS, X), unrolled(recipe), recipe)


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_pmap(recipe: str) -> None:
    run = jax.value_and_grad(cast_by(RECIPES[recipe]())(by(layer)))
    found = jax.pmap(run, in_axes=(None, 0))(WS, jnp.stack([X, X]))
    assert_near([x[1] for x in found], unrolled(recipe), recipe)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_along_a_gradient_that_is_not_differentiated(recipe: str) -> None:
    """As in first-order MAML; the gradient is taken inside or outside of the region."""
    cast = cast_by(RECIPES[recipe]())

    def stepped(loss: Any) -> Any:
        return lambda ws, x: loss(ws - 0.01 * lax.stop_gradient(jax.grad(loss)(ws, x)), x)

    bound = 1.0 if recipe == "NVFP4BlockScaling" else 0.5
    runs = (stepped(by(layer)), stepped(cast(by(layer))), cast(stepped(by(layer))))
    wanted, *found = jax.jit(lambda ws, x: [jax.grad(run)(ws, x) for run in runs])(WS, X)
    for gradient in found:
        assert np.linalg.norm(gradient - wanted) < bound * np.linalg.norm(wanted)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_mode_is_within_the_region_or_an_error_that_says_so(recipe: str) -> None:
    cast = cast_by(RECIPES[recipe]())
    for loss in (by(layer), scanned(layer)):
        with pytest.raises(TypeError, match=r"test_transformations.py:\d+: products in 8 or 4 bits have no .* jax.jvp"):
            jax.jvp(cast(loss), (WS, X), (WS, X))
        inner = lambda ws, x, loss=loss: jax.jvp(loss, (ws, x), (ws, x))
        found, wanted = jax.jit(lambda ws, x, inner=inner: (cast(inner)(ws, x), inner(ws, x)))(WS, X)
        np.testing.assert_allclose(found, wanted, rtol=0.1)
    second = jax.grad(lambda ws: (jax.grad(cast(by(layer)))(ws, X) ** 2).sum())
    for run in (second, jax.jit(second)):
        with pytest.raises(
            TypeError, match="no second derivatives from outside of the autocast region; take the inner"
        ):
            jax.eval_shape(run, WS)


# Random bits
SAME = jnp.broadcast_to(jax.random.normal(KEYS[3], (64, 64)), (8, 64, 64))


def in_a_row(xs: Any) -> Any:
    return jnp.stack([x @ WS[0] for x in xs])


def in_calls(xs: Any) -> Any:
    return jnp.stack([jax.jit(jnp.matmul)(x, WS[0]) for x in xs])


def in_a_loop(xs: Any) -> Any:
    return lax.scan(lambda _, x: (None, jax.checkpoint(jnp.matmul)(x, WS[0])), None, xs)[1]


def in_two_loops(xs: Any) -> Any:
    return lax.map(lambda xs: lax.map(lambda x: x @ WS[0], xs), xs.reshape(2, 4, 64, 64)).reshape(xs.shape)


def on_devices(xs: Any) -> Any:
    mesh = Mesh(np.array(jax.devices()), ("all",))
    return jax.shard_map(lambda x: (x[0] @ WS[0])[None], mesh=mesh, in_specs=P("all"), out_specs=P("all"))(xs)


def in_regions(xs: Any) -> Any:
    run = cast_by(RECIPES["NVFP4BlockScaling"]())(lambda x: x @ WS[0])
    with rounding_key(KEYS[0]):
        return jnp.stack([run(x) for x in xs])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", [in_a_row, in_calls, in_a_loop, in_two_loops, on_devices, in_regions])
def test_each_product_draws_its_own_bits_and_the_same_ones_again(form: Any) -> None:
    """Of eight equal products with equal cotangents, in two traces."""
    run = form if form is in_regions else cast_by(RECIPES["NVFP4BlockScaling"]())(form)
    first, again = (
        jax.jit(jax.grad(lambda xs, run=run: (run(xs).astype(jnp.float32) * SAME[0]).sum()))(SAME) for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
    each = first.reshape(8, -1)
    assert all((each[i] != each[j]).mean() > 0.1 for i in range(8) for j in range(i))


def test_a_jitted_region_gets_the_key_of_each_trace() -> None:
    run = jax.jit(cast_by(RECIPES["NVFP4BlockScaling"]())(layer))
    step = jt.train_step(lambda w, state, x, rng: (run(x, w).astype(jnp.float32).sum(), (state, None)), optax.sgd(0.1))
    state = jt.TrainState.create(WS[0], optax.sgd(0.1), rng=KEYS[0])
    first, again = (jax.jit(lambda state, x: step(state, x))(state, X)[0].params for _ in range(2))
    np.testing.assert_array_equal(first, again)


@pytest.mark.full
def test_gradients_of_products_have_no_bias() -> None:
    """Over a million draws by a z-test: of 1,000 equal products in a loop, each with 1,024 draws of one number."""

    def gradients(x: Any) -> Any:
        # One of each 16 numbers is 6, so that scales are 1; identity matrices pass the cotangents on.
        w, rows = jnp.eye(32), jnp.full((32, 32), x).at[:, ::16].set(6.0)
        run = lambda xs: lax.scan(lambda _, x: (None, x @ w), None, xs)[1]
        cast = cast_by(jt.policies.NVFP4BlockScaling())(run)
        return jax.vjp(cast, jnp.ones((1000, 32, 32)))[1](jnp.broadcast_to(rows, (1000, 32, 32)).astype(jnp.bfloat16))

    for x, low, high in ((1.3, 1.0, 1.5), (0.125, 0.0, 0.5), (-5.5, -6.0, -4.0)):
        (found,) = jax.jit(gradients)(x)
        drawn, number = np.delete(np.asarray(found, np.float64), [0, 16], axis=2), float(jnp.bfloat16(x))
        np.testing.assert_allclose(np.unique(drawn), [low, high], rtol=1e-2)
        share = (number - low) / (high - low)
        error = drawn.mean() - number
        assert abs(error) <= 4 * (high - low) * (share * (1 - share) / drawn.size) ** 0.5


# Devices
def test_each_device_of_shard_map_has_its_own_scales() -> None:
    """An outlier costs the digits of the others on its device only."""
    x = jnp.full((8, 64), 1.0).at[0, 0].set(2.0**20)
    cast = cast_by(RECIPES["Float8CurrentScaling"]())
    product = lambda x: cast(jnp.matmul)(x, jnp.eye(64)).astype(jnp.float32)
    mapped = jax.shard_map(product, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(mapped)(x)[1], 0)
    np.testing.assert_array_equal(jax.jit(mapped)(x)[2:], 1)
    np.testing.assert_array_equal(jax.jit(product)(x)[1:], 0)
