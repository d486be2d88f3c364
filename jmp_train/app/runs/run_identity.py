"""The identity of a run in its checkpoints: task, options that affect results, digest of the data."""

import hashlib
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_train.app.runs.run_settings import RunSettings
from jmp_train.distributed import as_bytes
from jmp_train.graphs.structure import CSR, CSRAndCSC
from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import change_nodes, named_leaves
from jmp_train.task import Task, count_examples

_PACKAGES = ("jmp_train", "jax", "jaxlib", "flax", "optax", "numpy")
_FILES = 1000  # number of the data's files whose sizes count


def run_metadata(
    task: Task,
    policy: str,
    batch_size: int | None,
    epochs: int,
    settings: RunSettings,
    shared: PyTree,
) -> dict[str, Any]:
    """Returns the metadata of a run in its checkpoints, as JSON data.

    `run` has all options that affect its results, by the names of the command line, with None for defaults,
    and digests of the data and of rules from a file. The rest is for people: the paths of data and rules, which may
    move, the device and the versions. `definitions` has digests of the definitions in a user's file, which may change.

    Args:
      task: the task.
      policy: the name of the policy, mode or schedule.
      batch_size: examples per step; None if the batches decide.
      epochs: passes over the data.
      settings: the settings of the run. `identity` has the task's name as "task", its options that affect results as
        "options", the paths among them as "files", and the "definitions" of a user's file.
      shared: the result of `task.shared`, a tree of arrays.
    """
    said = settings.identity
    train = None if callable(task.train) else task.train
    test = None if callable(task.test) else task.test
    digest = data_digest(train, test, shared) if train or test or shared else None
    optional = {
        "train_size": None if train is None else count_examples(train),
        "accumulate_steps": None if settings.accumulate_steps == 1 else settings.accumulate_steps,
        "growth_interval": settings.growth_interval,
        "learning_rate": settings.learning_rate,
        "rules": None if settings.rules is None else settings.rules.digest,
        "steps": settings.steps,
        "batch_size": batch_size,
        "data": digest,
    }
    rules = settings.rules
    return {
        "run": {
            "task": said.get("task"),
            **said.get("options", {}),
            "devices": settings.devices,
            "policy": policy,
            **settings.few_bits.metadata(),
            "epochs": epochs,
            "seed": settings.seed,
            **{name: value for name, value in optional.items() if value is not None},
        },
        **said.get("files", {}),
        **({} if rules is None else {"rules_file": str(rules.path.absolute())}),
        **({"definitions": said["definitions"]} if "definitions" in said else {}),
        "device": jax.local_devices()[0].device_kind,
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def differences(saved: Mapping[str, Any], this: Mapping[str, Any]) -> list[str]:
    """Returns a line for each option that differs between two runs.

    Args:
      saved: `run` of a checkpoint's metadata.
      this: `run` of the current metadata.

    Example:
      >>> differences({"epochs": 3, "model": "gat", "seed": 0}, {"epochs": 5, "model": None, "seed": 0})
      ['epochs: the run has 3, this call 5', 'model: the run has gat, this call the default']
    """
    others = [name for name in dict.fromkeys([*saved, *this]) if _said(saved, name) != _said(this, name)]
    if not set(others) <= _NOT_OF_THE_DATA:
        others = [name for name in others if name != "data"]  # the options listed explain the difference
    return [f"{name}: the run has {_said(saved, name)}, this call {_said(this, name)}" for name in others]


_NOT_OF_THE_DATA = {
    "data", "devices", "policy", "epochs", "steps", "seed", "batch_size", "accumulate_steps", "growth_interval",
    "learning_rate", "rules", "state_dtypes", "parameters", "fp8",
}  # fmt: skip


def _said(options: Mapping[str, Any], name: str) -> str:
    value = options.get(name)  # older runs without this option used its default
    return "the default" if value is None or value is False else str(value)


def changed_definitions(saved: Mapping[str, Any], this: Mapping[str, Any], step: int) -> tuple[str, ...]:
    """Returns a line with the definitions of a user's file that changed since a checkpoint, if any.

    Args:
      saved: metadata of the checkpoint.
      this: metadata of the current run.
      step: step of the checkpoint.

    Example:
      >>> before = {"definitions": {"file": "my.py", "loss_fn": "3f", "Net": "9a"}}
      >>> now = {"definitions": {"file": "my.py", "loss_fn": "77", "Net": "9a"}}
      >>> changed_definitions(before, now, 40)
      ('my.py has changed since step 40 was saved: loss_fn',)
    """
    before, now = (dict(metadata.get("definitions", {})) for metadata in (saved, this))
    file = now.pop("file", None)
    before.pop("file", None)
    changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if not (before and changed):
        return ()
    return (f"{file} has changed since step {step} was saved: {', '.join(changed)}",)


class _BothDirections(NamedTuple):
    """A graph's sorted edges, in a form that does not depend on whether both directions share arrays."""

    by_source: CSR
    by_target: CSR


def data_digest(train: PyTree, test: PyTree, shared: PyTree = None) -> str:
    """Returns 16 hexadecimal digits of the sha256 of the data: its arrays' bytes, shapes and dtypes.

    For files that the data name, the digest covers their names below their common folder, and the sizes of up to 1,000
    of them, so that a copy elsewhere has the same digest.

    Args:
      train: tree of arrays, or of objects that are paths.
      test: likewise.
      shared: tree of arrays.
    """
    shared = change_nodes(shared, CSRAndCSC, lambda edges: _BothDirections(edges.by_source, edges.by_target))
    digest = hashlib.sha256()
    for path, leaf in named_leaves({"train": train, "test": test, "shared": shared}):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
        if array.dtype == object:
            digest.update(_facts_of_files(array.tolist()))
        else:
            digest.update(as_bytes(array).data)
    return digest.hexdigest()[:16]


def _facts_of_files(paths: Sequence[str]) -> bytes:
    folder = os.path.commonpath(paths) if paths else ""
    names = [os.path.relpath(path, folder) for path in paths]
    sizes = [str(os.path.getsize(path)) for path in paths[:: -(-len(paths) // _FILES) or 1]]
    return "\0".join(names + sizes).encode(errors="surrogateescape")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # imported from a folder
        return "unknown"
