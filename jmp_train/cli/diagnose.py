"""`jmp-train diagnose`: what half precision does to each operation of a step of a task, or of a script of one's own."""

import argparse
import sys
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Any

from jmp_train.cli.errors import PROBLEMS_FOUND, RUN_FAILED, Failure, WrongCall, checking_the_call
from jmp_train.cli.few_bits import few_bits_of, read_few_bits
from jmp_train.cli.options import (
    DEFAULT_POLICY,
    make_writable,
    output_with_folders,
    provide_cpu_devices,
    read_options,
    turn_ynn_fusion_off,
)
from jmp_train.cli.rules import read_rules
from jmp_train.launch import Output
from jmp_train.policies import NumericsReport, diagnose
from jmp_train.tasks import TaskOptions, load_task

if TYPE_CHECKING:
    from jmp_train.runs import FewBits, PreparedRun, RulesFile
    from jmp_train.steps import TrainState


def diagnose_command(args: argparse.Namespace) -> int:
    """Diagnoses a step of a task, prints what is found, and returns the exit code."""
    turn_ynn_fusion_off()
    provide_cpu_devices(args.devices)
    name = args.name or DEFAULT_POLICY
    rules = read_rules(args.rules, [name])
    few_bits = few_bits_of(read_few_bits(args, [name]), name)
    with outputs_of(args) as output:
        prepared, state, batch = _moment(args, name, rules, few_bits)
        step = int(state.step)
        phase = prepared.phase_at(step)
        report = diagnose(phase.step, state, batch, steps=args.steps)
        subject = {
            "task": args.task,
            "policy": name,
            **({"phase": phase.name} if phase.name != name else {}),
            **({"rules": rules.name} if rules else {}),
            "step": step,
        }
        within = f" ({phase.name})" if phase.name != name else ""
        title = f"{args.task}, {name}, {f'rules of {rules.name}, ' if rules else ''}step {step}{within}"
        return show(report, title, subject, args, output)


def _moment(
    args: argparse.Namespace, name: str, rules: "RulesFile | None", few_bits: "FewBits"
) -> "tuple[PreparedRun, TrainState, Any]":
    """Returns the run, and the state and the batch to be diagnosed."""
    from jmp_train.capsules import capsule_step, load_capsule
    from jmp_train.runs import check_run, check_state_dtypes, phase_bounds, prepare_run

    with checking_the_call():
        task = load_task(args.task, read_options(TaskOptions, args))
        total = check_run(task, args.epochs or task.epochs, args.batch_size or task.batch_size, args.seed)
        total *= args.epochs or task.epochs
        phase_bounds(name, total)
        check_state_dtypes(task, few_bits)
        skipped = None if args.capsule is None else capsule_step(args.capsule)
        after = args.after or 0
        if after > total:
            raise WrongCall(f"--after {after}: the run has {total} steps")
    prepared, state = prepare_run(
        task,
        name,
        epochs=args.epochs,
        batch_size=args.batch_size,
        seed=args.seed,
        growth_interval=args.growth_interval,
        rules=rules,
        few_bits=few_bits,
        with_metadata=args.checkpoint_dir is not None,
    )
    done, state = saved_state(args, prepared, state)
    if done + after > total:
        raise WrongCall(f"--after {after}: the run has {total} steps, {done} of them are done")
    if skipped is not None and args.after is None:
        after = min(max(skipped - done, 0), total - done)
    state, batch = prepared.advance(state, done, after)
    if args.capsule is not None:
        with checking_the_call():
            state, batch = load_capsule(args.capsule, state)
    return prepared, state, batch


def saved_state(args: argparse.Namespace, prepared: "PreparedRun", state: "TrainState") -> "tuple[int, TrainState]":
    """Returns how many steps are done and the state after them: of the last checkpoint, if a folder is named.

    Args:
      args: what the parser read.
      prepared: the run.
      state: its first.

    Raises:
      WrongCall: there is no checkpoint, or it is of another run.
    """
    if args.checkpoint_dir is None:
        return 0, state
    from jmp_train.checkpoints import CheckpointStore
    from jmp_train.runs import newest_saved

    with checking_the_call(), CheckpointStore(args.checkpoint_dir, read_only=True) as store:
        if not args.checkpoint_dir.is_dir():
            raise WrongCall(f"--checkpoint-dir {args.checkpoint_dir} is not a folder")
        if not store.steps():
            raise WrongCall(f"--checkpoint-dir {args.checkpoint_dir} has no checkpoint")
        done, state, _, _ = newest_saved(store, state, prepared.metadata, prepared.steps_per_epoch)
    return done, state


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
