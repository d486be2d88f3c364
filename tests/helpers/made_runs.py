"""Runs of training as reports read them, and tasks cut short."""

import dataclasses
import math

from jmp_train.app.runs.events import Epoch, Run, StepRecord
from jmp_train.steps.traced_costs import StepCosts
from jmp_train.task import Task

COSTS = StepCosts(
    half_flops_share=0.0,
    residual_bytes=3_000_000,
    params_bytes=200_000,
    opt_state_bytes=400_000,
    model_state_bytes=1_000,
)


def first_examples(task: Task, count: int) -> Task:
    """Returns the task with the first training examples only."""
    return dataclasses.replace(task, train={name: array[:count] for name, array in task.train.items()})


def make_run(policy: str = "float32", *, scale: float = 1.0, skips: tuple[int, ...] = ()) -> Run:
    """Returns a run of two epochs of 50 steps, whose losses fall from 1 and whose skips halve."""
    steps, epochs = [], []
    for number in range(1, 101):
        skipped = number in skips
        scale = scale / 2 if skipped else scale
        loss = math.nan if skipped else 1 / number
        steps.append(StepRecord(number, loss, 1.0, scale, not skipped))
        if number % 50 == 0:
            count = sum(skip <= number for skip in skips)
            epochs.append(Epoch(number // 50, loss, 1e-3, number / 25, 300.0, scale, count))
    return Run(
        policy,
        "cpu",
        {"test_accuracy": 0.987, "nonfinite_outputs": 0},
        7.5,
        "process",
        64,
        tuple(epochs),
        tuple(steps),
        COSTS,
    )
