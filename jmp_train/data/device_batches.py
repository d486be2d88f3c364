"""The end of every pipeline of graphs: checks stacks and moves batches to the devices ahead of time.

Iterators of grain are closed before the interpreter ends.
"""

import atexit
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jmp_train.extras import extra_packages
from jmp_train.graphs.structure import as_count
from jmp_train.policies.dtype_policies import check_narrowed
from jmp_train.types import Batch


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
