"""Frames: the edges and nodes that a call of message passing covers, and their features."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.messages.segment import gather
from jmp_train.graphs.structure import (
    Adjacency,
    EdgeType,
    Graph,
    HeteroGraph,
    as_int32_ids,
    known_ids,
    make_adjacency_checked,
    make_adjacency_traced,
    on_device,
)
from jmp_train.policies.pytrees import has_tracers

Edges = Ids | tuple[Ids, Ids]


@dataclasses.dataclass(frozen=True)
class Frame:
    """The edges of one type, with the features at their ends.

    Attributes:
      adjacency: who sends to whom.
      src: features [senders, ...] by name.
      dst: features [receivers, ...] by name.
      data: features [edges, ...] by name.
      receiver_type: the type of the nodes that the edges enter; None if the graph has only one.
    """

    adjacency: Adjacency
    src: Mapping[str, jax.Array]
    dst: Mapping[str, jax.Array]
    data: Mapping[str, jax.Array]
    receiver_type: str | None = None


class Nodes(NamedTuple):
    """The nodes of one type.

    Attributes:
      features: arrays [nodes, ...] by name.
      num_nodes: number of nodes.
    """

    features: Mapping[str, jax.Array]
    num_nodes: int


def frame_of(graph: Graph | HeteroGraph, etype: str | EdgeType | None) -> Frame:
    """Returns the edges of one type with the features at their ends.

    Args:
      graph: a graph.
      etype: the edge type; None if there is only one.

    Raises:
      ValueError: there is no such type, or there are several.
    """
    if isinstance(graph, Graph):
        if etype is not None:
            raise ValueError(f"etype={etype!r}, but the graph has one type of edges, without a name")
        return Frame(graph.connections, graph.nodes, graph.nodes, graph.edges)
    if not isinstance(graph, HeteroGraph):
        raise TypeError(f"graph must be a Graph, a HeteroGraph or a jraph.GraphsTuple, got {type(graph).__name__}")
    kind = graph.edge_type(etype)
    sender_type, _, receiver_type = kind
    nodes = graph.nodes
    return Frame(graph.connections[kind], nodes[sender_type], nodes[receiver_type], graph.edges[kind], receiver_type)


def nodes_of(graph: Graph | HeteroGraph, ntype: str | None) -> Nodes:
    """Returns the nodes of one type.

    Args:
      graph: a graph.
      ntype: the node type; None if there is only one.

    Raises:
      ValueError: there is no such type.
    """
    if isinstance(graph, Graph):
        if ntype is not None:
            raise ValueError(f"ntype={ntype!r}, but the graph has one type of nodes, without a name")
        return Nodes(graph.nodes, graph.num_nodes)
    if ntype is None or ntype not in graph.nodes:
        known = ", ".join(map(repr, graph.nodes))
        raise ValueError(f"ntype={ntype!r} is not one of {known}")
    return Nodes(graph.nodes[ntype], graph.num_nodes(ntype))


def some_edges(frame: Frame, edges: jax.Array) -> Frame:
    """Returns the frame of some edges only.

    Args:
      frame: the edges to choose from.
      edges: int [some edges], which.
    """
    ends = (frame.adjacency.senders, frame.adjacency.receivers)
    ids = [end.ids[edges] for end in ends]
    data = {name: gather(feature, edges) for name, feature in frame.data.items()}
    senders, receivers = ids
    counts = (ends[0].num_segments, ends[1].num_segments)
    if has_tracers(ids):
        adjacency = make_adjacency_traced(senders, receivers, *counts)
    else:
        adjacency = make_adjacency_checked(np.asarray(senders), np.asarray(receivers), *counts)
    return dataclasses.replace(frame, adjacency=adjacency, data=data)


def where_edges(frame: Frame, is_kept: jax.Array) -> Frame:
    """Returns the frame in which only the edges of a mask, bool [edges], send."""
    senders, receivers = frame.adjacency.senders, frame.adjacency.receivers.where(is_kept)
    return dataclasses.replace(frame, adjacency=Adjacency((senders, receivers)))


def checked_ids(name: str, ids: Ids, count: int) -> jax.Array:
    """Returns the places of nodes or edges, checked if they are not traced.

    Args:
      name: "nodes" or "edges", for messages.
      ids: int [places], or one place.
      count: number of nodes or edges.

    Raises:
      TypeError: they are not integers.
      ValueError: one does not exist.
    """
    if not has_tracers(ids):
        return on_device(known_ids(name, np.atleast_1d(np.asarray(ids)), count, name), np.int32)
    array = jnp.atleast_1d(as_int32_ids(name, ids))
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    return array


def edge_ids(adjacency: Adjacency, edges: Edges) -> jax.Array:
    """Returns the places of edges, given as such or by their ends.

    Args:
      adjacency: who sends to whom.
      edges: int [some edges], or a pair of senders and receivers; between these, all edges are meant.

    Raises:
      TypeError: they are not integers, or ends are looked up under jit.
      ValueError: an edge does not exist.
    """
    if not isinstance(edges, tuple):
        return checked_ids("edges", edges, adjacency.receivers.num_edges)
    if len(edges) != 2:
        raise ValueError(f"edges must be indices or (senders, receivers), got {len(edges)} arrays")
    senders, receivers = adjacency.senders, adjacency.receivers
    ends = [
        checked_ids("edges", edges[0], senders.num_segments),
        checked_ids("edges", edges[1], receivers.num_segments),
    ]
    if has_tracers((ends, senders.ids)):
        raise TypeError("edges can be found by their ends only outside of jit: pass their indices")
    wanted, all_edges = (
        np.asarray(end[0], np.int64) * receivers.num_segments + np.asarray(end[1])
        for end in (ends, (senders.ids, receivers.ids))
    )
    missing = ~np.isin(wanted, all_edges)
    if missing.any():
        sender, receiver = (int(end[missing.argmax()]) for end in ends)
        raise ValueError(f"edges: there is no edge from {sender} to {receiver}")
    return on_device(np.flatnonzero(np.isin(all_edges, wanted)), np.int32)
