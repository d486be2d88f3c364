"""Reads checkpoints of version 0.1: a folder per step, with a manifest and a zarr array for each leaf.

tensorstore, which flax installs, decodes the arrays; their files are read here, so that it sees plain files only.

Reference: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html (the files of each array).
"""

import contextlib
import hashlib
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jmp_train.checkpoints.leaves import Leaf
from jmp_train.checkpoints.step_files import SavedStep, checked_manifest, unreadable_is_damaged
from jmp_train.policies.files import DamagedError, parse_json, printable, read_plain

_LONGEST = 2**26  # bytes of a manifest; a leaf takes about 600 of them


@contextlib.contextmanager
def open_folder(folder: Path, step: int) -> Iterator[SavedStep]:
    """Opens the folder of a step for reading.

    Args:
      folder: the folder.
      step: the number in its name.

    Raises:
      DamagedError: the folder cannot be read or is not as it was written, or not of this step.
    """
    with unreadable_is_damaged(folder):
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise DamagedError(f"{folder} is not a folder")
    text = _content(folder, "manifest.json")
    with unreadable_is_damaged(folder / "manifest.json"):
        if hashlib.sha256(text).hexdigest().encode() != _content(folder, "manifest.sha256"):
            raise ValueError("it or manifest.sha256 is not as it was written")
        manifest = parse_json(folder / "manifest.json", text)
        metadata, leaves = checked_manifest(manifest, 1, step)
        about = {x["path"]: (x["folder"], x["sha256"]) for x in manifest["leaves"]}

    def read(leaf: Leaf) -> np.ndarray:
        name, digest = about[leaf.path]
        with unreadable_is_damaged(f"{folder}: leaf {printable(leaf.path)}"):
            array = _array(folder, f"arrays/{name}", leaf)
            if hashlib.sha256(array.tobytes()).hexdigest() != digest:
                raise ValueError("it is not what was saved")
        return array

    yield SavedStep(metadata, leaves, read)


def _array(folder: Path, name: str, leaf: Leaf) -> np.ndarray:
    if 0 in leaf.shape:
        return np.zeros(leaf.shape, leaf.dtype)  # without files
    import tensorstore

    chunk, memory = ".".join("0" for _ in leaf.shape) or "0", tensorstore.Context()
    kept = tensorstore.KvStore.open({"driver": "memory"}, context=memory).result()
    most = _LONGEST + 2 * np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape)  # zstd makes random numbers longer
    for file in (".zarray", chunk):
        kept.write(file, _content(folder, f"{name}/{file}", most)).result()
    layout = {"chunks": list(leaf.shape), "order": "C"}  # one chunk
    try:
        stored = tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": layout}, open=True, context=memory
        ).result()
        return np.asarray(stored.read().result()).view(leaf.dtype).reshape(leaf.shape)
    except Exception as error:  # noqa: BLE001 - tensorstore's errors are of many classes
        message = re.split(r" \[(?:tensorstore_spec|source locations|os_error_code)=", str(error))[0]
        raise DamagedError(f"{folder / name} is not {leaf}: {printable(message)}") from None


def _content(folder: Path, name: str, max_bytes: int = _LONGEST) -> bytes:
    """Returns the content of a plain file in the folder, to which no link leads."""
    path = folder / name
    with unreadable_is_damaged(path):
        if path.parent.resolve() != folder.resolve() / Path(name).parent:
            raise DamagedError(f"{path} is not in the folder")
        return read_plain(path, max_bytes=max_bytes, follow=False)
