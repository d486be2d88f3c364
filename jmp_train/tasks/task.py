"""What a task is made of, and what its user says of the data and the model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jmp_train.train_step import LossFn

Arrays = dict[str, np.ndarray]

DATA_AXIS = "data"  # the mesh axis along which a batch is cut


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Which data a task is to load, and which of its models.

    Attributes:
      data_dir: the folder of its files, for tasks that have files.
      synthetic: made-up data of the same shapes, for those tasks.
      train_size: train on that many rows only, the first; None for all.
      model: which model, for tasks that have several; None for the task's own choice.
      heads: the attention heads of each layer, for tasks that let choose; None for the task's own.
      scale: the size of the synthetic data, for tasks that let choose; None for the real data's.
      devices: over how many devices a batch is cut, for tasks whose batches can be.
      image_size: the side of an image in pixels, for tasks that let choose; None for the task's own.
    """

    data_dir: Path | None = None
    synthetic: bool = False
    train_size: int | None = None
    model: str | None = None
    heads: tuple[int, ...] | None = None
    scale: float | None = None
    devices: int = 1
    image_size: int | None = None

    @property
    def axis_name(self) -> str | None:
        """The mesh axis over which a model's BatchNorm is synchronised; None on one device."""
        return DATA_AXIS if self.devices > 1 else None


@dataclasses.dataclass(frozen=True)
class Task:
    """A job for the training loop: data, model, loss and optimizer.

    Attributes:
      name: what the command line calls it.
      train: the training data, arrays with one row an example, as they are stored.
      test: the test data; `test["label"]` is int [examples].
      prepare: makes what `loss_fn` and `predict` take of some rows of the data; on the host.
      init: `init(key) -> (params, model_state)`, in float32.
      loss_fn: what `train_step` takes; its batches are prepared rows of `train`.
      predict: `predict(params, model_state, batch) -> logits [batch, classes]`.
      schedule: the learning rate by the number of steps taken, given the total number of steps.
      optimizer: the optimizer, given its learning rate.
      batch_size: rows a step.
      epochs: passes over the training data.
      shared: makes the part of a batch that is the same for all rows, a graph for instance, which is
        added to what `prepare` makes; the loop calls it once, casts it once, as the policy casts what
        is computed with, and keeps it on the device.
      devices: over how many devices a batch is cut; if several, `loss_fn` may name `DATA_AXIS`.
      augment: `augment(rows, seeds)` prepares training rows in place of `prepare`, where that is random: `seeds` are
        uint64 [rows], of the run's seed, the epoch and the row, so that runs are repeated and resumed exactly; None
        where it is not.
      loading_threads: how many threads prepare batches, each a batch of its own.
      options: what was chosen of it; `load_task` says.
      batch_norms: finds the paths of the model's BatchNorms in the parameters, for modes that keep them in
        float32; the loop calls it where it needs them.
    """

    name: str
    train: Arrays
    test: Arrays
    prepare: Callable[[Arrays], Arrays]
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    predict: Callable[[Any, Any, Arrays], jax.Array]
    schedule: Callable[[int], optax.Schedule]
    optimizer: Callable[[Any], optax.GradientTransformation]
    batch_size: int
    epochs: int
    shared: Callable[[], dict[str, Any]] = dict
    devices: int = 1
    augment: Callable[[Arrays, np.ndarray], Arrays] | None = None
    loading_threads: int = 1
    options: TaskOptions = TaskOptions()
    batch_norms: Callable[[], tuple[str, ...]] = tuple
