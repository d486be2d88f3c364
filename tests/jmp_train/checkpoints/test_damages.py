"""Damages to a step's file: each is found and named, and the older step taken; nothing in a file is run or trusted."""

import json
import os
import pickle
import random
import resource
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
from sealed_files import entry, forge, put_together, taken_apart

import jmp_train as jt

pytestmark = pytest.mark.quick

MANIFEST = "jmp_train.checkpoint"


def state(value: float) -> dict[str, Any]:
    """Returns a state of arrays that safetensors has and has not, of a key and of a number."""
    return {
        "noise": np.random.default_rng(int(value)).normal(size=(30, 7)),
        "half": jnp.full((4, 5), value, jnp.bfloat16),
        "small": np.full(9, int(value), "uint4"),
        "none": jnp.zeros((0, 2)),
        "rng": jax.random.key(int(value)),
        "step": int(value),
    }


def bits(found: dict[str, Any]) -> list[bytes]:
    found = found | {"rng": jax.random.key_data(found["rng"])}
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(found)]


@pytest.fixture(name="whole", scope="module")
def fixture_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    with jt.CheckpointStore(directory) as store:
        for number in (1, 2):
            store.save(number, state(number))
    return directory


@pytest.fixture(name="newest")
def fixture_newest(whole: Path, tmp_path: Path) -> Path:
    """Returns the file of step 2 in a folder that a test may damage."""
    return shutil.copytree(whole, tmp_path / "copy") / "step_00000002.safetensors"


class Planted:
    """Makes a file when a pickle of it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        """Returns what a loader would call."""
        return os.open, (str(self.mark), os.O_CREAT)


def flip(path: Path, generator: random.Random, bytes_: int = 1, after: int = 0) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(bytes_):
        data[generator.randrange(after, len(data))] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def exchange(path: Path) -> None:
    older = path.with_name("step_00000001.safetensors")
    middle = path.with_name("middle")
    for old, new in ((path, middle), (older, path), (middle, older)):
        old.rename(new)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(path: Path) -> None:
        path.rename(path.parent.parent / "outside")
        make(path)

    return replace


def arrays_begin(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


# Of each damage, how it is done to a file, and what is said of it.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "emptied": (lambda path: path.write_bytes(b""), "its header is truncated"),
    "cut in the header": (lambda path: os.truncate(path, 200), "its header is truncated"),
    "cut by a byte": (lambda path: os.truncate(path, path.stat().st_size - 1), "its arrays end at byte"),
    "appended": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "its arrays end at byte"),
    "zeroed": (lambda path: path.write_bytes(bytes(path.stat().st_size)), "is not a safetensors file"),
    "arrays zeroed": (
        lambda path: path.write_bytes(path.read_bytes()[: arrays_begin(path)].ljust(path.stat().st_size, b"\0")),
        "the array .* is not as it was written",
    ),
    "array flipped": (
        lambda path: flip(path, random.Random(0), after=arrays_begin(path)), "leaf|the array .* is not as it was",
    ),
    "older step": (
        lambda path: shutil.copy(path.with_name("step_00000001.safetensors"), path), "it is of step 1",
    ),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps(Planted(path.with_name("run")))), "its header"),
    "gigantic": (lambda path: os.truncate(path, 2**40), "its arrays end at byte"),
    "gigantic header": (lambda path: path.write_bytes(b"\xff" * 99), "more than the limit"),
    "a folder": (replaced_by(Path.mkdir), "is not a regular file"),
    "a link": (
        replaced_by(lambda path: path.symlink_to(path.parent.parent / "outside")), "is not a regular file",
    ),
    "a link to itself": (replaced_by(lambda path: path.symlink_to(path)), "is not a regular file"),
    "a fifo": (replaced_by(os.mkfifo), "is not a regular file"),
    "no permission": (lambda path: path.chmod(0), "Permission denied"),
}  # fmt: skip


def assert_older_is_taken(directory: Path, message: str) -> None:
    with (
        jt.CheckpointStore(directory, read_only=True) as store,
        pytest.warns(UserWarning, match=rf"^step 2 is damaged: .*{message}") as warned,
    ):
        step, found = store.restore(state(7))
    assert (step, len(warned)) == (1, 1)
    assert bits(found) == bits(state(1))
    (text,) = str(warned[0].message).splitlines()
    assert str(directory / "step_00000002.safetensors") in text
    assert len(text) < 1000
    assert not (directory / "run").exists()


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damage_is_named_and_the_older_step_taken(kind: str, whole: Path) -> None:
    damage, message = DAMAGES[kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with everybodys_folder() as folder:
        copy = shutil.copytree(whole, folder / "copy")
        copy.chmod(0o755)
        damage(copy / "step_00000002.safetensors")
        with as_nobody():
            assert_older_is_taken(copy, message)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**18  # KiB


@pytest.mark.parametrize("count", [60, pytest.param(800, marks=pytest.mark.full)])
def test_of_many_flips_cuts_and_exchanges_none_is_silent(count: int, newest: Path) -> None:
    """Flips of a bit, of many, cuts at any length, and files that have taken each other's names."""
    content, generator = newest.read_bytes(), random.Random(count)
    wanted, directory = {number: bits(state(number)) for number in (1, 2)}, newest.parent
    with jt.CheckpointStore(directory, read_only=True) as store:
        for number in range(count):
            kind = number % 8
            if kind < 5:
                flip(newest, generator)
            elif kind == 5:
                flip(newest, generator, 2 + len(content) // 50)
            else:
                newest.write_bytes(content[: generator.randrange(len(content))])
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                step, found = store.restore(state(7))
            assert bits(found) == wanted[step], number
            assert (step, len(warned)) in ((1, 1), (2, 0)), number
            newest.write_bytes(content)
        exchange(newest)
        with pytest.raises(ValueError, match=r"intact: step 2 .* it is of step 1; step 1 .* it is of step 2$"):
            store.restore(state(7))


def leaf(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["leaves"][1].update(values)


def top(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest.update(values)


# Of each hostile manifest, how it is made of a good one, and what is said of it.
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format 99": (top(format=99), "it has format 99, this version of jmp_train reads 2"),
    "no format": (lambda m: m.pop("format"), "KeyError 'format'"),
    "other step": (top(step=1), "it is of step 1"),
    "nan step": (top(step=float("nan")), "it is of step nan"),
    "float step": (top(step=2.0), r"it is of step 2\.0"),
    "leaves null": (top(leaves=None), "TypeError"),
    "leaves texts": (top(leaves=["w"]), "TypeError"),
    "metadata": (top(metadata=[1]), r"it has metadata \[1\]"),
    "no path": (lambda m: m["leaves"][1].pop("path"), "KeyError 'path'"),
    "path twice": (leaf(path="['half']"), "it has two leaves of the same path"),
    "kind number": (leaf(kind=3), "it says of leaf 1 path .* and kind 3"),
    "dtype objects": (leaf(dtype="object"), "it says of leaf 1 dtype 'object'"),
    "dtype list": (leaf(dtype=["f4"]), "unhashable"),
    "huge dtype": (leaf(dtype="V100000000000"), "it says of leaf 1 dtype 'V1"),
    "hidden shape": (leaf(shape=[0, 2**70]), "which no array has"),
    "deep shape": (leaf(shape=[1] * 100), "which no array has"),
    "negative shape": (leaf(shape=[-30, -7]), r"shape \(-30, -7\), which no array has"),
    "shape text": (leaf(shape="43"), "shape .*, which no array has"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_named(name: str, newest: Path) -> None:
    edit, message = MANIFESTS[name]
    manifest = entry(newest, MANIFEST)
    assert manifest["leaves"][1]["path"] == "['noise']"
    edit(manifest)
    forge(newest, MANIFEST, json.dumps(manifest))
    assert_older_is_taken(newest.parent, message)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 10_000, '{"format": 2' + "0" * 5000 + "}", "\ud800"])
def test_a_manifest_that_is_none_is_named(text: str, newest: Path) -> None:
    forge(newest, MANIFEST, text)
    assert_older_is_taken(newest.parent, "")


def test_a_leaf_whose_array_does_not_fit_is_named(newest: Path) -> None:
    """The manifest and the state agree, and the header has other arrays."""
    header, body = taken_apart(newest)
    noise = header["['noise']"]
    for other in ({"dtype": "F32"}, {"shape": [30, 6]}, {"data_offsets": [0, 8]}, {"dtype": "BOOL", "shape": [1680]}):
        put_together(newest, {**header, "['noise']": {**noise, **other}}, body)
        assert_older_is_taken(newest.parent, "noise")
    short = {name: x for name, x in header.items() if name != "['none']"}
    put_together(newest, short, body)
    assert_older_is_taken(newest.parent, "does not have a sha256 of each array")


def test_what_only_looks_like_a_step_is_none(newest: Path) -> None:
    for name in (
        "step_000000003.safetensors", "step_٠٠٠٠٠٠٠٣.safetensors", "step_0000003.safetensors",
        "step_00000003.safetensor", "Step_00000003.safetensors", "step_00000003.safetensors ",
        f"step_{'9' * 200}.safetensors",
        ".step_00000003.safetensors.1.ab", "step_00000003.tmp", "step_-0000003.safetensors", "step_00000003.npz",
    ):  # fmt: skip
        shutil.copy(newest, newest.with_name(name))
    with jt.CheckpointStore(newest.parent) as store:
        assert store.steps() == [1, 2]
        assert store.restore(state(7))[0] == 2
