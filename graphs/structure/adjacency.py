"""Adjacency: both ends of the edges with their indices, created and checked once on the host."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import numpy as np
from jax.core import Tracer

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure.counts import check_int32
from jmp_train.graphs.structure.csr import NOT_APART, CSRAndCSC, host_csr_and_csc
from jmp_train.graphs.structure.edge_order import (
    clipped_ids,
    edge_order,
    fixed_incidence,
    incidence_of,
    incidence_on_host,
)
from jmp_train.graphs.structure.incidence import Incidence
from jmp_train.policies.pytrees import shown

FORMATS = ("coo", "csr", "mailbox")
DEFAULT_FORMATS = ("coo", "csr")
# So few sorted edges take little memory, so their shapes need not depend on degrees: graphs of one size share programs.
FIXED_EDGES = 2**14


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mailbox:
    """The nodes of one in-degree, and their edges.

    Attributes:
      nodes: int32 [nodes of that degree].
      edges: int32 [nodes of that degree, degree], each row ascending.
    """

    nodes: jax.Array
    edges: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adjacency:
    """The edges of a graph, without features.

    Attributes:
      ends: the nodes that the edges leave, and the nodes that they enter; None without "coo", when edges
        have no places of their own.
      neighbors: the edges sorted by either end, for chunked kernels; None without "csr".
      mailboxes: the nodes by in-degree, ascending, for reductions by user-defined functions; None
        without "mailbox".
      has_zero_in_degree: whether some node has no incoming edge; None if that is unknown, or must be
        the same for all graphs of a size.
    """

    is_index: ClassVar[bool] = True  # no model computes with its arrays, see `check_casts`

    ends: tuple[Incidence, Incidence] | None
    neighbors: CSRAndCSC | None = None
    mailboxes: tuple[Mailbox, ...] | None = None
    has_zero_in_degree: bool | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def senders(self) -> Incidence:
        """The node that each edge leaves."""
        return self._ends[0]

    @property
    def receivers(self) -> Incidence:
        """The node that each edge enters."""
        return self._ends[1]

    @property
    def _ends(self) -> tuple[Incidence, Incidence]:
        """Both ends; without them, edges cannot have features either."""
        if self.ends is None:
            raise ValueError(NOT_APART)
        return self.ends

    @property
    def num_edges(self) -> int:
        """Number of edges, including those that do not count."""
        if self.neighbors is not None:
            return self.neighbors.by_target.num_edges
        return self.receivers.num_edges

    @property
    def num_senders(self) -> int:
        """Number of sending nodes."""
        return self.out_degrees.shape[0]

    @property
    def num_receivers(self) -> int:
        """Number of receiving nodes."""
        return self.in_degrees.shape[0]

    @property
    def out_degrees(self) -> jax.Array:
        """Int32 [senders], number of edges that leave each node."""
        if self.neighbors is not None:
            return self.neighbors.by_source.degrees
        return self.senders.degrees

    @property
    def in_degrees(self) -> jax.Array:
        """Int32 [receivers], number of edges that enter each node."""
        if self.neighbors is not None:
            return self.neighbors.by_target.degrees
        return self.receivers.degrees


def make_adjacency(
    senders: Ids,
    receivers: Ids,
    num_senders: int,
    num_receivers: int,
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    where: str = "",
) -> Adjacency:
    """Returns the checked adjacency of known edges.

    Args:
      senders: int [edges].
      receivers: int [edges].
      num_senders: number of sending nodes.
      num_receivers: number of receiving nodes.
      formats: the indices to create, from `FORMATS`.
      where: edge type, for messages.

    Raises:
      TypeError: ids are not integers, or traced.
      ValueError: ids have the wrong shape or are out of range; the message names the edge. Or there are more
        edges than int32 can number.
    """
    check_formats(formats)
    ends = checked_ends(senders, receivers, num_senders, num_receivers, where=where)
    return make_adjacency_checked(*ends, num_senders, num_receivers, formats=formats)


def formats_made(adjacency: Adjacency) -> tuple[str, ...]:
    """Returns the formats of an adjacency."""
    kept = {
        "coo": adjacency.ends,
        "csr": adjacency.neighbors,
        "mailbox": adjacency.mailboxes,
    }
    return tuple(name for name, indices in kept.items() if indices is not None)


def formats_of_size(num_edges: int) -> tuple[str, ...]:
    """Returns the formats for a number of edges, with sorted edges if they save memory."""
    return DEFAULT_FORMATS if num_edges > FIXED_EDGES else ("coo",)


def check_formats(formats: Sequence[str]) -> None:
    """Raises TypeError or ValueError if formats are not a sequence from `FORMATS`."""
    if isinstance(formats, str):
        raise TypeError(f"formats must be a sequence of names, got {formats!r}")
    if not isinstance(formats, Sequence):
        raise TypeError(f"formats must be a sequence of names, got {shown(formats)}")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ValueError(f"formats has {unknown[0]!r}, which is not one of {', '.join(FORMATS)}")


def checked_ends(
    senders: Ids, receivers: Ids, num_senders: int, num_receivers: int, *, where: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the checked ends of known edges; see `make_adjacency`."""
    ids = [_host_ids(name, x, where) for name, x in (("senders", senders), ("receivers", receivers))]
    if ids[0].shape != ids[1].shape:
        first = min(map(len, ids))
        raise ValueError(
            f"senders has {len(ids[0])} edges and receivers {len(ids[1])}{where}: edge {first} has only one end"
        )
    for name, end, count in zip(("senders", "receivers"), ids, (num_senders, num_receivers), strict=True):
        wrong = (end < 0) | (end >= count)
        if wrong.any():
            edge = int(wrong.argmax())
            fault = "is negative" if end[edge] < 0 else f"is out of range for {count} nodes"
            raise ValueError(f"{name}[{edge}] = {end[edge]}{where} {fault}")
    senders, receivers = (x.astype(np.int64) if x.dtype == np.uint64 else x for x in ids)
    return senders, receivers


def make_adjacency_checked(
    senders: np.ndarray,
    receivers: np.ndarray,
    num_senders: int,
    num_receivers: int,
    *,
    formats: Sequence[str] = ("coo",),
    is_fixed: bool = False,
) -> Adjacency:
    """Returns the adjacency of known edges; those out of range do not count.

    Args:
      senders: int [edges].
      receivers: int [edges].
      num_senders: number of sending nodes.
      num_receivers: number of receiving nodes.
      formats: the indices to create, from `FORMATS`.
      is_fixed: True if structure and shapes, except those of mailboxes, must depend only on the counts, not on the
        edges.
    """
    check_int32("the graph has", len(senders), "edges")
    senders, receivers = clipped_ids(senders, num_senders), clipped_ids(receivers, num_receivers)
    ends = neighbors = has_zero_in_degree = None
    has_ends, has_csr = set(formats) != {"csr"}, "csr" in formats
    if has_ends and is_fixed:
        ends = fixed_incidence(senders, num_senders), fixed_incidence(receivers, num_receivers)
    if has_csr or not is_fixed:
        by_source = edge_order(senders, receivers, num_senders, num_receivers)
        by_target = edge_order(receivers, senders, num_receivers, num_senders)
        if has_ends and not is_fixed:
            ends = incidence_on_host(by_source), incidence_on_host(by_target)
        if has_csr:
            is_small = len(senders) <= FIXED_EDGES
            found = host_csr_and_csc(by_source, by_target, have_places=has_ends, is_fixed=is_fixed or is_small)
            neighbors = jax.device_put(found)
        has_zero_in_degree = None if is_fixed else bool((by_target.degrees == 0).any())
    mailboxes = make_mailboxes(receivers, num_receivers) if "mailbox" in formats else None
    return Adjacency(ends, neighbors, mailboxes, has_zero_in_degree)


def make_adjacency_traced(senders: jax.Array, receivers: jax.Array, num_senders: int, num_receivers: int) -> Adjacency:
    """Returns the adjacency of edges that only the device knows, unchecked."""
    return Adjacency((incidence_of(senders, num_senders), incidence_of(receivers, num_receivers)))


def make_mailboxes(receivers: np.ndarray, num_receivers: int) -> tuple[Mailbox, ...]:
    """Returns the nodes by in-degree, ascending, without nodes that have no edges.

    Args:
      receivers: int [edges]; edges with an id out of range are left out.
      num_receivers: number of nodes.
    """
    edges = np.flatnonzero((receivers >= 0) & (receivers < num_receivers))
    edges = edges[np.argsort(receivers[edges], kind="stable")].astype(np.int32)
    degrees = np.bincount(receivers[edges], minlength=num_receivers)
    starts = np.cumsum(degrees) - degrees
    boxes = []
    for degree in np.unique(degrees[degrees > 0]):
        nodes = np.flatnonzero(degrees == degree).astype(np.int32)
        places = starts[nodes][:, None] + np.arange(degree)
        boxes.append(Mailbox(jax.device_put(nodes), jax.device_put(edges[places])))
    return tuple(boxes)


def _host_ids(name: str, ids: Ids, where: str) -> np.ndarray:
    if isinstance(ids, Tracer):
        raise TypeError(f"{name}{where} is traced: graphs are made outside of jit, and passed to it")
    array = np.asarray(ids)
    if array.size == 0 and not isinstance(ids, np.ndarray | jax.Array):
        array = array.astype(np.int32)  # an empty list is float64
    if array.ndim != 1:
        raise ValueError(f"{name}{where} must have one axis, got shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        example = f": edge 0 has {array[0]!r}" if array.size else ""
        raise TypeError(f"{name}{where} must be integers, got {array.dtype}{example}")
    check_int32(f"{name}{where} has", len(array), "edges")
    is_large_enough = array.dtype in (np.int32, np.int64, np.uint64)
    return array if is_large_enough else array.astype(np.int64)  # int8 may be too small for n_node
