"""Mini-batches of a graph that is larger than the device's memory: sampled neighbors, in blocks of fixed shapes.

A layer's targets are the first of its sources, and the sources of one layer are the targets of the one
before it. All arrays are padded to sizes that were measured once, so that one compiled program serves all
batches. A larger batch takes the next sizes, and no batch loses an edge.
"""

import dataclasses
import functools
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling.host_edge_index import ALL, HostEdges
from jmp_train.graphs.sampling.sampled_layer import (
    EDGE,
    Counts,
    Edges,
    Fanout,
    LayerSizes,
    Nodes,
    SampledLayer,
    blocks_of,
    edges_by_type,
    inputs_of,
    largest_sizes,
    node_counts,
    padding_buckets,
    sample_layer,
    sizes_needed,
)
from jmp_train.graphs.structure import EdgeType, as_count, checked_word, filled, known_ids
from jmp_train.policies.pytrees import check_flag

Sizes = tuple[tuple[LayerSizes, ...], ...]
EdgeIds = Mapping[EdgeType, np.ndarray]


@dataclasses.dataclass(frozen=True)
class LayerSampler:
    """Draws the layers of mini-batches, with seeds of one node type or of several.

    Attributes:
      edges: the edges by type.
      fanouts: for each layer, by edge type, number of edges drawn per node.
      num_seeds: by node type, the largest number of seeds; types may be missing.
      replace: whether edges are drawn with replacement.
      sizes: the sizes of the layers, for each shape that batches may have, the smallest first.
    """

    edges: Edges
    fanouts: tuple[Fanout, ...]
    num_seeds: Counts
    replace: bool
    sizes: Sizes = ()

    def layers(self, seeds: Nodes, random: np.random.Generator, excluded: EdgeIds | None = None) -> list[SampledLayer]:
        """Returns the layers of a batch without padding, the first layer's first.

        Args:
          seeds: by node type, int [seeds].
          random: NumPy's generator.
          excluded: see `sample_layer`.
        """
        layers, targets = [], seeds
        for fanout in reversed(self.fanouts):
            layer = sample_layer(self.edges, targets, fanout, random, replace=self.replace, excluded=excluded)
            layers.append(layer)
            targets = layer.nodes
        return layers[::-1]

    def padded(
        self, several: Sequence[Sequence[SampledLayer]], left_out: Collection[EdgeType] = ()
    ) -> list[tuple[tuple[Any, ...], Any]]:
        """Returns the blocks and the inputs of several batches, all of one shape, for a `MiniBatch`.

        Args:
          several: the layers of each batch.
          left_out: the edge types with edges that may have been excluded.
        """
        sizes = _fitting(self.sizes, several)
        num_targets = [*(size.sources for size in sizes[1:]), self.num_seeds]
        padded = []
        for layers in several:
            blocks = [
                blocks_of(layer, size, counts, self.edges, fanout, left_out=left_out)
                for layer, size, counts, fanout in zip(layers, sizes, num_targets, self.fanouts, strict=True)
            ]
            padded.append((tuple(map(self.alone, blocks)), self.alone(inputs_of(layers[0], sizes[0]))))
        return padded

    def alone(self, by_type: Mapping[Any, Any]) -> Any:
        """Returns the single value if the graph has one type, or the mapping if it has several."""
        is_alone = set(self.edges) == {EDGE}
        return next(iter(by_type.values())) if is_alone else FrozenDict(by_type)

    def most_sizes(self, num_repeated: Counts) -> tuple[LayerSizes, ...]:
        """Returns sizes that no batch exceeds.

        Args:
          num_repeated: by node type, the number of seeds that may be the same node; types may be missing.
        """
        most, num_targets = [], self.num_seeds
        for fanout in reversed(self.fanouts):
            most.append(largest_sizes(self.edges, num_targets, num_repeated, fanout, replace=self.replace))
            num_targets = most[-1].sources
        return tuple(most[::-1])

    def measured_sizes(self, trials: Iterable[Sequence[SampledLayer]], most: Sequence[LayerSizes]) -> Sizes:
        """Returns sizes that hold some batches, with room for the seeds in all layers, and larger ones.

        Args:
          trials: the layers of each of these batches.
          most: for each layer, sizes that no batch exceeds.
        """
        needed = ([sizes_needed(layer) for layer in layers] for layers in trials)
        largest = functools.reduce(_larger, needed)
        seeds = self.num_seeds
        with_seeds = [
            dataclasses.replace(size, sources={kind: max(n, seeds.get(kind, 0)) for kind, n in size.sources.items()})
            for size in largest
        ]
        return padding_buckets(with_seeds, most)


def checked_fanouts(fanouts: Sequence[int | Fanout], edges: Edges) -> tuple[dict[EdgeType, int], ...]:
    """Returns fanouts by edge type, for each layer; raises as `neighbor_sampler` does.

    Args:
      fanouts: see `neighbor_sampler`.
      edges: the edges by type.
    """
    if not fanouts:
        raise ValueError("fanouts is empty: at least one layer is needed")
    return tuple(_checked_fanout(fanout, edges) for fanout in fanouts)


def _checked_fanout(fanout: int | Fanout, edges: Mapping[EdgeType, HostEdges]) -> dict[EdgeType, int]:
    by_type = fanout if isinstance(fanout, Mapping) else dict.fromkeys(edges, fanout)
    for kind in edges:
        if kind not in by_type:
            raise ValueError(f"fanouts lacks edge type {kind!r}")
        number = by_type[kind]
        is_integer = isinstance(number, int) and not isinstance(number, bool)
        if not is_integer or (number != ALL and number < 1):
            raise ValueError(f"fanout {reprlib.repr(number)} must be a positive integer, or -1 for all")
        if number != ALL:
            as_count("fanout", number)
    return {kind: by_type[kind] for kind in edges}


def _fitting(sizes: Sizes, several: Sequence[Sequence[SampledLayer]]) -> tuple[LayerSizes, ...]:
    """Returns the smallest sizes that hold all layers of several mini-batches."""
    needed = [[sizes_needed(layer) for layer in layers] for layers in several]
    for step in sizes:
        if all(size.hold(need) for each in needed for size, need in zip(step, each, strict=True)):
            return step
    raise AssertionError("the largest sizes hold every batch")


def _larger(some: Sequence[LayerSizes], others: Sequence[LayerSizes]) -> list[LayerSizes]:
    return [a.combine(b, max) for a, b in zip(some, others, strict=True)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """The input of a model for some nodes, its seeds; padded arrays in the host's memory.

    Attributes:
      blocks: a block for each layer, the first layer's first; by edge type if there are several.
      inputs: int32 [sources of the first layer], the nodes whose features the first layer reads, -1 for
        padding; by node type if there are several. It begins with the seeds.
      seeds: int32 [batch size], the nodes of the last layer's result, -1 for padding.

    Example:
      >>> import numpy as np
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([1, 2], [0, 0], 3)
      >>> sampler = neighbor_sampler(edges, (2,), seeds=[0], batch_size=2)
      >>> batch = sampler.sample([0], np.random.default_rng(0))
      >>> batch.seeds.tolist(), sorted(batch.inputs[:3].tolist())
      ([0, -1], [0, 1, 2])
    """

    blocks: tuple[Any, ...]
    inputs: Any
    seeds: Any


@dataclasses.dataclass(frozen=True)
class NeighborSampler:
    """Draws neighbors for mini-batches; create it with `neighbor_sampler`.

    Attributes:
      edges: the edges by type.
      fanouts: for each layer, by edge type, number of edges drawn per node.
      seed_type: the type of the seeds.
      batch_size: the largest number of seeds.
      replace: whether edges are drawn with replacement.
      sizes: the sizes of the layers, for each shape that batches may have, the smallest first.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> sampler = neighbor_sampler(host_edges([1, 2], [0, 0], 3), (2, -1), seeds=[0], batch_size=2)
      >>> len(sampler.fanouts), sampler.batch_size
      (2, 2)
    """

    edges: Edges
    fanouts: tuple[Mapping[EdgeType, int], ...]
    seed_type: str
    batch_size: int
    replace: bool
    sizes: tuple[tuple[LayerSizes, ...], ...] = ()

    def sample(self, seeds: Ids, random: np.random.Generator) -> MiniBatch:
        """Returns the mini-batch of some seeds.

        Args:
          seeds: int [at most the batch size].
          random: NumPy's generator; the same one gives the same batch.

        Raises:
          TypeError: seeds are not integers.
          ValueError: there are too many seeds, or one is out of range.
        """
        return self.sample_several([seeds], random)[0]

    def sample_several(self, parts: Sequence[Any], random: np.random.Generator) -> list[MiniBatch]:
        """Returns the mini-batches of several lists of seeds, all of one shape, as for a `stack`.

        Args:
          parts: the seeds of each mini-batch, see `sample`.
          random: see `sample`.

        Raises:
          TypeError: see `sample`.
          ValueError: see `sample`.
        """
        parts = [self._checked_seeds(seeds) for seeds in parts]
        padded = zip(self._sampler.padded([self.layers(seeds, random) for seeds in parts]), parts, strict=True)
        return [MiniBatch(*each, filled(seeds, self.batch_size, -1)) for each, seeds in padded]

    def layers(self, seeds: np.ndarray, random: np.random.Generator) -> list[SampledLayer]:
        """Returns the layers without padding, the first layer's first."""
        return self._sampler.layers({self.seed_type: seeds}, random)

    @property
    def _sampler(self) -> LayerSampler:
        return LayerSampler(self.edges, self.fanouts, {self.seed_type: self.batch_size}, self.replace, self.sizes)

    def _checked_seeds(self, seeds: Ids) -> np.ndarray:
        seeds = known_ids("seeds", seeds, node_counts(self.edges)[self.seed_type])
        if len(seeds) > self.batch_size:
            raise ValueError(f"seeds must be at most {self.batch_size} nodes, the batch size, got {len(seeds)}")
        return seeds


def neighbor_sampler(
    edges: HostEdges | Mapping[EdgeType, HostEdges],
    fanouts: Sequence[int | Mapping[EdgeType, int]],
    seeds: Ids,
    batch_size: int,
    *,
    seed_type: str | None = None,
    replace: bool = False,
    num_trials: int = 16,
) -> NeighborSampler:
    """Returns a sampler of neighbors, with the sizes that its batches need.

    Sizes are a tenth larger than those of the largest of some trial batches. A batch that does not
    fit takes the next sizes, half as large again, and so on up to the largest possible ones.

    Args:
      edges: the edges of one type, or of several.
      fanouts: for each layer, the first layer's first, number of edges drawn per node; -1 for all
        edges. By edge type if types differ.
      seeds: int [nodes], the nodes to train on, from which trial batches are drawn.
      batch_size: number of seeds per batch.
      seed_type: the type of the seeds, if there are several node types.
      replace: whether edges are drawn with replacement.
      num_trials: number of trial batches.

    Returns:
      The sampler.

    Raises:
      ValueError: a fanout is neither positive nor -1, or is missing; a type is unknown; node counts
        of edge types disagree; there are no seeds; the batch size is not positive.
      TypeError: the batch size is not an integer, or edges or fanouts are of another type.

    Example:
      >>> import numpy as np
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([1, 2, 3, 0], [0, 0, 0, 1], 4)
      >>> sampler = neighbor_sampler(edges, (2, 2), seeds=np.arange(4), batch_size=2)
      >>> batch = sampler.sample([0, 1], np.random.default_rng(0))
      >>> [block.num_targets for block in batch.blocks][-1], batch.blocks[-1].in_degrees.tolist()
      (2, [2, 1])

    Reference: Hamilton et al., Inductive Representation Learning on Large Graphs,
    https://arxiv.org/abs/1706.02216; DGL's NeighborSampler.
    """
    by_type = edges_by_type(edges)
    if isinstance(fanouts, int):
        raise TypeError(f"fanouts={fanouts} must have one number for each layer: ({fanouts},) for one layer")
    counts = node_counts(by_type)
    as_count("batch_size", batch_size, least=1)
    check_flag("replace", replace)
    if seed_type is None and len(counts) > 1:
        raise ValueError(f"seed_type is needed, one of {', '.join(map(repr, counts))}")
    seed_type = next(iter(counts)) if seed_type is None else seed_type
    checked_word("seed_type", seed_type, counts)
    seeds = known_ids("seeds", seeds, counts[seed_type])
    if len(seeds) == 0:
        raise ValueError("seeds is empty")
    as_count("num_trials", num_trials, least=1)
    num_seeds = {seed_type: batch_size}
    layers = LayerSampler(by_type, checked_fanouts(fanouts, by_type), num_seeds, replace)
    trials = (np.random.default_rng(trial) for trial in range(num_trials))
    some = (layers.layers({seed_type: random.permutation(seeds)[:batch_size]}, random) for random in trials)
    sizes = layers.measured_sizes(some, layers.most_sizes(num_seeds))
    return NeighborSampler(by_type, layers.fanouts, seed_type, batch_size, replace, sizes)
