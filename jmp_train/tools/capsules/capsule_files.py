"""A capsule's file: sealed safetensors, as a checkpoint's, with the batch and a part of the state.

Its name is `step_00000042.capsule`; each of several processes writes its own, `step_00000042.process_0_of_2.capsule`.
The metadata's entry `jmp_train.capsule` describes three groups of leaves: the batch, the changed part of the state, and
the kept rest, of which it has the leaves or only fingerprints.

The structures of pytrees are JSON data.
A class of a node is looked up among the loaded ones, or in packages with common containers of batches. jax must know it
as a pytree node. Nothing else is imported, no pickle is read, and no code of the file runs.
"""

import ast
import contextlib
import importlib
import json
import math
import operator
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import PyTreeDef, default_registry, keystr

from jmp_train.checkpoints import Leaf, as_ascii, in_file, is_count, leaf_of, leaves_in
from jmp_train.distributed import key_implementation, local_data, to_host
from jmp_train.policies import PyTree
from jmp_train.policies.files import (
    DamagedError,
    SafetensorsFile,
    damage_named,
    parse_json,
    printable,
    write_safetensors,
)
from jmp_train.policies.pytrees import is_key
from jmp_train.tools.capsules.state_parts import Snapshot, StateParts
from jmp_train.types import Batch

_FORMAT = 2
_ABOUT = "jmp_train.capsule"  # the entry of the metadata
_NAME = re.compile(
    r"step_(?P<step>[0-9]{8,18})(\.process_(?P<process>[0-9]{1,9})_of_(?P<processes>[0-9]{1,9}))?\.capsule"
)
BATCH, CHANGED, KEPT = "batch", "changed", "kept"
NUMBERS = {kind.__name__: kind for kind in (bool, int, float, complex)}


def capsule_path(directory: Path, step: int, process: int, processes: int) -> Path:
    """Returns the path of the capsule that a process writes for a step."""
    own = f".process_{process}_of_{processes}" if processes > 1 else ""
    return directory / f"step_{step:08d}{own}.capsule"


def capsules_in(directory: Path, process: int, processes: int) -> list[Path]:
    """Returns the capsules of a process in a folder, in the order of their steps."""
    steps = [int(match["step"]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    paths = [capsule_path(directory, step, process, processes) for step in sorted({*steps})]
    return [path for path in paths if path.exists()]


def _files(path: Path) -> list[Path]:
    """Returns the files of all processes for a capsule; raises FileNotFoundError if one does not exist."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise DamagedError(f"{path} does not have the name of a capsule, such as step_00000042.capsule")
    if match["processes"] is None and not path.exists():
        firsts = [first for first in path.parent.glob(f"{path.stem}.process_0_of_*") if _NAME.fullmatch(first.name)]
        if firsts:
            return _files(max(firsts))
    files, processes = [], int(match["processes"] or 1)
    for process in range(processes):  # the first missing one ends it, however many a name promises
        files.append(capsule_path(path.parent, int(match["step"]), process, processes))
        if not files[-1].exists():
            raise FileNotFoundError(f"there is no capsule {files[-1]}")
    return files


def leaf_paths(tree: PyTree) -> list[str]:
    """Returns the paths of all leaves, as `keystr` writes them."""
    return [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def write_capsule(
    directory: Path, batch: Batch, parts: StateParts, before: Snapshot, kept: Sequence[Any] | None, later: int
) -> Path:
    """Writes this process's file of a capsule, and returns its path.

    Args:
      directory: the folder.
      batch: the batch of the step.
      parts: the parts of the state.
      before: the snapshot of the state before the step.
      kept: the leaves that the skip left unchanged, if the capsule stores them.
      later: number of later steps dispatched before the skip was seen.

    Raises:
      TypeError, ValueError: a leaf cannot be stored; the message names it.
      OSError: the file cannot be written.
    """
    changed_paths, kept_paths = ([parts.paths[i] for i in positions] for positions in (parts.changed, parts.kept))
    groups: dict[str, Iterable[tuple[str, Any]] | None] = {
        BATCH: zip(leaf_paths(batch), jax.tree.leaves(batch), strict=True),
        CHANGED: zip(changed_paths, before.changed, strict=True),
        KEPT: None if kept is None else zip(kept_paths, kept, strict=True),
    }
    arrays: dict[str, np.ndarray] = {}
    structure, described = jax.tree.structure(batch), None
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):  # `like` is needed
        described = structure_to_json(structure)
    step = int(np.max(local_data(before.changed[changed_paths.index(".step")])))
    place = step, jax.process_index(), jax.process_count()
    about = {
        "format": _FORMAT,
        "place": place,
        "jax": jax.__version__,
        "later_steps": later,
        "structure": described,
        "shown_structure": str(structure),
        "fingerprints": dict(zip(kept_paths, local_data(before.fingerprints).tolist(), strict=True)),
        "groups": {
            name: group and [_taken_apart(name, path, x, arrays) for path, x in group] for name, group in groups.items()
        },
    }
    for group in about["groups"].values():
        leaves_in(group or [])  # raises if a reader would, as for two leaves of the same path
    file = capsule_path(directory, *place)
    write_safetensors(file, arrays, {_ABOUT: json.dumps(about)}, sealed=True)
    return file


def _taken_apart(group: str, path: str, x: Any, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the description of a leaf, and adds the parts of it that this process has to the arrays of the file."""
    leaf, sharding = leaf_of(path, x), None
    held = leaf.kind if leaf.kind in NUMBERS else "numpy"
    pieces = {json.dumps([[0, size] for size in leaf.shape]): x}
    if isinstance(x, jax.Array):
        if x.is_deleted():
            raise ValueError(f"{path}: an array was deleted, usually by donation")
        held, sharding = "weak" if jax.typeof(x).weak_type else "jax", _described(x.sharding)
        if is_key(x):
            held, x = key_implementation(x), jax.random.key_data(x)
        pieces = {_bounds(shard.index, leaf.shape): shard.data for shard in x.addressable_shards}
    for place, piece in pieces.items():
        arrays[f"{group}{path}@{place}"] = in_file(to_host(piece))
    return {**leaf._asdict(), "held": held, "sharding": sharding, "parts": [json.loads(place) for place in pieces]}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    return json.dumps([part.indices(size)[:2] for part, size in zip(index, shape, strict=True)])


class CapsuleFile(NamedTuple):
    """The content of one process's file.

    Attributes:
      about: the entry of the metadata.
      leaves: the leaves of each group; None for one that the file does not have.
      arrays: the arrays by their names.
    """

    about: dict[str, Any]
    leaves: dict[str, list[Leaf] | None]
    arrays: dict[str, np.ndarray]


def read_capsule(path: Path) -> list[CapsuleFile]:
    """Returns the files of all processes for a capsule, in the order of the processes.

    Args:
      path: the file of any process, or `step_00000042.capsule` for the files of all.

    Raises:
      FileNotFoundError: the capsule, or the file of a process, does not exist.
      DamagedError: a file is not as it was written, or not a capsule.
      OSError: a file cannot be read.
    """
    paths = _files(path)
    found = [_read(file, process, len(paths)) for process, file in enumerate(paths)]
    same = [{**one.about, "place": None, "later_steps": 0, "groups": one.leaves} for one in found]
    if any(facts != same[0] for facts in same):
        raise DamagedError(f"{path}: the files of {len(found)} processes are not of one run")
    return found


def _read(path: Path, process: int, processes: int) -> CapsuleFile:
    with SafetensorsFile(path, sealed=True) as file, damage_named(path):
        about = parse_json(path, file.metadata[_ABOUT].encode())
        if about["format"] != _FORMAT:
            raise ValueError(f"it has format {as_ascii(about['format'])}, this version of jmp_train reads {_FORMAT}")
        if capsule_path(path.parent, *about["place"]) != path or about["place"][1:] != [process, processes]:
            said = as_ascii(about["place"])
            raise ValueError(f"it is of step, process and number of processes {said}, which its name is not")
        if not all(map(is_count, [*about["fingerprints"].values(), about["later_steps"]])):
            raise ValueError("its fingerprints or later steps are no numbers")
        groups = {name: about["groups"][name] for name in (BATCH, CHANGED, KEPT)}
        leaves = {name: None if group is None else leaves_in(group) for name, group in groups.items()}
        if leaves[BATCH] is None or leaves[CHANGED] is None or not about.keys() >= {"structure", "shown_structure"}:
            raise ValueError("it has no batch, or no changed part of the state")
        return CapsuleFile(about, leaves, {name: file.read(name) for name in file.names})


def whole(files: Sequence[CapsuleFile], group: str, number: int, own: int | None) -> np.ndarray:
    """Returns a whole leaf, assembled from the parts of all processes.

    Args:
      files: the files of all processes.
      group: the leaf's group.
      number: its number in the group.
      own: index of this process if the number of processes is the same; otherwise None.

    Raises:
      ValueError: parts are missing, or each process had a different leaf.
    """
    leaf = (files[0].leaves[group] or [])[number]
    pieces: dict[str, list[np.ndarray]] = {}
    for file in files:
        for bounds in file.about["groups"][group][number]["parts"]:
            place, shape = json.dumps(bounds), [stop - start for start, stop in bounds]
            array = file.arrays[f"{group}{leaf.path}@{place}"].view(leaf.dtype).reshape(shape)
            pieces.setdefault(place, []).append(array)
    copies = next(iter(pieces.values()), [])
    if len(pieces) == 1 and len(copies) == len(files) and copies[0].shape == leaf.shape:
        if own is None and any(array.tobytes() != copies[0].tobytes() for array in copies):
            raise ValueError(f"each of {len(files)} processes had a different one; load it with as many processes")
        return copies[own or 0]
    if sum(copies[0].size for copies in pieces.values()) != math.prod(leaf.shape):
        raise ValueError("parts of it are missing")
    array, known = np.empty(leaf.shape, leaf.dtype), np.zeros(leaf.shape, bool)
    for place, copies in pieces.items():
        where = tuple(slice(*bounds) for bounds in json.loads(place))
        array[where], known[where] = copies[0], True
    if not known.all():
        raise ValueError("parts of it overlap")
    return array


def _described(sharding: Sharding) -> dict[str, Any] | None:
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    mesh = sharding.mesh
    return {
        "axes": mesh.axis_names,
        "shape": mesh.devices.shape,
        "types": [kind.name for kind in mesh.axis_types],
        "devices": [device.id for device in mesh.devices.flat],
        "spec": [*sharding.spec],
    }


def sharding_of(described: dict[str, Any] | None) -> Sharding | None:
    """Returns the sharding over the devices with the same ids; None if one of them does not exist."""
    devices = {device.id: device for device in jax.devices()}
    if described is None or not devices.keys() >= set(described["devices"]):
        return None
    placed = np.array([devices[number] for number in described["devices"]]).reshape(described["shape"])
    types = tuple(AxisType[name] for name in described["types"])
    spec = P(*(tuple(entry) if isinstance(entry, list) else entry for entry in described["spec"]))
    return NamedSharding(Mesh(placed, tuple(described["axes"]), axis_types=types), spec)


_IMPORTED = ("jmp_train.graphs.", "jraph.", "flax.core.")
_LEAF = "*"


def structure_to_json(structure: Any) -> Any:
    """Returns a structure as JSON data.

    Raises:
      ValueError: it has a node whose fields are not literals.

    Example:
      >>> import jax
      >>> structure_to_json(jax.tree.structure({"x": (1, None)}))
      ['builtins:dict', "['x']", [['builtins:tuple', 'None', ['*', None]]]]
    """
    node = structure.node_data()
    if node is None:
        return _LEAF
    kind, static = node
    if kind is type(None):
        return None
    found = ast.literal_eval(repr(static))
    if type(found) is not type(static) or found != static:
        raise ValueError(f"{static!r} is not a literal")
    children = [structure_to_json(child) for child in structure.children()]
    return [f"{kind.__module__}:{kind.__qualname__}", repr(static), children]


def structure_from_json(described: Any) -> Any:
    """Returns the structure described by `structure_to_json`; raises an error if it is none.

    Raises:
      ValueError: a class is not loaded, or is no pytree node.
    """
    make = PyTreeDef.from_node_data_and_children  # pyright: ignore[reportAttributeAccessIssue]
    if described == _LEAF:
        return make(default_registry, None, [])
    if described is None:
        return make(default_registry, (type(None), None), [])
    name, static, children = described
    kind, rest = _class_of(name), [structure_from_json(child) for child in children]
    try:
        data = ast.literal_eval(static)
        if kind is dict and (type(data) is not list or not len({*data}) == len(data) == len(rest)):
            raise ValueError("a dictionary does not have its own key for each value")
        return make(default_registry, (kind, data), rest)
    except (RuntimeError, ValueError, TypeError, SyntaxError, MemoryError) as error:
        raise ValueError(f"jax knows no node {printable(name)} with these fields: {printable(error)}") from None


def _class_of(name: str) -> type[Any]:
    module, _, path = name.partition(":")
    if f"{module}.".startswith(_IMPORTED):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found = None
    with contextlib.suppress(KeyError, AttributeError):
        found = operator.attrgetter(path)(sys.modules[module])
    if not isinstance(found, type):
        raise ValueError(
            f"the class {printable(name)} is not loaded: import its module, or pass like=a batch of that structure"
        )
    return found
