import dataclasses

import jax
import optax
import pytest
from example_tasks import load_task
from promotion import relaxed

import jmp_train as jt
from jmp_train.app.runs.loop import train
from jmp_train.task import Task

pytestmark = [pytest.mark.full, pytest.mark.newest]

POLICIES = ("float32", "mixed_float16", "autocast_float16")


def load(model: str) -> Task:
    task = load_task("karate", model=model)
    return dataclasses.replace(task, optimizer=lambda steps: relaxed(task.optimizer_for(steps)))


@pytest.mark.parametrize(("model", "least"), [("gcn", 0.9), ("gat", 0.8)])
def test_every_policy_is_as_accurate(model: str, least: float) -> None:
    runs = [train(load(model), policy) for policy in POLICIES]
    accuracies = [run.metrics["test_accuracy"] for run in runs]
    assert accuracies[0] > least
    assert accuracies == accuracies[:1] * 3
    for run in runs:
        assert run.epochs[-1].skipped_steps == 0
        assert run.epochs[-1].loss < 0.1 < run.epochs[0].loss


@pytest.mark.parametrize("model", ["gcn", "gat"])
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_the_model_computes_in_half(model: str, policy: str) -> None:
    """Reads the products' dtypes in the program of a whole step."""
    task = load(model)
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    params, _ = task.init(jax.random.key(0))
    state = jt.TrainState.create(params, optimizer, rng=jax.random.key(1))
    step = jt.train_step(task.loss_fn, optimizer, policy=policy)
    text = str(jax.make_jaxpr(step)(state, task.train))
    products = [line for line in text.splitlines() if "dot_general" in line]
    halves = [line for line in products if ":f16[" in line.partition("dot_general")[0]]
    assert products and len(halves) == len(products)
