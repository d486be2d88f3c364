"""Chunked kernels of built-in messages: reductions of any, and products of both ends."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Message, Operation, Reduce
from jmp_train.graphs.kernels.chunks import run_chunked
from jmp_train.graphs.kernels.edge_reads import EdgeIds
from jmp_train.graphs.kernels.edge_terms import Inputs, weighted_sender
from jmp_train.graphs.kernels.messages_xla import CheckedMessage, Reductions, combined_rows
from jmp_train.graphs.kernels.native_calls import Scales
from jmp_train.graphs.kernels.reductions import MOMENTS, PLACES, keys_of, of_nothing, reduce_function, reduce_messages
from jmp_train.graphs.kernels.spmm_sddmm import edge_dot, weighted_sum
from jmp_train.graphs.structure import Adjacency, CSRAndCSC, inverse_degrees, upcast

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
    assert message.dtype is not None and adjacency.neighbors is not None  # or "xla" is chosen
    if adjacency.neighbors.by_target.num_blocks == 0 or not all(x.size for x in operands):
        shape = adjacency.num_receivers, *message.shape
        return {reduce.out: of_nothing(reduce, shape, message.dtype) for reduce in reductions}
    by_end = dict(zip(ends, operands, strict=True))
    heads = _heads(message.message, operands)
    named = [dataclasses.replace(reduce, message="m") for reduce in reductions]
    if message.message.operation == "dot" and keys_of(named, "max", "min", *PLACES):
        return _dot_extremes(adjacency, ends, operands, named)
    if heads is None:
        inputs = Inputs(**{_FIELDS[end]: x for end, x in by_end.items()})
        return reduce_messages(_BuiltIn(message.message.operation, ends), adjacency, inputs, named)
    data = by_end["u"].reshape(by_end["u"].shape[0], heads, -1)
    weights = by_end["e"].reshape(-1, heads) if "e" in by_end else None
    sums: dict[str, jax.Array] = {}
    for _, name, _ in keys_of(named, "sum", "mean", *MOMENTS):  # moments need the mean
        name = "sum" if name == "sum" else "mean"
        if name not in sums:
            scales = Scales(receivers=None if name == "sum" else inverse_degrees(adjacency.in_degrees, data))
            kernel = functools.partial(weighted_sum, None)
            sums[name] = run_chunked(kernel, adjacency.neighbors, scales, data, weights)
    own = ("sum",) if keys_of(named, *MOMENTS) else ("sum", "mean")  # moments make a mean, too
    found = {reduce.out: sums[reduce.reduction] for reduce in named if reduce.reduction in own}
    rest = [reduce for reduce in named if reduce.out not in found]
    if rest:
        inputs = Inputs(() if weights is None else weights[..., None], data)
        found |= reduce_messages(weighted_sender, adjacency, inputs, rest, sums.get("mean"))
    return {reduce.out: found[reduce.out].reshape(-1, *message.shape) for reduce in reductions}


def _dot_extremes(
    adjacency: Adjacency, ends: Sequence[str], operands: Sequence[jax.Array], reductions: Sequence[Reduce]
) -> dict[str, jax.Array]:
    """Returns reductions of products, each computed once: XLA may round the sum of another pass in another way."""

    def products(rows: Inputs, ids: EdgeIds) -> dict[str, jax.Array]:
        del ids
        return {"m": combined_rows("dot", *(upcast(getattr(rows, _FIELDS[end])["m"]) for end in ends))}

    read = {_FIELDS[end]: {"m": x} for end, x in zip(ends, operands, strict=True)}
    elements = max(math.prod(x.shape[1:]) for x in operands)
    assert adjacency.neighbors is not None
    return reduce_function(adjacency.neighbors, products, Inputs({}, {}, {})._replace(**read), elements, reductions)


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
