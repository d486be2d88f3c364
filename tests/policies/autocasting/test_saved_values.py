"""What half precision cannot hold stays float32; what it can hold is cast once and saved in half precision."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from promotion import promoting

from jmp_train.policies.autocasting.rules import TORCH_CUDA
from jmp_train.policies.autocasting.transform import autocast

pytestmark = [pytest.mark.quick, pytest.mark.newest]

F16, F32 = "float16", "float32"


MASKS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "where": lambda y, mask: jnp.where(mask, y, -1e9),
    "least": lambda y, mask: jnp.where(mask, y, jnp.finfo(jnp.float32).min),
    "added": lambda y, mask: y + (1.0 - mask.astype(jnp.float32)) * -1e9,
    "subtracted": lambda y, mask: y - 1e9 * (1 - mask.astype(jnp.int32)),
    "in a jit": lambda y, mask: y + jax.jit(lambda m: (1.0 - m.astype(jnp.float32)) * -1e9)(mask),
}


@pytest.mark.parametrize("half", [F16, jnp.bfloat16], ids=["float16", "bfloat16"])
def test_a_row_that_is_masked_altogether_is_uniform(half: Any) -> None:
    def softmax(x: jax.Array, w: jax.Array, allowed: jax.Array) -> dict[str, jax.Array]:
        return {name: jax.nn.softmax(mask(x @ w, allowed)) for name, mask in MASKS.items()}

    allowed = np.zeros((2, 3), bool)
    allowed[0, 1] = True
    out = jax.jit(autocast(promoting(softmax), half))(np.ones((2, 3), F32), np.ones((3, 3), F32), allowed)
    for name, found in out.items():
        np.testing.assert_allclose(found, [[0, 1, 0], [1 / 3] * 3], atol=1e-6, err_msg=name)


LITERALS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a root": lambda y: y / jnp.sqrt(1e10) * 1e5,
    "a power": lambda y: y * jnp.float32(10) ** 6 / 1e6,
    "tiny": lambda y: (y * 1e-7) * 1e7,
    "nearly zero": lambda y: 1e-9 * y / 1e-9,
    "a sum": lambda y: y + jnp.sum(jnp.full(100, 1e3)) - 1e5,
    "a product": lambda y: y + jnp.prod(jnp.full(6, 10.0)) - 1e6,
    "counted": lambda y: y * 0 + jnp.arange(80_000.0)[jnp.array([1, 4_093, 79_999])],
}


def test_literals_that_half_cannot_hold_are_float32() -> None:
    def after_a_product(x: jax.Array) -> dict[str, jax.Array]:
        return {name: fn((x[None] @ jnp.eye(3))[0]) for name, fn in LITERALS.items()}

    x = np.array([0.0, 0.5, 2.0], np.float32)
    for name, found in jax.jit(autocast(after_a_product))(x).items():
        assert found.dtype == F32, name
        np.testing.assert_allclose(found, promoting(LITERALS[name])(x), rtol=1e-5, atol=0.07, err_msg=name)


def test_literals_that_half_can_hold_are_half() -> None:
    x = jax.ShapeDtypeStruct((2, 2), F32)
    for scale in (0.5, 1 / np.sqrt(64), 6e-4, -60_000.0, 0.0, np.inf):
        scaled = autocast(lambda x, scale=scale: jnp.maximum((x @ x) * scale, scale + 0.0))
        assert jax.eval_shape(scaled, x).dtype == F16
    gelu = autocast(lambda x: jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x @ x) / jnp.log(10.0)))
    assert jax.eval_shape(gelu, x).dtype == F16


def test_a_parameter_is_cast_once() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 3))

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jax.jit(lambda x: x @ w)(x)
        return x

    lowered = jax.jit(autocast(fn)).lower(x, w)
    assert lowered.as_text().count("(tensor<3x3xf32>) -> tensor<3x3xf16>") == 4  # one for each use
    compiled = lowered.compile().as_text() or ""
    assert len(re.findall(r"= f16\[3,3\]\S* convert\(", compiled)) == 1


def added_up(y: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 5_000, lambda _, c: c + y[0, 0], jnp.float32(0))


ONE, MANY = (1, 1), (5_000, 1)
READ_OFTEN: dict[str, tuple[Callable[[jax.Array, jax.Array], Any], tuple[int, int]]] = {
    "gather": (lambda x, w: (x @ w)[jnp.zeros(5_000, jnp.int32)], ONE),
    "embedding": (lambda x, w: w[jnp.zeros(5_000, jnp.int32)] @ x, ONE),
    "along axis": (lambda x, w: jnp.take_along_axis(x @ w, jnp.zeros((5_000, 1), jnp.int32), 0), ONE),
    "loop": (lambda x, w: lax.fori_loop(0, 5_000, lambda _, c: c + (x @ w)[0, 0], jnp.float32(0)), ONE),
    "loop over half": (lambda x, w: added_up(x @ w), ONE),
    "inputs": (lambda x, w: lax.scan(lambda c, row: (c, row[None] @ w), None, x)[1], MANY),
    "bias": (lambda x, w: x @ jnp.ones((1, 1)) + w[0], MANY),
    "bias of a batch": (lambda x, w: jax.vmap(lambda row: row @ jnp.eye(1) + w[0])(x), MANY),
    "broadcast": (lambda x, w: jnp.broadcast_to(x @ w, (5_000, 1)) * 1, ONE),
    "gate": (lambda x, w: (x @ jnp.ones((1, 1))) * (w @ jnp.ones((1, 1))), MANY),
    "many times": (lambda x, w: functools.reduce(jnp.add, [x @ w for _ in range(500)]), ONE),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("half", [F16, jnp.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", READ_OFTEN)
def test_gradients_of_what_is_read_often_are_added_in_float32(name: str, half: Any) -> None:
    grad = gradient_of_what_is_read(name, lambda f: autocast(f, half))
    np.testing.assert_allclose(grad, plain_gradient_of_what_is_read(name), rtol=float(jnp.finfo(half).eps))


def gradient_of_what_is_read(name: str, transform: Callable[[Any], Any]) -> jax.Array:
    fn, shape = READ_OFTEN[name]

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(transform(fn)(jnp.ones(shape), w), dtype=jnp.float32)

    return jax.jit(jax.grad(loss))(np.ones((1, 1), np.float32))


@functools.cache
def plain_gradient_of_what_is_read(name: str) -> jax.Array:
    return gradient_of_what_is_read(name, lambda f: f)


def saved(fn: Any, *args: Any) -> list[str]:
    """Returns dtype and shape of what is saved for the gradient, without the arguments' own shapes."""
    avals = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))
    shapes = {arg.shape for arg in args}
    return [f"{a.dtype.name}{list(a.shape)}" for a in avals if a.shape not in shapes]


def test_what_is_computed_in_float32_of_half_values_is_saved_in_half() -> None:
    x, w, v = jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.ones((5, 2))
    scale = jnp.ones((4, 5))
    assert saved(autocast(lambda x, w: jnp.exp(x @ w).sum()), x, w) == ["float16[4, 5]"]

    def scaled(x: jax.Array, w: jax.Array, scale: jax.Array, v: jax.Array) -> jax.Array:
        return ((x @ w - scale) * scale * scale + scale) @ v

    residuals = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(autocast(scaled), *args)[1], x, w, scale, v))
    floats = [a.dtype for a in residuals if a.shape == (4, 5)]
    assert floats.count(F32) <= 2  # of scale, which is an argument
    assert floats.count(F16) >= 3
    out = autocast(scaled)(x, w, scale, v)
    assert out.tolist() == [[15.0] * 2] * 4


def test_a_float32_intermediate_is_not_rounded_on_the_way() -> None:
    x, scale = jnp.full((2, 2), 100.0), jnp.full((2, 2), 1000.0)

    def fn(x: jax.Array, scale: jax.Array) -> jax.Array:
        return ((x @ x) * scale - 2e4 * scale) @ x

    assert autocast(fn)(x, scale).tolist() == [[0.0, 0.0], [0.0, 0.0]]  # 2e7 is not a float16


def test_a_result_of_a_large_literal_is_not_rounded_for_storing() -> None:
    x = jnp.eye(2)
    out = autocast(lambda x: (jnp.tanh((x @ x) * 1e6 * 1e-7) * 1e6 * 1e-6) @ x)(x)
    np.testing.assert_allclose(out, np.tanh(0.1) * np.eye(2), rtol=2e-3)


def test_rules_for_one_path_change_nothing_elsewhere() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        with jax.named_scope("body"):
            y = jnp.exp(x @ w).sum()
        with jax.named_scope("head"):
            return y + (x @ w).sum()

    args = (jnp.ones((4, 3)), jnp.ones((3, 5)))
    head = autocast(fn, rules=TORCH_CUDA.replace(paths={"head": "float32"}))
    text = str(jax.make_jaxpr(head)(*args))
    assert text.count("f16[4,5] = dot_general") == text.count("f32[4,5] = dot_general") == 1
    assert saved(head, *args) == ["float16[4, 5]"]
