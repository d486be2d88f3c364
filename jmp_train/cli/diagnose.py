"""`jmp-train diagnose`: what half precision does to each operation of a step of a task, or of a script of one's own."""

import argparse
import dataclasses
import math
import sys
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Any

from jmp_train.cli.errors import PROBLEMS_FOUND, RUN_FAILED, Failure, WrongCall, checking_the_call
from jmp_train.cli.few_bits import few_bits_of, read_few_bits
from jmp_train.cli.jobs import load_job
from jmp_train.cli.options import DEFAULT_POLICY, make_writable, output_with_folders
from jmp_train.cli.rules import read_rules
from jmp_train.launch import Output
from jmp_train.policies import NumericsReport, diagnose
from jmp_train.task import Task
from jmp_train.tasks import TaskSource, described, errors_of_file

if TYPE_CHECKING:
    from jmp_train.runs import FewBits, PreparedRun, RulesFile, Saved
    from jmp_train.steps import TrainState

_WANTED = "wanted is a jt.Task, or a tuple of a function and its arguments, such as (step, state, batch)"


def diagnose_command(args: argparse.Namespace) -> int:
    """Diagnoses a step of a task or a function's, prints what is found, and returns the exit code."""
    source: TaskSource = args.source
    with outputs_of(args) as output:
        if source.takes_policy:
            raise WrongCall(f"{args.task} takes a parameter: {_WANTED}, from a function without one")
        with checking_the_call():
            made = source.make() if source.options is None else None
        if isinstance(made, tuple):
            return _diagnose_function(args, made, output)
        if isinstance(made, Task):
            args.source = dataclasses.replace(source, function=made)
        elif source.options is None:
            raise WrongCall(f"{args.task} returned {described(made)}: {_WANTED}")
        name = args.name or DEFAULT_POLICY
        rules = read_rules(args.rules, [name])
        few_bits = few_bits_of(read_few_bits(args, [name]), name)
        with errors_of_file(source.file):
            prepared, state, batch = _moment(args, name, rules, few_bits)
            step = int(state.step)
            phase = prepared.phase_at(step)
            report = diagnose(phase.step, state, batch, steps=args.steps)
        subject = {
            "task": source.name,
            "policy": name,
            **({"phase": phase.name} if phase.name != name else {}),
            **({"rules": rules.name} if rules else {}),
            "step": step,
        }
        within = f" ({phase.name})" if phase.name != name else ""
        title = f"{source.name}, {name}, {f'rules of {rules.name}, ' if rules else ''}step {step}{within}"
        return show(report, title, subject, args, output)


def _diagnose_function(args: argparse.Namespace, made: tuple[Any, ...], output: Output | None) -> int:
    if not made or not callable(made[0]):
        raise WrongCall(f"{args.task} returned {described(made)}: {_WANTED}")
    fn, *arguments = made
    with errors_of_file(args.source.file):
        report = diagnose(fn, *arguments, steps=args.steps)
    return show(report, args.task, {"function": args.task}, args, output)


def _moment(
    args: argparse.Namespace, name: str, rules: "RulesFile | None", few_bits: "FewBits"
) -> "tuple[PreparedRun, TrainState, Any]":
    """Returns the run, and the state and the batch to be diagnosed."""
    from jmp_train.capsules import capsule_step, load_capsule

    with checking_the_call():
        prepared, state = load_job(args, rules, few_bits).prepare(name, with_metadata=args.checkpoint_dir is not None)
        total = math.inf if prepared.length.total is None else prepared.length.total
        skipped = None if args.capsule is None else capsule_step(args.capsule)
        after = args.after or 0
        if after > total:
            raise WrongCall(f"--after {after}: the run has {total} steps")
    saved = saved_state(args, prepared, state)
    done = saved.done
    if done + after > total:
        raise WrongCall(f"--after {after}: the run has {total} steps, {done} of them are done")
    if skipped is not None and args.after is None:
        after = int(min(max(skipped - done, 0), total - done))
    state, batch = prepared.advance(saved.state, done, after, saved.place)
    if args.capsule is not None:
        with checking_the_call():
            state, batch = load_capsule(args.capsule, state)
    return prepared, state, batch


def saved_state(args: argparse.Namespace, prepared: "PreparedRun", state: "TrainState") -> "Saved":
    """Returns where a run is: after its last checkpoint, if a folder is named.

    Args:
      args: what the parser read.
      prepared: the run.
      state: its first.

    Raises:
      WrongCall: there is no checkpoint, or it is of another run.
    """
    from jmp_train.runs import Saved, newest_saved

    if args.checkpoint_dir is None:
        return Saved(0, state, [], [])
    from jmp_train.checkpoints import CheckpointStore

    with checking_the_call(), CheckpointStore(args.checkpoint_dir, read_only=True) as store:
        if not args.checkpoint_dir.is_dir():
            raise WrongCall(f"--checkpoint-dir {args.checkpoint_dir} is not a folder")
        if not store.steps():
            raise WrongCall(f"--checkpoint-dir {args.checkpoint_dir} has no checkpoint")
        return newest_saved(store, state, prepared.metadata, prepared.length)


def outputs_of(args: argparse.Namespace) -> AbstractContextManager[Output | None]:
    """Makes the folder of `--out`, which stays if something is in it, and provides what `--json` prints on."""
    made = [] if args.out is None else make_writable("--out", args.out)
    return output_with_folders(made, as_json=args.json)


def show(
    report: NumericsReport, title: str, subject: dict[str, Any], args: argparse.Namespace, output: Output | None
) -> int:
    """Prints a diagnosis, writes its files, and returns the exit code.

    Args:
      report: the diagnosis.
      title: of the page and of what is printed.
      subject: what was diagnosed, for JSON.
      args: whether JSON is wanted, and where files are.
      output: what JSON is printed on.

    Raises:
      Failure: a file could not be written.
    """
    from jmp_train.reports import diagnosis_json, write_diagnosis

    log: IO[str] = sys.stdout if output is None else sys.stderr
    if output is None:
        print(f"{title}:\n{report}")
    else:
        print(diagnosis_json(subject, report), end="", file=output, flush=True)
    if args.out is not None:
        written, unwritten = write_diagnosis(args.out, title, subject, report)
        for path in written:
            print(f"wrote {path}", file=log)
        if unwritten:
            raise Failure("; ".join(unwritten))
    if output is not None and output.lost is not None:
        return RUN_FAILED
    return PROBLEMS_FOUND if any(problem.severity == "problem" for problem in report.problems) else 0
