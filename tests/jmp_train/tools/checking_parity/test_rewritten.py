"""Samplers written otherwise than training: what is the same in the end is not blamed, a planted fault is."""

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

WORDS, WIDTH, LENGTH, SPARE = 13, 16, 8, 3
EPSILON = 1e-5


@pytest.fixture(name="args", scope="module")
def fixture_args() -> tuple[Any, Any]:
    """Parameters of a block, with small words as models begin with, and tokens."""
    random = np.random.default_rng(0)
    params = {name: random.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32) for name in "qkvo"}
    params["words"] = random.normal(0, 0.05, (WORDS, WIDTH)).astype(np.float32)
    return params, random.integers(0, WORDS, (3, LENGTH + 1), np.int32)


def chosen(x: jax.Array, words: jax.Array, tokens: jax.Array) -> jax.Array:
    log_probs = jax.nn.log_softmax(20 * (x @ words.T).astype(jnp.float32))
    return jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]


def norm_of_training(x: jax.Array, kind: str) -> jax.Array:
    y = x.astype(jnp.float32)
    square = jnp.mean(y * y, -1, keepdims=True)
    if kind == "rms":
        return (y * jax.lax.rsqrt(square + EPSILON)).astype(x.dtype)
    mean = jnp.mean(y, -1, keepdims=True)
    return ((y - mean) * jax.lax.rsqrt(square - mean * mean + EPSILON)).astype(x.dtype)


def norm_of_inference(x: jax.Array, kind: str, epsilon: float) -> jax.Array:
    """The same by other operations: of the centered values, and with a square root."""
    y = x.astype(jnp.float32)
    if kind == "layer":
        y = y - y.sum(-1, keepdims=True) / WIDTH
    variance = jnp.sum(y**2, -1, keepdims=True) / WIDTH
    return (y / jnp.sqrt(variance + epsilon)).astype(x.dtype)  # fault: epsilon


def trained(dtype: Any, kind: str) -> Callable[..., jax.Array]:
    def train(params: Any, tokens: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), params)
        x = p["words"][tokens[:, :-1]]
        y = norm_of_training(x, kind)
        scores = jnp.einsum("btd,bsd->bts", y @ p["q"], y @ p["k"], preferred_element_type=jnp.float32)
        scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)  # what is seen
        x = x + (jax.nn.softmax(scores).astype(dtype) @ (y @ p["v"])) @ p["o"]
        return chosen(norm_of_training(x, kind), p["words"], tokens[:, 1:])

    return train


def sampling(dtype: Any, kind: str, *, epsilon: float = EPSILON, further: int = 0) -> Callable[..., jax.Array]:
    """Returns token by token, with a cache [examples, features, places]."""
    size = LENGTH + SPARE

    def infer(params: Any, tokens: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda x: jnp.asarray(x).astype(dtype), params)

        def step(carry: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            (keys, values), position = carry
            x = p["words"][token]
            y = norm_of_inference(x, kind, epsilon)
            keys = keys.at[:, :, position].set(y @ p["k"])
            values = values.at[:, :, position].set(y @ p["v"])
            scores = jnp.einsum("bd,bds->bs", y @ p["q"], keys, preferred_element_type=jnp.float32)
            seen = jnp.arange(size) <= position + further  # fault: further
            scores = jnp.where(seen, scores, -1e30)
            x = x + jnp.einsum("bs,bds->bd", jax.nn.softmax(scores).astype(dtype), values) @ p["o"]
            return ((keys, values), position + 1), x

        empty = jnp.zeros((len(tokens), WIDTH, size), dtype)
        _, x = jax.lax.scan(step, ((empty, empty), jnp.int32(0)), tokens[:, :-1].T)
        return chosen(norm_of_inference(x.swapaxes(0, 1), kind, epsilon), p["words"], tokens[:, 1:])

    return infer


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_what_is_written_otherwise_does_not_differ(args: Any, kind: str) -> None:
    report = jt.parity(trained(jnp.float32, kind), sampling(jnp.float32, kind), *args)
    assert report.mean < 1e-5
    assert report.first_difference is None


# A mask one place short has rows that are those of other tokens in training, but not at the same places.
FAULTS = [("epsilon", {"epsilon": 1e-6}), ("epsilon", {"epsilon": 1e-3}), ("further", {"further": 1}),
          ("further", {"further": -1})]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("fault", "options"), FAULTS)
def test_the_planted_fault_is_named_and_not_what_is_written_otherwise(
    args: Any, fault: str, options: Any, kind: str, dtype: Any
) -> None:
    report = jt.parity(trained(dtype, kind), sampling(dtype, kind, **options), *args)
    first = report.first_difference
    assert first is not None
    assert first.kind == "value"
    assert first.infer is not None
    assert (Path(first.infer.file).name, first.infer.line) == line_of(__file__, fault)
    assert 0.8 < first.infer.contribution < 1.2
    if fault == "further":
        assert first.train is not None
        assert first.train.code.endswith("# what is seen")
