"""`jt.Task` refuses what it cannot use, and says what it wants."""

from typing import Any

import numpy as np
import optax
import pytest
from user_jobs import examples, make_task

import jmp_train as jt

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"init": 3}, TypeError, "init must be a function, got a int"),
        ({"loss_fn": None}, TypeError, "loss_fn must be a function, got None"),
        ({"evaluate": {}}, TypeError, "evaluate must be a function or None, got a dict"),
        ({"optimizer": 1e-3}, TypeError, "optimizer must be an optax optimizer, or a function of the number of steps"),
        ({"train": [1, 2]}, TypeError, r"train must be a dict of arrays .*, or a function of the epoch .* got a list"),
        ({"train": {"x": [1, 2]}}, TypeError, "train must be a dict of arrays .* got a int at 'x/0'"),
        ({"train": {}}, TypeError, "train must be a dict of arrays"),
        ({"train": {"x": np.ones(3), "y": np.ones(4)}}, ValueError, "same number of examples: 'x' has 3, 'y' has 4"),
        ({"train": {"x": np.ones((0, 3))}}, ValueError, "train has no examples"),
        ({"test": 3}, TypeError, "test must be a dict of arrays .*, or a function that returns batches, got a int"),
        ({"epochs": 0}, ValueError, "epochs=0 must be at least 1"),
        ({"epochs": 1.5}, TypeError, "epochs must be a whole number, got 1.5"),
        ({"batch_size": True}, TypeError, "batch_size must be a whole number, got True"),
        ({"steps_per_epoch": 3}, ValueError, "steps_per_epoch is for a train that returns batches, but"),
        ({"evaluate": lambda *args: {}}, ValueError, "evaluate and metrics exclude each other"),
        ({"test": None}, ValueError, "metrics is given without test"),
        ({"metrics": None}, ValueError, "test is given without metrics"),
        ({"learning_rate": 0.0}, TypeError, "learning_rate must be a number above 0, or a function"),
        ({"init": lambda: 1}, TypeError, r"init is called as init\(key\): too many positional arguments"),
        ({"metrics": lambda params, batch: {}}, TypeError, r"called as metrics\(params, model_state, batch\): too"),
        ({"test": lambda epoch: []}, TypeError, r"test is called as test\(\): missing a required argument: 'epoch'"),
        ({"train": lambda: iter(())}, TypeError, r"train is called as train\(epoch\): too many"),
        ({"train": lambda epoch: []}, ValueError, "batch_size is for a train of arrays, but train returns batches"),
    ],
)  # fmt: skip
def test_what_a_task_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^Task: .*{message}"):
        make_task("arrays", **changes)


def test_the_optimizer_and_the_learning_rate_of_a_run() -> None:
    task = make_task("arrays", learning_rate=lambda steps: optax.linear_schedule(1.0, 0.0, steps))
    schedule = task.schedule_for(4)
    assert schedule is not None
    assert [float(np.asarray(schedule(step))) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert isinstance(task.optimizer_for(4), optax.GradientTransformation)
    with pytest.raises(ValueError, match="learning_rate is a function of the number of steps, which is unknown"):
        task.schedule_for(None)
    assert make_task("arrays").schedule_for(None) is None
    with pytest.raises(TypeError, match=r"learning_rate\(4\) must return a schedule, got a float"):
        make_task("arrays", learning_rate=lambda steps: 0.1).schedule_for(4)


def test_a_task_is_frozen() -> None:
    with pytest.raises(AttributeError):
        make_task("arrays").epochs = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert jt.Task is type(make_task("arrays", train=examples(4)))
