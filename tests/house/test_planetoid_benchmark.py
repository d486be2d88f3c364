"""`benchmarks/planetoid.py`: how it selects epochs, compares seeds and reads data."""

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmark_runs import BENCHMARKS, measured
from models import Accuracy
from planetoid_files import write_planetoid
from process_helpers import shell
from promotion import relaxed

import jmp_train as jt
from jmp_train.task import Task

pytestmark = pytest.mark.quick


@pytest.fixture(name="planetoid", scope="module")
def fixture_planetoid() -> Any:
    return importlib.import_module("planetoid")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "selected", "epochs", "accuracy"),
    [
        ({"epochs": 20, "patience": 2, "by_accuracy": True}, 2, 7, 75),
        ({"epochs": 4, "patience": 2, "by_accuracy": True}, 2, 4, 75),
        ({"epochs": 8, "patience": None, "by_accuracy": True}, 8, 8, 100),
        ({"epochs": 7, "patience": None, "by_accuracy": False}, 4, 7, 75),
        ({"epochs": 8, "patience": None, "by_accuracy": False}, 8, 8, 100),
    ],
)
def test_validation_selects_the_epoch(
    planetoid: Any, options: dict[str, Any], selected: int, epochs: int, accuracy: float
) -> None:
    """The only parameter counts the epochs, and the logits of each are given."""
    margins = [  # of the right class over the other, of four nodes
        [1, 1, -1, -1],
        [1, 1, 1, -1],  # more accurate, and a smaller loss
        [0.1, 0.1, 0.1, 0.1],  # more accurate
        [3, 3, 3, -1],  # a smaller loss
        [0.5, 0.5, 0.5, 0.5],  # as accurate as ever
        [-1, -1, -1, -1],
        [-1, -1, -1, -1],
        [9, 9, 9, 9],  # more of both
    ]
    nodes = np.arange(8)
    tested = np.where(nodes <= nodes[:, None], 1, -1)  # in epoch n, n of 8 test nodes are right

    def batch(margins: Any) -> dict[str, np.ndarray]:
        logits = np.stack([np.float32(margins), np.zeros(np.shape(margins), np.float32)], axis=-1)
        return {"logits": logits, "label": np.zeros(logits.shape[1], np.int32)}

    def predict(count: Any, model_state: Any, batch: Any) -> jax.Array:
        del model_state
        return batch["logits"][count.astype(jnp.int32) - 1]

    task = Task(
        train={"x": nodes},
        test={"x": nodes},
        init=lambda key: (jnp.float32(0), None),
        loss_fn=lambda count, model_state, batch, rng: (-count, (model_state, None)),
        metrics=Accuracy(predict),
        optimizer=relaxed(optax.sgd(optax.constant_schedule(1.0))),
    )
    paper = planetoid.Paper(accuracies={}, **options)
    train = planetoid.make_trainer(task, jt.get_policy("float32"), paper)
    batches = {"train": {}, "validation": batch(margins), "test": batch(tested)}
    result = {name: x.item() for name, x in train(jax.random.key(0), batches).items()}
    assert result == {
        "accuracy": 100 * selected / 8,
        "validation_accuracy": accuracy,
        "epoch": selected,
        "epochs": epochs,
        "skipped_steps": 0,
    }


def test_differences_are_paired_by_the_seed(planetoid: Any) -> None:
    """Student's t of 2 degrees of freedom is 4.302653, by the tables."""
    below, above = planetoid.interval_of_mean([1.0, 2.0, 3.0])
    half = 4.302653 / 3**0.5
    assert (below, above) == pytest.approx((2 - half, 2 + half))
    accuracies = {"float32": (80, 84, 81), "mixed_float16": (81, 86, 84)}
    seeds = {
        policy: [{"accuracy": x, "skipped_steps": 0} for x in of_policy] for policy, of_policy in accuracies.items()
    }
    summary = planetoid.summarize(seeds)
    assert summary["float32"]["mean"] == pytest.approx(245 / 3)
    assert summary["float32"]["deviation"] == pytest.approx((13 / 3) ** 0.5)
    assert summary["mixed_float16"]["difference"] == pytest.approx(2)
    assert summary["mixed_float16"]["interval"] == pytest.approx((below, above))
    assert "difference" not in summary["float32"]


def test_data_sets_without_files_are_left_out_unless_they_are_named(
    planetoid: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_planetoid(tmp_path, np.ones((12, 5)), np.arange(12) % 3, {n: [] for n in range(12)}, 3, (10, 7, 11, 9))
    assert list(planetoid.read_data(tmp_path, None)) == ["cora"]
    assert "lacks ind.pubmed.x" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"lacks ind\.citeseer\.x"):
        planetoid.read_data(tmp_path, ["cora", "citeseer"])


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_planetoid_benchmark_runs(tmp_path: Path) -> None:
    options = ("--synthetic", "--seeds", "2", "--epochs", "2", "--models", "gcn")
    output, results = measured(tmp_path, "planetoid.py", *options)
    report = results["cora"]["gcn"]
    assert list(report["summary"]) == ["float32", "mixed_float16", "autocast_float16"]
    for policy, row in report["summary"].items():
        seeds = report["seeds"][policy]
        assert [seed["epochs"] for seed in seeds] == [2, 2]
        assert row["mean"] == pytest.approx(np.mean([seed["accuracy"] for seed in seeds]))
        assert f"\n{policy} " in output
    assert "published 81.5, band 80.8 to 82.2" in output


@pytest.mark.full
def test_the_planetoid_benchmark_says_where_files_are_public() -> None:
    code, _, error = shell("$PYTHON planetoid.py --data-dir nowhere", BENCHMARKS)
    assert code == 2
    assert "data_dir nowhere is not a folder; Planetoid's files are public in" in error
