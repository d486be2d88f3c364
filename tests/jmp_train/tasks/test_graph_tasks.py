"""What the tasks on one graph have in common: seeds, loading, the arguments of a step, and `compare`."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from process_helpers import run_python
from promotion import relaxed

import jmp_train as jt
from jmp_train.cli.entry import main
from jmp_train.graphs.datasets.synthetic_graphs import synthetic_cora, synthetic_reddit
from jmp_train.tasks import load_task

pytestmark = pytest.mark.quick

DATA = {"cora": synthetic_cora, "reddit": lambda seed: synthetic_reddit(0.001, seed)}
OPTIONS: dict[str, dict[str, Any]] = {"cora": {"model": "gat"}, "reddit": {"scale": 0.001}}


@pytest.mark.parametrize("name", DATA)
def test_the_seed_makes_the_data(name: str) -> None:
    one, same, other = (DATA[name](seed) for seed in (3, 3, 4))
    for field in ("senders", "receivers", "features", "labels", "train", "validation", "test"):
        arrays = [getattr(data, field) for data in (one, same, other)]
        np.testing.assert_array_equal(arrays[0], arrays[1])
        assert not np.array_equal(arrays[0], arrays[2])


@pytest.mark.parametrize("name", ["cora", pytest.param("reddit", marks=pytest.mark.full)])
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
from jmp_train.tasks import load_task
load_task("cora", synthetic=True)
load_task("reddit", synthetic=True, scale=0.001)
jax.config.update("jax_num_cpu_devices", 3)  # refused once a device is started
print(jax.device_count())
"""
    assert run_python("-c", code) == "3\n"


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "task",
    ["cora --synthetic --model gat", "reddit --synthetic --scale 0.002", "karate --model gcn", "karate --model gat"],
)
def test_compare_trains_in_both_precisions(
    task: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    policies = ["float32", "mixed_float16"]
    assert main(["compare", *task.split(), "--epochs", "2", "--json", "--policies", *policies]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["policy"] for run in runs] == policies
    assert [len(run["epochs"]) for run in runs] == [2, 2]
    losses = [run["epochs"][0]["loss"] for run in runs]
    assert 0 < losses[0] < 8
    if "karate" in task:  # whose first step is not skipped
        assert losses[1] == pytest.approx(losses[0], rel=0.01)
