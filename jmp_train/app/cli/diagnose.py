"""`jmp-train diagnose`: shows how half precision affects each operation of a step of a task or a user's script."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from jmp_train.app.cli.errors import PROBLEMS_FOUND, WrongCall, checking_the_call
from jmp_train.app.cli.jobs import load_job
from jmp_train.app.cli.option_values import count, path, positive
from jmp_train.app.cli.options import DEFAULT_POLICY, option
from jmp_train.app.cli.outputs import checked_outputs, show
from jmp_train.app.launch import Output
from jmp_train.app.runs import PreparedRun, Saved, newest_saved
from jmp_train.app.tasks import TaskSource, described, errors_of_file
from jmp_train.checkpoints import CheckpointStore
from jmp_train.steps import TrainState
from jmp_train.task import Task
from jmp_train.tools import NumericsReport, diagnose
from jmp_train.tools.capsules import capsule_step, load_capsule

_WANTED = "it must return a jt.Task, or a tuple of a function and its arguments, such as (step, state, batch)"


@dataclasses.dataclass(frozen=True)
class DiagnoseOptions:
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


def diagnose_command(args: argparse.Namespace) -> int:
    """Diagnoses a step of a task or of a function, prints the findings, and returns the exit code."""
    source: TaskSource = args.source
    device = _device(args.device)
    with checked_outputs(as_json=args.json, folders={"--out": args.out}) as output:
        if source.takes_policy:
            raise WrongCall(f"{args.task} must not have parameters; {_WANTED}")
        with checking_the_call():
            made = source.make() if source.options is None else None
        if isinstance(made, tuple):
            return _diagnose_function(args, made, device, output)
        if isinstance(made, Task):
            args.source = dataclasses.replace(source, function=made)
        elif source.options is None:
            raise WrongCall(f"{args.task} returned {described(made)}; {_WANTED}")
        name = args.name or DEFAULT_POLICY
        with errors_of_file(source.file):
            prepared, state, batch = _moment(args, name)
            step = int(state.step)
            phase = prepared.phase_at(step)
            report = diagnose(phase.step, state, batch, steps=args.steps, device=device)
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
        return _show(report, title, subject, args, output)


def _device(name: str | None) -> Any:
    """Returns the device of an option: one of `plan`'s, or the name of a platform."""
    if name in (None, "cpu", "cuda", "tpu"):
        return name
    from jmp_train.tools.aot import GPUS, tpu_slice

    if ":" not in name:
        if name not in GPUS:
            raise WrongCall(f"--device {name} is unknown; choose from cuda, tpu, {', '.join(GPUS)}, v5e:1x1, ...")
        return GPUS[name]
    try:
        return tpu_slice(name)
    except ValueError as error:
        raise WrongCall(f"--device: {error}") from error


def _diagnose_function(args: argparse.Namespace, made: tuple[Any, ...], device: Any, output: Output | None) -> int:
    if not made or not callable(made[0]):
        raise WrongCall(f"{args.task} returned {described(made)}; {_WANTED}")
    fn, *arguments = made
    with errors_of_file(args.source.file):
        report = diagnose(fn, *arguments, steps=args.steps, device=device)
    return _show(report, args.task, {"function": args.task}, args, output)


def _moment(args: argparse.Namespace, name: str) -> tuple[PreparedRun, TrainState, Any]:
    """Returns the run, and the state and the batch to diagnose."""
    with checking_the_call():
        prepared, state = load_job(args, name).prepare(name, with_metadata=args.checkpoint_dir is not None)
        total = math.inf if prepared.length.total is None else prepared.length.total
        skipped = None if args.capsule is None else capsule_step(args.capsule)
    saved = saved_state(args, prepared, state)
    done, after = saved.done, args.after or 0
    if done + after > total:
        raise WrongCall(f"--after {after}: the run has {total} steps{f', and {done} are done' * bool(done)}")
    if skipped is not None and args.after is None:
        after = int(min(max(skipped - done, 0), total - done))
    state, batch = prepared.advance(saved.state, done, after, saved.place)
    if args.capsule is not None:
        with checking_the_call():
            state, batch = load_capsule(args.capsule, state)
    return prepared, state, batch


def saved_state(args: argparse.Namespace, prepared: PreparedRun, state: TrainState) -> Saved:
    """Returns the position of a run: after its last checkpoint if a folder is given, otherwise at its start.

    Args:
      args: the parsed arguments.
      prepared: the run.
      state: its first state.

    Raises:
      WrongCall: there is no checkpoint, or it is of another run.
    """
    if args.checkpoint_dir is None:
        return Saved(0, state, [], [])
    with checking_the_call(), CheckpointStore(args.checkpoint_dir, read_only=True) as store:
        if not args.checkpoint_dir.is_dir():
            raise WrongCall(f"--checkpoint-dir {args.checkpoint_dir} is not a folder")
        if not store.steps():
            raise WrongCall(f"--checkpoint-dir {args.checkpoint_dir} has no checkpoint")
        return newest_saved(store, state, prepared.metadata, prepared.length)


def _show(
    report: NumericsReport, title: str, subject: dict[str, Any], args: argparse.Namespace, output: Output | None
) -> int:
    """Prints a diagnosis, writes its files, and returns the exit code."""
    from jmp_train.app.reports import json_line, write_diagnosis

    code = show(
        output,
        lambda: f"{title}:\n{report}",
        lambda: json_line(subject, report.as_dict()),
        lambda: ([], []) if args.out is None else write_diagnosis(args.out, title, subject, report),
    )
    return code or (PROBLEMS_FOUND if any(problem.severity == "problem" for problem in report.problems) else 0)
