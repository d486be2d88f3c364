"""The job of a call: its task with the task's own options, and the settings of the run with its precision options."""

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jmp_train.app.cli.errors import WrongCall
from jmp_train.app.cli.option_values import precisions_without_device
from jmp_train.app.cli.options import RunOptions, read_options
from jmp_train.app.runs import (
    AUTOCAST_CHOICES,
    FewBits,
    PreparedRun,
    RulesFile,
    RunSettings,
    autocasts,
    is_schedule,
    prepare_run,
)
from jmp_train.app.tasks import TaskSource, errors_of_file
from jmp_train.steps import TrainState
from jmp_train.task import Task, count_examples

_IN_HALF = "for example params=bfloat16,compute=bfloat16"
_AUTOCASTING = "use autocast_bfloat16 or autocast_float16"


def read_rules(args: argparse.Namespace, names: Sequence[str]) -> RulesFile | None:
    """Returns the autocast rules of a call; None if it has none.

    Args:
      args: the parsed arguments.
      names: the policies, modes and schedules of the call; those that autocast take the rules.

    Raises:
      WrongCall: none of them autocasts, or the file is missing or has no rules.
    """
    file = args.rules
    if file is None:
        return None
    if not any(map(takes_rules, names)):
        do = "does" if len(names) == 1 else "do"
        raise WrongCall(f"--rules {file}: {', '.join(names)} {do} not autocast; use {AUTOCAST_CHOICES}")
    try:
        return RulesFile.read(file)
    except OSError as error:
        raise WrongCall(f"--rules {file}: {error.strerror}") from error
    except ValueError as error:
        raise WrongCall(f"--rules {error}") from error


def takes_rules(name: str) -> bool:
    """Returns whether a policy or mode, or one in a schedule, autocasts.

    Args:
      name: the policy, mode or schedule.
    """
    return any(autocasts(phase.precision) for phase in precisions_without_device(name))


def read_few_bits(args: argparse.Namespace, names: Sequence[str]) -> FewBits:
    """Returns the few-bits options of a call.

    Args:
      args: the parsed arguments.
      names: the policies, modes and schedules of the call; each option must apply to one of them.

    Raises:
      WrongCall: an option applies to none of them.
    """
    few_bits = FewBits(tuple(args.state_dtypes), args.parameters, args.fp8)
    fields = Counter(text.rpartition("=")[0] for text in few_bits.state_dtypes)
    repeated = [field for field, count in fields.items() if count > 1]
    if repeated:
        raise WrongCall(f"--state-dtypes names {repeated[0]} more than once")
    taken = [few_bits_taken(few_bits, name) for name in names]
    said = ", ".join(names)
    if few_bits.parameters and not any(part.parameters for part in taken):
        raise WrongCall(
            f"--parameters {few_bits.parameters} is for policies with parameters in half precision, which {said} "
            f"{'is' if len(names) == 1 else 'are'} not; {_IN_HALF}"
        )
    if few_bits.fp8 and not any(part.fp8 for part in taken):
        do = "does" if len(names) == 1 else "do"
        raise WrongCall(f"--fp8 {few_bits.fp8}: {said} {do} not autocast as policies; {_AUTOCASTING}")
    for name, part in zip(names, taken, strict=True):
        if part.has_fp8_state and is_schedule(name):
            raise WrongCall(f"--fp8 {part.fp8} has a state, which the phases of {name} cannot share")
    return few_bits


def few_bits_taken(few_bits: FewBits, name: str) -> FewBits:
    """Returns the few-bits options that apply to a policy or mode, or to a phase of a schedule.

    Args:
      few_bits: the options of the call.
      name: the policy, mode or schedule.
    """
    parts = [few_bits.for_precision(phase.precision) for phase in precisions_without_device(name)]
    return FewBits(
        few_bits.state_dtypes,
        next((part.parameters for part in parts if part.parameters), None),
        next((part.fp8 for part in parts if part.fp8), None),
    )


OF_RUNS = frozenset(
    field.name for field in dataclasses.fields(RunOptions)
)  # options of a task with these names are shared with the run
_LEFT_TO_TASKS = frozenset({"learning_rate", "batch_size"})  # not set in the settings of a run if a task has them
_OF_SETTINGS = OF_RUNS & {field.name for field in dataclasses.fields(RunSettings)} - {"rules"}
OF_TASK = "task."  # prefix of a task's other options, whose names may clash with other parsed names


@dataclasses.dataclass(frozen=True)
class Job:
    """A task and the settings of its run.

    Attributes:
      source: the source of the task.
      task: the task, with its data loaded.
      settings: the settings of the run.
    """

    source: TaskSource
    task: Task
    settings: RunSettings

    def prepare(self, policy: str, **options: Any) -> tuple[PreparedRun, TrainState]:
        """Returns the result of `prepare_run`, with errors of a user's file as one line."""
        with errors_of_file(self.source.file):
            return prepare_run(self.task, policy, self.settings, **options)


def load_job(args: argparse.Namespace, name: str | None = None) -> Job:
    """Returns the job of a call.

    Args:
      args: the parsed arguments: `source`, the `options` of the command, and all of their fields.
      name: a policy, mode or schedule, which must accept the rules and few bits of the call; None if the command
        has no such options.

    Raises:
      WrongCall: the options do not fit the task, or the policy or mode.
      FileError: the user's file fails.
    """
    source: TaskSource = args.source
    of_precision = {} if name is None else {"rules": read_rules(args, [name]), "few_bits": read_few_bits(args, [name])}
    if source.takes_policy:
        raise WrongCall(f"{source.name} must annotate its parameter with a dataclass of options")
    if args.devices is None and jax.process_count() > 1:
        args.devices = jax.device_count()
    options = read_task_options(args)
    task = source.task(options)
    settings = run_settings(args, options, task)
    return Job(source, _with_train_size(task, args.train_size), dataclasses.replace(settings, **of_precision))


def read_task_options(args: argparse.Namespace) -> Any:
    """Returns the task's own options, with the command's values for shared ones; None if it has none.

    Args:
      args: the parsed arguments.
    """
    source: TaskSource = args.source
    if source.options is None:
        return None
    with errors_of_file(source.file):
        return read_options(source.options, args, without=OF_RUNS, prefix=OF_TASK)


def run_settings(args: argparse.Namespace, options: Any, task: Task) -> RunSettings:
    """Returns the settings of a run, without its rules and few bits.

    Args:
      args: the parsed arguments.
      options: the task's own options, whose defaults are the run's.
      task: the task.
    """
    own = {} if options is None else {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    said = {f.name: getattr(args, f.name) for f in dataclasses.fields(args.options) if f.name in _OF_SETTINGS}
    said |= {name: own[name] for name in ("seed", "devices", "accumulate_steps") if name in own}
    left_to_task = own.keys() & (_LEFT_TO_TASKS if callable(task.train) else {"learning_rate"})
    return RunSettings(
        **{name: value for name, value in said.items() if value is not None and name not in left_to_task},
        identity=identity_of(args.source, options),
    )


def identity_of(source: TaskSource, options: Any) -> dict[str, Any]:
    """Returns the identity of a task in checkpoints: its options by name, except those of the run.

    Args:
      source: the source of the task.
      options: a dataclass; None if the task has none.
    """
    said: dict[str, Any] = {}
    files: dict[str, str | None] = {}
    of_run = {field.name for field in dataclasses.fields(RunSettings)} - _LEFT_TO_TASKS
    for field in () if options is None else dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, Path) or field.name in ("data_dir", "text_file"):
            files[field.name] = None if value is None else str(Path(value).absolute())
        elif field.name not in of_run and field.metadata.get("identity", True):
            said[field.name] = list(value) if isinstance(value, tuple) else value
    definitions = source.definitions()
    return {
        "task": source.name,
        "options": said,
        "files": files,
        **({"definitions": definitions} if definitions else {}),
    }


def _with_train_size(task: Task, count: int | None) -> Task:
    if count is None:
        return task
    if callable(task.train):
        raise WrongCall(f"--train-size {count}: the task's train creates its own batches")
    total = count_examples(task.train)
    if not 1 <= count <= total:
        raise WrongCall(f"train_size={count} must be between 1 and the {total} training examples")
    return dataclasses.replace(task, train=jax.tree.map(lambda array: array[:count], task.train))
