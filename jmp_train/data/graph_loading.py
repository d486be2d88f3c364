"""Mini-batches of graphs for training loops: shuffled, sampled, and moved to the device ahead of time."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jmp_train.data.array_loading import check_integers, check_order, check_process
from jmp_train.data.device_batches import is_shared, on_devices, stacked_count
from jmp_train.extras import extra_packages
from jmp_train.graphs import EdgeSampler, NeighborSampler, SaintSampler, SkipGramSampler
from jmp_train.graphs.structure import EdgeType
from jmp_train.graphs.structure import stack as graph_stack
from jmp_train.policies.pytrees import check_flag


def neighbor_batches(
    sampler: NeighborSampler | EdgeSampler | SkipGramSampler | SaintSampler,
    seeds: ArrayLike | Sequence[int] | Mapping[EdgeType, ArrayLike],
    fetch: Callable[[Any], Any],
    *,
    seed: int = 0,
    epochs: int | None = 1,
    shuffle: bool = True,
    drop_remainder: bool = False,
    process_index: int = 0,
    process_count: int = 1,
    num_threads: int = 1,
    prefetch: int = 4,
    device: Any = None,
    stack: int | None = None,
) -> Any:
    """Returns an iterator over sampled mini-batches of seeds, made by threads through grain.

    The batches are the same on every run, whatever the threads. All processes have the same number of
    batches, with different seeds.

    Args:
      sampler: draws neighbors, walks or subgraphs.
      seeds: int [nodes], the nodes to train on. For an `EdgeSampler`, int [edges], the edges, or edges by type if
        batches have several types, which are shuffled together.
      fetch: returns the input of the step, given a batch of the sampler: it adds features and labels, by
        `take_rows`. It runs on the host, in a thread.
      seed: seed of the order and of the neighbors, both different in each epoch; below 2**32.
      epochs: passes over the seeds; None for no end.
      shuffle: True to shuffle the seeds.
      drop_remainder: True to leave out the last, incomplete batch of an epoch; otherwise it is padded.
      process_index: index of this process.
      process_count: number of processes that share the seeds; fewer seeds than that are left out in an epoch.
      num_threads: number of threads that sample and fetch.
      prefetch: number of batches made ahead of time.
      device: a device or a sharding for the batches; None for the first device of this process. Over several
        processes, mini-batches have the sampler's largest sizes, so that all processes have the same.
      stack: number of mini-batches of this process in one `jmp_train.graphs.stack` of the results of `fetch`:
        one for each of its devices and micro-batches. The last, incomplete batch of an epoch is left out.
        None for one mini-batch outside a stack.

    Returns:
      An iterator, with grain's `get_state` and `set_state`.

    Raises:
      ValueError: there are too few seeds for a batch of each process, or a number is out of range.

    Example:
      >>> from jmp_train.graphs import host_edges, neighbor_sampler, take_rows
      >>> edges = host_edges([1, 2, 3, 0], [0, 0, 1, 2], 4)
      >>> seeds, features = np.arange(4), np.eye(4, dtype=np.float32)
      >>> sampler = neighbor_sampler(edges, (2,), seeds, batch_size=2)
      >>> def fetch(batch):
      ...     return {"block": batch.blocks[0], "features": take_rows(features, batch.inputs)}
      >>> batches = neighbor_batches(sampler, seeds, fetch, epochs=2)
      >>> sum(int(batch["block"].num_targets) for batch in batches)
      8
    """
    with extra_packages():
        import grain

    num_seeds, chosen = _choice(seeds)
    check_order(seed, epochs)
    check_process(process_index, process_count)
    check_integers(num_threads=num_threads, prefetch=prefetch)
    check_flag("shuffle", shuffle)
    check_flag("drop_remainder", drop_remainder)
    share = num_seeds // process_count
    size = sampler.batch_size * stacked_count(stack)
    drop_remainder = drop_remainder or stack is not None  # a mini-batch without seeds has no mean loss
    if is_shared(device):
        sampler = dataclasses.replace(sampler, sizes=sampler.sizes[-1:])
    least = size if drop_remainder else 1
    if share < least:
        raise ValueError(
            f"seeds has {num_seeds} nodes, {share} for each of {process_count} processes, but a batch needs {least}"
        )

    def sample(places: np.ndarray, random: np.random.Generator) -> Any:
        if stack is None:
            return fetch(sampler.sample(chosen(places), random))
        parts = [chosen(part) for part in np.split(places, stack)]
        return graph_stack([fetch(batch) for batch in sampler.sample_several(parts, random)])

    places = grain.MapDataset.range(num_seeds)
    if shuffle:
        places = places.shuffle(seed=seed)
    own = places[: share * process_count][process_index::process_count]
    own_seed = int(np.random.SeedSequence([seed, process_index]).generate_state(1)[0])
    batches = (
        own.batch(size, drop_remainder=drop_remainder, batch_fn=np.asarray)
        .random_map(sample, seed=own_seed)
        .repeat(epochs)
        .to_iter_dataset(grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch))
    )
    return on_devices(batches, device)


def _choice(seeds: Any) -> tuple[int, Callable[[np.ndarray], Any]]:
    """Returns the number of seeds over all types, and a function from places to seeds by type."""
    if not isinstance(seeds, Mapping):
        array = np.asarray(seeds)
        return len(array), lambda places: array[places]
    by_type = {kind: np.asarray(ids) for kind, ids in seeds.items()}
    ends = dict(zip(by_type, np.cumsum([len(ids) for ids in by_type.values()]), strict=True))

    def chosen(places: np.ndarray) -> dict[EdgeType, np.ndarray]:
        found = {}
        for kind, ids in by_type.items():
            own = places - (ends[kind] - len(ids))
            found[kind] = ids[own[(own >= 0) & (own < len(ids))]]
        return found

    return sum(map(len, by_type.values())), chosen
