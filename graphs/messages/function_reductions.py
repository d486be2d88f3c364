"""Reductions of messages that a function of one edge makes: in chunks, or of arrays of all edges."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jmp_train.graphs.fn import Reduce
from jmp_train.graphs.kernels import EdgeIds, EdgeOperation, Ends, Reductions, pvary_alike, reduce_rows
from jmp_train.graphs.messages.chunked import of_nothing
from jmp_train.graphs.messages.edge_messages import PerEdge, Shapes
from jmp_train.graphs.messages.frames import Frame
from jmp_train.graphs.messages.reductions import PLACES, reduce_messages
from jmp_train.graphs.messages.user_functions import call_message_function
from jmp_train.graphs.structure import CSR, Adjacency, CSRAndCSC, graph_storage, in_float32, upcast
from jmp_train.policies.autocasting import opaque_but_for

Messages = Mapping[str, jax.Array]


def reduce_all(frame: Frame, messages: Messages, reductions: Reductions) -> dict[str, jax.Array]:
    """Returns reductions of the messages of all edges, [receivers, ...] by name.

    Args:
      frame: the edges.
      messages: arrays [edges, ...] by name.
      reductions: which.

    Raises:
      ValueError: a message is missing.
    """
    _check_names(messages, reductions)
    results = {}
    for name in dict.fromkeys(reduce.message for reduce in reductions):
        some = tuple(reduce for reduce in reductions if reduce.message == name)
        reduced = functools.partial(_of_rows, frame.adjacency, some)
        results |= in_float32(reduced, messages[name])
    return results


def _of_rows(adjacency: Adjacency, reductions: Reductions, messages: jax.Array) -> dict[str, jax.Array]:
    return reduce_rows(adjacency, reductions, upcast(messages))


def _by_xla(adjacency: Adjacency, frame: Frame, message: PerEdge, reductions: Reductions) -> dict[str, jax.Array]:
    del adjacency
    return reduce_all(frame, call_message_function(message, frame, None), reductions)


def _traced(frame: Frame, message: PerEdge) -> tuple[Ends, Shapes]:
    """Returns the features that a message reads, by name, and the shapes of one edge's messages."""
    features = Ends(dict(frame.src), dict(frame.dst), dict(frame.data))
    return message.traced(features, have_places=frame.adjacency.ends is not None)


def _elements(frame: Frame, message: PerEdge, reductions: Reductions) -> int | None:
    """Returns the size of the largest row that an edge reads or computes; None for messages that are not floats."""
    used, shapes = _traced(frame, message)
    _check_names(shapes, reductions)
    reduced = [shapes[reduce.message] for reduce in reductions]
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in reduced):
        return None
    return max(map(math.prod, [*(x.shape[1:] for x in jax.tree.leaves(used)), *(x.shape for x in reduced)]))


def _traced_function(
    function: Callable[[Ends, EdgeIds], Any], features: Ends, ids: EdgeIds
) -> tuple[Any, Any, Ends, Ends, Ends]:
    """Returns the program of a function of one edge, and what it reads.

    Args:
      function: a function of rows and ids.
      features: the arrays of which it reads rows.
      ids: some edge's.

    Returns:
      The program, a function of what the function closed over, of rows and of ids; the structure of its results; the
      dtypes of what it reads at each end; and the arrays of which it reads, without and with gradients.
    """
    rows = jax.tree.map(lambda x: x[0], features)  # an example, of which nothing is computed
    closed, like = jax.make_jaxpr(function, return_shape=True)(rows, ids)
    constants = list(map(jnp.asarray, closed.consts))

    def run(constants: list[jax.Array], *leaves: jax.Array) -> list[jax.Array]:
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(closed.jaxpr, constants))(*leaves)

    program = jax.make_jaxpr(run)(constants, *jax.tree.leaves((rows, ids)))
    parts = [*map(jax.tree.leaves, features[:3]), constants]
    dtypes = Ends._make(tuple(x.dtype for x in part) for part in parts)
    fixed, inputs = ([[x for x in part if _is_inexact(x) == kind] for part in parts] for kind in (False, True))
    return program, jax.tree.structure(like), dtypes, Ends._make(fixed), Ends._make(inputs)


@dataclasses.dataclass(frozen=True, eq=False)
class _OfEdge:
    """A function of one edge for `edge_sums`, of what `_traced_function` returns."""

    program: Callable[..., list[jax.Array]]
    structure: Any
    dtypes: Ends

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        senders, receivers, edge, closed_over = map(_merged, fixed, inputs, self.dtypes)
        found = self.program(*closed_over, *senders, *receivers, *edge, *jax.tree.leaves(ids))
        return Ends(receivers=jax.tree.unflatten(self.structure, found))


def _merged(fixed: Any, inputs: Any, dtypes: Any) -> list[jax.Array]:
    """Returns what is read at an end in order, in its own dtypes."""
    parts = iter(fixed), iter(inputs)
    return [next(parts[jnp.issubdtype(dtype, jnp.inexact)]).astype(dtype) for dtype in dtypes]


def _is_inexact(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _by_chunks(adjacency: Adjacency, frame: Frame, message: PerEdge, reductions: Reductions) -> dict[str, jax.Array]:
    used, shapes = _traced(frame, message)
    edges, count = adjacency.neighbors, adjacency.num_receivers
    assert edges is not None
    if edges.by_target.num_blocks == 0 or not all(x.size for x in jax.tree.leaves((used, shapes))):
        like = {name: ((count, *x.shape), x.dtype) for name, x in shapes.items()}
        return {reduce.out: of_nothing(reduce, *like[reduce.message]) for reduce in reductions}
    found = reduce_function(edges, message.of_edge, used, reductions)
    dtypes = {reduce.out: shapes[reduce.message].dtype for reduce in reductions if reduce.reduction not in PLACES}
    return {name: graph_storage(x.astype(dtypes.get(name, x.dtype))) for name, x in found.items()}


def reduce_function(
    edges: CSRAndCSC | CSR,
    function: Callable[[Ends, EdgeIds], dict[str, jax.Array]],
    features: Ends,
    reductions: Sequence[Reduce],
) -> dict[str, jax.Array]:
    """Returns the reductions of a function over the edges that enter each node, [receivers, ...] in at least float32.

    Args:
      edges: the edges, at least one; or only the ones by the nodes that they enter.
      function: a function of the rows that one edge reads, in their own dtypes, and of its ids, to messages by name;
        floating arrays that it closes over have gradients.
      features: the arrays of which it reads rows, at both ends and of the edges.
      reductions: which.
    """
    names = sorted({reduce.message for reduce in reductions})

    def stored(rows: Ends, ids: EdgeIds) -> dict[str, jax.Array]:
        messages = function(rows, ids)
        return {name: graph_storage(messages[name]) for name in names}

    edges, features = pvary_alike(jax.tree.map(jnp.asarray, (edges, features)))
    into = edges if isinstance(edges, CSR) else edges.by_target
    place = into.others[0]
    ids = EdgeIds(place, place, None if into.edges is None else place)
    traced, structure, dtypes, fixed, inputs = _traced_function(stored, features, ids)

    def kernel(program: Any, edges: CSRAndCSC | CSR, fixed: Ends, inputs: Ends) -> dict[str, jax.Array]:
        return reduce_messages(_OfEdge(program, structure, dtypes), edges, fixed, inputs, reductions)

    return opaque_but_for(traced, kernel)(*pvary_alike((edges, fixed, inputs)))


def _check_names(messages: Mapping[str, object], reductions: Reductions) -> None:
    for reduce in reductions:
        if reduce.message not in messages:
            known = ", ".join(map(repr, messages))
            raise ValueError(f"{reduce.reduction} needs the message {reduce.message!r}; there are: {known}")


PER_EDGE = EdgeOperation(
    {"xla": _by_xla, "chunked": _by_chunks}, _elements, "reduces messages of floats; these are others"
)
