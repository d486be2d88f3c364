"""`load_capsule`: restores the state and the batch that reproduce a skipped step's gradients."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.checkpoints import Leaf, as_ascii, differences, leaves_of
from jmp_train.distributed import gather_texts, local_data, placement, to_leaf
from jmp_train.policies import PyTree
from jmp_train.policies.files import damage_named, printable
from jmp_train.policies.pytrees import checked_path
from jmp_train.steps import TrainState, check_is_train_state
from jmp_train.tools.capsules.capsule_files import (
    BATCH,
    CHANGED,
    KEPT,
    NUMBERS,
    CapsuleFile,
    leaf_paths,
    read_capsule,
    sharding_of,
    structure_from_json,
    whole,
)
from jmp_train.tools.capsules.state_parts import parts_of, snapshot
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
    path, parts = checked_path("path", path), parts_of(state)
    files = read_capsule(path)
    own = jax.process_index() if jax.process_count() == len(files) else None  # if as many processes wrote it
    leaves, structure = jax.tree.flatten(state)
    types = [leaf for leaf, _ in leaves_of(jax.eval_shape(lambda x: x, state))]
    for group, positions in ((CHANGED, parts.changed), (KEPT, parts.kept)):
        saved, wanted = files[0].leaves[group], [types[i] for i in positions]
        if saved is None:
            _check_fingerprints(path, files[0].about, parts.paths, parts.kept, state)
            continue
        if lines := differences(saved, wanted, "capsule"):
            raise ValueError("\n  ".join([f"{path} does not fit the state:", *lines]))
        for i in positions:
            number = saved.index(types[i])
            with damage_named(f"{path}: {group} {printable(types[i].path)}"):
                leaves[i] = to_leaf(whole(files, group, number, own), leaves[i], placement(leaves[i]))
    return jax.tree.unflatten(structure, leaves), _batch(path, files, own, like)


def capsule_step(path: Path) -> int:
    """Returns the number of steps that a run had done before the step of a capsule.

    Args:
      path: see `load_capsule`.

    Raises:
      DamagedError, FileNotFoundError, OSError: as `load_capsule` does.
    """
    return read_capsule(path)[0].about["place"][0]


def _check_fingerprints(
    path: Path, about: dict[str, Any], paths: Sequence[str], kept: Sequence[int], state: TrainState
) -> None:
    """Raises ValueError if a state does not have the parameters and model state of the step."""
    prints = local_data(snapshot(jax.tree.leaves(state), kept=kept).fingerprints).tolist()
    found = dict(zip((paths[i] for i in kept), prints, strict=True))
    wanted = about["fingerprints"]
    if found == wanted:
        return
    others = [printable(name) for name in dict.fromkeys([*wanted, *found]) if wanted.get(name) != found.get(name)]
    step, later = about["place"][0], about["later_steps"]
    hint = f"; the run was {later} steps further when the skip was seen" if later else ""
    raise ValueError(
        f"{path} is of step {step} and needs the parameters and model state from before or after its skip; "
        f"the given state is of step {int(np.max(local_data(state.step)))}, and differs in {len(others)} of "
        f"{len(wanted)} leaves: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}{hint}. A checkpoint of that "
        "step fits; SkipRecorder(..., wait=True) returns the state that fits, save_state=True puts it into the capsule"
    )


def _batch(path: Path, files: Sequence[CapsuleFile], own: int | None, like: Batch | None) -> Any:
    leaves, about = files[0].leaves[BATCH] or [], files[0].about
    found = []
    for number, leaf in enumerate(leaves):
        with damage_named(f"{path}: batch {printable(leaf.path)}"):
            found.append(_restored(leaf, about["groups"][BATCH][number], whole(files, BATCH, number, own)))
    paths = [leaf.path for leaf in leaves]
    structure = _structure(path, about, paths, like)
    with damage_named(path):
        batch = jax.tree.unflatten(structure, found)
        if leaf_paths(batch) != paths:
            raise ValueError(f"its batch has other leaves than its structure {printable(about['shown_structure'])}")
    return batch


def _restored(leaf: Leaf, about: dict[str, Any], array: np.ndarray) -> Any:
    """Returns a leaf of the batch as it was held, on the devices of its mesh if these are present."""
    held = about["held"]
    if held in NUMBERS:
        return NUMBERS[held](array.item())
    if held == "numpy":
        return array
    try:
        is_array = held in ("jax", "weak")
        like = jax.ShapeDtypeStruct(array.shape, array.dtype) if is_array else jax.random.key(0, impl=held)
        x = to_leaf(array, like, sharding_of(about["sharding"]))
    except (RuntimeError, MemoryError):  # of the device
        raise
    except Exception as error:  # noqa: BLE001 - of any kind, because jax's errors about shardings are of many
        raise ValueError(f"{as_ascii(held)} or sharding {as_ascii(about['sharding'])} does not fit: {error}") from None
    if held in ("jax", "weak") and x.dtype.name != leaf.dtype:
        raise ValueError(f"a leaf is {leaf.dtype}, which needs JAX_ENABLE_X64=1")
    if held == "weak":  # an update of a weak array stays weak
        return jnp.broadcast_to(jnp.asarray(x.dtype.type(0).item()), x.shape).at[...].set(x)
    return x


def _structure(path: Path, about: dict[str, Any], paths: Sequence[str], like: PyTree) -> Any:
    if like is not None:
        if (found := leaf_paths(like)) != list(paths):
            raise ValueError(f"{path} has a batch with other leaves than like: {printable(list(paths))}, not {found}")
        return jax.tree.structure(like)
    if about["structure"] is None:
        raise ValueError(
            f"{path} has a batch with containers whose fields no file holds, {printable(about['shown_structure'])}: "
            "pass like=a batch of that structure"
        )
    with damage_named(path):
        return structure_from_json(about["structure"])
