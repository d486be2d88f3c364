"""A value that is subtracted from a constant is float32 under autocast, so that the difference keeps its digits."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train.policies.autocasting.explain import explain_autocast
from jmp_train.policies.autocasting.rules import TORCH_CPU, TORCH_CUDA
from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

HALVES = pytest.mark.parametrize("half", ["float16", pytest.param("bfloat16", marks=pytest.mark.full)])
sigmoid = jax.nn.sigmoid

# Of arguments near 5. Half precision rounds the sigmoid, 0.993, to two or three digits of its distance from 1.
COMPLEMENTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sigmoid": lambda x: 1 - sigmoid(x),
    "reversed": lambda x: sigmoid(x) - 1.0,
    "added": lambda x: sigmoid(x) + -1.0,
    "logistic": lambda x: 1 - lax.logistic(x),
    "of ones": lambda x: jnp.ones_like(x) - sigmoid(x),
    "split": lambda x: 1 - jnp.split(sigmoid(jnp.stack([x, x])), 2)[1][0],
    "scaled": lambda x: 2 * sigmoid(x) - 2,
    "negative": lambda x: 2 * sigmoid(-x / 4096) - 1,
    "jitted difference": lambda x: jax.jit(lambda a: 1 - a)(sigmoid(x)),
    "jitted gate": lambda x: 1 - jax.jit(lambda x: sigmoid(x)[None])(x)[0],
    "also a gate": lambda x: 0 * (sigmoid(x) * x) + (1 - sigmoid(x)),
    "clipped": lambda x: jnp.log(1 - jnp.clip(sigmoid(x), 1e-7, 1 - 1e-7)),
    "focal": lambda x: (1 - jnp.where(x > 0, sigmoid(x), 1 - sigmoid(x))) ** 2,
    "tanh": lambda x: 1 - jnp.tanh(x / 2),
    "derivative of tanh": lambda x: 1 - jnp.tanh(x / 2) ** 2,
    "product of tanh": lambda x: 1 - jnp.tanh(x / 2) * jnp.tanh(x / 2),
    "erf": lambda x: 1 - lax.erf(x / 2),
    "cosine": lambda x: 1 - jnp.cos(x / 256),
    "exponential": lambda x: jnp.exp(x / 1024) - 1,
    "vmap": jax.vmap(lambda x: 1 - sigmoid(x)),
    "remat": jax.checkpoint(lambda x: 1 - sigmoid(x)),
    "remat of the difference": lambda x: jax.checkpoint(lambda a: 1 - a)(sigmoid(x)),
    "scan of gates": lambda x: lax.scan(lambda c, a: (c, 1 - a), 0, sigmoid(x))[1],
    "branch": lambda x: lax.cond(x.sum() > 0, lambda a: 1 - a, lambda a: 2 * (1 - a) - (1 - a), sigmoid(x)),
    "scan": lambda x: lax.scan(lambda c, x: (c, 1 - sigmoid(x)), 0, x)[1],
}


@HALVES
@pytest.mark.parametrize("rules", [TORCH_CUDA, pytest.param(TORCH_CPU, marks=pytest.mark.full)], ids=["CUDA", "CPU"])
def test_differences_have_all_digits(rules: Any, half: Any) -> None:
    x = jnp.linspace(3.0, 6.0, 13).astype(half)

    def all_of(x: jax.Array) -> dict[str, jax.Array]:
        return {name: fn(x) for name, fn in COMPLEMENTS.items()}

    found = jax.jit(autocast(all_of, half, rules=rules))(x)
    with jax.enable_x64(True):
        exact = jax.jit(all_of)(np.asarray(x.astype(jnp.float32), np.float64))
    for name, value in found.items():
        # arithmetic on the argument, as its halves and negatives, is half: exact for powers of two
        np.testing.assert_allclose(value, exact[name], rtol=2e-3, err_msg=name)
        assert value.dtype == jnp.float32, name


T, B, D = 12, 16, 16
RANDOM = np.random.default_rng(0)
INPUTS, WEIGHTS = RANDOM.normal(size=(T, B, D)).astype("f4"), RANDOM.normal(size=(2, D, D)).astype("f4") / 4
BIASES, TARGET = np.repeat([[3.0], [0.0]], D, 1).astype("f4"), RANDOM.normal(size=(B, D)).astype("f4")


def mingru(w: jax.Array, b: jax.Array) -> jax.Array:
    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        a = sigmoid(x @ w[0] + b[0])
        return a * h + (1 - a) * (x @ w[1] + b[1]), None

    return lax.scan(cell, jnp.zeros((B, D)), jnp.asarray(INPUTS))[0]


def lru(w: jax.Array, b: jax.Array) -> jax.Array:
    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        a = sigmoid(x @ w[0] + b[0])
        return a * h + jnp.sqrt(1 - a**2) * (x @ w[1]), None

    return lax.scan(cell, jnp.zeros((B, D)), jnp.asarray(INPUTS))[0]


def highway(w: jax.Array, b: jax.Array) -> jax.Array:
    h = jnp.asarray(INPUTS[0])
    for _ in range(6):
        a = sigmoid(h @ w[0] + b[0])
        h = a * h + (1 - a) * jnp.tanh(h @ w[1] + b[1])
    return h


def linen_gru(w: jax.Array, b: jax.Array) -> jax.Array:
    gates = {"ir": (w[1], b[1]), "iz": (w[0], b[0]), "in": (w[1], b[1])}
    params = {name: {"kernel": kernel, "bias": bias} for name, (kernel, bias) in gates.items()}
    params |= {name: {"kernel": w[1]} for name in ("hr", "hz")} | {"hn": {"kernel": w[1], "bias": b[1]}}
    h = jnp.zeros((B, D))
    for x in INPUTS[:4]:
        h, _ = nn.GRUCell(D).apply({"params": params}, h, jnp.asarray(x))
    return h


def haiku_gru(w: jax.Array, b: jax.Array) -> jax.Array:
    core = hk.without_apply_rng(hk.transform(lambda x, h: hk.GRU(D)(x, h)[1]))
    gates = jnp.concatenate([w[0], w[1], w[1]], 1)
    params = {"gru": {"w_i": gates, "w_h": gates, "b": jnp.concatenate([b[0], b[1], b[1]])}}
    h = jnp.zeros((B, D))
    for x in INPUTS[:4]:
        h = core.apply(params, jnp.asarray(x), h)
    return h


CELLS = {"minGRU": mingru, "LRU": lru, "highway": highway, "linen": linen_gru, "haiku": haiku_gru}


@pytest.mark.full
@HALVES
def test_gradients_of_gated_cells(half: Any) -> None:
    def loss(copies: dict[str, Any]) -> jax.Array:
        return sum((jnp.sum(cell(*copies[name]) * TARGET) for name, cell in CELLS.items()), start=jnp.float32(0))

    copies = dict.fromkeys(CELLS, (WEIGHTS, BIASES))
    found, exact = jax.jit(jax.grad(autocast(loss, half)))(copies), jax.jit(jax.grad(loss))(copies)
    for name in CELLS:
        pairs = list(zip(found[name], exact[name], strict=True))
        apart = np.sqrt(sum(np.sum(np.square(a - b)) for a, b in pairs) / sum(np.sum(np.square(b)) for _, b in pairs))
        assert apart < float(jnp.finfo(half).eps), name  # torch's: a half to two thirds of it


def test_gates_that_are_not_subtracted_stay_half_and_rules_come_first() -> None:
    def lstm(x: jax.Array, w: jax.Array) -> jax.Array:
        i, f, g = jnp.split(x @ w, 3)
        return sigmoid(i) * jnp.tanh(g) + sigmoid(f) * jnp.tanh(g - 1.0)

    def gate(x: jax.Array, w: jax.Array) -> jax.Array:
        return 1 - sigmoid(x @ w)

    def functions(fn: Any, **options: Any) -> set[tuple[str, str]]:
        rows = explain_autocast(autocast(fn, **options), np.ones((3, 2), "f4"), np.ones((2, 4), "f4")).operations
        return {(row.dtypes_out[0], row.reason) for row in rows if row.operation in ("logistic", "tanh")}

    assert functions(lstm) == {("float16", "elementwise")}
    assert functions(gate) == {("float32", "subtracted from a constant")}
    ((dtype, _),) = functions(gate, rules=TORCH_CUDA.replace(primitives={"logistic": "promote"}))
    assert dtype == "float16"
