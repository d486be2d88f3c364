"""What a run's checkpoints say of it: every option that its results depend on, and the data."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from example_tasks import load_task
from made_runs import first_examples

from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.resuming import data_digest, differences, run_metadata
from jmp_train.app.runs.run_settings import FewBits, RulesFile
from jmp_train.policies import TORCH_CUDA, AutocastRules
from jmp_train.task import Arrays, Task

pytestmark = pytest.mark.quick


def run_of(task: Task, epochs: int = 3, batch_size: int = 2, **settings: Any) -> dict[str, object]:
    settings.setdefault("identity", {"task": "cora", "options": {"synthetic": True, "model": "gcn"}})
    return run_metadata(task, "float32", batch_size, epochs, RunSettings(**settings), task.shared())["run"]


@pytest.fixture(name="cora", scope="module")
def fixture_cora() -> Task:
    return load_task("cora", synthetic=True)


@pytest.mark.full
def test_each_option_is_told(cora: Task) -> None:
    run = run_of(cora)
    other = {"task": "cora", "options": {"synthetic": True, "model": "gat", "image_size": 32}}
    found = differences(run, run_of(cora, 4, 6, seed=1, devices=2, learning_rate=0.5, steps=7, identity=other))
    assert set(found) == {
        "model: the run has gcn, this call gat",
        "devices: the run has 1, this call 2",
        "image_size: the run has the default, this call 32",
        "epochs: the run has 3, this call 4",
        "steps: the run has the default, this call 7",
        "batch_size: the run has 2, this call 6",
        "learning_rate: the run has the default, this call 0.5",
        "seed: the run has 0, this call 1",
    }
    assert differences({**run, "synthetic": False}, {**run, "synthetic": None}) == []  # as 0.1 wrote it of all tasks
    assert differences(run, run_of(cora)) == []
    short = run_of(cora, growth_interval=20)
    assert differences(run, short) == ["growth_interval: the run has the default, this call 20"]
    assert differences(short, run) == ["growth_interval: the run has 20, this call the default"]
    assert "growth_interval" not in run  # as in checkpoints of before there was the option
    small = run_of(cora, few_bits=FewBits(("nu=bfloat16",)))
    assert differences(run, small) == ["state_dtypes: the run has the default, this call ['nu=bfloat16']"]
    assert not {"state_dtypes", "parameters", "fp8"} & run.keys()


def test_the_entries_of_rules_are_told_and_not_where_their_file_is(cora: Task) -> None:
    def metadata(file: str, rules: AutocastRules) -> dict[str, Any]:
        return run_metadata(cora, "torch", 2, 3, RunSettings(rules=RulesFile(Path(file), rules)), None)

    run = metadata("a.toml", TORCH_CUDA)["run"]
    assert differences(run, metadata("b.toml", AutocastRules(*dataclasses.astuple(TORCH_CUDA)))["run"]) == []
    other = metadata("a.toml", TORCH_CUDA.replace(paths={"head": "float32"}))["run"]
    assert differences(run, other) == [f"rules: the run has {run['rules']}, this call {other['rules']}"]
    plain = run_metadata(cora, "torch", 2, 3, RunSettings(), None)
    assert differences(plain["run"], run) == [f"rules: the run has the default, this call {run['rules']}"]
    assert metadata("a.toml", TORCH_CUDA)["rules_file"] == str(Path("a.toml").absolute())
    assert "rules" not in plain["run"]  # as in checkpoints of before there was the option
    assert "rules_file" not in plain
    # What is in checkpoints must not change.
    assert RulesFile(Path("x"), AutocastRules(paths=(("head", "float32"),))).digest == "31f87287d71878b9"


def test_other_data_of_the_same_shapes_is_told(cora: Task) -> None:
    changed = dict(cora.train)
    name = "label"
    changed[name] = changed[name].copy()
    changed[name][-1] += 1
    other = dataclasses.replace(cora, train=changed)
    [line] = differences(run_of(cora), run_of(other))
    assert line.startswith("data: the run has ")
    features = cora.shared()
    digests = {data_digest(cora.train, cora.test, features), data_digest(cora.train, cora.test)}
    assert len(digests) == 2
    few = first_examples(cora, 100)
    assert differences(run_of(cora), run_of(few)) == [
        "train_size: the run has 140, this call 100"  # and not that the data is another, too
    ]


def test_the_digest_has_every_byte_name_shape_and_dtype() -> None:
    train = {"x": np.arange(6, dtype=np.int32), "y": np.ones((2, 3))}
    others: list[tuple[Arrays, Arrays]] = [
        (train, {}),
        ({}, train),
        (train | {"x": train["x"].astype(np.uint32)}, {}),
        (train | {"y": np.ones((3, 2))}, {}),
        (train | {"x": train["x"][::-1]}, {}),
        ({"x": train["x"], "z": train["y"]}, {}),
        (train | {"y": np.ones((2, 0))}, {}),
        (train | {"y": np.ones((2, 3), jnp.bfloat16)}, {}),
    ]
    assert len({data_digest(*one) for one in others}) == len(others)
    assert data_digest(train, {}) == data_digest(dict(reversed(train.items())), {})


def test_files_are_the_same_data_elsewhere_and_other_data_of_other_sizes(tmp_path: Path) -> None:
    digests = []
    for folder, size in (("a", 5), ("b", 5), ("c", 6)):
        paths = [tmp_path / folder / part / f"{n}.jpg" for part in ("u", "v") for n in range(3)]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(size))
        train = {"path": np.array([str(path) for path in paths], object)}
        digests.append(data_digest(train, train))
    assert digests[0] == digests[1] != digests[2]
