"""A capsule's file: a JSON header, the bytes of arrays, and a sha256 of both at the end; and its content.

Its name is `step_00000042.capsule`; each of several processes writes its own, `step_00000042.process_0_of_2.capsule`.
It holds the batch, the changed part of the state, and the rest of the state or only its fingerprints.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from jmp_train.capsules.state_parts import Snapshot, StateParts
from jmp_train.capsules.stored_leaves import StoredLeaf, stored, structure_to_json, what_is_wrong
from jmp_train.checkpoints import MOST_AXES, STORED, is_count, shown
from jmp_train.distributed import as_bytes, local_data
from jmp_train.policies import PyTree
from jmp_train.policies.files import DamagedError, damage_named, open_plain, parse_json, printable
from jmp_train.types import Batch

_MAGIC = b"jmp_train capsule 1\n"
_SUM = hashlib.sha256().digest_size
_LENGTH = 8  # bytes of the header's length
_LONGEST_HEADER = 2**26  # bytes; a leaf takes about 300 of them
_NAME = re.compile(
    r"step_(?P<step>[0-9]{8,18})(\.process_(?P<process>[0-9]{1,9})_of_(?P<processes>[0-9]{1,9}))?\.capsule"
)


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


def step_of(path: Path) -> int:
    """Returns the step in a capsule's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match["step"])


def capsule_files(path: Path) -> list[Path]:
    """Returns the files of all processes for a capsule, in the order of the processes.

    Args:
      path: the file of any process, or `step_00000042.capsule` for the files of all.

    Raises:
      FileNotFoundError: the capsule, or the file of a process, does not exist.
      DamagedError: the file does not have a capsule's name.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise DamagedError(f"{path} does not have the name of a capsule, such as step_00000042.capsule")
    step, processes = int(match["step"]), int(match["processes"] or 1)
    if match["processes"] is None and not path.exists():
        firsts = path.parent.glob(f"step_{step:08d}.process_0_of_*.capsule")
        counts = [int(found["processes"]) for first in firsts if (found := _NAME.fullmatch(first.name))]
        processes = max(counts, default=1)
    files = []
    for process in range(processes):  # the first missing one ends it, however many a name promises
        files.append(capsule_path(path.parent, step, process, processes))
        if not files[-1].exists():
            raise FileNotFoundError(f"there is no capsule {files[-1]}")
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
    """Returns the header and the arrays of a file, neither of which is checked beyond its size.

    Raises:
      DamagedError: the file is not as it was written, or not of this kind; the message names it.
      OSError: the file cannot be read, or does not fit into memory.
    """
    with open_plain(path) as file, damage_named(path):
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_MAGIC) + _LENGTH)
        if not start.startswith(_MAGIC):
            raise DamagedError(f"{path} is no capsule that this version of jmp_train reads, or its beginning is lost")
        length = int.from_bytes(start[len(_MAGIC) :], "little")
        if length > _LONGEST_HEADER:
            raise DamagedError(f"{path} has a header of {length} bytes, more than the limit of {_LONGEST_HEADER}")
        text = file.read(length)
        header = parse_json(path, text)
        types = [(_dtype(about["dtype"]), _shape(about["shape"])) for about in header["arrays"]]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in types]
        if size != len(start) + length + sum(sizes) + _SUM:
            raise DamagedError(f"{path} has {size} bytes, which its header does not give")
        digest = hashlib.sha256(start + text)
        arrays = []
        for (dtype, shape), count in zip(types, sizes, strict=True):
            content = bytearray(count)
            file.readinto(content)
            digest.update(content)
            arrays.append(np.frombuffer(content, np.uint8).view(dtype).reshape(shape))
        if file.read() != digest.digest():
            raise DamagedError(f"{path} is not as it was written: its {size} bytes have another sha256")
    return header, arrays


def _dtype(name: Any) -> np.dtype:
    if name not in STORED:
        raise ValueError(f"it has an array of the unknown dtype {shown(name)}")
    return np.dtype(name)


def _shape(sizes: Any) -> tuple[int, ...]:
    is_one = isinstance(sizes, list) and len(sizes) <= MOST_AXES and all(is_count(size) for size in sizes)
    if not is_one or math.prod(max(1, size) for size in sizes) >= 2**60:
        raise ValueError(f"it has an array of shape {shown(sizes)}, which no array has")
    return tuple(sizes)


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
    """Returns the groups in a file by name; raises an error if one is invalid, or does not fit the arrays."""
    found, rest = header["groups"], iter(arrays)
    if [*found] != ["batch", "changed", "kept"] or found["batch"] is None or found["changed"] is None:
        raise ValueError(f"it has the groups {shown([*found])}")
    groups = {name: None if group is None else _group(group, rest) for name, group in found.items()}
    if next(rest, None) is not None:
        raise ValueError("it has an array of no leaf")
    return groups


def _group(group: dict[str, Any], rest: Iterator[np.ndarray]) -> Group:
    paths, leaves = group["paths"], [StoredLeaf(**leaf) for leaf in group["leaves"]]
    if not all(isinstance(path, str) for path in paths) or len(set(paths)) < len(paths) or len(paths) != len(leaves):
        raise ValueError("it does not give each leaf its own path")
    parts = [[next(rest) for _ in leaf.parts] for leaf in leaves]
    for path, leaf, arrays in zip(paths, leaves, parts, strict=True):
        if wrong := what_is_wrong(leaf, arrays):
            raise ValueError(f"it says of leaf {printable(path)} {wrong}")
    return Group(paths, leaves, parts)


def check_header(header: dict[str, Any], step: int, process: int, processes: int) -> None:
    """Raises an error if a header does not belong to the name of its file, or has an invalid entry."""
    if header["format"] != FORMAT:
        raise ValueError(f"it has format {shown(header['format'])}, this version of jmp_train reads {FORMAT}")
    said = [header[name] for name in ("step", "process", "processes")]
    if said != [step, process, processes]:
        raise ValueError(f"it is of step, process and number of processes {shown(said)}, which its name is not")
    prints, later = header["fingerprints"], header["later_steps"]
    if not isinstance(prints, dict) or not all(is_count(number) for number in prints.values()) or not is_count(later):
        raise ValueError("its fingerprints or later steps are no numbers")
