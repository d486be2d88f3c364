"""Damages to every file and folder of a checkpoint: found, or harmless; and nothing in it is run."""

import collections
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine_limits import as_nobody, everybodys_folder

import jmp_train as jt

pytestmark = pytest.mark.quick

TO_FILES = (
    "deleted",
    "truncated",
    "emptied",
    "flipped",
    "many flipped",
    "zeroed",
    "appended",
    "swapped",
    "older",
    "a folder",
    "a link",
    "a link to itself",
    "a fifo",
    "a pickle",
    "no permission",
)
TO_FOLDERS = ("deleted", "emptied", "a file", "a link", "a fifo", "older", "more files", "no permission")


def state(value: float) -> dict[str, Any]:
    """Returns a state of arrays that compress and that do not, of a key and of a number."""
    random_numbers = np.random.default_rng(int(value)).normal(size=(30, 7))
    return {
        "noise": random_numbers,
        "half": jnp.full((4, 5), value, jnp.bfloat16),
        "small": np.full(9, int(value), "uint4"),
        "none": jnp.zeros((0, 2)),
        "rng": jax.random.key(int(value)),
        "step": int(value),
    }


def bits(found: dict[str, Any]) -> list[bytes]:
    found = found | {"rng": jax.random.key_data(found["rng"])}
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(found)]


class Planted:
    """Makes a file when a pickle of it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        """Returns what a loader would call."""
        return os.open, (str(self.mark), os.O_CREAT)


def damage_file(path: Path, kind: str, step: Path, outside: Path, generator: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind in ("flipped", "many flipped"):
        for _ in range(1 if kind == "flipped" else 1 + len(data) // 4):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
    elif kind in ("truncated", "emptied", "zeroed", "appended"):
        half = data[: generator.randrange(len(data))]
        zeros = bytes(len(data))
        path.write_bytes({"truncated": half, "zeroed": zeros, "appended": data + b"\n"}.get(kind, b""))
    elif kind == "swapped":
        files = [x for x in sorted(step.rglob("*")) if x.is_file() and x.read_bytes() != data]
        other = generator.choice(files)
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    elif kind == "older":
        shutil.copy(step.with_name("step_00000001") / path.relative_to(step), path)
    elif kind == "a link":
        path.rename(outside)
        path.symlink_to(outside)
    elif kind == "no permission":
        path.chmod(0)
    else:
        path.unlink()
        pickled = pickle.dumps(Planted(outside.with_name("run")))
        make: dict[str, Callable[[], object]] = {
            "deleted": lambda: None,
            "a folder": path.mkdir,
            "a link to itself": lambda: path.symlink_to(path),
            "a fifo": lambda: os.mkfifo(path),
            "a pickle": lambda: path.write_bytes(pickled),
        }
        make[kind]()


def damage_folder(path: Path, kind: str, step: Path, outside: Path) -> None:
    pickled = pickle.dumps(Planted(outside.with_name("run")))
    if kind == "more files":
        for name in ("state.pkl", "__init__.py", "_sharding", "descriptor", "0.1", "manifest.ocdbt", "x.npy"):
            (path / name).write_bytes(pickled)
        return
    if kind == "no permission":
        path.chmod(0)
        return
    older = step.with_name("step_00000001") / path.relative_to(step)
    path.rename(outside)
    make: dict[str, Callable[[], object]] = {
        "deleted": lambda: None,
        "emptied": path.mkdir,
        "a file": lambda: path.write_bytes(pickled),
        "a link": lambda: path.symlink_to(outside),
        "a fifo": lambda: os.mkfifo(path),
        "older": lambda: shutil.copytree(older, path),
    }
    make[kind]()


def test_damage_to_any_file_is_found_and_the_file_named(tmp_path: Path) -> None:
    like = {"w": np.zeros(3), "none": np.zeros((0, 2))}
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, {"w": np.arange(3.0), "none": np.zeros((0, 2))})
        store.wait()
        (step,) = tmp_path.glob("step_*")
        files = [path for path in step.rglob("*") if path.is_file()]
        assert {"manifest.json", "manifest.sha256", ".zarray", "_METADATA"} <= {path.name for path in files}
        for path in files:
            whole = path.read_bytes()
            for kind in ("flipped", "truncated", "emptied", "deleted"):
                damage_file(path, kind, step, tmp_path / "outside", random.Random(0))
                with pytest.raises(ValueError, match=f"step 1 is damaged: .*({re.escape(path.name)}|manifest)"):
                    store.restore(like)
                path.write_bytes(whole)
        assert store.restore(like)[0] == 1


@pytest.mark.full
@pytest.mark.timeout(600)
def test_each_of_at_least_200_damages_is_found_or_harmless() -> None:
    with everybodys_folder() as folder:
        check_damages(folder)


def check_damages(folder: Path) -> None:
    wanted = {number: bits(state(number)) for number in (1, 2)}
    whole = folder / "whole"
    with jt.CheckpointStore(whole) as store:
        for number in (1, 2):
            store.save(number, state(number))
        assert bits(store.restore(state(7))[1]) == wanted[2]
    step = whole / "step_00000002"
    cases = [
        (path.relative_to(whole), kind)
        for path in [step, *sorted(step.rglob("*"))]
        for kind in (TO_FOLDERS if path.is_dir() else TO_FILES)
    ]
    generator, outcomes = random.Random(0), collections.Counter()
    for name, kind in cases:
        copy = shutil.copytree(whole, folder / "copy")
        outside, path = folder / "outside", copy / name
        with jt.CheckpointStore(copy) as store:
            if path.is_dir():
                damage_folder(path, kind, copy / step.name, outside)
            else:
                damage_file(path, kind, copy / step.name, outside, generator)
            with warnings.catch_warnings(record=True) as warned, as_nobody():
                warnings.simplefilter("always")
                found, restored = store.restore(state(7))
        assert not (folder / "run").exists(), (name, kind)
        assert bits(restored) == wanted[found], (name, kind)
        texts = [str(warning.message) for warning in warned]
        if found == 1 and (name, kind) != (Path(step.name), "deleted"):
            assert len(texts) == 1, (name, kind, texts)
            assert texts[0].startswith("step 2 is damaged: "), (name, kind, texts)
        else:
            assert not texts, (name, kind, texts)
        outcomes[f"{kind}: step {found}"] += 1
        for path in (copy, outside):
            _remove(path)
    assert outcomes.total() >= 200
    harmless = {name for name in outcomes if name.endswith("step 2")}
    # Files of the same contents in both steps, and files that are read by nobody.
    assert harmless <= {"older: step 2", "more files: step 2"}, outcomes
    print(outcomes.total(), "damages:", dict(sorted(outcomes.items())))


def _remove(path: Path) -> None:
    for x in [path, *path.rglob("*")] if path.is_dir() else []:
        if x.is_dir() and not x.is_symlink():
            x.chmod(0o755)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
