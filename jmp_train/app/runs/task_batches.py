"""Batches of a task: training batches with their place in the data, and evaluation batches."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding

from jmp_train.app.runs.foreign_batches import (
    BatchKind,
    as_arrays,
    check_alike,
    examples_in,
    iterator_state,
    kind_of,
    length_of,
    placed,
    restore_iterator,
)
from jmp_train.data import array_batches
from jmp_train.extras import extra_packages
from jmp_train.policies.pytrees import named_leaves
from jmp_train.task import Task, count_examples


class DataPosition(NamedTuple):
    """A place in the training data, between two batches.

    Attributes:
      epoch: counted from 0.
      batch: batches of that epoch before the place.
      iterator: the state of the epoch's iterator as JSON data; None if it has none.
    """

    epoch: int = 0
    batch: int = 0
    iterator: Any = None


class TaskBatch(NamedTuple):
    """A training batch.

    Attributes:
      batch: the batch, on the devices.
      ends_epoch: True if it is the last batch of its epoch.
      after: the place after it.
      nans: the result of `nan_lines` for the first batch; empty for later batches.
    """

    batch: Any
    ends_epoch: bool
    after: DataPosition
    nans: tuple[str, ...] = ()


class ArrayData:
    """Batches of arrays: shuffled by a seed, prepared by threads, prefetched.

    Args:
      task: the task.
      batch_size: examples per batch. The last, incomplete batch of an epoch is left out.
      seed: seed of the order, which differs in each epoch.

    Attributes:
      steps_per_epoch: batches per epoch; None if it is unknown.
      batch_size: examples per batch; None if the batches decide.
    """

    def __init__(self, task: Task, batch_size: int, seed: int) -> None:
        self._task = task
        self._seed = seed
        self.batch_size = batch_size
        self.steps_per_epoch = count_examples(task.train) // batch_size

    def items(self, place: DataPosition, epochs: int, sharding: NamedSharding | None) -> Iterator[TaskBatch]:
        """Yields the batches after a place, epoch after epoch.

        Args:
          place: the place to begin.
          epochs: number of epochs.
          sharding: sharding of a batch over several devices; None for the first device.
        """
        task, steps = self._task, self.steps_per_epoch
        start = place.epoch * steps + place.batch
        batches = array_batches(
            task.train,
            self.batch_size,
            seed=self._seed,
            epochs=epochs,
            start=start,
            prepare=task.prepare,
            augment=task.augment,
            sharding=None if task.shards_shared else sharding,
            num_threads=task.loading_threads,
            prefetch=max(4, task.loading_threads),
        )
        for number, batch in enumerate(batches, start):
            nans = nan_lines(batch, "the first batch") if number == start else ()
            if task.shards_shared:
                batch = jax.device_put(batch, sharding)
            epoch, before = divmod(number, steps)
            yield TaskBatch(batch, before + 1 == steps, DataPosition(epoch, before + 1), nans)


class IterableData:
    """Batches of a function of the epoch, with the attributes of `ArrayData`.

    Args:
      task: the task.
    """

    batch_size = None

    def __init__(self, task: Task) -> None:
        assert callable(task.train)
        self._train = task.train
        self._given = task.steps_per_epoch
        self._first: Any = None if self._given else task.train(0)
        self.steps_per_epoch = self._given or length_of(self._first)

    def items(self, place: DataPosition, epochs: int, sharding: NamedSharding | None) -> Iterator[TaskBatch]:
        """Yields the batches after a place, epoch after epoch; see `ArrayData`."""
        first: BatchKind | None = None
        for epoch in range(place.epoch, epochs):
            iterator = iter(self._epoch(epoch))
            done = place.batch if epoch == place.epoch else 0
            if done and not restore_iterator(iterator, place.iterator):
                self._run_forward(iterator, epoch, done)
            number = done
            ahead = self._next(iterator, epoch, number)
            while ahead is not None:
                batch, state = ahead
                where = f"batch {number} of train({epoch})"
                nans = nan_lines(batch, where) if first is None else ()
                kind = kind_of(batch)
                first = first or kind
                check_alike(kind, first, where)
                batch = placed(batch, sharding, where)
                number += 1
                ahead = self._next(iterator, epoch, number)
                yield TaskBatch(batch, ahead is None, DataPosition(epoch, number, state), nans)
            if not number:
                hint = "; it has to return a new iterator for each epoch" if epoch else ""
                raise ValueError(f"train({epoch}) returned no batches{hint}")

    def _epoch(self, epoch: int) -> Any:
        """Returns the batches of an epoch; those created to find the length are used once."""
        batches, self._first = (self._first, None) if epoch == 0 and self._first is not None else (None, None)
        return _checked_batches(self._train(epoch) if batches is None else batches, epoch)

    def _next(self, iterator: Iterator[Any], epoch: int, number: int) -> tuple[Any, Any] | None:
        """Returns the next batch of an epoch and the iterator's state after it; None at the epoch's end."""
        if number == self.steps_per_epoch:
            return None
        try:
            batch = next(iterator)
        except StopIteration:
            if self.steps_per_epoch is not None and number:
                wanted = f"steps_per_epoch={self._given}" if self._given else f"train(0) has {self.steps_per_epoch}"
                raise ValueError(f"train({epoch}) ended after {number} batches, but {wanted}") from None
            return None
        return as_arrays(batch, f"batch {number} of train({epoch})"), iterator_state(iterator)

    def _run_forward(self, iterator: Iterator[Any], epoch: int, count: int) -> None:
        found = sum(1 for _ in itertools.islice(iterator, count))
        if found < count:
            raise ValueError(f"train({epoch}) ended after {found} batches, but the run had already used {count}")


TrainingData: TypeAlias = ArrayData | IterableData


def train_batches(
    task: Task, batch_size: int, seed: int, epochs: int, sharding: NamedSharding | None = None, start: int = 0
) -> Iterator[Any]:
    """Yields the training batches of a task of arrays; see `array_batches`.

    Args:
      task: the task.
      batch_size: examples per batch.
      seed: seed of the order.
      epochs: passes over the arrays.
      sharding: sharding of a batch over several devices; None for the first one.
      start: number of batches to skip.
    """
    data = ArrayData(task, batch_size, seed)
    place = DataPosition(*divmod(start, data.steps_per_epoch))
    return (item.batch for item in data.items(place, epochs, sharding))


def nan_lines(batch: Any, where: str) -> tuple[str, ...]:
    """Returns a line for each array of a batch with NaN, and for each with infinities.

    Args:
      batch: tree of arrays of this process.
      where: name of the batch.

    Example:
      >>> nan_lines({"x": np.array([1.0, np.nan]), "y": np.ones(2)}, "batch 0 of train(0)")
      ("'x' of batch 0 of train(0) has NaN in 1 of 2 values",)
    """
    lines = []
    for path, leaf in named_leaves(batch):
        if not (hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)):
            continue
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            continue
        with np.errstate(over="ignore"):  # as on the device
            values = np.asarray(leaf).astype(np.float32)
        for kind, count in (("NaN", np.isnan(values).sum()), ("infinity", np.isinf(values).sum())):
            if count:
                lines.append(f"{path or 'the array'!r} of {where} has {kind} in {count} of {leaf.size} values")
    return tuple(lines)


def batch_shapes(task: Task, size: int | None) -> Any:
    """Returns the shapes of a training batch, without its shared entries.

    Args:
      task: the task. Two examples of its arrays are prepared, or its first batch is read.
      size: examples of the batch; None for the task's own number.

    Raises:
      ValueError: a size is given, and the batch has no common leading axis.
    """
    if not callable(task.train):
        rows = min(2, count_examples(task.train))
        examples = task.prepare(jax.tree.map(lambda array: array[:rows], task.train))
        size = size or task.batch_size or count_examples(task.train)
        return _shapes(examples, None if task.shards_shared else size)  # its rows are those of the devices' parts
    batch = next(iter(_checked_batches(task.train(0), 0)), None)
    if batch is None:
        raise ValueError("train(0) returned no batches")
    batch = as_arrays(batch, "batch 0 of train(0)")
    if size is not None and examples_in(batch) is None:
        raise ValueError(f"batch_size={size}: the arrays of a batch have no common number of examples")
    return _shapes(batch, size)


def _checked_batches(batches: Any, epoch: int) -> Any:
    """Returns the result of `train`; raises TypeError if it is not an iterable of batches."""
    if not hasattr(batches, "__iter__") or isinstance(batches, Mapping):
        raise TypeError(f"train({epoch}) must return an iterable of batches, got a {type(batches).__name__}")
    return batches


def _shapes(batch: Any, size: int | None) -> Any:
    def shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(x.shape if size is None else (size, *x.shape[1:]), dtype)

    return jax.tree.map(shape, batch)


def evaluation_batches(task: Task, batch_size: int | None) -> Iterator[tuple[Any, int | None]]:
    """Yields the batches of `task.test`, and the number of examples of each; None if it is unknown.

    Args:
      task: a task with metrics.
      batch_size: examples per batch of arrays; the last batch has the rest; None for one batch.
    """
    if callable(task.test):
        made: Any = task.test()
        for number, found in enumerate(made):
            batch = as_arrays(found, f"batch {number} of test()")
            yield batch, examples_in(batch)
        return
    with extra_packages():
        import grain

    test: Any = task.test
    total = count_examples(test)
    size = batch_size or total

    def fetch(number: int) -> tuple[Any, int]:
        chosen = slice(number * size, min((number + 1) * size, total))
        return task.prepare(jax.tree.map(lambda array: array[chosen], test)), chosen.stop - chosen.start

    threads = task.loading_threads
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(2, threads))
    yield from grain.MapDataset.range(-(-total // size)).map(fetch).to_iter_dataset(options)


def with_shared(batch: Any, shared: dict[str, Any]) -> Any:
    """Returns a batch with the entries that all batches share.

    Args:
      batch: a dict if there are such entries.
      shared: the entries.
    """
    if not shared:
        return batch
    if not isinstance(batch, dict):
        raise TypeError(f"Task: shared adds entries to each batch, which must be a dict, got a {type(batch).__name__}")
    return batch | shared
