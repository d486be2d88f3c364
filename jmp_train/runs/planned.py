"""A task's step as shapes alone, for plans: nothing is on a device, and no parameter is made."""

from collections.abc import Callable
from typing import Any

import jax

from jmp_train.runs.setups import make_setup
from jmp_train.runs.task_batches import batch_shapes
from jmp_train.steps import TrainStep
from jmp_train.tasks import Task

_SCHEDULE = 100  # steps, of which only the shapes depend


def planned_step(task: Task, name: str) -> tuple[TrainStep, Any, Callable[[int], Any]]:
    """Returns the step of a task, its state and its batches by their size, as shapes.

    Args:
      task: the task.
      name: of the policy or mode, see `precision_of`.

    Raises:
      ValueError: there is no such policy or mode.
    """
    setup = make_setup(task, name, task.schedule(_SCHEDULE))

    def create(key: jax.Array) -> Any:
        init_key, step_key = jax.random.split(key)
        return setup.create_state(*task.init(init_key), step_key)

    shared = jax.eval_shape(setup.cast_shared, task.shared())

    def batches(size: int) -> Any:
        return batch_shapes(task, size) | shared

    return setup.step, jax.eval_shape(create, jax.random.key(0)), batches
