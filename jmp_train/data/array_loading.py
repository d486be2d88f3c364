"""Batches for training loops: shuffled, split, shared between processes, and moved to the devices ahead of time.

Iterators of grain are closed before the interpreter ends.
"""

import atexit
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jmp_train.extras import extra_packages
from jmp_train.graphs.structure import as_count
from jmp_train.policies import PathPolicy, PyTree
from jmp_train.policies.dtype_policies import Policy, check_narrowed, named_policy, warn_of_collapse
from jmp_train.policies.pytrees import named_leaves, shown
from jmp_train.steps import check_no_graph
from jmp_train.types import Batch


def array_batches(
    arrays: PyTree,
    batch_size: int,
    *,
    seed: int = 0,
    epochs: int | None = 1,
    start: int = 0,
    prepare: Callable[[Any], Any] = lambda examples: examples,
    augment: Callable[[Any, np.ndarray], Any] | None = None,
    process_index: int | None = None,
    process_count: int | None = None,
    sharding: Sharding | None = None,
    num_threads: int = 1,
    prefetch: int = 4,
    policy: Policy | PathPolicy | str | None = None,
) -> Any:
    """Returns an iterator over batches of arrays in memory, prepared by threads through grain.

    The order changes each epoch and is the same on every run. A global batch has the same examples for any number of
    processes, each of which reads a part of it. The last, incomplete batch of an epoch is left out, so that all
    processes have the same number of batches.

    Args:
      arrays: tree of NumPy arrays [examples, ...], memory maps included; the examples of a `jmp_train.graphs.stack`
        are its graphs.
      batch_size: examples per global batch, over all processes.
      seed: seed of the order; below 2**32.
      epochs: passes over the examples; None for no end.
      start: number of batches to skip, for a run that continues.
      prepare: returns a batch, given a tree of examples; runs on the host, in a thread.
      augment: `augment(examples, seeds)` replaces `prepare` for random preparation: `seeds` are uint64 [examples], and
        depend only on `seed`, the epoch and the example.
      process_index: index of this process; None asks jax, or takes the examples of `sharding`.
      process_count: number of processes that share a batch, at most one per example; None asks jax.
      sharding: sharding of the global batch, for example `NamedSharding(mesh, PartitionSpec("data"))`, which combines
        the parts of all processes into one array; None puts this process's examples on its first device.
      num_threads: number of threads that prepare batches.
      prefetch: number of batches made ahead of time.
      policy: the step's policy, for a check of the casts on one batch of examples, spread over all.

    Returns:
      An iterator with grain's `get_state` and `set_state`; a state fits any number of processes.

    Raises:
      ValueError: leaves have different numbers of examples, or an argument is out of range; from the iterator, if
        64-bit integers do not fit into JAX's 32 bits.
      TypeError: there is a graph outside a stack, a leaf is not an array, or an argument is of another type.

    Warns:
      CollapsedValuesWarning: different floats become equal in the policy's compute dtype, or in float32.

    Example:
      >>> examples = {"x": np.arange(10.0, dtype=np.float32), "y": np.arange(10)}
      >>> batches = array_batches(examples, batch_size=4, epochs=3)
      >>> sum(len(batch["x"]) for batch in batches)
      24
    """
    with extra_packages():
        import grain
        from grain.experimental import ThreadPrefetchIterDataset

    total = _count_examples(arrays)
    check_order(seed, epochs, start)
    check_integers(batch_size=batch_size, num_threads=num_threads, prefetch=prefetch)
    if not 1 <= batch_size <= total:
        raise ValueError(f"batch_size={batch_size} must be between 1 and the {total} examples")
    if not isinstance(sharding, Sharding | None):
        raise TypeError(f"sharding must be a jax.sharding.Sharding, got {type(sharding).__name__}")
    own = _own_examples(batch_size, process_index, process_count, sharding)

    def fetch(number: int, indices: np.ndarray) -> Any:
        indices = indices[own]
        batch = jax.tree.map(lambda array: array[indices], arrays)
        if augment is None:
            return prepare(batch)
        return augment(batch, example_seeds(seed, number // (total // batch_size), indices))

    if policy is not None:
        spread = np.arange(batch_size) * total // batch_size
        examples = jax.tree.map(lambda array: array[spread], arrays)
        first = prepare(examples) if augment is None else augment(examples, example_seeds(seed, 0, spread))
        warn_of_collapse(first, named_policy(policy))

    seen = itertools.count()

    def place(batch: Batch) -> Any:
        check_narrowed(batch, "the batch", floats=next(seen) == 0)
        if sharding is None:
            return jax.device_put(batch)  # uncommitted, like a new state; otherwise a step would be compiled twice
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)

    batches = (
        grain.MapDataset.range(total)
        .shuffle(seed=seed)
        .batch(batch_size, drop_remainder=True, batch_fn=np.asarray)
        .repeat(epochs)
        .map_with_index(fetch)[start:]
        .to_iter_dataset(grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch))
        .map(place)
    )
    return closed_at_exit(iter(ThreadPrefetchIterDataset(batches, prefetch_buffer_size=2)))


def _own_examples(batch_size: int, index: int | None, count: int | None, sharding: Sharding | None) -> slice:
    """Returns the examples of a global batch that one of `count` processes reads."""
    if sharding is not None and index is None and count is None:
        return _examples_on_devices(sharding, batch_size)
    index = jax.process_index() if index is None else index
    count = jax.process_count() if count is None else count
    check_process(index, count)
    if batch_size % count:
        raise ValueError(f"{count} processes must divide batch_size={batch_size}")
    share = batch_size // count
    return slice(index * share, (index + 1) * share)


def _examples_on_devices(sharding: Sharding, batch_size: int) -> slice:
    """Returns the examples of a global batch on this process's devices; other devices may have the same ones."""
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    try:
        parts = sharding.addressable_devices_indices_map((batch_size,))
    except ValueError as error:
        raise ValueError(f"batch_size={batch_size} does not suit the sharding: {error}") from error
    ranges = [part[0].indices(batch_size)[:2] for part in parts.values() if part is not None]
    first, last = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    if last - first != sum(stop - start for start, stop in set(ranges)):
        raise ValueError(f"sharding must give this process a contiguous part of the batch, got {sharding}")
    return slice(first, last)


def example_seeds(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """Returns a seed for each example, uint64 [examples], different in each epoch.

    Args:
      seed: seed of the run, at least 0.
      epoch: number of the epoch, from 0.
      indices: int [examples], the indices of the examples.

    Example:
      >>> example_seeds(0, 1, np.array([7, 5]))[1] == example_seeds(0, 1, np.array([5]))[0]
      np.True_
    """
    words = [np.random.SeedSequence((seed, epoch, int(index))).generate_state(1, np.uint64) for index in indices]
    return np.concatenate(words)


def check_integers(**numbers: Any) -> None:
    """Raises TypeError if an argument is not an integer.

    Args:
      **numbers: the arguments by name.
    """
    for name, number in numbers.items():
        try:
            operator.index(number)  # also accepts a jax array, such as the step of a state
        except TypeError:
            raise TypeError(f"{name}={shown(number)} must be an integer") from None


def check_seed(seed: int) -> None:
    """Raises ValueError if a seed is out of range, TypeError if it is not an integer."""
    check_integers(seed=seed)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be between 0 and 2**32 - 1")


def check_order(seed: int, epochs: int | None, start: int = 0) -> None:
    """Raises ValueError if an argument of the order is out of range, and TypeError if it is not an integer."""
    check_seed(seed)
    check_integers(epochs=1 if epochs is None else epochs, start=start)
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs={epochs} must be at least 1")
    if start < 0:
        raise ValueError(f"start={start} must be at least 0")


def check_process(process_index: int, process_count: int) -> None:
    """Raises ValueError unless a process is one of `process_count`, and TypeError if a number is not an integer."""
    check_integers(process_index=process_index, process_count=process_count)
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index} must be in [0, {process_count})")


def _count_examples(arrays: PyTree) -> int:
    """Returns the number of examples, which all leaves must share."""
    check_no_graph(arrays, "array_batches")
    for path, array in named_leaves(arrays):
        if not hasattr(array, "shape"):
            raise TypeError(f"arrays {path or '(root)'!r} must be an array [examples, ...], got {type(array).__name__}")
    counts = {path: len(array) if np.ndim(array) else 0 for path, array in named_leaves(arrays)}
    if len(set(counts.values())) != 1:
        found = ", ".join(f"{path!r} has {count}" for path, count in counts.items()) or "there are none"
        raise ValueError(f"all leaves of arrays must have the same number of examples: {found}")
    return next(iter(counts.values()))


def stacked_count(stack: int | None) -> int:
    """Returns the number of graphs that this process stacks; 1 without a stack.

    Args:
      stack: number of graphs per stack; None for no stack.

    Raises:
      TypeError: the number is not an integer.
      ValueError: the number is not positive.

    Example:
      >>> stacked_count(None), stacked_count(4)
      (1, 4)
    """
    count = 1 if stack is None else as_count("stack", stack)
    if count == 0:
        raise ValueError("stack=0 must be positive")
    return count


def is_shared(device: Any) -> bool:
    """Returns whether batches go to devices of several processes.

    Args:
      device: a device or a sharding; None for the first device of this process.

    Example:
      >>> is_shared(None)
      False
    """
    return isinstance(device, Sharding) and not device.is_fully_addressable


def on_devices(batches: Any, device: Any) -> Iterator[Batch]:
    """Returns an iterator that moves two batches to the devices ahead of time.

    It raises an error for 64-bit integers that do not fit into JAX's 32 bits.

    Args:
      batches: grain's data set of batches, in the host's memory.
      device: the destination, see `is_shared`. Under a sharding over several processes, each passes its own part.
        Arrays are committed to a given device, but not to the default one: a step with an uncommitted state and
        committed batches would be compiled once more for the committed state that it returns.
    """
    with extra_packages():
        from grain.experimental import ThreadPrefetchIterDataset, device_put

    seen = itertools.count()

    def checked(batch: Batch) -> Batch:
        check_narrowed(batch, "the batch", floats=next(seen) == 0)
        return batch

    batches = batches.map(checked)

    def place(batch: Batch) -> Batch:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(device, np.asarray(x)), batch)

    if is_shared(device):
        return closed_at_exit(iter(ThreadPrefetchIterDataset(batches.map(place), prefetch_buffer_size=2)))
    return closed_at_exit(iter(device_put(batches, device)))


_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


def closed_at_exit(iterator: Any) -> Any:
    """Returns grain's iterator after registering it to be closed when the interpreter ends.

    Its own `__del__` would close it too late: the names of grain's modules are gone by then, and Python prints
    "Exception ignored". Its threads would also still move arrays to devices that are being shut down.

    Args:
      iterator: a `grain.DatasetIterator`.
    """
    _OPEN.add(iterator)
    return iterator


@atexit.register
def _close_all() -> None:
    for iterator in list(_OPEN):
        iterator.close()
        vars(iterator).clear()  # also ends the iterators that it reads from
        iterator.close = lambda: None  # for its `__del__`
