"""Batches for the training loop: shuffled, cut, and on the device before they are wanted."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jmp_train.tasks.task import Arrays, Task


def count_rows(data: Arrays) -> int:
    """Returns how many rows a data set has."""
    return len(next(iter(data.values())))


def train_batches(task: Task, batch_size: int, seed: int, epochs: int) -> Iterator[Any]:
    """Yields the training batches of all epochs; threads prepare them and put them on the device.

    Args:
      task: whose training data, and how it prepares rows.
      batch_size: rows a batch. The last, incomplete batch of an epoch is left out.
      seed: of the order, which is another one each epoch; below 2**32.
      epochs: passes over the data.
    """
    import grain
    from grain.experimental import device_put

    def batch(rows: Any) -> Arrays:
        return task.prepare({name: array[rows] for name, array in task.train.items()})

    batches = (
        grain.MapDataset.range(count_rows(task.train))
        .shuffle(seed=seed)
        .batch(batch_size, drop_remainder=True, batch_fn=np.asarray)
        .repeat(epochs)
        .map(batch)
        .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    )
    return iter(device_put(batches, jax.local_devices()[0]))


def test_batches(task: Task, batch_size: int) -> Iterator[tuple[Arrays, int]]:
    """Yields (batch, count): batches of one size, the last filled up, and how many rows are real.

    Args:
      task: whose test data, and how it prepares rows.
      batch_size: rows a batch.
    """
    total = count_rows(task.test)
    for start in range(0, total, batch_size):
        rows = np.arange(start, start + batch_size)
        batch = {name: array[np.minimum(rows, total - 1)] for name, array in task.test.items()}
        yield task.prepare(batch), min(batch_size, total - start)
