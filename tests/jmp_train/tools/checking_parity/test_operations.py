"""Samplers with planted faults: the first operation that differs is named, on its line, though a cache is filled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted_lines import line_of

import jmp_train as jt

pytestmark = pytest.mark.quick

WORDS, WIDTH, LENGTH, SPARE = 13, 16, 10, 3
HALF = WIDTH // 2
FREQUENCIES = (100.0 ** (-np.arange(HALF) / HALF)).astype(np.float32)
FAULTS = {"softmax": "rounding", "angles": "rounding", "epsilon": "value", "mask": "value", "bias": "value"}


@pytest.fixture(name="args", scope="module")
def fixture_args() -> tuple[Any, Any]:
    """Parameters of two blocks, and tokens."""
    random = np.random.default_rng(0)
    blocks = [{name: random.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32) for name in "qkvom"} for _ in range(2)]
    params = {"words": random.normal(0, 1, (WORDS, WIDTH)).astype(np.float32), "blocks": blocks}
    return params, random.integers(0, WORDS, (3, LENGTH + 1), np.int32)


def turned(x: jax.Array, angles: jax.Array) -> jax.Array:
    first, second = x[..., :HALF].astype(jnp.float32), x[..., HALF:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def chosen(x: jax.Array, words: jax.Array, tokens: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax((x @ words.T).astype(jnp.float32))
    return jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]


def trained(dtype: Any) -> Callable[..., jax.Array]:
    """Returns the full forward pass."""

    def train(params: Any, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), params)
        x = params["words"][tokens[:, :-1]]
        angles = jnp.arange(LENGTH, dtype=jnp.float32)[:, None] * FREQUENCIES
        for p in params["blocks"]:
            y = x.astype(jnp.float32)
            y = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(dtype)
            query, key = turned(y @ p["q"], angles), turned(y @ p["k"], angles)
            scores = jnp.einsum("btd,bsd->bts", query, key, preferred_element_type=jnp.float32) / WIDTH**0.5
            scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
            probs = jax.nn.softmax(scores).astype(dtype)
            x = x + (probs @ (y @ p["v"])) @ p["o"]
            x = x + jax.nn.silu(x @ p["m"])
        return chosen(x, params["words"], tokens[:, 1:])

    return train


def sampling(dtype: Any, fault: str | None = None) -> Callable[..., jax.Array]:
    """Returns the same token by token, with a cache that is larger than need be."""
    size = LENGTH + SPARE

    def infer(params: Any, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), params)

        def step(carry: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            caches, position = carry
            x = params["words"][token]
            angles = position.astype(jnp.float32) * FREQUENCIES
            if fault == "angles":
                angles = angles.astype(jnp.bfloat16).astype(jnp.float32)  # fault: angles
            grown = []
            for p, (keys, values) in zip(params["blocks"], caches, strict=True):
                epsilon = 1e-2 if fault == "epsilon" else 1e-5
                y = x.astype(jnp.float32)
                square = jnp.mean(y * y, -1, keepdims=True)
                y = (y * jax.lax.rsqrt(square + epsilon)).astype(dtype)  # fault: epsilon
                query, key = turned(y @ p["q"], angles), turned(y @ p["k"], angles)
                keys = jax.lax.dynamic_update_index_in_dim(keys, key, position, 1)
                values = jax.lax.dynamic_update_index_in_dim(values, y @ p["v"], position, 1)
                scores = jnp.einsum("bd,bsd->bs", query, keys, preferred_element_type=jnp.float32) / WIDTH**0.5
                seen = jnp.arange(size) <= position
                if fault == "mask":
                    seen = seen & (jnp.arange(size) > position - 4)  # fault: mask
                scores = jnp.where(seen, scores, -1e30)
                if fault == "softmax":
                    scores = scores.astype(jnp.bfloat16)  # fault: softmax
                probs = jax.nn.softmax(scores).astype(dtype)
                x = x + jnp.einsum("bs,bsd->bd", probs, values) @ p["o"]
                if fault == "bias":
                    x = x + jnp.asarray(0.25, dtype)  # fault: bias
                x = x + jax.nn.silu(x @ p["m"])
                grown.append((keys, values))
            return (grown, position + 1), x

        empty = jnp.zeros((len(tokens), size, WIDTH), dtype)
        start = [(empty, empty) for _ in params["blocks"]], jnp.int32(0)
        _, x = jax.lax.scan(step, start, tokens[:, :-1].T)
        return chosen(x.swapaxes(0, 1), params["words"], tokens[:, 1:])

    return infer


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_cache_alone_makes_no_more_than_rounding(args: Any, dtype: Any) -> None:
    train = jax.jit(trained(dtype))
    report = jt.parity(train, jax.jit(sampling(dtype)), *args)
    first = report.first_difference
    if dtype == jnp.float32:
        assert report.mean < 1e-5
        assert first is None
    else:
        own = np.abs(np.asarray(train(*args) - trained(jnp.float32)(*args), np.float64))
        assert report.mean <= own.mean()
        assert first is None or first.kind == "rounding"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_operation_that_differs_is_the_planted_one(args: Any, fault: str, dtype: Any) -> None:
    report = jt.parity(jax.jit(trained(dtype)), jax.jit(sampling(dtype, fault)), *args)
    first = report.first_difference
    assert first is not None
    assert first.kind == FAULTS[fault]
    assert first.infer is not None
    assert (Path(first.infer.file).name, first.infer.line) == line_of(__file__, fault)
    assert f"# fault: {fault}" in first.infer.code
    assert "{}:{}".format(*line_of(__file__, fault)) in str(report)
    assert report.mean > 1e-4


def test_programs_in_loops_and_branches_are_entered() -> None:
    def train(x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(x * 8.0 + 1.0)

    def infer(x: jax.Array) -> jax.Array:
        def double(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            return carry[0] + 1, carry[1] * 2.0

        _, x = jax.lax.while_loop(lambda carry: carry[0] < 3, double, (0, x))
        x = jax.lax.cond(x[0, 0] < 1e9, lambda x: (x + 1.0).astype(jnp.float16), lambda x: x.astype(jnp.float16), x)
        return jax.nn.log_softmax(x.astype(jnp.float32))

    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    report = jt.parity(train, infer, x)
    assert report.operations is not None
    assert [row.runs for row in report.operations.infer if row.primitive == "mul"] == [3]
    first = report.first_difference
    assert first is not None
    assert first.kind == "rounding"
    assert first.infer is not None
    assert (first.infer.primitive, first.infer.dtype) == ("convert_element_type", "float16")
    assert "lambda x: (x + 1.0).astype(jnp.float16)" in first.infer.code


def test_functions_with_effects_and_without_arguments() -> None:
    def train(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: None, x)
        return -jnp.exp(x)

    x = np.linspace(0, 1, 8, dtype=np.float32)
    report = jt.parity(train, lambda x: -jnp.exp(x), x)
    assert report.operations is not None
    assert [row.primitive for row in report.operations.train] == ["exp", "neg"]
    assert report.first_difference is None
    first = jt.parity(lambda: -jnp.exp(jnp.asarray(x)), lambda: jnp.asarray(-x)).first_difference
    assert first is not None
    assert (first.train and first.train.primitive, first.kind) == ("exp", "value")


@pytest.mark.full
def test_values_that_no_operation_made_have_no_first_difference(args: Any) -> None:
    recorded = np.asarray(trained(jnp.float32)(*args)) + np.float32(0.5) * np.eye(3, LENGTH, dtype=np.float32)
    report = jt.parity(trained(jnp.float32), lambda params, tokens: np.minimum(recorded, 0), *args)
    assert report.maximum == pytest.approx(0.5, abs=1e-5)
    first = report.first_difference
    assert first is not None
    assert first.kind == "value"
    assert first.infer is None
