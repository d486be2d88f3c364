"""A task's step as shapes only, for plans: it creates no parameters and uses no device."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jmp_train.runs.preparing import with_shared
from jmp_train.runs.run_settings import DEFAULT_SETTINGS, RunSettings
from jmp_train.runs.setups import setup_of, shapes_of_init
from jmp_train.runs.task_batches import batch_shapes
from jmp_train.steps import TrainStep
from jmp_train.task import Task


def planned_step(
    task: Task, name: str, settings: RunSettings = DEFAULT_SETTINGS
) -> tuple[TrainStep, Any, Callable[[int | None], Any]]:
    """Returns the step of a task, its state and its batches by their size, as shapes.

    Args:
      task: the task.
      name: a policy or mode, see `precision_of`.
      settings: the settings of the run; only the number of parts is used.

    Raises:
      ValueError: there is no such policy or mode.
    """
    setup = setup_of(task, name, settings)
    state = jax.eval_shape(setup.create_state, *shapes_of_init(task), jax.eval_shape(jax.random.key, 0))
    shared = jax.eval_shape(setup.cast_shared, task.shared())

    @functools.cache  # because a user's loader may be slow
    def batches(size: int | None) -> Any:
        return with_shared(batch_shapes(task, size), shared)

    return setup.step, state, batches
