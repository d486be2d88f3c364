"""Chunked kernels of built-in messages: reductions of any, and products of both ends."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Message, Operation, Reduce
from jmp_train.graphs.kernels import (
    CheckedMessage,
    Inputs,
    Reductions,
    Scales,
    Term,
    chunked_argextreme,
    chunked_extreme,
    chunked_mean,
    chunked_moments,
    chunked_softmax_sum,
    chunked_sum,
    combined_rows,
    edge_dot,
    run_chunked,
    weighted_sender,
    weighted_sum,
)
from jmp_train.graphs.structure import Adjacency, CSRAndCSC, inverse_degrees, root_or_zero

_FIELDS = {"u": "senders", "v": "receivers", "e": "edge"}


@dataclasses.dataclass(frozen=True)
class _BuiltIn:
    """A built-in message as a function of the rows at both ends and of the edge."""

    operation: Operation
    ends: tuple[str, ...]

    def __call__(self, fixed: object, inputs: Inputs) -> jax.Array:
        del fixed
        rows = [getattr(inputs, _FIELDS[end]) for end in self.ends]
        return rows[0] if len(rows) == 1 else combined_rows(self.operation, *rows)


def elements_of_reductions(message: CheckedMessage, reductions: Reductions, *operands: jax.Array) -> int | None:
    """Returns the number of elements of a message of floats of one precision; None for other messages.

    Args:
      message: which.
      reductions: which.
      *operands: the message's features.
    """
    del reductions
    if message.dtype is None:
        return None
    return math.prod(operands[0].shape[1:] if message.message.operation == "dot" else message.shape)


def _heads(message: Message, operands: Sequence[jax.Array]) -> int | None:
    """Returns the number of heads of a sum of senders' rows, weighted by edges or not; None for other messages.

    The axes of the senders' features that the edges' have too are heads: an edge has one weight for each.
    """
    ends = "".join([end for end, _ in message.operands])
    is_sum = (message.operation, ends) in (("copy", "u"), ("mul", "ue"), ("mul", "eu"))
    if not is_sum:
        return None
    if ends == "u":
        return 1
    rows, weights = operands if ends == "ue" else reversed(operands)
    shape = (1,) * (rows.ndim - weights.ndim) + weights.shape[1:]
    count = max((axis + 1 for axis, length in enumerate(shape) if length != 1), default=0)
    is_prefix = rows.ndim >= weights.ndim and shape[:count] == rows.shape[1 : count + 1]
    return math.prod(shape[:count]) if is_prefix else None


def chunked_reductions(
    adjacency: Adjacency, message: CheckedMessage, reductions: Reductions, *operands: jax.Array
) -> dict[str, jax.Array]:
    """Returns the reductions of messages, [receivers, ...] by name in at least float32.

    Args:
      adjacency: who sends to whom, with `neighbors`.
      message: which.
      reductions: which.
      *operands: the message's features in their stored dtypes.
    """
    ends = tuple(end for end, _ in message.message.operands)
    if not all(x.size for x in operands):
        assert message.dtype is not None  # or "xla" is chosen
        shape = adjacency.num_receivers, *message.shape
        return {reduce.out: of_nothing(reduce, shape, message.dtype) for reduce in reductions}
    by_end = dict(zip(ends, operands, strict=True))
    heads = _heads(message.message, operands)
    if heads is None:
        inputs = Inputs(**{_FIELDS[end]: x for end, x in by_end.items()})
        return _reduced(_BuiltIn(message.message.operation, ends), adjacency, inputs, reductions)
    data = by_end["u"].reshape(by_end["u"].shape[0], heads, -1)
    weights = by_end["e"].reshape(-1, heads, 1) if "e" in by_end else ()
    found = _reduced(weighted_sender, adjacency, Inputs(weights, data), reductions)
    return {name: x.reshape(-1, *message.shape) for name, x in found.items()}


def of_nothing(reduce: Reduce, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the reduction of no messages, or of messages without elements."""
    is_place = reduce.reduction in ("argmax", "argmin")
    return jnp.full(shape, -1, jnp.int32) if is_place else jnp.zeros(shape, dtype)


def _reduced(message: Term, adjacency: Adjacency, inputs: Inputs, reductions: Reductions) -> dict[str, jax.Array]:
    """Returns the reductions [receivers, ...] of a message by name, in at least float32."""
    names = {reduce.reduction for reduce in reductions}
    found: dict[str, jax.Array] = {}
    if message is weighted_sender:
        for name in sorted(names & {"sum", "mean", "var", "std"}):  # in the same order in every process
            found["sum" if name == "sum" else "mean"] = _weighted(adjacency, inputs, is_mean=name != "sum")
    if names & {"var", "std"}:  # the mean is at hand then
        found["mean"], found["var"] = chunked_moments(message, adjacency, inputs, found.get("mean"))
        found["std"] = root_or_zero(found["var"])
    results = {}
    for reduce in reductions:
        name = reduce.reduction
        if name in found:
            result = found[name]
        elif name == "softmax":
            result = chunked_softmax_sum(message, reduce.temperature, adjacency, inputs)
        elif name in ("sum", "mean"):
            result = (chunked_sum if name == "sum" else chunked_mean)(message, adjacency, inputs)
        else:
            sign = 1 if name.endswith("max") else -1
            result = (chunked_argextreme if "arg" in name else chunked_extreme)(message, sign, adjacency, inputs)
        results[reduce.out] = result
    return results


def _weighted(adjacency: Adjacency, inputs: Inputs, *, is_mean: bool) -> jax.Array:
    """Returns the sums or means [receivers, heads, width] of weighted senders."""
    data, weights = inputs.senders, None if isinstance(inputs.edge, tuple) else inputs.edge[..., 0]
    scales = Scales(receivers=inverse_degrees(adjacency.in_degrees, data) if is_mean else None)
    return run_chunked(functools.partial(weighted_sum, None), adjacency.neighbors, scales, data, weights)


def elements_of_dot(message: CheckedMessage, *operands: jax.Array) -> int | None:
    """Returns the number of products for each edge; None if the message is not a product of rows of one shape.

    Args:
      message: which.
      *operands: its features.
    """
    ends = {end for end, _ in message.message.operands}
    if message.message.operation != "dot" or ends != {"u", "v"} or message.dtype is None:
        return None
    left, right = operands
    is_one_shape = left.ndim > 1 and left.shape[1:] == right.shape[1:]
    return math.prod(left.shape[1:]) if is_one_shape else None


def chunked_dot(adjacency: Adjacency, message: CheckedMessage, *operands: jax.Array) -> jax.Array:
    """Returns the products [edges, ..., 1] of rows at both ends, in the operands' common dtype.

    Args:
      adjacency: who sends to whom, with `neighbors`.
      message: which.
      *operands: its features in their stored dtypes.
    """
    by_end = {end: x for (end, _), x in zip(message.message.operands, operands, strict=True)}
    *inner, width = operands[0].shape[1:]
    if not all(operand.size for operand in operands):
        return jnp.zeros((adjacency.num_edges, *message.shape), message.dtype)

    def kernel(edges: CSRAndCSC, *rows: jax.Array) -> jax.Array:  # reshaped within, where autocast casts nothing
        return edge_dot(edges, Scales(), *(x.reshape(-1, math.prod(inner), width) for x in rows))

    return run_chunked(kernel, adjacency.neighbors, by_end["u"], by_end["v"]).reshape(-1, *message.shape)
