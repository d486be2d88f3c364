"""A capsule's file: a JSON header, the bytes of arrays, and a sha256 of both at the end; and its content.

Its name is `step_00000042.capsule`; each of several processes writes its own, `step_00000042.process_0_of_2.capsule`.
It holds the batch, the changed part of the state, and the rest of the state or only its fingerprints.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from jmp_train.capsules.state_parts import Snapshot, StateParts
from jmp_train.capsules.stored_leaves import StoredLeaf, stored, structure_to_json
from jmp_train.checkpoints import DamagedError
from jmp_train.distributed import as_bytes, local_data
from jmp_train.policies import PyTree
from jmp_train.types import Batch

_MAGIC = b"jmp_train capsule 1\n"
_SUM = hashlib.sha256().digest_size
_LENGTH = 8  # bytes of the header's length
_NAME = re.compile(r"step_(?P<step>\d{8,})(\.process_(?P<process>\d+)_of_(?P<processes>\d+))?\.capsule")


def capsule_path(directory: Path, step: int, process: int, processes: int) -> Path:
    """Returns the path of the capsule that a process writes for a step."""
    own = f".process_{process}_of_{processes}" if processes > 1 else ""
    return directory / f"step_{step:08d}{own}.capsule"


def capsules_in(directory: Path, process: int, processes: int) -> list[Path]:
    """Returns the capsules of a process in a folder, in the order of their steps."""
    found = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path == capsule_path(directory, int(match["step"]), process, processes):
            found[int(match["step"])] = path
    return [found[step] for step in sorted(found)]


def capsule_step(path: Path) -> int:
    """Returns the number of steps that a run had done before the step of a capsule.

    Args:
      path: see `capsule_files`.

    Raises:
      FileNotFoundError: see `capsule_files`.
      ValueError: see `capsule_files`.
    """
    match = _NAME.fullmatch(capsule_files(path)[0].name)
    assert match is not None
    return int(match["step"])


def capsule_files(path: Path) -> list[Path]:
    """Returns the files of all processes for a capsule, in the order of the processes.

    Args:
      path: the file of any process, or `step_00000042.capsule` for the files of all.

    Raises:
      FileNotFoundError: the capsule, or the file of a process, does not exist.
      ValueError: the file does not have a capsule's name.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} does not have the name of a capsule, such as step_00000042.capsule")
    step, processes = int(match["step"]), int(match["processes"] or 1)
    if match["processes"] is None and not path.exists():
        firsts = path.parent.glob(f"step_{step:08d}.process_0_of_*.capsule")
        counts = [int(found["processes"]) for first in firsts if (found := _NAME.fullmatch(first.name))]
        processes = max(counts, default=1)
    files = [capsule_path(path.parent, step, process, processes) for process in range(processes)]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"there is no capsule {file}")
    return files


def pack(header: dict[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    """Returns the content of a file.

    Args:
      header: JSON data.
      arrays: arrays of any NumPy or jax dtypes.
    """
    native = [x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("=")) for x in arrays]
    about = [{"dtype": x.dtype.name, "shape": list(x.shape)} for x in native]
    text = json.dumps({**header, "arrays": about}).encode()
    parts = [_MAGIC, len(text).to_bytes(_LENGTH, "little"), text, *(as_bytes(x).data for x in native)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def unpack(path: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns the header and the arrays of a file.

    Raises:
      DamagedError: the file is not as it was written; the message names it.
    """
    content = path.read_bytes()
    body, digest = memoryview(content)[:-_SUM], content[-_SUM:]
    if not content.startswith(_MAGIC):
        raise DamagedError(f"{path} is not a capsule that this version of jmp_train reads, or its beginning is lost")
    if hashlib.sha256(body).digest() != digest:
        raise DamagedError(f"{path} is not as it was written: its {len(content)} bytes have another sha256")
    start = len(_MAGIC) + _LENGTH
    end = start + int.from_bytes(body[len(_MAGIC) : start], "little")
    header = json.loads(bytes(body[start:end]))
    arrays = []
    for about in header["arrays"]:
        dtype, shape = np.dtype(about["dtype"]), tuple(about["shape"])
        start, end = end, end + dtype.itemsize * math.prod(shape)
        arrays.append(np.frombuffer(body[start:end], np.uint8).copy().view(dtype).reshape(shape))
    return header, arrays


FORMAT = 1


class Group(NamedTuple):
    """Leaves of a capsule that belong together: "batch", "changed" or "kept".

    Attributes:
      paths: the path of each leaf.
      leaves: the description of each leaf.
      parts: this process's arrays of each leaf.
    """

    paths: list[str]
    leaves: list[StoredLeaf]
    parts: list[list[np.ndarray]]


def group_of(paths: Sequence[str], leaves: Sequence[Any]) -> Group:
    """Returns leaves in their stored form; raises an error with the name of a leaf that cannot be stored."""
    found = []
    for path, x in zip(paths, leaves, strict=True):
        try:
            found.append(stored(x))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{path}: {error}") from None
    return Group(list(paths), [leaf for leaf, _ in found], [parts for _, parts in found])


def leaf_paths(tree: PyTree) -> list[str]:
    """Returns the paths of all leaves, as `keystr` writes them."""
    return [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def capsule_content(
    batch: Batch,
    parts: StateParts,
    before: Snapshot,
    kept: Sequence[Any] | None,
    later: int,
) -> tuple[int, bytes]:
    """Returns the step's number and the content of a capsule's file.

    Args:
      batch: the batch of the step.
      parts: the parts of the state.
      before: the snapshot of the state before the step.
      kept: the leaves that the skip left unchanged, if the capsule stores them.
      later: number of later steps dispatched before the skip was seen.
    """
    changed_paths, kept_paths = ([parts.paths[i] for i in positions] for positions in (parts.changed, parts.kept))
    groups = {
        "batch": group_of(leaf_paths(batch), jax.tree.leaves(batch)),
        "changed": group_of(changed_paths, before.changed),
        "kept": group_of(kept_paths, kept) if kept is not None else None,
    }
    step = int(np.max(local_data(before.changed[changed_paths.index(".step")])))
    structure = jax.tree.structure(batch)
    header = {
        "format": FORMAT,
        "step": step,
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "later_steps": later,
        "structure": structure_to_json(structure),
        "shown_structure": str(structure),
        "fingerprints": dict(zip(kept_paths, local_data(before.fingerprints).tolist(), strict=True)),
        "groups": {
            name: group and {"paths": group.paths, "leaves": [leaf._asdict() for leaf in group.leaves]}
            for name, group in groups.items()
        },
    }
    arrays = [array for group in groups.values() if group for parts in group.parts for array in parts]
    return step, pack(header, arrays)


def groups_in(header: dict[str, Any], arrays: Sequence[np.ndarray]) -> dict[str, Group | None]:
    """Returns the groups in a file by name."""
    groups, rest = {}, iter(arrays)
    for name, group in header["groups"].items():
        if group is None:
            groups[name] = None
            continue
        leaves = [StoredLeaf(**leaf) for leaf in group["leaves"]]
        groups[name] = Group(group["paths"], leaves, [[next(rest) for _ in leaf.parts] for leaf in leaves])
    return groups
