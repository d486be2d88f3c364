"""The task `cifar10`: its data on the way into the network, its optimizer, and training with a small ResNet."""

import dataclasses

import cifar10
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_tasks import load_task
from made_runs import first_examples
from mnist import BLOCKS
from models.convolution import ResNet
from promotion import promoting_task, relaxed

from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.loop import train
from jmp_train.task import Task

pytestmark = pytest.mark.full


@pytest.fixture(name="synthetic", scope="module")
def fixture_synthetic() -> Task:
    task = first_examples(load_task("mnist", synthetic=True), 96)
    return dataclasses.replace(promoting_task(task), test={name: array[:40] for name, array in task.test.items()})


def test_the_network_is_pytorchs(synthetic: Task) -> None:
    params, batch_stats = jax.eval_shape(synthetic.init, jax.random.key(0))
    # weights and biases of each block, and BatchNorm's two; of the dense layers 1024-1000-1000-10
    blocks = sum(i * o * k * k + o + 2 * o for i, o, k, _, _ in BLOCKS)
    dense = 1024 * 1000 + 1000 + 1000 * 1000 + 1000 + 1000 * 10 + 10
    assert sum(x.size for x in jax.tree.leaves(params)) == blocks + dense == 14_740_522
    assert sum(x.size for x in jax.tree.leaves(batch_stats)) == 2 * sum(o for _, o, *_ in BLOCKS)
    assert {x.dtype for x in jax.tree.leaves((params, batch_stats))} == {jnp.dtype("float32")}


def test_half_precision_starts_as_float32_does(synthetic: Task) -> None:
    losses = {
        name: [step.loss for step in train(synthetic, name, RunSettings(epochs=1, batch_size=16)).steps]
        for name in ("float32", "mixed_float16", "mixed_bfloat16", "autocast_float16")
    }
    assert losses["float32"][-1] < losses["float32"][0]
    np.testing.assert_allclose(losses["mixed_float16"], losses["float32"], rtol=0.005)
    np.testing.assert_allclose(losses["autocast_float16"], losses["float32"], rtol=0.005)
    np.testing.assert_allclose(losses["mixed_bfloat16"], losses["float32"], rtol=0.02)


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
