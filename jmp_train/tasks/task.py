"""What a task is made of."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jmp_train.train_step import LossFn

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Task:
    """A job for the training loop: data, model, loss and optimizer.

    Attributes:
      name: what the command line calls it.
      train: the training data, arrays with one row an example.
      test: the test data; `test["label"]` is int [examples].
      init: `init(key) -> (params, model_state)`, in float32.
      loss_fn: what `train_step` takes; its batches are rows of `train`.
      predict: `predict(params, model_state, test) -> logits [examples, classes]`.
      schedule: the learning rate by the number of steps taken, given the total number of steps.
      optimizer: the optimizer, given its learning rate.
      batch_size: rows a step.
      epochs: passes over the training data.
    """

    name: str
    train: Arrays
    test: Arrays
    init: Callable[[jax.Array], tuple[Any, Any]]
    loss_fn: LossFn
    predict: Callable[[Any, Any, Arrays], jax.Array]
    schedule: Callable[[int], optax.Schedule]
    optimizer: Callable[[Any], optax.GradientTransformation]
    batch_size: int
    epochs: int
