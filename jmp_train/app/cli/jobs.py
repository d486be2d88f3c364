"""A call of a command with a task: its options, the task's own options, and the settings of the run."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

from jmp_train.app.cli.option_values import precisions_without_device
from jmp_train.app.cli.options import BatchOptions, PlannedOptions, RunOptions, SetupOptions, read_options
from jmp_train.app.cli.results import WrongCall, check_different, checking_the_call
from jmp_train.app.launch import Output, threads_for
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
from jmp_train.app.tasks import TaskSource, errors_of_file, find_task
from jmp_train.distributed import initialize
from jmp_train.policies.autocasting import FUSION_FLAG
from jmp_train.steps import TrainState
from jmp_train.task import Task, count_examples

P = TypeVar("P", bound=SetupOptions)


def options_for(options: P, name: str) -> P:
    """Returns the options of a call without those that do not apply to a policy or mode, or to a phase of a schedule.

    Args:
      options: the options of the call.
      name: the policy, mode or schedule.
    """
    precisions = [phase.precision for phase in precisions_without_device(name)]
    few_bits = [FewBits((), options.parameters, options.fp8).for_precision(precision) for precision in precisions]
    return dataclasses.replace(
        options,
        rules=options.rules if any(map(autocasts, precisions)) else None,
        parameters=next((part.parameters for part in few_bits if part.parameters), None),
        fp8=next((part.fp8 for part in few_bits if part.fp8), None),
    )


def check_precisions(options: SetupOptions, names: Sequence[str]) -> None:
    """Raises WrongCall if an option about precision is wrong, or applies to none of the names.

    Args:
      options: the options of the call.
      names: the policies, modes and schedules of the call.
    """
    taken = [options_for(options, name) for name in names]
    said, do, are = ", ".join(names), *(("does", "is") if len(names) == 1 else ("do", "are"))
    check_different("--state-dtypes", [text.rpartition("=")[0] for text in options.state_dtypes])
    reasons = {
        "rules": f": {said} {do} not autocast; use {AUTOCAST_CHOICES}",
        "parameters": (
            f" is for policies with parameters in half precision, which {said} {are} not; for example "
            "params=bfloat16,compute=bfloat16"
        ),
        "fp8": f": {said} {do} not autocast as policies; use autocast_bfloat16 or autocast_float16",
    }
    for option, reason in reasons.items():
        given = getattr(options, option)
        if given is not None and not any(getattr(part, option) for part in taken):
            raise WrongCall(f"--{option} {given}{reason}")
    rules = read_rules(options)
    with_recipe = dataclasses.replace(options, fp8=options.fp8 or "Float8CurrentScaling")
    takes_recipe = any(options_for(with_recipe, name).fp8 for name in names)
    if options.fp8 is None and rules is not None and rules.rules.has_fp8 and takes_recipe:
        raise WrongCall(f"--rules {rules.name} has entries 'fp8': name their recipe too, as --fp8 {with_recipe.fp8}")
    for name, part in zip(names, taken, strict=True):
        if FewBits(fp8=part.fp8).has_fp8_state and is_schedule(name):
            raise WrongCall(f"--fp8 {part.fp8} has a state, which the phases of {name} cannot share")


def read_rules(options: SetupOptions) -> RulesFile | None:
    """Returns the autocast rules of a call; None if it has none. Raises WrongCall if the file is missing or wrong."""
    if options.rules is None:
        return None
    try:
        return RulesFile.read(options.rules)
    except OSError as error:
        raise WrongCall(f"--rules {options.rules}: {error.strerror}") from error
    except ValueError as error:
        raise WrongCall(f"--rules {error}") from error


T_co = TypeVar("T_co", bound=PlannedOptions, covariant=True)
OF_RUNS = frozenset(
    field.name for field in dataclasses.fields(RunOptions)
)  # options of a task with these names are shared with the run
_LEFT_TO_TASKS = frozenset({"learning_rate", "batch_size"})  # not set in the settings of a run if a task has them
_OF_SETTINGS = OF_RUNS & {field.name for field in dataclasses.fields(RunSettings)} - {"rules"}


@dataclasses.dataclass(frozen=True)
class Call(Generic[T_co]):
    """A call of a command with a task.

    Attributes:
      text: the task, as the user wrote it.
      source: the source of the task.
      options: the options of the command.
      of_task: the given values of the task's own options, also of those that it shares with the run.
      output: the output for `--json`; None without it.
    """

    text: str
    source: TaskSource
    options: T_co
    of_task: Mapping[str, Any]
    output: Output | None = None

    def task_options(self, **defaults: Any) -> Any:
        """Returns the task's own options; None if it has none.

        Args:
          **defaults: values of options that are not given.
        """
        if self.source.options is None:
            return None
        with errors_of_file(self.source.file):
            return read_options(self.source.options, {**defaults, **self.of_task})


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


def load_job(call: Call[Any], name: str | None = None) -> Job:
    """Returns the job of a call.

    Args:
      call: the call.
      name: a policy, mode or schedule, which must accept the rules and few bits of the call; None if the command
        has no such options.

    Raises:
      WrongCall: the options do not fit the task, or the policy or mode.
      FileError: the user's file fails.
    """
    options, source, of_precision = call.options, call.source, {}
    if name is not None:
        check_precisions(options, [name])
        few_bits = FewBits(options.state_dtypes, options.parameters, options.fp8)
        of_precision = {"rules": read_rules(options), "few_bits": few_bits}
    if source.takes_policy:
        raise WrongCall(f"{source.name} must annotate its parameter with a dataclass of options")
    if options.devices is None and jax.process_count() > 1:
        all_devices = {"devices": jax.device_count()}
        call = dataclasses.replace(
            call, options=dataclasses.replace(options, **all_devices), of_task={**call.of_task, **all_devices}
        )
    of_task = call.task_options()
    task = source.task(of_task)
    settings = run_settings(call, of_task, task)
    return Job(source, _with_train_size(task, options.train_size), dataclasses.replace(settings, **of_precision))


def run_settings(call: Call[Any], of_task: Any, task: Task) -> RunSettings:
    """Returns the settings of a run, without its rules and few bits.

    Args:
      call: the call.
      of_task: the task's own options, whose defaults are the run's.
      task: the task.
    """
    own = {} if of_task is None else {f.name: getattr(of_task, f.name) for f in dataclasses.fields(of_task)}
    shared = next(k for k in (RunOptions, SetupOptions, BatchOptions, PlannedOptions) if isinstance(call.options, k))
    said = {f.name: getattr(call.options, f.name) for f in dataclasses.fields(shared) if f.name in _OF_SETTINGS}
    said |= {name: own[name] for name in ("seed", "devices", "accumulate_steps") if name in own}
    left_to_task = own.keys() & (_LEFT_TO_TASKS if callable(task.train) else {"learning_rate"})
    return RunSettings(
        **{name: value for name, value in said.items() if value is not None and name not in left_to_task},
        identity=identity_of(call.source, of_task),
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


def find_task_of(command: str, text: str, devices: int | None) -> TaskSource:
    """Returns the source of a task, after setting options of jax that must be set before a user's file may use it.

    Args:
      command: the command.
      text: see `find_task`.
      devices: the devices of the run; None for one.

    Raises:
      WrongCall: there is no such task, or the command cannot run in several processes.
      FileError: the user's file fails.
    """
    several = os.environ.get("JAX_NUM_PROCESSES", "1") != "1"
    if several and command != "train":
        raise WrongCall(f"{command} runs in one process; of the commands, only train runs in several")
    if command == "plan":
        jax.config.update("jax_platforms", "cpu")  # so that a GPU stays free for measurements
    else:
        turn_ynn_fusion_off()
        initialize() if several else provide_cpu_devices(devices or 1)
    with checking_the_call():
        return find_task(text)


def turn_ynn_fusion_off() -> None:
    """Disables a fusion in XLA that leaves bfloat16 results unwritten on CPUs (jaxlib 0.11, 0.12)."""
    flags = os.environ.get("XLA_FLAGS", "")
    if FUSION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSION_FLAG}".strip()


def provide_cpu_devices(count: int) -> None:
    """Splits a CPU into this many devices, before jax starts; accelerators are not changed."""
    if count == 1:
        return
    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < count:
        with contextlib.suppress(RuntimeError):  # jax has started, and its devices are fixed
            jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(threads_for(count)))
