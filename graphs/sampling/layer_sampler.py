"""The common base of samplers of mini-batches: layers of sampled neighbors, and their padded sizes."""

import dataclasses
import functools
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax.core import FrozenDict

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
    inputs_of,
    largest_sizes,
    padding_buckets,
    sample_layer,
    sizes_needed,
)
from jmp_train.graphs.structure import EdgeType, as_count

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
