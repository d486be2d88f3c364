"""The identity of a run, kept in its checkpoints: task, options that results depend on, digest of the data."""

import hashlib
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_train.distributed import as_bytes
from jmp_train.graphs.structure import CSR, CSRAndCSC
from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import change_nodes, named_leaves
from jmp_train.runs.few_bits import DEFAULT_FEW_BITS, FewBits
from jmp_train.runs.rules_files import RulesFile
from jmp_train.runs.task_batches import count_examples
from jmp_train.tasks import Arrays, Task, TaskOptions, options_of

_PACKAGES = ("jmp_train", "jax", "jaxlib", "flax", "optax", "numpy")
_DECIDE_THE_DATA = {"task"} | {name for name, option in options_of(TaskOptions).items() if option.decides == "data"}
_FILES = 1000  # of those that the data names, of how many the sizes count


def run_metadata(
    task: Task,
    policy: str,
    epochs: int,
    batch_size: int,
    seed: int,
    shared: PyTree,
    growth_interval: int | None = None,
    rules: RulesFile | None = None,
    few_bits: FewBits = DEFAULT_FEW_BITS,
) -> dict[str, Any]:
    """Returns what a run's checkpoints say of it, as JSON has it.

    `run` has all that its results depend on, by the names of the command line's options, of which None is the default,
    and digests of the data and of rules from a file. The rest is for people: where data and rules are (they may move),
    the device and the versions.

    Args:
      task: what is trained.
      policy: the policy's or the mode's name, or the schedule's.
      epochs: passes over the data.
      batch_size: examples a step.
      seed: of parameters, dropout and the order of the data.
      shared: what `task.shared` made, a tree of arrays.
      growth_interval: see `train`. Where it is None it is left out, as before there was such an option.
      rules: see `train`; left out likewise.
      few_bits: see `train`; what it does not say is left out likewise.
    """
    data_dir, text_file = task.options.data_dir, task.options.text_file
    return {
        "run": {
            "task": task.name,
            **_deciding(task.options),
            "train_size": count_examples(task.train),
            "policy": policy,
            **({} if growth_interval is None else {"growth_interval": growth_interval}),
            **({} if rules is None else {"rules": rules.digest}),
            **few_bits.metadata(),
            "epochs": epochs,
            "batch_size": batch_size,
            "seed": seed,
            "data": data_digest(task.train, task.test, shared),
        },
        "data_dir": None if data_dir is None else str(data_dir.absolute()),
        **({} if text_file is None else {"text_file": str(text_file.absolute())}),
        **({} if rules is None else {"rules_file": str(rules.path.absolute())}),
        "device": jax.local_devices()[0].device_kind,
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def _deciding(options: TaskOptions) -> dict[str, Any]:
    """Returns the options that a run's results depend on, as JSON has them."""
    names = [name for name, option in options_of(TaskOptions).items() if option.decides is not None]
    if options.accumulate_steps == 1:  # left out, as before there was such an option
        names.remove("accumulate_steps")
    values = {name: getattr(options, name) for name in names}
    return {name: list(x) if isinstance(x, tuple) else x for name, x in values.items()}


def differences(saved: Mapping[str, Any], this: Mapping[str, Any]) -> list[str]:
    """Returns a line for each option of two runs that is not the same in both.

    Args:
      saved: `run` of a checkpoint's metadata.
      this: that of this call.

    Example:
      >>> differences({"epochs": 3, "model": "gat", "seed": 0}, {"epochs": 5, "model": None, "seed": 0})
      ['epochs: the run has 3, this call 5', 'model: the run has gat, this call the default']
    """
    others = [name for name in dict.fromkeys([*saved, *this]) if _said(saved, name) != _said(this, name)]
    if not _DECIDE_THE_DATA.isdisjoint(others):
        others = [name for name in others if name != "data"]  # it is what these lines say
    return [f"{name}: the run has {_said(saved, name)}, this call {_said(this, name)}" for name in others]


def _said(options: Mapping[str, Any], name: str) -> str:
    value = options.get(name)  # a run of before there was the option has its default
    return "the default" if value is None else str(value)


class _BothDirections(NamedTuple):
    """A graph's sorted edges, the same whether both directions share arrays or not."""

    by_source: CSR
    by_target: CSR


def data_digest(train: Arrays, test: Arrays, shared: PyTree = None) -> str:
    """Returns 16 hexadecimal digits of the sha256 of the data: its arrays' bytes, shapes and dtypes.

    Of files that the data names, it is their names below the folder that they share, and the sizes of up to 1,000 of
    them, so that a copy elsewhere is the same data.

    Args:
      train: arrays, or objects that are paths.
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
    except importlib.metadata.PackageNotFoundError:  # it is imported from a folder
        return "unknown"
