"""The task `cifar10`: its data on the way into the network, its optimizer, and training with a small ResNet."""

import dataclasses

import cifar10
import optax
import pytest
from models.convolution import ResNet
from promotion import promoting_task, relaxed

from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.loop import train
from jmp_train.task import Task

pytestmark = pytest.mark.full


def small_task(examples: int, features: tuple[int, ...], devices: int = 1) -> Task:
    """Returns the task with one block a stage and images of 8 x 8, which compiles in seconds."""
    train, test = cifar10.synthetic_data(examples, seed=0), cifar10.synthetic_data(96, seed=1)
    train, test = ({**data, "image": data["image"][:, :8, :8]} for data in (train, test))
    model = ResNet(stages=(1,) * len(features), features=features, axis_name="data" if devices > 1 else None)
    return promoting_task(cifar10.make_task(model, train, test))


@pytest.mark.parametrize("mode", ["float32", "torch", "apex-O1", "apex-O2", "apex-O3", "mixed_bfloat16"])
def test_a_small_network_learns(mode: str) -> None:
    task = small_task(512, (8, 16))
    # The task's cosine without its warm-up: at a rate that stays, running statistics do not settle.
    task = dataclasses.replace(
        task, optimizer=lambda steps: relaxed(cifar10.sgd(optax.cosine_decay_schedule(0.1, steps)))
    )
    run = train(task, mode, RunSettings(epochs=8, batch_size=32))
    assert len(run.skipped) <= 3
    assert run.epochs[-1].loss < 0.6 * run.epochs[0].loss
    assert run.metrics["test_accuracy"] > 0.5  # chance level: 0.1
    assert run.metrics["nonfinite_outputs"] == 0
