"""One layer of a mini-batch: its sampled edges, its padding buckets, and its blocks."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_train.graphs.sampling.host_edge_index import ALL, HostEdges, renumbered, sample_in_edges
from jmp_train.graphs.structure import Block, EdgeType, filled, most_in_as_many_levels, padded_block

EDGE: EdgeType = ("node", "edge", "node")  # the edge type of a graph with one type
MARGIN = 1.1  # factor of the sizes over the largest measured batch
STEP = 1.5  # from one size to the next
MULTIPLE = 64  # of sizes

Edges = Mapping[EdgeType, HostEdges]
Fanout = Mapping[EdgeType, int]
Counts = Mapping[str, int]
Nodes = Mapping[str, np.ndarray]


class SampledLayer(NamedTuple):
    """One layer of a batch, without padding.

    Attributes:
      nodes: by node type, int32 [sources], the targets first.
      num_targets: by node type, number of targets.
      ends: by edge type, the indices of each edge's ends, int [edges], and the id of the edge.
    """

    nodes: dict[str, np.ndarray]
    num_targets: dict[str, int]
    ends: dict[EdgeType, tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """The padded or required sizes of a layer.

    Attributes:
      sources: by node type, number of nodes.
      edges: by edge type, number of edges.
      most_out: by edge type, the largest number of edges that leave a node.
    """

    sources: Counts
    edges: Mapping[EdgeType, int]
    most_out: Mapping[EdgeType, int]

    def combine(self, other: "LayerSizes", function: Callable[[int, int], int]) -> "LayerSizes":
        """Applies a function to each of these counts and that of the other sizes."""

        def combined(mine: Mapping[Any, int], theirs: Mapping[Any, int]) -> dict[Any, int]:
            return {key: function(mine[key], theirs[key]) for key in mine}

        return LayerSizes(
            combined(self.sources, other.sources),
            combined(self.edges, other.edges),
            combined(self.most_out, other.most_out),
        )

    def hold(self, needed: "LayerSizes") -> bool:
        """Returns whether a layer that needs the given sizes fits in."""
        return self.combine(needed, max) == self


def sample_layer(
    edges: Edges,
    targets: Nodes,
    fanout: Fanout,
    random: np.random.Generator,
    *,
    replace: bool = False,
    excluded: Mapping[EdgeType, np.ndarray] | None = None,
) -> SampledLayer:
    """Returns one layer of a batch.

    Args:
      edges: the edges by type.
      targets: by node type, int [targets]; types may be missing.
      fanout: the fanout by edge type.
      random: NumPy's generator.
      replace: see `sample_in_edges`.
      excluded: by edge type, int [edges], edges to leave out if they are drawn; types may be missing. None
        for none.
    """
    none = np.empty(0, np.int32)
    counts = node_counts(edges)
    targets = {kind: np.asarray(targets.get(kind, none)) for kind in counts}
    drawn = {
        kind: sample_in_edges(these, targets[kind[2]], fanout[kind], random, replace=replace)
        for kind, these in edges.items()
    }
    for kind, ids in (excluded or {}).items():
        drawn[kind] = _without(edges[kind], *drawn[kind], ids)
    nodes, senders = {}, {}
    for node_type, count in counts.items():
        kinds = [kind for kind in edges if kind[0] == node_type]
        ids = [edges[kind].sources[drawn[kind][1]] for kind in kinds]
        nodes[node_type], places = renumbered(targets[node_type], ids, count)
        senders |= dict(zip(kinds, places, strict=True))
    ends = {kind: (senders[kind], *drawn[kind]) for kind in edges}
    return SampledLayer(nodes, {kind: len(ids) for kind, ids in targets.items()}, ends)


def _without(
    edges: HostEdges, owners: np.ndarray, places: np.ndarray, excluded: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the drawn edges without those to exclude."""
    assert edges.edge_ids is not None  # checked when exclusion is requested
    is_kept = ~np.isin(edges.edge_ids[places], excluded)
    return owners[is_kept], places[is_kept]


def edges_by_type(edges: HostEdges | Mapping[EdgeType, HostEdges]) -> Edges:
    """Returns edges by type, under `EDGE` if there is one type; raises TypeError for other arguments."""
    if isinstance(edges, HostEdges):
        return {EDGE: edges}
    if not isinstance(edges, Mapping):
        raise TypeError(
            "edges must be a result of host_edges, or a mapping from edge types to such results, got "
            f"{type(edges).__name__}"
        )
    return dict(edges)


def node_counts(edges: Edges) -> dict[str, int]:
    """Returns the number of nodes of each type; raises ValueError if edge types disagree."""
    counts: dict[str, int] = {}
    for kind, these in edges.items():
        if not (isinstance(kind, tuple) and len(kind) == 3):
            raise ValueError(f"edge type {kind!r} must be (type of senders, name, type of receivers)")
        for node_type, count in ((kind[0], these.num_sources), (kind[2], these.num_targets)):
            if counts.setdefault(node_type, count) != count:
                raise ValueError(
                    f"edge type {kind!r} has {count} nodes of type {node_type!r}, but another edge type has "
                    f"{counts[node_type]}"
                )
    if not counts:
        raise ValueError("edges is empty: at least one edge type is needed")
    return counts


def sizes_needed(layer: SampledLayer) -> LayerSizes:
    """Returns the sizes of a layer without padding."""
    most_out = {kind: int(np.bincount(senders).max(initial=0)) for kind, (senders, _, _) in layer.ends.items()}
    return LayerSizes(
        {kind: len(nodes) for kind, nodes in layer.nodes.items()},
        {kind: len(senders) for kind, (senders, _, _) in layer.ends.items()},
        most_out,
    )


def largest_sizes(
    edges: Edges, num_targets: Counts, num_repeated: Counts, fanout: Fanout, *, replace: bool
) -> LayerSizes:
    """Returns sizes that no layer with this many targets exceeds.

    Args:
      edges: the edges by type.
      num_targets: by node type; types may be missing.
      num_repeated: by node type, the number of these that may be the same node; types may be missing.
      fanout: the fanout by edge type.
      replace: see `sample_in_edges`.
    """
    counts = node_counts(edges)
    num_edges = {}
    for kind, these in edges.items():
        degrees = these.in_degrees
        if fanout[kind] != ALL:
            of_each = np.where(degrees > 0, fanout[kind], 0)
            degrees = of_each if replace else np.minimum(degrees, fanout[kind])
        repeated = num_repeated.get(kind[2], 0)
        largest = np.sort(degrees)[::-1][: num_targets.get(kind[2], 0) - repeated]
        num_edges[kind] = int(largest.sum() + repeated * degrees.max(initial=0))
    sources = {}
    for node_type, count in counts.items():
        others = sum(number for kind, number in num_edges.items() if kind[0] == node_type)
        sources[node_type] = num_targets.get(node_type, 0) + min(others, count)
    return LayerSizes(sources, num_edges, num_edges)


def padding_buckets(needed: Sequence[LayerSizes], most: Sequence[LayerSizes]) -> tuple[Any, ...]:
    """Returns sizes of the layers, from a little above the measured ones up to the largest possible.

    Args:
      needed: measured sizes of each layer.
      most: largest possible sizes of each layer.
    """
    factor, steps = MARGIN, []
    while not steps or steps[-1] != tuple(most):
        grown = functools.partial(_grown, factor)
        scaled = [size.combine(size, grown) for size in needed]
        steps.append(tuple(a.combine(b, min) for a, b in zip(scaled, most, strict=True)))
        factor *= STEP
    return tuple(steps)


def _grown(factor: float, number: int, _: int) -> int:
    """Returns a multiple that is at least `factor` times as large; a number that was 0 in the trials grows too."""
    return -(-math.ceil(max(number, 1) * factor) // MULTIPLE) * MULTIPLE


def inputs_of(layer: SampledLayer, sizes: LayerSizes) -> dict[str, np.ndarray]:
    """Returns the sources of a layer, by node type, int32 [sources]; -1 for padding."""
    return {kind: filled(nodes, sizes.sources[kind], -1) for kind, nodes in layer.nodes.items()}


def blocks_of(
    layer: SampledLayer,
    sizes: LayerSizes,
    num_targets: Counts,
    edges: Edges,
    fanout: Fanout,
    *,
    left_out: Collection[EdgeType] = (),
) -> dict[EdgeType, Block]:
    """Returns the blocks of a layer, padded, by edge type.

    Args:
      layer: the layer.
      sizes: the sizes of the layer.
      num_targets: by node type, padded number of targets; types may be missing.
      edges: the edges from which it was drawn.
      fanout: the fanout by edge type.
      left_out: the edge types with edges that may have been excluded, so that a target may have no incoming edge.
    """
    blocks = {}
    for kind, (senders, receivers, drawn) in layer.ends.items():
        these = edges[kind]
        sources = layer.nodes[kind[0]]
        targets = layer.nodes[kind[2]][: layer.num_targets[kind[2]]]
        most_in = these.most_in if fanout[kind] == ALL else fanout[kind]
        blocks[kind] = padded_block(
            senders,
            receivers,
            sizes.sources[kind[0]],
            num_targets.get(kind[2], 0),
            num_edges=sizes.edges[kind],
            most_in=most_in_as_many_levels(most_in),
            most_out=most_in_as_many_levels(sizes.most_out[kind]),
            has_zero_in_degree=None if kind in left_out else these.has_zero_in_degree,
            whole_degrees=(these.out_degrees[sources], these.in_degrees[targets]),
            edge_ids=None if these.edge_ids is None else these.edge_ids[drawn],
        )
    return blocks
