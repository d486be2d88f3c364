"""Flax and optax promote dtypes in tests, while our own code stays strict."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from jmp_train.task import Task


def relaxed(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Lets optax's own code promote dtypes (adam raises a float to an int32), ours stays strict."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def promoting(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets flax's own code promote dtypes within `fn`."""

    def relaxed_fn(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return fn(*args)

    return relaxed_fn


def promoting_task(task: Task) -> Task:
    """Returns the task with dtypes promoted within flax and optax, ours stay strict."""
    metrics: Any = task.metrics
    if hasattr(metrics, "predict"):
        metrics = dataclasses.replace(metrics, predict=promoting(metrics.predict))
    return dataclasses.replace(
        task,
        loss_fn=promoting(task.loss_fn),
        metrics=promoting(metrics),
        init=promoting(task.init),
        optimizer=lambda steps: relaxed(task.optimizer_for(steps)),
    )
