"""What version 0.1.0 has saved is restored, and gone on with, wherever its modules are now."""

import contextlib
import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from example_tasks import task_module
from flax import serialization
from released_states import STEP_OF, new_state, next_params, optimizers, values_of

import jmp_train as jt
from jmp_train.app.cli.jobs import identity_of
from jmp_train.app.runs import RunSettings, Saving, train
from jmp_train.app.runs.events import Epoch
from jmp_train.app.runs.resuming import differences, run_metadata
from jmp_train.app.tasks import TaskSource
from jmp_train.checkpoints import DamagedError

pytestmark = pytest.mark.quick

TESTS = next(path for path in Path(__file__).resolve().parents if path.name == "tests")
DATA = TESTS / "data" / "checkpoint_0_1"
VALUES = json.loads((DATA / "values.json").read_text())


@pytest.fixture(name="saved", scope="module")
def fixture_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with what 0.1.0 has saved."""
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(DATA / "checkpoints.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def restored(saved: Path, name: str) -> tuple[int, Any]:
    with jt.CheckpointStore(saved / name, read_only=True) as store:
        return store.restore(new_state(name))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", STEP_OF)
def test_a_state_has_the_values_that_were_saved(name: str, saved: Path) -> None:
    step, state = restored(saved, name)
    assert step == STEP_OF[name]
    assert values_of(state) == VALUES[name]
    with jt.CheckpointStore(saved / name, read_only=True) as store:
        assert store.metadata(step) == {"state": name}


@pytest.mark.full
def test_the_values_are_not_those_of_a_new_state() -> None:
    for name in STEP_OF:
        fresh = values_of(new_state(name))
        assert fresh.keys() == VALUES[name].keys()
        assert fresh != VALUES[name]


def test_its_folders_are_kept_and_removed_as_files_are(saved: Path, tmp_path: Path) -> None:
    """Also what it left when it was killed: a folder that was about to replace the step, and parts of others."""
    directory = shutil.copytree(saved / "flat", tmp_path / "copy")
    (directory / "step_00000007").rename(directory / "step_00000007.host-1-ab.whole")
    parts = ("7.host-1-ab.deleted", "9.host-1-ab.tmp", "9.host-1-ab.whole.5.deleted")  # the last is a newer version's
    for name in (f"step_0000000{part}" for part in parts):
        (directory / name / "arrays").mkdir(parents=True)
    with jt.CheckpointStore(directory, max_to_keep=2) as store:
        step, state = store.restore(new_state("flat"))
        assert (step, values_of(state)) == (7, VALUES["flat"])
        store.save(8, state)
        store.wait()
        assert store.steps() == [7, 8]
        assert not list(directory.glob("*.deleted")) + list(directory.glob("*.tmp"))
        store.save(7, state, metadata={"state": "again"})
        store.wait()
        assert store.metadata(7) == {"state": "again"}
        store.save(9, state)
        store.wait()
        shutil.copytree(saved / "flat" / "step_00000007", directory / "step_00000007")
        assert values_of(store.restore(new_state("flat"))[1]) == VALUES["flat"]
        store.save(10, state)
    assert sorted(path.name for path in directory.iterdir()) == [f"step_{n:08d}.safetensors" for n in (9, 10)]


def damaged(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    path.unlink()
    if kind == "flipped":
        content[len(content) // 2] ^= 8
    if kind in ("flipped", "truncated"):
        path.write_bytes(content if kind == "flipped" else content[: len(content) // 2])
    elif kind == "a link":
        path.with_name("elsewhere").write_bytes(content)
        path.symlink_to("elsewhere")
    elif kind == "a fifo":
        os.mkfifo(path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["flipped", "truncated", "deleted", "a link", "a fifo"])
def test_damage_to_any_of_its_files_is_found(kind: str, saved: Path, tmp_path: Path) -> None:
    step, read = saved / "flat" / "step_00000007", 0
    for name in sorted(path.relative_to(step) for path in step.rglob("*") if path.is_file()):
        directory = shutil.copytree(saved / "flat", tmp_path / "copy")
        damaged(directory / step.name / name, kind)
        with jt.CheckpointStore(directory, read_only=True) as store:
            if name.name.startswith("_"):  # orbax's, which is not read
                assert values_of(store.restore(new_state("flat"))[1]) == VALUES["flat"]
            elif kind == "flipped" and name.name == ".zarray":  # it may say the same
                with contextlib.suppress(DamagedError):
                    assert values_of(store.restore(new_state("flat"))[1]) == VALUES["flat"]
            else:
                with pytest.raises(DamagedError, match=r"step 7 is damaged: .*step_00000007"):
                    store.restore(new_state("flat"))
        read += 1
        shutil.rmtree(directory)
    assert read > 30


def test_a_manifest_that_leads_out_of_its_folder_is_refused(saved: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(saved / "flat", tmp_path / "copy")
    folder = directory / "step_00000007"
    text = (folder / "manifest.json").read_text()
    edits: list[tuple[str, str, str]] = [
        ('"folder": "', '"folder": "../../step_00000007/arrays/', "is not in the folder"),
        ('"format": 1', '"format": 9', "it has format 9, this version of jmp_train reads 1"),
        ('"step": 7', '"step": 8', "it is of step 8"),
        ('"dtype": "int8"', '"dtype": "object"', "dtype 'object'"),
        ('"float16"', '"int16"', "does not fit the state"),
    ]
    for old, new, message in edits:
        assert old in text
        (folder / "manifest.json").write_text(text.replace(old, new))
        (folder / "manifest.sha256").write_text(hashlib.sha256(text.replace(old, new).encode()).hexdigest())
        with jt.CheckpointStore(directory, read_only=True) as store, pytest.raises(ValueError, match=message):
            store.restore(new_state("flat"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["master_weights", "stochastic_rounding"])
def test_a_state_takes_the_next_step_that_it_took_then(name: str, saved: Path) -> None:
    _, state = restored(saved, name)
    scaled = jt.get_loss_scale(state.opt_state)
    assert float(scaled.loss_scale) == 2.0**9  # the second of its three steps overflowed
    assert int(state.step) == 3
    with jax.numpy_dtype_promotion("standard"):
        params = next_params(name, state)
    wanted = VALUES["next"][name]
    assert params.keys() == wanted.keys()
    half = 2.0**-11 if optimizers()[name][0] == np.float16 else 2.0**-8
    for path, values in wanted.items():
        np.testing.assert_allclose(params[path], values, rtol=4 * half, atol=1e-6, err_msg=path)


def test_weights_are_loaded(saved: Path) -> None:
    params = jt.load_weights(saved / "weights.safetensors", new_state("master_weights").params)
    wanted = VALUES["master_weights"]
    found = {f".params{path}": value for path, value in values_of(params).items()}
    assert found == {path: x for path, x in wanted.items() if path.startswith(".params[")}


def test_flax_reads_its_message(saved: Path) -> None:
    message = (saved / "state.msgpack").read_bytes()
    state = serialization.from_bytes(new_state("master_weights"), message)
    assert values_of(jax.tree.map(_on_device, state)) == VALUES["master_weights"]


def _on_device(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jax.numpy.asarray(x)


@pytest.mark.full
def test_a_run_goes_on(saved: Path) -> None:
    source = source_of("karate")
    options = source.options()
    settings, events = RunSettings(epochs=4, identity=identity_of(source, options)), []
    with jt.CheckpointStore(saved / "karate") as store, jax.numpy_dtype_promotion("standard"):
        saving = Saving(store, 2, True, lambda: False)
        train(source.task(options), "mixed_float16", settings, saving=saving, on_event=events.append)
    epochs = [event for event in events if isinstance(event, Epoch)]
    assert [epoch.epoch for epoch in epochs] == [3, 4]  # the first two were done
    # As 0.1.0 printed it of the run in one piece.
    np.testing.assert_allclose([x.loss for x in epochs], [0.5674, 0.5072], atol=2e-3)
    with jt.CheckpointStore(saved / "karate", read_only=True) as store:
        assert store.steps() == [2, 4]
        before, now = (store.metadata(step)["run"] for step in (2, 4))
    assert now == {name: before[name] for name in now}
    others = before.keys() - now.keys()  # options of other tasks, which 0.1.0 saved too
    assert others == {"heads", "image_size", "scale", "synthetic"} and not any(before[name] for name in others)


def source_of(name: str) -> Any:
    """Returns the source of a task as it was in 0.1.0, when all of them were built in."""
    module = task_module(name)
    return TaskSource(name, module.task, module.Options)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("task", "options", "run"),
    [
        ("digits", {}, {"train_size": 1437, "data": "447d99a43e6eac73"}),
        ("karate", {"model": "gat"}, {"model": "gat", "train_size": 2, "data": "661eed51010f973c"}),
        (
            "cora",
            {"synthetic": True},
            {"model": "gcn", "train_size": 140, "synthetic": True, "data": "9e8a7ccbbe5f2e4c"},
        ),
        (
            "reddit",
            {"synthetic": True, "scale": 0.001, "heads": (2, 2, 2)},
            {"heads": [2, 2, 2], "scale": 0.001, "train_size": 153, "synthetic": True, "data": "6fea0d415651c67c"},
        ),
    ],
)
def test_a_run_says_the_same_of_itself(task: str, options: dict[str, Any], run: dict[str, Any]) -> None:
    """Otherwise `--resume` would refuse the checkpoints of before as another run's."""
    source = source_of(task)
    given = source.options(**options)
    loaded = source.task(given)
    settings = RunSettings(identity=identity_of(source, given))
    found = run_metadata(loaded, "mixed_float16", 2, 3, settings, loaded.shared())["run"]
    saved = {
        "task": task, **dict.fromkeys(["model", "heads", "scale", "image_size"]), "synthetic": False,
        "policy": "mixed_float16", "epochs": 3, "batch_size": 2, "devices": 1, "seed": 0, **run,
    }  # fmt: skip
    assert differences(saved, found) == []
    assert differences(found, saved) == []
