"""Manifests whose sum is right and whose contents are not: refused by name, and nothing else is read."""

import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jmp_train as jt

pytestmark = pytest.mark.quick

STATE = {"w": np.arange(12.0).reshape(4, 3), "half": np.arange(5, dtype=np.float16), "step": 2}
OLDER = {"w": -STATE["w"], "half": -STATE["half"], "step": 1}
OUTSIDE = "outside"


@pytest.fixture(name="two_steps", scope="module")
def fixture_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("two_steps")
    with jt.CheckpointStore(directory) as store:
        store.save(1, OLDER)
        store.save(2, STATE)
    return directory


@pytest.fixture(name="directory")
def fixture_directory(two_steps: Path, tmp_path: Path) -> Path:
    """Returns a copy that a test may damage."""
    return shutil.copytree(two_steps, tmp_path / "copy")


def forge(folder: Path, manifest: Any) -> None:
    """Writes a manifest, an object or its text, with the right sum."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.sha256").write_text(hashlib.sha256(text).hexdigest())


def assert_older_is_taken(directory: Path, message: str) -> str:
    """Restores, which has to warn once; returns the warning."""
    with (
        jt.CheckpointStore(directory) as store,
        pytest.warns(UserWarning, match=rf"step 2 is damaged: .*{message}") as warned,
    ):
        step, found = store.restore(STATE)
    assert (step, found["step"], len(warned)) == (1, 1, 1)
    np.testing.assert_array_equal(found["w"], OLDER["w"])
    np.testing.assert_array_equal(found["half"], OLDER["half"])
    (text,) = str(warned[0].message).splitlines()
    assert len(text) < 1000
    return text


def leaf(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["leaves"][2].update(values)


def file(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest["files"].update({name: {"bytes": 1, "sha256": "0" * 64}})


def top(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest.update(values)


def without(*path: Any) -> Callable[[dict[str, Any]], Any]:
    def remove(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        del manifest[path[-1]]

    return remove


ZARRAY = "arrays/0002.w/.zarray"
# Of each hostile manifest, how it is made of a good one, and what is said of it.
EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format 99": (top(format=99), r"manifest\.json has format 99, this version of jmp_train reads 1"),
    "format text": (top(format="1"), "has format '1'"),
    "format true": (top(format=True), "has format True"),
    "no format": (without("format"), "has format None"),
    "other step": (top(step=1), "is of step 1"),
    "nan step": (top(step=float("nan")), "is of step nan"),
    "float step": (top(step=2.0), r"is of step 2\.0"),
    "true step": (top(step=True), "is of step True"),
    "negative step": (top(step=-2), "is of step -2"),
    "no leaves": (without("leaves"), "has no list of leaves"),
    "leaves null": (top(leaves=None), "has no list of leaves"),
    "leaves texts": (top(leaves=["w"]), "says of leaf 0 'w'"),
    "files list": (top(files=[]), "has no list of leaves or no files"),
    "no files": (top(files={}), "of leaf 0 folder .*, of whose file .zarray it says nothing"),
    "facts null": (lambda m: m["files"].update({ZARRAY: None}), "how long 'arrays/0002.w/.zarray'"),
    "facts text": (lambda m: m["files"].update({ZARRAY: {"bytes": "9"}}), "how long"),
    "sum number": (lambda m: m["files"][ZARRAY].update(sha256=1), "the sha256 of 'arrays/0002.w/"),
    "fewer files": (without("files", ZARRAY), r"of leaf 2 folder '0002\.w', of whose file \.zarray"),
    "no chunk": (without("files", "arrays/0002.w/0.0"), r"of whose file 0\.0 it says nothing"),
    "absolute file": (file("/etc/hostname"), "names a file '/etc/hostname', which is not one of"),
    "file above": (file("../../outside"), r"names a file '\.\./\.\./outside'"),
    "file within above": (file("arrays/../../../outside"), "names a file 'arrays/../../../outside'"),
    "empty file": (file(""), "names a file ''"),
    "double slash": (file("arrays//x"), "names a file 'arrays//x'"),
    "newline": (file("arrays/a\nstep 3 is intact"), r"names a file 'arrays/a\\nstep 3 is intact'"),
    "escape": (file("arrays/\x1b[2J"), r"names a file 'arrays/\\x1b\[2J'"),
    "nul": (file("arrays/\0"), r"names a file 'arrays/\\x00'"),
    "windows": (file("C:\\outside"), r"names a file 'C:\\\\outside'"),
    "long name": (file("x" * 100_000 + "/.."), r"names a file 'x{79}\.\.\."),
    "folder above": (leaf(folder="../../../outside"), r"of leaf 2 folder '\.\./\.\./\.\./outside'"),
    "folder absolute": (leaf(folder="/tmp"), "of leaf 2 folder '/tmp'"),
    "folder dots": (leaf(folder=".."), r"of leaf 2 folder '\.\.'"),
    "folder of another": (leaf(folder="0000.half", shape=[5]), "two leaves of the same folder"),
    "folder list": (leaf(folder=["0002.w"]), r"of leaf 2 folder \['0002\.w'\]"),
    "no folder": (without("leaves", 2, "folder"), "of leaf 2 folder None"),
    "no path": (without("leaves", 2, "path"), "of leaf 2 path None"),
    "path twice": (leaf(path="['half']"), "two leaves of the same path"),
    "kind number": (leaf(kind=3), "of leaf 2 kind 3"),
    "dtype objects": (leaf(dtype="object"), "of leaf 2 dtype 'object'"),
    "dtype code": (leaf(dtype="O"), "of leaf 2 dtype 'O'"),
    "dtype list": (leaf(dtype=["f4"]), r"of leaf 2 dtype \['f4'\]"),
    "huge dtype": (leaf(dtype="V100000000000"), "of leaf 2 dtype 'V1"),
    "other dtype": (leaf(dtype="int64"), r"0002\.w is not int64\[4, 3\]: .*dtype"),
    "larger dtype": (leaf(dtype="complex128"), r"0002\.w is not complex128\[4, 3\]: "),
    "huge shape": (leaf(shape=[2**20, 2**20]), r"0002\.w is not float64\[1048576, 1048576\]: "),
    "larger shape": (leaf(shape=[2**59, 1]), r"0002\.w is not float64\[576460752303423488, 1\]: "),
    "beyond shape": (leaf(shape=[2**40] * 2), "which no array has"),
    "hidden shape": (leaf(shape=[0, 2**70]), "which no array has"),
    "deep shape": (leaf(shape=[1] * 100), "which no array has"),
    "no shape": (without("leaves", 2, "shape"), "of leaf 2 shape None"),
    "shape text": (leaf(shape="43"), "of leaf 2 shape '43'"),
    "negative shape": (leaf(shape=[-4, -3]), r"of leaf 2 shape \[-4, -3\]"),
    "float shape": (leaf(shape=[4.0, 3.0]), r"of leaf 2 shape \[4\.0, 3\.0\]"),
    "transposed": (leaf(shape=[3, 4]), r"0002\.w is not float64\[3, 4\]: "),
    "other sum": (leaf(sha256="0" * 64), r"leaf \['w'\] is not what was saved"),
    "no sum": (without("leaves", 2, "sha256"), "of leaf 2 sha256 None"),
    "metadata": (top(metadata=[1]), r"has metadata \[1\]"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_hostile_manifest_is_named_and_the_older_step_taken(name: str, directory: Path) -> None:
    edit, message = EDITS[name]
    folder = directory / "step_00000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    forge(folder, manifest)
    (directory.parent / OUTSIDE).write_text("x")
    assert_older_is_taken(directory, message)


UNPARSED = {
    "deep list": b"[" * 200_000,
    "deep object": b'{"a":' * 200_000,
    "empty": b"",
    "bytes": b"\xff\xfe",
    "digits": b'{"format": 1, "step": 1' + b"0" * 5000 + b"}",
    "pickle": b"cos\nsystem\n(S'touch run'\ntR.",
}


NO_MANIFESTS = {"[]": "is not a JSON object", "null": "is not a JSON object", "{}": "has format None"}


@pytest.mark.parametrize("name", [*UNPARSED, *NO_MANIFESTS])
def test_a_manifest_that_is_none_is_named(name: str, directory: Path) -> None:
    message = NO_MANIFESTS.get(name, "cannot be parsed: ")
    forge(directory / "step_00000002", UNPARSED.get(name, name.encode()))
    assert_older_is_taken(directory, rf"manifest\.json {message}")


def test_a_gigantic_manifest_takes_no_memory(directory: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("manifest.json", "manifest.sha256"):
        with (directory / "step_00000002" / name).open("wb") as file:
            file.truncate(2**40)  # of which the disk has nothing
        assert_older_is_taken(directory, f"{name} is too large: it has {2**40} bytes, more than the limit of {2**26}")
        shutil.copy(directory / "step_00000001" / name, directory / "step_00000002" / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**20  # KiB


ZARRAYS: dict[str, dict[str, Any]] = {
    "shape": {"shape": [2**40, 3]},
    "chunks": {"chunks": [2**40, 3]},
    "split": {"chunks": [1, 3]},
    "dtype": {"dtype": "<i8"},
    "order": {"order": "F"},
    "separator": {"dimension_separator": "/"},
    "blosc": {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 1}},
    "version": {"zarr_format": 3},
}


@pytest.mark.parametrize("name", ZARRAYS)
def test_a_hostile_zarray_with_the_right_sum_is_named(name: str, directory: Path) -> None:
    folder = directory / "step_00000002"
    path = folder / "arrays" / "0002.w" / ".zarray"
    text = json.dumps(json.loads(path.read_text()) | ZARRAYS[name]).encode()
    path.write_bytes(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    facts = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    manifest["files"]["arrays/0002.w/.zarray"] = facts
    forge(folder, manifest)
    assert_older_is_taken(directory, r"0002\.w is not float64\[4, 3\]: ")


def test_a_step_that_is_no_folder_is_damaged(directory: Path) -> None:
    folder = directory / "step_00000002"
    moved = folder.rename(directory.parent / OUTSIDE)
    for make in (folder.touch, lambda: folder.symlink_to(moved), lambda: os.mkfifo(folder)):
        make()
        assert_older_is_taken(directory, "step_00000002 is not a folder")
        folder.unlink()


def test_what_only_looks_like_a_step_is_none(directory: Path) -> None:
    for name in ("step_000000003", "step_٠٠٠٠٠٠٠٣", "step_0000003", "Step_00000003", "step_00000003 "):
        shutil.copytree(directory / "step_00000002", directory / name)
    with jt.CheckpointStore(directory) as store:
        assert store.steps() == [1, 2]
        assert store.restore(STATE)[0] == 2


def test_a_link_out_of_the_folder_is_not_followed(directory: Path) -> None:
    """Also where what it leads to is what the manifest wants."""
    folder = directory / "step_00000002"
    for name in (
        "manifest.json",
        "manifest.sha256",
        "arrays/0002.w/.zarray",
        "arrays/0002.w/0.0",
        "arrays/0002.w",
        "arrays",
    ):
        path, kind = folder / name, "regular file" if (folder / name).is_file() else "folder"
        moved = path.rename(directory.parent / OUTSIDE)
        path.symlink_to(moved)
        assert_older_is_taken(directory, f"{path} is not a {kind}")
        path.unlink()
        moved.rename(path)
    with jt.CheckpointStore(directory) as store:
        assert store.restore(STATE)[0] == 2
