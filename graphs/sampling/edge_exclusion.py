"""The edges that messages must not use when an edge is in a mini-batch: itself and its reverse, which reveal it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jmp_train.graphs.sampling.host_edge_index import HostEdges
from jmp_train.graphs.sampling.sampled_layer import EDGE, Edges
from jmp_train.graphs.structure import EdgeType, checked_word, known_ids

Excluded = Mapping[EdgeType, Mapping[EdgeType, np.ndarray]]
WORDS = ("self", "reverse", "reverse_types")


def checked_exclusion(
    edges: Edges,
    ends: Mapping[EdgeType, tuple[np.ndarray, np.ndarray]],
    exclude: str | None,
    reverse_ids: Mapping[EdgeType, Any] | None,
    reverse_types: Mapping[EdgeType, EdgeType] | None,
) -> Excluded:
    """Returns, by type of a batch's edges and by edge type, the edges excluded with each, int64 [edges, ...].

    Args:
      edges: the edges by type.
      ends: by type of a batch's edges, their senders and receivers.
      exclude: see `edge_sampler`.
      reverse_ids: by edge type, see `edge_sampler`.
      reverse_types: see `edge_sampler`.

    Raises:
      ValueError: see `edge_sampler`.
    """
    if exclude is not None:
        checked_word("exclude", exclude, WORDS)
    if (exclude == "reverse") != (reverse_ids is not None):
        raise ValueError("reverse_ids and exclude='reverse' need each other; compute reverse_ids with reverse_edge_ids")
    if (exclude == "reverse_types") != (reverse_types is not None):
        raise ValueError("reverse_types and exclude='reverse_types' need each other")
    excluded: dict[EdgeType, dict[EdgeType, np.ndarray]] = {}
    for kind, (senders, _) in ends.items():
        own = np.arange(len(senders))
        excluded[kind] = {} if exclude is None else {kind: own}
        if reverse_ids is not None:
            reverse = _checked_reverse(kind, reverse_ids, len(own))
            excluded[kind] = {kind: np.stack([own, reverse], axis=1)}
        if reverse_types is not None:
            other = _checked_reverse_type(kind, reverse_types, edges, ends)
            excluded[kind][other] = own  # the same ids; for a type that is its own reverse, only loops
    for kind in [*ends, *(other for others in excluded.values() for other in others)]:
        if edges[kind].edge_ids is None:
            of = "" if kind == EDGE else f" of {kind}"
            raise ValueError(f"edges{of} must be made with keep_edge_ids=True, to exclude the edges of a batch")
    return excluded


def _checked_reverse(kind: EdgeType, reverse_ids: Mapping[EdgeType, Any], count: int) -> np.ndarray:
    if kind not in reverse_ids:
        raise ValueError(f"reverse_ids lacks edge type {kind!r}")
    name = "reverse_ids" if kind == EDGE else f"reverse_ids[{kind!r}]"
    reverse = known_ids(name, reverse_ids[kind], count, "edges", least=-1)
    if len(reverse) != count:
        raise ValueError(f"{name} must have {count} rows, one for each of the edges, got {len(reverse)}")
    return reverse


def _checked_reverse_type(
    kind: EdgeType,
    reverse_types: Mapping[EdgeType, EdgeType],
    edges: Edges,
    ends: Mapping[EdgeType, tuple[np.ndarray, np.ndarray]],
) -> EdgeType:
    """Returns the reverse of an edge type, after checking that it has the same edges, reversed, in the same order."""
    if kind not in reverse_types:
        raise ValueError(f"reverse_types lacks edge type {kind!r}")
    other, (senders, receivers) = reverse_types[kind], ends[kind]
    if other not in edges:
        raise ValueError(f"reverse_types[{kind!r}] = {other!r} is not an edge type of edges")
    these = edges[other]
    if these.num_edges != len(senders):
        raise ValueError(
            f"reverse_types[{kind!r}] = {other!r} has {these.num_edges} edges, but {len(senders)} edges need a reverse"
        )
    if these.edge_ids is not None:
        sources, targets = (_in_given_order(these, ids) for ids in (these.sources, these.receivers))
        is_other = (sources != receivers) | (targets != senders)
        if is_other.any():
            raise ValueError(
                f"reverse_types[{kind!r}] = {other!r}: edge {int(is_other.argmax())} is not the reverse of the "
                "edge at the same index; both types must have their edges in the same order"
            )
    return other


def _in_given_order(edges: HostEdges, values: np.ndarray) -> np.ndarray:
    ordered = np.empty_like(values)
    ordered[edges.edge_ids] = values
    return ordered
