"""The settings of a run: its length, batches, devices and precision options."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import optax

from jmp_train.app.runs.precisions import stores_in_half
from jmp_train.app.runs.task_batches import ArrayData, IterableData, TrainingData
from jmp_train.data import check_seed
from jmp_train.policies import (
    Amp,
    AutocastPolicy,
    AutocastRules,
    DelayedScaling,
    Policy,
    with_kahan,
    with_stochastic_rounding,
)
from jmp_train.policies.autocasting import RECIPES
from jmp_train.policies.files import escaped
from jmp_train.task import Task, count_examples

PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "kahan": with_kahan,
    "kahan-int8": partial(with_kahan, compensation_dtype="int8"),
    "stochastic-rounding": lambda optimizer: with_stochastic_rounding(optimizer, jax.random.key(0)),
}


@dataclasses.dataclass(frozen=True)
class FewBits:
    """The options of a run that store or compute in few bits, in addition to its policy or mode.

    Attributes:
      state_dtypes: dtypes of the optimizer's arrays, such as "nu=bfloat16"; see `with_state_dtypes`.
      parameters: method for updates below the precision of half parameters, one of `PARAMETERS`; None for none.
      fp8: the one of `RECIPES` by which an autocast policy multiplies dense layers in 8 bits; None for none.

    Example:
      >>> FewBits(("nu=bfloat16",), fp8="Float8CurrentScaling").metadata()
      {'state_dtypes': ['nu=bfloat16'], 'fp8': 'Float8CurrentScaling'}
    """

    state_dtypes: tuple[str, ...] = ()
    parameters: str | None = None
    fp8: str | None = None

    @property
    def has_fp8_state(self) -> bool:
        """True if the fp8 recipe has a state."""
        return self.fp8 == DelayedScaling.__name__

    def metadata(self) -> dict[str, Any]:
        """Returns the options that are set, as JSON data."""
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(x) if isinstance(x, tuple) else x for name, x in said.items() if x}

    def for_precision(self, precision: Policy | Amp) -> "FewBits":
        """Returns the options that apply to a policy or mode.

        Args:
          precision: see `precision_of`.
        """
        parameters = self.parameters if stores_in_half(precision) else None
        return dataclasses.replace(
            self, parameters=parameters, fp8=self.fp8 if isinstance(precision, AutocastPolicy) else None
        )

    def outer_optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns an optimizer with the method for half parameters around it.

        Args:
          optimizer: the optimizer with its loss scale.
        """
        return optimizer if self.parameters is None else PARAMETERS[self.parameters](optimizer)

    def policy(self, policy: Policy, *, has_rules: bool) -> Policy:
        """Returns a policy with products in 8 bits, if a recipe is set.

        Args:
          policy: the policy; only one that autocasts is changed.
          has_rules: True if it got rules, which choose the fp8 products; otherwise all dense layers are fp8 products.
        """
        if self.fp8 is None or not isinstance(policy, AutocastPolicy):
            return policy
        rules = policy.rules if has_rules else policy.rules.replace(primitives={"dot_general": "fp8"})
        return dataclasses.replace(policy, rules=rules, fp8=RECIPES[self.fp8]())


DEFAULT_FEW_BITS = FewBits()


@dataclasses.dataclass(frozen=True)
class RulesFile:
    """Autocast rules, and their file.

    Attributes:
      path: the path of the file.
      rules: the rules when it was read.
    """

    path: Path
    rules: AutocastRules

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns the rules of a file; raises the errors of `AutocastRules.load`.

        Args:
          path: the path of the file.
        """
        return cls(path, AutocastRules.load(path))

    @property
    def name(self) -> str:
        """The path for display, without control characters and characters outside UTF-8."""
        return escaped(str(self.path))

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of the sha256 of the entries, whatever the file's name and comments."""
        tables = {field.name: getattr(self.rules, field.name) for field in dataclasses.fields(self.rules)}
        entries = {table: pairs for table, pairs in tables.items() if pairs}  # so that new tables change no digest
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run besides its task and its policy; all of them affect its results.

    Args:
      epochs: passes over the training data; None for the task's own number.
      steps: number of steps to train in place of epochs; None for whole epochs.
      batch_size: examples per step, for tasks of arrays; None for the task's own number.
      seed: seed of parameters, dropout and the order of arrays; below 2**32.
      devices: number of devices over which a batch is sharded. Several processes use all of their devices.
      accumulate_steps: parts of a batch whose gradients are averaged, one after the other.
      learning_rate: the largest learning rate; None for the task's own.
      growth_interval: steps without overflow after which a dynamic loss scale grows; None for the policy's own.
      rules: autocast rules in place of those of the policy or mode; None for its own.
      few_bits: options that store and compute in few bits; a policy or mode uses those that apply to it.
      identity: the task's entries in the checkpoints' metadata, see `run_metadata`.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    seed: int = 0
    devices: int = 1
    accumulate_steps: int = 1
    learning_rate: float | None = None
    growth_interval: int | None = None
    rules: RulesFile | None = None
    few_bits: FewBits = DEFAULT_FEW_BITS
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


DEFAULT_SETTINGS = RunSettings()


@dataclasses.dataclass(frozen=True)
class RunLength:
    """The length of a run.

    Attributes:
      epochs: passes over the data; the last may end early.
      total: steps of the run; None if the batches have no length.
      steps_per_epoch: batches per epoch; None if they have no length.
    """

    epochs: int
    total: int | None
    steps_per_epoch: int | None


def check_run(task: Task, settings: RunSettings = DEFAULT_SETTINGS) -> tuple[TrainingData, RunLength]:
    """Returns the training data and the length of a run.

    Args:
      task: the task.
      settings: the settings of the run.

    Raises:
      ValueError: a number does not fit the data or the devices; the message names it.
    """
    check_seed(settings.seed)
    epochs, total = settings.epochs, settings.steps
    if total is not None and epochs is not None:
        raise ValueError(f"epochs={epochs} and steps={total} exclude each other")
    size = _checked_batch_size(task, settings)
    _check_devices(task, settings, size)
    data: TrainingData = IterableData(task) if size is None else ArrayData(task, size, settings.seed)
    if data.steps_per_epoch == 0:
        raise ValueError("train(0) has no batches")
    epochs = task.epochs if epochs is None else epochs
    if total is not None:
        epochs = -(-total // data.steps_per_epoch) if data.steps_per_epoch else total
    elif data.steps_per_epoch is not None:
        total = epochs * data.steps_per_epoch
    if total is not None and total >= 2**31:
        raise ValueError(f"epochs={epochs} needs {total} steps, more than the limit of 2**31 - 1")
    return data, RunLength(epochs, total, data.steps_per_epoch)


def _checked_batch_size(task: Task, settings: RunSettings) -> int | None:
    if callable(task.train):
        if settings.batch_size is not None:
            raise ValueError(
                f"batch_size={settings.batch_size}: the task's train creates its own batches; add a field "
                "batch_size to the task's options"
            )
        return None
    count = count_examples(task.train)
    size = settings.batch_size or task.batch_size or count
    if not 1 <= size <= count:
        raise ValueError(f"batch_size={size} must be between 1 and the {count} training examples")
    return size


def _check_devices(task: Task, settings: RunSettings, size: int | None) -> None:
    devices, parts = settings.devices, settings.accumulate_steps
    if devices < 1 or (size is not None and size % devices and not task.shards_shared):
        raise ValueError(f"devices={devices} must divide batch_size={size}")
    if parts < 1 or (size is not None and size // devices % parts):
        of = "" if devices == 1 else f" / devices={devices}"
        raise ValueError(f"accumulate_steps={parts} must divide batch_size={size}{of}")
    check_shared(task, settings)
    first_devices(devices)


def check_shared(task: Task, settings: RunSettings) -> None:
    """Raises ValueError if batches with shared arrays cannot be divided as the settings require.

    Args:
      task: the task.
      settings: the settings of the run.
    """
    devices, parts = settings.devices, settings.accumulate_steps
    if has_shared(task) and devices > 1 and not task.shards_shared:
        raise ValueError(
            f"devices={devices}: all batches share arrays, such as a whole graph, which cannot be partitioned"
        )
    if has_shared(task) and parts > 1:
        raise ValueError(
            f"accumulate_steps={parts}: all batches share arrays, such as a graph, which cannot be divided"
        )


def has_shared(task: Task) -> bool:
    """Returns True if the batches of a task share arrays."""
    return task.shared is not dict


def first_devices(count: int) -> list[Any]:
    """Returns this many devices of this process, or all devices of several processes.

    Args:
      count: number of devices.

    Raises:
      ValueError: there are fewer, or several processes have another number.
    """
    if jax.process_count() > 1:
        devices = jax.devices()
        if len(devices) != count:
            raise ValueError(
                f"devices={count}: must be the {len(devices)} devices of the {jax.process_count()} processes, "
                "which train on all of them"
            )
        return devices
    devices = jax.local_devices()
    if len(devices) < count:
        there = f"{len(devices)} x {devices[0].device_kind}"
        raise ValueError(f"devices={count}: only {there} available")
    return devices[:count]
