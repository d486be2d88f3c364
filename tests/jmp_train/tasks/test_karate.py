import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from promotion import relaxed

import jmp_train as jt
from jmp_train.cli.entry import main
from jmp_train.runs.loop import train
from jmp_train.task import Task
from jmp_train.tasks import load_task
from jmp_train.tasks.karate import read_club

pytestmark = [pytest.mark.quick, pytest.mark.newest]

POLICIES = ("float32", "mixed_float16", "autocast_float16")


def load(model: str) -> Task:
    task = load_task("karate", model=model)
    return dataclasses.replace(task, optimizer=lambda steps: relaxed(task.optimizer_for(steps)))


def test_the_club_is_zacharys() -> None:
    graph, clubs = read_club()
    assert (graph.num_nodes, graph.num_edges) == (34, 2 * 78 + 34)
    edges = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert edges == {(receiver, sender) for sender, receiver in edges}
    assert {(member, member) for member in range(34)} <= edges
    assert graph.in_degrees[jax.numpy.array([0, 33])].tolist() == [16 + 1, 17 + 1]
    assert clubs[[0, 33]].tolist() == [0, 1]
    assert np.bincount(clubs).tolist() == [17, 17]


@pytest.mark.full
@pytest.mark.parametrize(("model", "least"), [("gcn", 0.9), pytest.param("gat", 0.8, marks=pytest.mark.full)])
def test_every_policy_is_as_accurate(model: str, least: float) -> None:
    runs = [train(load(model), policy) for policy in POLICIES]
    accuracies = [run.metrics["test_accuracy"] for run in runs]
    assert accuracies[0] > least
    assert accuracies == accuracies[:1] * 3
    for run in runs:
        assert run.epochs[-1].skipped_steps == 0
        assert run.epochs[-1].loss < 0.1 < run.epochs[0].loss


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", ["gcn", "gat"])
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_the_model_computes_in_half(model: str, policy: str) -> None:
    """Reads the products' dtypes in the program of a whole step."""
    from jmp_train.policies.dtype_policies.policy import get_policy
    from jmp_train.steps.step import train_step
    from jmp_train.steps.train_state import TrainState

    task = load(model)
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    params, _ = task.init(jax.random.key(0))
    state = TrainState.create(params, optimizer, rng=jax.random.key(1))
    step = train_step(task.loss_fn, optimizer, policy=get_policy(policy))
    text = str(jax.make_jaxpr(step)(state, task.train))
    products = [line for line in text.splitlines() if "dot_general" in line]
    halves = [line for line in products if ":f16[" in line.partition("dot_general")[0]]
    assert products and len(halves) == len(products)


@pytest.mark.full
def test_compare_trains_either_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", "karate", "--epochs", "3", "--policies", "float32", "mixed_float16"]
    losses = []
    for model in ("gcn", "gat"):
        assert main([*arguments, "--model", model, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        losses.append(report["runs"][0]["epochs"][0]["loss"])
        assert report["runs"][1]["epochs"][0]["loss"] == pytest.approx(losses[-1], rel=0.01)
    assert losses[0] != losses[1]


def test_wrong_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "karate", "--model", "mlp"]) == 2
    assert "argument --model: invalid choice: 'mlp' (choose from" in capsys.readouterr().err
