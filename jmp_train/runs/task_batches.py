"""Batches of a task: training data shuffled by a seed, test data in order."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jmp_train.data import array_batches
from jmp_train.extras import extra_packages
from jmp_train.tasks import Arrays, Task


def count_examples(data: Arrays) -> int:
    """Returns how many examples a data set has."""
    return len(next(iter(data.values())))


def batch_shapes(task: Task, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of so many examples, without what all batches share.

    Args:
      task: whose training data, of which two examples are prepared.
      size: how many.
    """
    some = min(2, count_examples(task.train))
    examples = task.prepare({name: array[:some] for name, array in task.train.items()})
    if task.is_partitioned:  # rows of nodes, whatever the number of examples
        return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in examples.items()}
    return {name: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype) for name, array in examples.items()}


def train_batches(
    task: Task,
    batch_size: int,
    seed: int,
    epochs: int,
    sharding: Sharding | None = None,
    start: int = 0,
) -> Iterator[Any]:
    """Yields the training batches of all epochs; see `array_batches`.

    Args:
      task: whose training data, and how it prepares examples.
      batch_size: examples a batch. The last, incomplete batch of an epoch is left out.
      seed: of the order, which is another one each epoch; below 2**32.
      epochs: passes over the data.
      sharding: of a batch over several devices; None for the first one.
      start: how many batches to leave out.
    """
    return array_batches(
        task.train,
        batch_size,
        seed=seed,
        epochs=epochs,
        start=start,
        prepare=task.prepare,
        augment=task.augment,
        sharding=sharding,
        num_threads=task.loading_threads,
        prefetch=max(4, task.loading_threads),
    )


def evaluation_batches(task: Task, batch_size: int) -> Iterator[tuple[Arrays, int]]:
    """Yields (batch, count): batches of one size, the last filled up, and how many examples are real.

    Args:
      task: whose test data, and how it prepares examples.
      batch_size: examples a batch.
    """
    with extra_packages():
        import grain

    total = count_examples(task.test)

    def fetch(number: int) -> tuple[Arrays, int]:
        start = number * batch_size
        chosen = np.minimum(np.arange(start, start + batch_size), total - 1)
        batch = {name: array[chosen] for name, array in task.test.items()}
        return task.prepare(batch), min(batch_size, total - start)

    threads = task.loading_threads
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2, threads))
    yield from grain.MapDataset.range(-(-total // batch_size)).map(fetch).to_iter_dataset(options)
