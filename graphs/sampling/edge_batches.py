"""Mini-batches of edges: their ends, negatives, and the neighbors of all these, without the edges themselves.

Messages must not use an edge of the mini-batch or its reverse, which would reveal it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling.host_edge_index import HostEdges
from jmp_train.graphs.sampling.sampled_layer import EDGE, Edges, Nodes, SampledLayer, edges_by_type, node_counts
from jmp_train.graphs.sampling.sampler import EdgeIds, LayerSampler, Sizes, checked_fanouts
from jmp_train.graphs.structure import EdgeType, as_count, checked_ends, checked_word, filled, known_ids

Excluded = Mapping[EdgeType, Mapping[EdgeType, np.ndarray]]

Ends = Mapping[EdgeType, tuple[np.ndarray, np.ndarray]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeMiniBatch:
    """The input of a model for some edges and their negatives; padded arrays in the host's memory.

    The ends of edges are indices of rows that the last layer returns. Padding edges have the ends 0. For a graph
    of several types, blocks, edges and their ends are by edge type, inputs and seeds by node type.

    Attributes:
      blocks: a block for each layer, the first layer's first.
      inputs: int32 [sources of the first layer], the nodes whose features the first layer reads, -1 for padding.
      seeds: int32 [most ends], the nodes of the last layer's rows, -1 for padding.
      edge_ids: int32 [batch size], ids of the edges, -1 for padding.
      senders: int32 [batch size], the row of the node that each edge leaves.
      receivers: int32 [batch size], the row of the node that each edge enters.
      negative_receivers: int32 [batch size, negatives], rows of the negatives' receivers.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([0, 1, 2], [1, 2, 0], 3, keep_edge_ids=True)
      >>> sampler = edge_sampler(edges, (2,), [0, 1, 2], [1, 2, 0], batch_size=2, negatives=1)
      >>> batch = sampler.sample([2], np.random.default_rng(0))
      >>> batch.seeds[batch.senders[0]], batch.seeds[batch.receivers[0]], batch.edge_ids.tolist()
      (np.int32(2), np.int32(0), [2, -1])
    """

    blocks: tuple[Any, ...]
    inputs: Any
    seeds: Any
    edge_ids: Any
    senders: Any
    receivers: Any
    negative_receivers: Any


@dataclasses.dataclass(frozen=True)
class EdgeSampler:
    """Draws mini-batches of edges; create it with `edge_sampler`.

    `jmp_train.data.neighbor_batches` takes it, with ids of edges in place of seeds.

    Attributes:
      neighbors: draws the neighbors of the edges' ends.
      ends: by edge type, int32 [edges], senders and receivers of all edges that batches may have.
      batch_size: the largest number of edges, over all types together.
      negatives: number of negatives per edge.
      excluded: by type of a batch's edges and by edge type, int64 [edges, ...], the edges that messages must not use
        when each edge is in a batch; -1 for none.
      sizes: the sizes of the layers, for each shape that batches may have, the smallest first.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([0, 1, 2], [1, 2, 0], 3, keep_edge_ids=True)
      >>> edge_sampler(edges, (2, 2), [0, 1, 2], [1, 2, 0], batch_size=2).batch_size
      2
    """

    neighbors: LayerSampler
    ends: Ends
    batch_size: int
    negatives: int
    excluded: Excluded
    sizes: Sizes

    def sample(self, edge_ids: Ids | Mapping[EdgeType, Ids], random: np.random.Generator) -> EdgeMiniBatch:
        """Returns the mini-batch of some edges.

        Args:
          edge_ids: int [at most the batch size], ids of the edges; by edge type if batches have several.
          random: NumPy's generator; the same one gives the same batch.

        Raises:
          ValueError: there are too many edges, an id is out of range or not an integer, or a type is unknown or
            missing.
        """
        return self.sample_several([edge_ids], random)[0]

    def sample_several(self, parts: Sequence[Any], random: np.random.Generator) -> list[EdgeMiniBatch]:
        """Returns the mini-batches of several lists of edges, all of one shape, as for a `stack`.

        Args:
          parts: the edges of each mini-batch, see `sample`.
          random: see `sample`.

        Raises:
          ValueError: see `sample`.
        """
        parts = [self._checked(ids) for ids in parts]
        found = [self._ends(ids, random) for ids in parts]
        sampler = dataclasses.replace(self.neighbors, sizes=self.sizes)
        several = [
            sampler.layers(nodes, random, self._left_out(ids)) for ids, (nodes, _) in zip(parts, found, strict=True)
        ]
        left_out = {other for others in self.excluded.values() for other in others}
        padded = sampler.padded(several, left_out)
        return [self._batch(*each) for each in zip(padded, parts, found, strict=True)]

    def layers_on_trial(self, random: np.random.Generator) -> list[SampledLayer]:
        """Returns the layers, without padding, of a batch of randomly drawn edges.

        Args:
          random: NumPy's generator.
        """
        counts = np.array([len(senders) for senders, _ in self.ends.values()])
        total = int(counts.sum())
        drawn = random.choice(total, min(self.batch_size, total), replace=False)
        ids = {}
        for kind, count, end in zip(self.ends, counts, counts.cumsum(), strict=True):
            places = drawn - (end - count)
            ids[kind] = places[(places >= 0) & (places < count)]
        return self.neighbors.layers(self._ends(ids, random)[0], random, self._left_out(ids))

    def _checked(self, edge_ids: Any) -> dict[EdgeType, np.ndarray]:
        by_type: Mapping[EdgeType, Any] = edge_ids
        if not isinstance(edge_ids, Mapping):
            if len(self.ends) > 1:
                raise ValueError(f"edge_ids must be a mapping from edge types: {', '.join(map(str, self.ends))}")
            by_type = {next(iter(self.ends)): edge_ids}
        for kind in by_type:
            if kind not in self.ends:
                known = ", ".join(map(str, self.ends))
                raise ValueError(f"edge_ids has edge type {kind!r}, which is not one of the sampler's: {known}")
        ids = {kind: np.empty(0, np.int32) for kind in self.ends}
        for kind, some in by_type.items():
            ids[kind] = known_ids("edge_ids", some, len(self.ends[kind][0]), "edges")
        count = sum(map(len, ids.values()))
        if count > self.batch_size:
            raise ValueError(f"edge_ids must be at most {self.batch_size} edges, the batch size, got {count}")
        return ids

    def _left_out(self, ids: EdgeIds) -> EdgeIds:
        """Returns the edges that messages must not use, by edge type."""
        found: dict[EdgeType, list[np.ndarray]] = {}
        for kind, others in self.excluded.items():
            for other, table in others.items():
                found.setdefault(other, []).append(table[ids[kind]].ravel())
        return {kind: np.unique(np.concatenate(several)) for kind, several in found.items()}

    def _ends(self, ids: EdgeIds, random: np.random.Generator) -> tuple[Nodes, dict[EdgeType, list[np.ndarray]]]:
        """Returns the distinct nodes at the ends of edges and negatives, by type, and the indices of the ends.

        Indices are those of senders, receivers and negatives, by edge type.
        """
        lists: dict[str, list[np.ndarray]] = {}
        for kind, (senders, receivers) in self.ends.items():
            num_nodes = self.neighbors.edges[kind].num_targets
            negatives = random.integers(0, max(num_nodes, 1), len(ids[kind]) * self.negatives)
            lists.setdefault(kind[0], []).append(senders[ids[kind]])
            lists.setdefault(kind[2], []).extend([receivers[ids[kind]], negatives])
        nodes, places = {}, {}
        for node_type, several in lists.items():
            nodes[node_type], each = np.unique(np.concatenate(several), return_inverse=True)
            places[node_type] = iter(np.split(each, np.cumsum([len(some) for some in several])))
        # in the order of insertion
        return nodes, {kind: [next(places[end]) for end in (kind[0], kind[2], kind[2])] for kind in self.ends}

    def _batch(
        self,
        padded: tuple[tuple[Any, ...], Any],
        ids: EdgeIds,
        found: tuple[Nodes, Mapping[EdgeType, Sequence[np.ndarray]]],
    ) -> EdgeMiniBatch:
        (nodes, places), size, alone = found, self.batch_size, self.neighbors.alone
        negatives = {kind: filled(rows, size * self.negatives, 0) for kind, (_, _, rows) in places.items()}
        return EdgeMiniBatch(
            *padded,
            alone({kind: filled(nodes[kind], count, -1) for kind, count in self.neighbors.num_seeds.items()}),
            alone({kind: filled(rows, size, -1) for kind, rows in ids.items()}),
            alone({kind: filled(rows, size, 0) for kind, (rows, _, _) in places.items()}),
            alone({kind: filled(rows, size, 0) for kind, (_, rows, _) in places.items()}),
            alone({kind: rows.reshape(size, self.negatives) for kind, rows in negatives.items()}),
        )


def edge_sampler(
    edges: HostEdges | Mapping[EdgeType, HostEdges],
    fanouts: Sequence[int | Mapping[EdgeType, int]],
    senders: Ids | Mapping[EdgeType, Ids],
    receivers: Ids | Mapping[EdgeType, Ids],
    batch_size: int,
    *,
    negatives: int = 0,
    exclude: str | None = "self",
    reverse_ids: Ids | Mapping[EdgeType, Ids] | None = None,
    reverse_types: Mapping[EdgeType, EdgeType] | None = None,
    replace: bool = False,
    num_trials: int = 16,
) -> EdgeSampler:
    """Returns a sampler of edges with the neighbors of their ends.

    A model that predicts whether an edge exists must not see it. So messages do not use edges of the batch and,
    with "reverse" or "reverse_types", their reverses.

    Args:
      edges: the edges for messages, created with `keep_edge_ids=True`; of one type, or of several.
      fanouts: see `neighbor_sampler`.
      senders: int [edges], the node that each edge leaves, in the order passed to `host_edges`. For several types,
        by edge type, for the types whose edges batches have.
      receivers: int [edges], the node that each edge enters; as `senders`.
      batch_size: number of edges per batch, over all types together. Each type is padded to this number.
      negatives: number of negatives per edge: its sender with nodes drawn uniformly from the receivers' type.
      exclude: "self", "reverse", "reverse_types", or None to exclude no edge.
      reverse_ids: int [edges], the reverse of each edge among those of its own type, or -1; for "reverse".
        `reverse_edge_ids` finds them. By edge type if `senders` are.
      reverse_types: the type whose edges are the reverse of each type's, in the same order; for "reverse_types".
      replace: see `neighbor_sampler`.
      num_trials: number of trial batches of edges, with their negatives, that measure the sizes of layers.

    Returns:
      The sampler.

    Raises:
      TypeError: a number or ids are not integers, or an argument for several types is not by edge type.
      ValueError: see `neighbor_sampler`; or there are no edges, `exclude` is unknown, `reverse_ids` or
        `reverse_types` do not fit it, edges were created without their ids, their numbers differ, or an edge's reverse
        is wrong.

    Example:
      >>> import numpy as np
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([0, 1, 2], [1, 2, 0], 3, keep_edge_ids=True)
      >>> sampler = edge_sampler(edges, (-1,), [0, 1, 2], [1, 2, 0], batch_size=1)
      >>> batch = sampler.sample([0], np.random.default_rng(0))  # 0 to 1
      >>> batch.blocks[0].in_degrees[batch.receivers].tolist()  # nobody else sends to 1
      [0]
      >>> plays, played = ("user", "plays", "game"), ("game", "played by", "user")
      >>> several = {
      ...     plays: host_edges([0, 1], [0, 0], 2, 1, keep_edge_ids=True),
      ...     played: host_edges([0, 0], [0, 1], 1, 2, keep_edge_ids=True),
      ... }
      >>> options = {"exclude": "reverse_types", "reverse_types": {plays: played}}
      >>> sampler = edge_sampler(several, (-1,), {plays: [0, 1]}, {plays: [0, 0]}, batch_size=1, **options)
      >>> batch = sampler.sample({plays: [0]}, np.random.default_rng(0))
      >>> batch.blocks[0][plays].in_degrees.tolist(), batch.blocks[0][played].in_degrees.tolist()
      ([1], [0])

    Reference: as_edge_prediction_sampler of Deep Graph Library, https://www.dgl.ai.
    """
    is_alone = isinstance(edges, HostEdges)
    by_type = edges_by_type(edges)
    ends = _checked_ends(by_type, *(_by_type(name, ids, is_alone) for name, ids in _named(senders, receivers)))
    size, num_negatives = as_count("batch_size", batch_size, least=1), as_count("negatives", negatives)
    trials = as_count("num_trials", num_trials, least=1)
    own_reverse = None if reverse_ids is None else _by_type("reverse_ids", reverse_ids, is_alone)
    excluded = checked_exclusion(by_type, ends, exclude, own_reverse, reverse_types)
    most_ends = _most_ends(by_type, ends, size, num_negatives)
    neighbors = LayerSampler(by_type, checked_fanouts(fanouts, by_type), most_ends, replace)
    sampler = EdgeSampler(neighbors, ends, size, num_negatives, excluded, ())
    tried = (sampler.layers_on_trial(np.random.default_rng(trial)) for trial in range(trials))
    return dataclasses.replace(sampler, sizes=neighbors.measured_sizes(tried, neighbors.most_sizes({})))


def _named(senders: Any, receivers: Any) -> tuple[tuple[str, Any], ...]:
    return ("senders", senders), ("receivers", receivers)


def _by_type(name: str, ids: Any, is_alone: bool) -> Mapping[EdgeType, Any]:
    if is_alone:
        return {EDGE: ids}
    if not isinstance(ids, Mapping):
        raise TypeError(f"{name} must be a mapping from edge types, like edges, got {type(ids).__name__}")
    return ids


def _checked_ends(edges: Edges, senders: Mapping[EdgeType, Any], receivers: Mapping[EdgeType, Any]) -> Ends:
    node_counts(edges)  # raises if types disagree
    ends = {}
    for kind in {**senders, **receivers}:
        where = "" if kind == EDGE else f" of {kind}"
        for name, given in _named(senders, receivers):
            if kind not in given:
                raise ValueError(f"{name} lacks edge type {kind!r}")
        if kind not in edges:
            raise ValueError(f"senders has edge type {kind!r}, which edges lack")
        these = edges[kind]
        pair = checked_ends(senders[kind], receivers[kind], these.num_sources, these.num_targets, where=where)
        if len(pair[0]) != these.num_edges:
            raise ValueError(f"senders{where} has {len(pair[0])} edges, but edges has {these.num_edges}")
        ends[kind] = (pair[0].astype(np.int32), pair[1].astype(np.int32))
    if not any(len(pair[0]) for pair in ends.values()):
        raise ValueError("senders is empty: there are no edges to sample")
    return ends


def _most_ends(edges: Edges, ends: Ends, size: int, negatives: int) -> dict[str, int]:
    """Returns the largest number of nodes of each type at the ends of a batch's edges and negatives."""
    counts, most = node_counts(edges), {}
    for kind in ends:
        for node_type in (kind[0], kind[2]):
            of_each = (kind[0] == node_type) + (kind[2] == node_type) * (1 + negatives)
            most[node_type] = max(most.get(node_type, 0), min(size * of_each, counts[node_type]))
    return most


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
