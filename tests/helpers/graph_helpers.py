"""Graphs drawn for tests, and their results in float64, by numpy or by plain jax."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.graphs import fn

HALVES = ("float16", "bfloat16")
# Of the tests that take longest `make test` runs one dtype, `make test-all` the other, too.
ONE_HALF = ("float16", pytest.param("bfloat16", marks=pytest.mark.full))
MESSAGES = [fn.copy_u, fn.copy_e] + [
    getattr(fn, f"{left}_{op}_{right}")
    for op in ("add", "sub", "mul", "div", "dot")
    for left in "uve"
    for right in "uve"
    if left != right
]
REDUCERS = [fn.sum, fn.mean, fn.max, fn.min, fn.var, fn.std, fn.softmax]


def make_message(function: Any, left: str = "l", right: str = "r") -> fn.Message:
    """Returns the message "m" of a function of `fn`."""
    return function(left, "m") if function in (fn.copy_u, fn.copy_e) else function(left, right, "m")


def draw(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Returns numbers of a kind, none of them so small that quotients overflow."""
    random = np.random.default_rng(seed)
    if kind == "uniform":
        return random.uniform(0.25, 1, shape)
    if kind == "equal":
        return np.full(shape, 0.3)
    signs = random.choice([-1.0, 1.0], shape)
    if kind == "signed":
        return signs * random.uniform(0.25, 2, shape)
    return signs * 2.0 ** random.uniform(-4, 3, shape)  # "of many sizes"


def assert_within(actual: Any, exact: Any, dtype: str, magnitudes: Any, ulps: int, share: Any = 1e-6) -> None:
    """Asserts the rule of the numbers: units in the last place, and a share of the magnitudes' sum.

    Args:
      actual: what was computed.
      exact: in float64.
      dtype: what it was computed in, to which `exact` is rounded.
      magnitudes: the sum of the magnitudes of the terms of each entry.
      ulps: how many units.
      share: of the magnitudes.
    """
    info = jnp.finfo(dtype)
    wanted, found = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in (exact, actual))
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite], wanted[~finite])
    wanted, found = wanted[finite], found[finite]
    sizes = np.maximum(np.abs(wanted), float(info.smallest_normal))
    bound = ulps * 2.0 ** np.floor(np.log2(sizes)) * float(info.eps)
    bound = bound + np.broadcast_to(share * np.abs(magnitudes), finite.shape)[finite]
    distance = np.abs(found - wanted)
    assert (distance <= bound).all(), f"{np.max(distance / bound):.3g} times the bound"


def exact_messages(message: fn.Message, ends: dict[str, Any], features: Mapping[Any, Any], xp: Any = np) -> Any:
    """Returns messages, by DGL's rules.

    Args:
      message: which.
      ends: "u" and "v", int [edges].
      features: by end and field, ("u", "l") and so on, float64.
      xp: numpy or jax.numpy.
    """
    reads = [features[end, field] if end == "e" else features[end, field][ends[end]] for end, field in message.operands]
    if message.operation == "copy":
        return reads[0]
    rank = max(x.ndim for x in reads)
    left, right = (x.reshape(x.shape[0], *[1] * (rank - x.ndim), *x.shape[1:]) for x in reads)
    if message.operation == "dot":
        product = left * right
        return product if rank == 1 else product.sum(-1, keepdims=True)
    operation = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}
    return getattr(xp, operation[message.operation])(left, right)


def exact_reduction(messages: np.ndarray, receivers: np.ndarray, count: int, name: str) -> Any:
    """Returns what nodes make of messages [edges, ...] in float64, 0 without messages."""
    out = np.zeros((count, *messages.shape[1:]))
    for node in range(count):
        mine = messages[receivers == node]
        if len(mine):
            out[node] = softmax_sum(mine) if name == "softmax" else getattr(mine, name)(0)
    return out


def softmax_sum(rows: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Returns the sum of rows, weighted elementwise by the softmax of temperature times themselves."""
    powers = np.exp(temperature * (rows - rows.max(0)))
    return (powers / powers.sum(0) * rows).sum(0)


def reduction_magnitudes(sizes: np.ndarray, receivers: np.ndarray, count: int, name: str) -> Any:
    """Returns of what a result of a reduction is to be exact to a millionth, from the messages' magnitudes.

    A standard deviation changes by no more than the root of the mean square of what its numbers change by; softmax
    aggregation by what the numbers change, and by the weights, which change with the logits.
    """
    if name in ("var", "std"):
        square = exact_reduction(sizes * sizes, receivers, count, "mean")
        return square if name == "var" else np.sqrt(square)
    largest = exact_reduction(sizes, receivers, count, "max")
    if name == "softmax":
        return largest * (1 + 2 * largest)
    return largest if name in ("max", "min") else exact_reduction(sizes, receivers, count, name)


def magnitude_message(message: fn.Message) -> fn.Message:
    """Returns the message that, of magnitudes, gives the sum of its terms' magnitudes."""
    if message.operation != "sub":
        return message
    return fn.Message("add", message.operands, message.out)


def reduce_in_jax(messages: jax.Array, receivers: Any, count: int, name: str) -> jax.Array:
    """Returns what nodes make of messages, by jax's own segment operations in the messages' dtype."""
    if name in ("max", "min"):
        segment = jax.ops.segment_max if name == "max" else jax.ops.segment_min
        out = segment(messages, receivers, count)
        return jnp.where(jnp.isfinite(out), out, 0)
    if name == "softmax":
        powers = jnp.exp(messages - jax.ops.segment_max(messages, receivers, count)[receivers])
        weights = powers / jax.ops.segment_sum(powers, receivers, count)[receivers]
        return jax.ops.segment_sum(weights * messages, receivers, count)
    total = jax.ops.segment_sum(messages, receivers, count)
    if name == "sum":
        return total
    sizes = jnp.maximum(jnp.bincount(receivers, length=count), 1).astype(messages.dtype)
    mean = total / sizes.reshape(-1, *[1] * (messages.ndim - 1))
    if name == "mean":
        return mean
    variance = reduce_in_jax((messages - mean[receivers]) ** 2, receivers, count, "mean")
    is_positive = variance > 0
    return variance if name == "var" else jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, variance, 1)), 0)


def gradient_magnitudes(
    messages: jax.Array, sizes: jax.Array, receivers: Any, count: int, name: str, cotangent: jax.Array
) -> jax.Array:
    """Returns of what the gradients of messages are to be exact to a millionth, [edges, ...].

    Args:
      messages: [edges, ...] in float64.
      sizes: the magnitudes of their terms.
      receivers: int [edges].
      count: how many nodes there are.
      name: "var", "std" or "softmax".
      cotangent: the magnitude of the result's gradient, [nodes, ...].
    """

    def of_edges(name: str, rows: jax.Array) -> jax.Array:
        return reduce_in_jax(rows, receivers, count, name)[receivers]

    size = of_edges("max", sizes)
    if name == "softmax":
        powers = jnp.exp(messages - of_edges("max", messages))
        weights = powers / of_edges("sum", powers)
        return cotangent[receivers] * weights * (1 + 2 * size) ** 2
    degree = of_edges("sum", jnp.ones_like(sizes))
    if name == "var":
        return cotangent[receivers] * 4 * size / degree
    std = of_edges("std", messages)
    # Of numbers that are all alike, the gradient has any direction, and a length that is bounded.
    direction = jnp.where(std > 1e-4 * size, size / jnp.where(std > 0, std, 1), 1e6)
    return cotangent[receivers] * direction * (1 + jnp.minimum(direction, 1e3)) / degree
