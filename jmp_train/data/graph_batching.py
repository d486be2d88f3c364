"""Batches of graphs for training loops, of many small ones or sampled from one: shuffled, padded, moved to devices.

The order is that in which grain shuffles examples, computed for a whole epoch at once. grain finds the place of one
example by a cipher on at least 2**16 numbers, applied until the result is an existing place: 350 times for 188
examples. Here the cipher is applied to all numbers at once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jmp_train.data.array_loading import (
    check_integers,
    check_order,
    check_process,
    is_shared,
    on_devices,
    stacked_count,
)
from jmp_train.extras import extra_packages
from jmp_train.graphs import (
    EdgeSampler,
    GraphData,
    NeighborSampler,
    PaddedSize,
    SaintSampler,
    SkipGramSampler,
    padded_batch,
    padded_sizes,
)
from jmp_train.graphs.datasets import first_that_holds
from jmp_train.graphs.structure import EdgeType, Graph
from jmp_train.graphs.structure import stack as graph_stack
from jmp_train.policies.pytrees import check_flag


def graph_batches(
    data: GraphData,
    batch_size: int,
    *,
    places: ArrayLike | Sequence[int] | None = None,
    sizes: Sequence[PaddedSize] | None = None,
    prepare: Callable[[Graph], Graph] = lambda graph: graph,
    seed: int = 0,
    epochs: int | None = 1,
    start: int = 0,
    shuffle: bool = True,
    drop_remainder: bool = False,
    formats: Sequence[str] | None = None,
    process_index: int = 0,
    process_count: int = 1,
    num_threads: int = 1,
    prefetch: int = 4,
    device: Any = None,
    stack: int | None = None,
) -> Any:
    """Returns an iterator over batches of graphs, padded to a few sizes and made by threads through grain.

    The batches are the same on every run, whatever the threads. The graphs of a step and their padded size are the same
    for any number of processes and devices that share them. A program is compiled once per size.

    Args:
      data: the graphs.
      batch_size: graphs per padded graph.
      places: int [some graphs], the graphs to use; None for all.
      sizes: sizes to which batches are padded, ascending: each to the first that holds it. None for `padded_sizes`.
      prepare: changes a padded graph; runs on the host, in a thread.
      seed: seed of the order, which differs between epochs; below 2**32.
      epochs: passes over the graphs; None for no end.
      start: number of batches to skip, for a run that continues.
      shuffle: True to shuffle the graphs.
      drop_remainder: True to leave out the last, incomplete batch of an epoch; otherwise it gets padding graphs.
        Several processes and stacks always leave it out.
      formats: see `pad`.
      process_index: index of this process.
      process_count: number of processes that share the graphs of a step.
      num_threads: number of threads that make batches.
      prefetch: number of batches made ahead of time.
      device: a device or a sharding for the batches; None for the first device of this process.
      stack: number of padded graphs of this process in one `jmp_train.graphs.stack`: one for each of its
        devices and micro-batches. None for one graph outside a stack.

    Returns:
      An iterator over dictionaries of a "graph", its "label" [n_graph, ...], 0 for padding, and the other
      features of its graphs, by name; or over stacks of such dictionaries. It has grain's `get_state` and `set_state`.

    Raises:
      ValueError: there are too few graphs for a step, no size holds a batch, or a number is out of range.

    Example:
      >>> from jmp_train.graphs import graph_mask, synthetic_proteins
      >>> batches = graph_batches(synthetic_proteins(20), batch_size=8)
      >>> sum(int(graph_mask(batch["graph"]).sum()) for batch in batches)
      20
    """
    with extra_packages():
        import grain

    check_order(seed, epochs, start)
    check_process(process_index, process_count)
    check_integers(num_threads=num_threads, prefetch=prefetch)
    check_flag("shuffle", shuffle)
    check_flag("drop_remainder", drop_remainder)
    own = stacked_count(stack)
    parts = own * process_count
    chosen = np.arange(len(data)) if places is None else np.asarray(places)
    known = padded_sizes(data, batch_size, places=chosen) if sizes is None else tuple(sizes)
    drop_remainder = drop_remainder or parts > 1
    if len(chosen) < (batch_size * parts if drop_remainder else 1):
        raise ValueError(f"there are {len(chosen)} graphs, but a step needs {batch_size * parts}")

    def dictionary(graphs: np.ndarray, size: PaddedSize) -> dict[str, Any]:
        of_graphs = {"label": data.labels, **data.graphs}
        rows = {name: _filled(array[graphs], size.n_graph) for name, array in of_graphs.items()}
        return {"graph": prepare(padded_batch(data, graphs, size, formats=formats)), **rows}

    size_of_step = batch_size * parts
    steps = len(chosen) // size_of_step if drop_remainder else -(-len(chosen) // size_of_step)

    def fetch(number: int, step: int) -> Any:
        epoch_seed = (int(seed) + number // steps) % 2**32
        order = shuffled_order(len(chosen), epoch_seed) if shuffle else np.arange(len(chosen))
        graphs = chosen[order[step * size_of_step : (step + 1) * size_of_step]]
        shares = np.split(graphs, parts)
        size = first_that_holds(data, known, shares)
        mine = shares[process_index * own : (process_index + 1) * own]
        found = [dictionary(share, size) for share in mine]
        return found[0] if stack is None else graph_stack(found)

    batches = (
        grain.MapDataset.range(steps)
        .repeat(epochs)
        .map_with_index(fetch)[start:]
        .to_iter_dataset(grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch))
    )
    return on_devices(batches, device)


def _filled(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


_ROUNDS = 4
_LEAST_BITS = 16


@functools.lru_cache(maxsize=4)
def shuffled_order(count: int, seed: int) -> np.ndarray:
    """Returns the order of one epoch, int64 [count], equal to that of grain's `MapDataset.shuffle`.

    It takes the memory of at most `4 * count`, or 2**16, numbers.

    Args:
      count: number of examples.
      seed: seed of the epoch, below 2**32: grain adds the number of the epoch to the seed of the data set.

    Example:
      >>> shuffled_order(5, seed=0).tolist()
      [0, 4, 1, 2, 3]

    References:
      Beaulieu et al., The SIMON and SPECK families of lightweight block ciphers, 2013.
      Black and Rogaway, Ciphers with arbitrary finite domains, 2002: cycle walking.
    """
    if count < 2:
        return np.arange(count)
    bits = math.ceil(math.log2(count - 1))
    bits = max(bits + bits % 2, _LEAST_BITS)
    word = np.uint32 if bits <= 32 else np.uint64
    found = _simon(np.arange(2**bits, dtype=word), bits // 2, _round_keys(seed)).astype(np.int64)
    for _ in range(bits - count.bit_length() - 2):  # each pass doubles the number of cipher steps
        found = np.where(found < count, found, found[found])
    order = found[np.arange(count) % 2**bits]
    while (is_beyond := order >= count).any():
        order[is_beyond] = found[order[is_beyond]]
    order.flags.writeable = False  # the next caller gets the same array
    return order


def _simon(values: np.ndarray, width: int, keys: list[int]) -> np.ndarray:
    """Returns the cipher's results for values of two words, each of `width` bits."""
    mask = 2**width - 1  # a word's bits; the arrays keep their unsigned integer dtype

    def mixed(word: np.ndarray) -> np.ndarray:
        by_1, by_2, by_8 = ((word << shift | word >> width - shift) & mask for shift in (1, 2, 8))
        return by_1 & by_8 ^ by_2

    left, right = values >> width, values & mask
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ mixed(right) ^ (first & mask)
        right = right ^ mixed(left) ^ (second & mask)
    return left << width | right


def _round_keys(seed: int) -> list[int]:
    """Returns the words that C++'s `std::seed_seq` of one seed generates."""
    count, given, mask = _ROUNDS, [seed % 2**32], 2**32 - 1
    words = [0x8B8B8B8B] * count
    apart = (count - 1) // 2
    middle = (count - apart) // 2
    rounds = max(len(given) + 1, count)

    def scrambled(number: int) -> int:
        return number ^ number >> 27

    for k in range(rounds):
        here, near, far = k % count, (k + middle) % count, (k + middle + apart) % count
        first = 1664525 * scrambled(words[here] ^ words[near] ^ words[k - 1 if k else count - 1]) & mask
        second = first + (len(given) if k == 0 else here + given[k - 1] if k <= len(given) else here) & mask
        words[near], words[far] = words[near] + first & mask, words[far] + second & mask
        words[here] = second
    for k in range(rounds, rounds + count):
        here, near, far = k % count, (k + middle) % count, (k + middle + apart) % count
        third = 1566083941 * scrambled(words[here] + words[near] + words[(k - 1) % count] & mask) & mask
        fourth = third - here & mask
        words[near], words[far] = words[near] ^ third, words[far] ^ fourth
        words[here] = fourth
    return words


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
