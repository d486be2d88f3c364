"""`Task`: data, model, loss and optimizer of a training job."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from jmp_train.steps import LossFn
from jmp_train.tasks.options import TaskOptions

Arrays = dict[str, np.ndarray]
Examples: TypeAlias = Mapping[str, jax.Array]  # of a batch, as they are in the step
Variables: TypeAlias = Mapping[str, Any]  # of a linen module, by name


@dataclasses.dataclass(frozen=True)
class Task:
    """A job for the training loop: data, model, loss and optimizer.

    Attributes:
      train: the training data, arrays of examples along the first axis, as they are stored.
      test: the test data; `test["label"]` is int [examples], or [examples, ...] where each has several labels.
      prepare: makes what `loss_fn` and `predict` take of some examples of the data; on the host.
      init: `init(key) -> (params, model_state)`, in float32.
      loss_fn: what `train_step` takes; its batches are prepared examples of `train`.
      predict: `predict(params, model_state, batch) -> logits [batch, classes]`, or [batch, ..., classes].
      schedule: the learning rate by the number of steps taken, given the total number of steps.
      optimizer: the optimizer, given its learning rate.
      batch_size: examples a step.
      epochs: passes over the training data.
      shared: makes the part of a batch that is the same for all examples, a graph for instance, which is
        added to what `prepare` makes; the loop calls it once, casts it once, as the policy casts what
        is computed with, and keeps it on the device.
      augment: `augment(examples, seeds)` prepares training examples in place of `prepare`, where that is random:
        `seeds` are uint64 [examples], of the run's seed, the epoch and the example, so that runs are repeated and
        resumed exactly; None where it is not.
      loading_threads: how many threads prepare batches, each a batch of its own.
      name: what the command line calls it; `load_task` says.
      options: what was chosen of it; `load_task` says. If its `devices` are several, `loss_fn` may name `DATA_AXIS`.
      batch_norms: finds the paths of the model's BatchNorms in the parameters, for modes that keep them in
        float32; the loop calls it where it needs them.
      is_partitioned: whether one graph is cut over `devices`: what `prepare` and `shared` make, and the logits of
        `predict`, are then the parts' rows in place of the examples, however many these are; labels are -1 in rows
        that are no example.
      bits_per_byte: whether the labels are bytes, and the evaluation says in how many bits the model codes one.
    """

    train: Arrays
    test: Arrays
    prepare: Callable[[Arrays], Arrays]
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    predict: Callable[[Any, Any, Any], jax.Array]
    schedule: Callable[[int], optax.Schedule]
    optimizer: Callable[[Any], optax.GradientTransformation]
    batch_size: int
    epochs: int
    shared: Callable[[], dict[str, Any]] = dict
    augment: Callable[[Arrays, np.ndarray], Arrays] | None = None
    loading_threads: int = 1
    name: str = ""
    options: TaskOptions = dataclasses.field(default_factory=TaskOptions)
    batch_norms: Callable[[], tuple[str, ...]] = tuple
    is_partitioned: bool = False
    bits_per_byte: bool = False

    @property
    def devices(self) -> int:
        """Over how many devices a batch is sharded."""
        return self.options.devices
