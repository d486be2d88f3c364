"""The content of a capsule: the batch, the changed part of the state, and the rest or only its fingerprints."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

from jmp_train.capsules.capsule_files import pack
from jmp_train.capsules.state_parts import Snapshot, StateParts
from jmp_train.capsules.stored_leaves import StoredLeaf, stored
from jmp_train.capsules.tree_structures import structure_to_json
from jmp_train.distributed import local_data
from jmp_train.policies import PyTree
from jmp_train.types import Batch

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
