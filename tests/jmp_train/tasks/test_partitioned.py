"""Tasks on one graph over several devices: the losses of one device, and half of the halo in half precision."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from promotion import relaxed

from jmp_train.cli.entry import main
from jmp_train.runs import RunSettings
from jmp_train.runs.events import Run
from jmp_train.runs.loop import train
from jmp_train.runs.run_settings import FewBits
from jmp_train.task import Task
from jmp_train.tasks import load_task

pytestmark = pytest.mark.quick


def task_of(name: str, devices: int, **options: Any) -> Task:
    task = load_task(name, synthetic=True, devices=devices, **options)
    return dataclasses.replace(task, optimizer=lambda steps: relaxed(task.optimizer_for(steps)))


def run_of(policy: str, devices: int, epochs: int = 3) -> Run:
    return train(task_of("reddit", devices, scale=0.001), policy, RunSettings(epochs=epochs, devices=devices))


def losses(run: Run) -> list[float]:
    return [step.loss for step in run.steps if step.finite]


@pytest.fixture(name="alone", scope="module")
def fixture_alone() -> Run:
    return run_of("float32", 1)


@pytest.mark.full
@pytest.mark.parametrize("devices", [3, 8])
def test_losses_are_those_of_one_device(devices: int, alone: Run) -> None:
    together = run_of("float32", devices)
    np.testing.assert_allclose(losses(together), losses(alone), rtol=1e-6)
    assert together.metrics["test_accuracy"] == alone.metrics["test_accuracy"]
    assert together.device.startswith(f"{devices} x ")
    assert alone.costs.exchanged_bytes == 0 < together.costs.exchanged_bytes


@pytest.mark.full
@pytest.mark.parametrize("policy", ["mixed_float16", "autocast_bfloat16"])
def test_half_of_the_halo_in_half_precision(policy: str, alone: Run) -> None:
    full, half = run_of("float32", 4), run_of(policy, 4, epochs=8)  # float16's scale falls in the first steps
    assert 2 * half.costs.exchanged_bytes == full.costs.exchanged_bytes
    np.testing.assert_allclose(losses(half)[:3], losses(alone), rtol=3e-2)


@pytest.mark.full
def test_cora_is_learned_on_devices() -> None:
    run = train(task_of("cora", 4, model="gcn"), "mixed_float16", RunSettings(epochs=30, devices=4))
    assert losses(run)[-1] < 0.9 * losses(run)[0]
    assert run.metrics["test_accuracy"] > 0.3  # of seven classes


def test_a_batch_is_the_labels_of_some_rows() -> None:
    task = task_of("reddit", 4, scale=0.001)
    whole = load_task("reddit", synthetic=True, scale=0.001)
    examples = {name: array[5:12] for name, array in task.train.items()}
    prepared, shared = task.prepare(examples), task.shared()
    rows = prepared["label"].shape[0]
    assert shared["features"].shape[0] == rows == 4 * shared["graph"].graphs.is_node.shape[1]
    found = prepared["label"] >= 0
    assert sorted(prepared["label"][found].tolist()) == sorted(examples["label"].tolist())
    of_nodes = whole.shared()["features"][examples["node"]]
    order = [np.flatnonzero((shared["features"] == row).all(-1)).item() for row in of_nodes]
    np.testing.assert_array_equal(prepared["label"][order], examples["label"])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((prepared, shared)))


@pytest.mark.full
def test_products_in_8_bits_have_no_state_there() -> None:
    task = task_of("reddit", 2, scale=0.001)
    with pytest.raises(
        ValueError,
        match=r"fp8=DelayedScaling has a state, which is not supported for a graph partitioned over devices=2",
    ):
        train(task, "autocast_float16", RunSettings(epochs=1, devices=2, few_bits=FewBits(fp8="DelayedScaling")))
    run = train(
        task, "autocast_float16", RunSettings(epochs=1, devices=2, few_bits=FewBits(fp8="Float8CurrentScaling"))
    )
    assert run.costs.exchanged_bytes > 0


@pytest.mark.full
@pytest.mark.timeout(200)
def test_compare_prints_the_halo(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "compare reddit --synthetic --scale 0.001 --epochs 2 --devices 3 --policies float32 mixed_float16"
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "halo" in out
    assert "0.50x" in out
