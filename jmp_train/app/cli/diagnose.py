"""`jmp-train diagnose`: shows how half precision affects each operation of a step of a task or a user's script."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jmp_train.app.cli.jobs import Call, load_job
from jmp_train.app.cli.option_values import count, machine_named, path, positive
from jmp_train.app.cli.options import NameOptions, SetupOptions, option
from jmp_train.app.cli.results import PROBLEMS_FOUND, WrongCall, check_outputs, checking_the_call, show
from jmp_train.app.runs import PreparedRun, SavedRun, newest_saved
from jmp_train.app.tasks import described, errors_of_file
from jmp_train.checkpoints import CheckpointStore
from jmp_train.steps import TrainState
from jmp_train.task import Task
from jmp_train.tools import NumericsReport, diagnose
from jmp_train.tools.capsules import capsule_step, load_capsule

_WANTED = "it must return a jt.Task, or a tuple of a function and its arguments, such as (step, state, batch)"


@dataclasses.dataclass(frozen=True)
class DiagnoseOptions(SetupOptions, NameOptions):
    """Options of `jmp-train diagnose`.

    Attributes:
      checkpoint_dir: take the state from the run's last checkpoint
      after: train N steps first; default: 0, or up to the capsule's step
      capsule: take batch and state from a skipped step, see train --capsules
      steps: run N steps on the batch
      device: round products of float32 as a device does, such as H100-80GB, v5e:1x1, cuda or tpu
      out: write diagnosis.html and .json
    """

    checkpoint_dir: Path | None = option(path, "DIR")
    after: int | None = option(count, "STEPS")
    capsule: Path | None = option(path, "FILE")
    steps: int = option(positive, default=1)
    device: str | None = option(str, "NAME")
    out: Path | None = option(path, "DIR")


def diagnose_command(call: Call[DiagnoseOptions]) -> int:
    """Diagnoses a step of a task or of a function, prints the findings, and returns the exit code."""
    options, source = call.options, call.source
    device = _device(options.device)
    check_outputs(folders={"--out": options.out})
    if source.takes_policy:
        raise WrongCall(f"{call.text} must not have parameters; {_WANTED}")
    with checking_the_call():
        made = source.make() if source.options is None else None
    if isinstance(made, tuple):
        return _diagnose_function(call, made, device)
    if isinstance(made, Task):
        call = dataclasses.replace(call, source=dataclasses.replace(source, function=made))
    elif source.options is None:
        raise WrongCall(f"{call.text} returned {described(made)}; {_WANTED}")
    name = options.name
    with errors_of_file(source.file):
        prepared, state, batch = _moment(call, name)
        step = int(state.step)
        phase = prepared.phase_at(step)
        report = diagnose(phase.step, state, batch, steps=options.steps, device=device)
    rules = prepared.settings.rules
    subject = {
        "task": source.name,
        "policy": name,
        **({"phase": phase.name} if phase.name != name else {}),
        **({"rules": rules.name} if rules else {}),
        "step": step,
    }
    within = f" ({phase.name})" if phase.name != name else ""
    title = f"{source.name}, {name}, {f'rules of {rules.name}, ' if rules else ''}step {step}{within}"
    return _show(report, title, subject, call)


def _device(name: str | None) -> Any:
    """Returns the device of an option: one of `plan`'s, or the name of a platform."""
    if name in (None, "cpu", "cuda", "tpu"):
        return name
    return machine_named("--device", name).kind


def _diagnose_function(call: Call[DiagnoseOptions], made: tuple[Any, ...], device: Any) -> int:
    if not made or not callable(made[0]):
        raise WrongCall(f"{call.text} returned {described(made)}; {_WANTED}")
    fn, *arguments = made
    with errors_of_file(call.source.file):
        report = diagnose(fn, *arguments, steps=call.options.steps, device=device)
    return _show(report, call.text, {"function": call.text}, call)


def _moment(call: Call[DiagnoseOptions], name: str) -> tuple[PreparedRun, TrainState, Any]:
    """Returns the run, and the state and the batch to diagnose."""
    options = call.options
    with checking_the_call():
        prepared, state = load_job(call, name).prepare(name, with_metadata=options.checkpoint_dir is not None)
        total = math.inf if prepared.length.total is None else prepared.length.total
        skipped = None if options.capsule is None else capsule_step(options.capsule)
    saved = saved_state(options.checkpoint_dir, prepared, state)
    done, after = saved.done, options.after or 0
    if done + after > total:
        raise WrongCall(f"--after {after}: the run has {total} steps{f', and {done} are done' * bool(done)}")
    if skipped is not None and options.after is None:
        after = int(min(max(skipped - done, 0), total - done))
    state, batch = prepared.advance(saved.state, done, after, saved.place)
    if options.capsule is not None:
        with checking_the_call():
            state, batch = load_capsule(options.capsule, state)
    return prepared, state, batch


def saved_state(directory: Path | None, prepared: PreparedRun, state: TrainState) -> SavedRun:
    """Returns the position of a run: after its last checkpoint if a folder is given, otherwise at its start.

    Args:
      directory: the folder of the checkpoints.
      prepared: the run.
      state: its first state.

    Raises:
      WrongCall: there is no checkpoint, or it is of another run.
    """
    if directory is None:
        return SavedRun(0, state, [], [])
    with checking_the_call(), CheckpointStore(directory, read_only=True) as store:
        if not directory.is_dir():
            raise WrongCall(f"--checkpoint-dir {directory} is not a folder")
        if not store.steps():
            raise WrongCall(f"--checkpoint-dir {directory} has no checkpoint")
        return newest_saved(store, state, prepared.metadata, prepared.length)


def _show(report: NumericsReport, title: str, subject: dict[str, Any], call: Call[DiagnoseOptions]) -> int:
    """Prints a diagnosis, writes its files, and returns the exit code."""
    from jmp_train.app.reports import json_line

    out, found = call.options.out, report.as_dict()
    files = {"diagnosis.html": lambda: report.to_html(title), "diagnosis.json": lambda: json_line(subject, found)}
    named = {None if out is None else out / name: text for name, text in files.items()}
    show(call.output, lambda: f"{title}:\n{report}", subject, found, named)
    return PROBLEMS_FOUND if any(problem.severity == "problem" for problem in report.problems) else 0
