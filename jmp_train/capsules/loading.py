"""`load_capsule`: restores the state and the batch that reproduce a skipped step's gradients."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jmp_train.capsules.capsule_files import Group, capsule_files, check_header, groups_in, leaf_paths, step_of, unpack
from jmp_train.capsules.state_parts import StateParts, parts_of, snapshot
from jmp_train.capsules.stored_leaves import restored, short_type, structure_from_json, whole
from jmp_train.distributed import gather_texts, local_data, placement, to_leaf
from jmp_train.policies import PyTree
from jmp_train.policies.files import DamagedError, damage_named, printable
from jmp_train.policies.pytrees import checked_path
from jmp_train.steps import TrainState, check_is_train_state
from jmp_train.types import Batch


def load_capsule(
    path: str | os.PathLike[str], state: TrainState, *, like: Batch | None = None
) -> tuple[TrainState, Any]:
    """Returns the state and the batch of a skipped step, as they were before it.

    `step(*load_capsule(path, state))` computes the skipped gradients again, bitwise, if the step is compiled
    as before and runs on as many devices of the same kind. The gradients do not depend on the optimizer's moments,
    which come from `state`.

    Args:
      path: a capsule's file. With several processes, pass any of their files, or `step_00000042.capsule` for all of
        them. The files are in one folder. If one of several processes calls this, all must.
      state: a state with the parameters and the model state of the step: the state before the skip, the one after it,
        or a checkpoint of either. If the capsule stores the state, any state of the run fits. It is not changed.
      like: a batch, or its shapes, with the structure of the capsule's batch. Required if the batch
        has containers that neither jax nor this program knows.

    Returns:
      `state` with the key, step number, loss scale and counters from before the step, and the batch. All other arrays
      are those of the given state, so a donated step also takes their memory. Arrays of the batch that were on a mesh
      return to it if the same devices exist; others are on the default device.

    Raises:
      DamagedError: a file is not as it was written; the message names it. It is a ValueError.
      FileNotFoundError: the capsule, or a process's file of it, does not exist.
      ValueError: the state has other parameters, model state or leaves: the message names both steps
        and the leaves. Or `like` has another structure, or is missing.
      TypeError: `state` is no `TrainState`.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
      >>> run = jax.jit(jt.train_step(jt.stateless(lambda w, x: (w * x).mean()), optimizer, policy="mixed_float16"))
      >>> state = jt.TrainState.create(jnp.ones(2), optimizer)
      >>> with jt.SkipRecorder(tempfile.mkdtemp()) as recorder:
      ...     state, metrics = recorder.watch(run)(state, jnp.array([1.0, jnp.nan]))
      >>> before, batch = jt.load_capsule(recorder.last_capsule(), state)
      >>> again, metrics = run(before, batch)
      >>> bool(metrics["grads_finite"]), int(again.step) == int(state.step)
      (False, True)
    """
    check_is_train_state(state)
    gather_texts("")  # waits until each process has arrived, and so has written its file
    parts = parts_of(state)
    headers, groups = _read(checked_path("path", path))
    header = headers[0]
    own = jax.process_index() if jax.process_count() == len(headers) else None  # if as many processes wrote it
    arrays = {name: _arrays(path, name, [found[name] for found in groups], own) for name in groups[0]}
    leaves, structure = jax.tree.flatten(state)
    _put(path, leaves, parts, parts.changed, groups[0]["changed"], arrays["changed"])
    if groups[0]["kept"] is None:
        _check_fingerprints(path, header, jax.tree.leaves(state), parts, state)
    else:
        _put(path, leaves, parts, parts.kept, groups[0]["kept"], arrays["kept"])
    batch = _batch(path, header, groups[0]["batch"], arrays["batch"], like)
    return jax.tree.unflatten(structure, leaves), batch


def capsule_step(path: Path) -> int:
    """Returns the number of steps that a run had done before the step of a capsule.

    Args:
      path: see `load_capsule`.

    Raises:
      DamagedError, FileNotFoundError, OSError: as `load_capsule` does.
    """
    return _read(path)[0][0]["step"]


def _read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Group | None]]]:
    """Returns headers and groups of the files of all processes."""
    files = capsule_files(path)
    headers, groups = [], []
    for process, file in enumerate(files):
        header, arrays = unpack(file)
        with damage_named(file):
            check_header(header, step_of(file), process, len(files))
            groups.append(groups_in(header, arrays))
        headers.append(header)
    with damage_named(path):
        about = [[header[name] for name in ("fingerprints", "structure", "shown_structure")] for header in headers]
        paths = [{name: group and group.paths for name, group in found.items()} for found in groups]
        if any(found != about[0] for found in about) or any(found != paths[0] for found in paths):
            raise DamagedError(f"{path}: the files of {len(headers)} processes are not of one run")
    return headers, groups


def _arrays(path: object, name: str, groups: Sequence[Group | None], own: int | None) -> list[np.ndarray]:
    found = [group for group in groups if group is not None]
    arrays = []
    for number, leaf_path in enumerate(found[0].paths if found else ()):
        with damage_named(f"{path}: {name} {printable(leaf_path)}"):
            arrays.append(whole([g.leaves[number] for g in found], [g.parts[number] for g in found], own))
    return arrays


def _put(
    path: object,
    leaves: list[Any],
    parts: StateParts,
    positions: Sequence[int],
    group: Group | None,
    arrays: Sequence[np.ndarray],
) -> None:
    """Replaces leaves of a state by those of a capsule; raises ValueError if their types differ."""
    assert group is not None
    stored_arrays = dict(zip(group.paths, arrays, strict=True))
    types = [printable(f"{leaf.key or leaf.dtype}{leaf.shape}") for leaf in group.leaves]
    found = dict(zip(group.paths, types, strict=True))
    wanted = {parts.paths[i]: short_type(leaves[i]) for i in positions}
    lines = [
        f"{printable(name)}: the capsule has {found.get(name, 'nothing')}, the state {wanted.get(name, 'nothing')}"
        for name in dict.fromkeys([*found, *wanted])
        if found.get(name) != wanted.get(name)
    ]
    if lines:
        raise ValueError("\n  ".join([f"{path} does not fit the state:", *lines]))
    for i in positions:
        leaves[i] = to_leaf(stored_arrays[parts.paths[i]], leaves[i], placement(leaves[i]))


def _check_fingerprints(
    path: object, header: dict[str, Any], leaves: Sequence[Any], parts: StateParts, state: TrainState
) -> None:
    """Raises ValueError if a state does not have the parameters and model state of the step."""
    prints = local_data(snapshot(leaves, kept=parts.kept).fingerprints).tolist()
    found = {parts.paths[i]: number for i, number in zip(parts.kept, prints, strict=True)}
    wanted = header["fingerprints"]
    if found == wanted:
        return
    others = [printable(name) for name in dict.fromkeys([*wanted, *found]) if wanted.get(name) != found.get(name)]
    later = header["later_steps"]
    hint = f"; the run was {later} steps further when the skip was seen" if later else ""
    raise ValueError(
        f"{path} is of step {header['step']} and needs the parameters and model state from before or after its skip; "
        f"the given state is of step {int(np.max(local_data(state.step)))}, and differs in {len(others)} of "
        f"{len(wanted)} leaves: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}{hint}. A checkpoint of that "
        "step fits; SkipRecorder(..., wait=True) returns the state that fits, save_state=True puts it into the capsule"
    )


def _batch(
    path: object, header: dict[str, Any], group: Group | None, arrays: Sequence[np.ndarray], like: Batch | None
) -> Any:
    assert group is not None
    leaves = []
    for name, leaf, array in zip(group.paths, group.leaves, arrays, strict=True):
        with damage_named(f"{path}: batch {printable(name)}"):
            leaves.append(restored(leaf, array))
    structure = _structure(path, header, group.paths, like)
    with damage_named(path):
        batch = jax.tree.unflatten(structure, leaves)
        if leaf_paths(batch) != group.paths:
            raise ValueError(f"its batch has other leaves than its structure {printable(header['shown_structure'])}")
    return batch


def _structure(path: object, header: dict[str, Any], paths: Sequence[str], like: PyTree) -> Any:
    if like is not None:
        found = leaf_paths(like)
        if found != list(paths):
            raise ValueError(f"{path} has a batch with other leaves than like: {printable(list(paths))}, not {found}")
        return jax.tree.structure(like)
    if header["structure"] is None:
        raise ValueError(
            f"{path} has a batch with containers whose fields no file holds, {printable(header['shown_structure'])}: "
            "pass like=a batch of that structure"
        )
    with damage_named(path):
        return structure_from_json(header["structure"])
