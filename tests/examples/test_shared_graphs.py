"""Tasks on one graph: what is shared by all batches, and the losses of one device on several."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from example_tasks import FOLDER, load_task
from process_helpers import run_python
from promotion import relaxed

import jmp_train as jt
from jmp_train.app.cli.entry import main
from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.events import Run
from jmp_train.app.runs.loop import train
from jmp_train.app.runs.run_settings import FewBits
from jmp_train.task import Task

pytestmark = pytest.mark.quick

ROOT = FOLDER.parents[1]


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
def test_the_loop_makes_the_graph_once_a_run_and_casts_the_features_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, made, traced = task_of("reddit", 1, scale=0.001), [], []
    step = jt.steps.TrainStep.__call__

    def shared() -> dict[str, Any]:
        made.append(1)
        return tiny.shared()

    def look(self: Any, state: Any, batch: Any) -> Any:
        traced.append(batch["features"].dtype)
        return step(self, state, batch)

    monkeypatch.setattr(jt.steps.TrainStep, "__call__", look)
    counted = dataclasses.replace(tiny, shared=shared)
    runs = [train(counted, policy, RunSettings(epochs=14)) for policy in ("float32", "mixed_float16")]
    assert (len(made), traced) == (2, [np.float32, np.float16])
    found = [losses(run) for run in runs]
    np.testing.assert_allclose(found[1], found[0][: len(found[1])], rtol=0.05, atol=0.02)
    assert min(run.metrics["test_accuracy"] for run in runs) > 0.75  # chance level: 0.25


OPTIONS: dict[str, dict[str, Any]] = {"cora": {"model": "gat"}, "reddit": {"scale": 0.001}}


@pytest.mark.full
@pytest.mark.parametrize("name", ["cora", "reddit"])
def test_graph_and_features_are_arguments_of_the_step(name: str) -> None:
    """Neither is a constant of the program, and the features are there in the compute dtype only."""
    policy = jt.get_policy("mixed_float16")
    task = load_task(name, synthetic=True, **OPTIONS[name])
    optimizer = jt.with_loss_scale(relaxed(task.optimizer_for(10)), jt.torch_loss_scale())
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    create = lambda params: jt.TrainState.create(params, optimizer, rng=jax.random.key(1))
    step = jt.train_step(task.loss_fn, optimizer, policy=policy)
    batch: Any = task.train | policy.cast_to_compute(task.shared())
    program = jax.make_jaxpr(step)(jax.eval_shape(create, params), batch)
    assert not program.consts
    dtypes = {x.aval.dtype.name for x in program.jaxpr.invars if x.aval.shape == batch["features"].shape}
    assert dtypes == {"float16"}
    if name == "reddit":  # which drops no features, and so draws no numbers of their shape
        assert f"f32{list(batch['features'].shape)}".replace(" ", "") not in str(program)


@pytest.mark.full
def test_loading_starts_no_device() -> None:
    """Where it did, `compare` would take the memory of the GPU that its processes need."""
    code = """
import jax
from example_tasks import load_task
load_task("cora", synthetic=True)
load_task("reddit", synthetic=True, scale=0.001)
jax.config.update("jax_num_cpu_devices", 3)  # refused once a device is started
print(jax.device_count())
"""
    assert run_python("-c", code, PYTHONPATH=f"{ROOT}:{ROOT / 'benchmarks'}") == "3\n"


@pytest.mark.full
@pytest.mark.timeout(200)
def test_compare_prints_the_halo(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        f"compare {FOLDER}/reddit.py --synthetic --scale 0.001 --epochs 2 --devices 3 --policies float32 mixed_float16"
    )
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "halo" in out
    assert "0.50x" in out
