"""What goes away of a difference once an operation has the other function's values: planted faults, by their part."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted_lines import line_of

import jmp_train as jt

pytestmark = pytest.mark.quick

TEXTS, LENGTH, SPARE, HEADS, GROUP, WIDTH, WORDS = 3, 7, 2, 2, 2, 5, 11


@pytest.fixture(name="args", scope="module")
def fixture_args() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes = {"q": (16, 4, 5), "k": (16, 2, 5), "v": (16, 2, 5), "o": (20, 16), "words": (WORDS, 16)}
    params = {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    return params, random.integers(0, WORDS, (TEXTS, LENGTH + 1), np.int32)


def chosen(x: jax.Array, words: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(x @ words.T), tokens[:, 1:, None], -1)[..., 0]


def train(params: Any, tokens: jax.Array) -> jax.Array:
    x = jnp.asarray(params["words"])[tokens[:, :-1]]
    query, key, value = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
    key, value = (jnp.repeat(y, GROUP, axis=2) for y in (key, value))
    scores = jnp.einsum("bthk,bshk->bhts", query, key) / 2.0
    scores = jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -jnp.inf)
    y = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), value)
    return chosen(x + y.reshape(TEXTS, LENGTH, 20) @ params["o"], params["words"], tokens)


def sampling(fault: str) -> Any:
    """Returns token by token, with a cache."""
    size = LENGTH + SPARE

    def infer(params: Any, tokens: jax.Array) -> jax.Array:
        def step(carry: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            keys, values, position = carry
            x = jnp.asarray(params["words"])[token]
            query, key, value = (jnp.einsum("bd,dhk->bhk", x, params[name]) for name in "qkv")
            place = position + 1 if fault == "place" else position  # fault: place
            keys = jax.lax.dynamic_update_index_in_dim(keys, key, position, 1)
            values = jax.lax.dynamic_update_index_in_dim(values, value, place, 1)
            spread = jnp.repeat(keys, GROUP, 2)
            if fault == "heads":
                spread = jnp.tile(keys, (1, 1, GROUP, 1))  # fault: heads
            scale = 0.75 if fault == "scale" else 0.5
            scores = jnp.einsum("bhk,bshk->bhs", query * scale, spread)  # fault: scale
            seen = jnp.arange(size) <= (jnp.maximum(position - 1, 0) if fault == "mask" else position)  # fault: mask
            scores = jnp.where(seen, scores, -1e30)
            y = jnp.einsum("bhs,bshk->bhk", jax.nn.softmax(scores), jnp.repeat(values, GROUP, 2))
            return (keys, values, position + 1), x + y.reshape(TEXTS, 20) @ params["o"]

        empty = jnp.zeros((TEXTS, size, HEADS, WIDTH))
        _, x = jax.lax.scan(step, (empty, empty, jnp.int32(0)), tokens[:, :-1].T)
        return chosen(x.swapaxes(0, 1), params["words"], tokens)

    return infer


@pytest.mark.full
@pytest.mark.parametrize("fault", ["mask", "place", "heads", "scale"])
def test_the_fault_is_named_by_its_part_though_its_rows_are_those_of_other_tokens(args: Any, fault: str) -> None:
    report = jt.parity(train, sampling(fault), *args)
    first = report.first_difference
    assert first is not None
    assert first.kind == "value"
    assert first.infer is not None
    assert (Path(first.infer.file).name, first.infer.line) == line_of(__file__, fault)
    assert 0.9 < first.infer.contribution < 1.1
    text = " ".join(str(report).split())
    assert f"with the values of train, {first.infer.contribution:.0%} of the difference goes away" in text
    assert "part of the difference" in report.to_html()


def test_what_inference_leaves_out_is_named_in_training(args: Any) -> None:
    def normed(params: Any, tokens: jax.Array) -> jax.Array:
        x = jnp.asarray(params["words"])[tokens[:, :-1]]
        x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))  # left out
        return chosen(x, params["words"], tokens)

    def plain(params: Any, tokens: jax.Array) -> jax.Array:
        return chosen(jnp.asarray(params["words"])[tokens[:, :-1]], params["words"], tokens)

    first = jt.parity(normed, plain, *args).first_difference
    assert first is not None
    assert first.train is not None
    assert first.train.code.endswith("# left out")


def test_positions_that_are_one_number_beside_those_of_all_tokens(args: Any) -> None:
    def one_by_one(params: Any, tokens: jax.Array) -> jax.Array:
        def step(position: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            later = position + 1  # a position too far
            return position + 1, jnp.asarray(params["words"])[token] * jnp.cos(later.astype(jnp.float32))

        _, x = jax.lax.scan(step, jnp.int32(0), tokens[:, :-1].T)
        return chosen(x.swapaxes(0, 1), params["words"], tokens)

    def at_once(params: Any, tokens: jax.Array) -> jax.Array:
        start = jnp.int32(tokens.size) - tokens.size  # of no axis
        turns = jnp.cos((start + jnp.arange(LENGTH)).astype(jnp.float32))[:, None]
        return chosen(jnp.asarray(params["words"])[tokens[:, :-1]] * turns, params["words"], tokens)

    first = jt.parity(at_once, one_by_one, *args).first_difference
    assert first is not None
    assert first.infer is not None
    assert first.infer.code.endswith("# a position too far")
