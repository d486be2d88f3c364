"""`jmp-train tune`: which operations of a task have to stay in float32, as a file of rules."""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from jmp_train.cli.diagnose import saved_state
from jmp_train.cli.errors import PROBLEMS_FOUND, RUN_FAILED, Failure, WrongCall, checking_the_call
from jmp_train.cli.jobs import load_job
from jmp_train.cli.options import check_file, remove_folders
from jmp_train.launch import Output, own_output
from jmp_train.tasks import errors_of_file
from jmp_train.tuning import TunedRules, tune

if TYPE_CHECKING:
    from jmp_train.steps import TrainState, TrainStep

_EXAMPLES = 4


def tune_command(args: argparse.Namespace) -> int:
    """Tunes the rules of a task, prints and writes what is found, and returns the exit code."""
    from jmp_train.reports import trials_shown

    with _outputs(args) as output, errors_of_file(args.source.file):
        step, examples = _examples(args)
        done = int(examples[0][0].step)
        with trials_shown(sys.stderr) if output is None else nullcontext() as progress:
            tuned = tune(
                step,
                examples,
                dtype=args.dtype,
                tolerance=args.tolerance,
                budget=args.budget,
                steps=args.steps,
                progress=progress,
            )
        subject = {"task": args.source.name, "step": done, "examples": len(examples)}
        return _show(tuned, f"{args.source.name}, {args.dtype}, step {done}", subject, args, output)


@contextmanager
def _outputs(args: argparse.Namespace) -> Iterator[Output | None]:
    """Makes the folders of the files, which stay if something is in them, and provides what `--json` prints on."""
    files = {option: file for option, file in (("--out", args.out), ("--page", args.page)) if file is not None}
    if len({file.absolute() for file in files.values()}) < len(files):
        raise WrongCall(f"--out and --page are both {args.out}")
    made = []
    try:
        for option, file in files.items():
            made = [*check_file(option, file), *made]
        with ExitStack() as stack:
            yield stack.enter_context(own_output()) if args.json else None
    finally:
        remove_folders(made)


def _examples(args: argparse.Namespace) -> "tuple[TrainStep, list[tuple[TrainState, Any]]]":
    """Returns the step to be tuned, and a state with each of the batches that come next in a run in float32."""
    from jmp_train.runs import make_setup, run_optimizer

    with checking_the_call():
        job = load_job(args)
        if job.settings.devices != 1:
            raise WrongCall(f"--devices {job.settings.devices}: tune runs on one device")
        if job.settings.accumulate_steps != 1:
            raise WrongCall(f"--accumulate-steps {job.settings.accumulate_steps}: tune takes whole batches")
        prepared, state = job.prepare("float32", with_metadata=args.checkpoint_dir is not None)
    total = prepared.length.total
    if total is not None and (args.after > total or (args.examples or 1) > max(1, total - args.after)):
        raise WrongCall(_too_many(args, total, 0))
    saved = saved_state(args, prepared, state)
    done, state, place = saved.done, saved.state, saved.place
    wanted = args.examples or _EXAMPLES
    if total is not None:
        left = max(1, total - done - args.after)  # at a run's end there is the last batch
        if done + args.after > total or (args.examples or 1) > left:
            raise WrongCall(_too_many(args, total, done))
        wanted = min(wanted, left)
    if args.after:
        state, _ = prepared.advance(state, done, args.after, place)
    batches = list(islice(prepared.batches(done, place), args.after, args.after + wanted))
    # The same step, with the loss scale that training by the rules will have.
    made = run_optimizer(job.task, state.params, total, job.settings)
    setup = make_setup(job.task, f"autocast_{args.dtype}", made, job.settings)
    if not setup.keeps_loss_scale:
        state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=setup.loss_scale))
    return setup.step, [(state, batch) for batch in batches]


def _too_many(args: argparse.Namespace, total: int, done: int) -> str:
    given = [f"--{name} {value}" for name in ("after", "examples") if (value := getattr(args, name))]
    return f"{' '.join(given)}: the run has {total} steps" + (f", {done} of them are done" if done else "")


def _show(
    tuned: TunedRules, title: str, subject: dict[str, Any], args: argparse.Namespace, output: Output | None
) -> int:
    """Prints what was found, writes its files, and returns the exit code."""
    from jmp_train.reports import tuning_json, write_tuning

    log = sys.stdout if output is None else sys.stderr
    if output is None:
        print(f"{title}:\n{tuned}")
        if args.out is None:
            print(tuned.code())
    else:
        print(tuning_json(subject, tuned), end="", file=output, flush=True)
    written, unwritten = write_tuning(args.out, args.page, title, subject, tuned)
    for path in written:
        print(f"wrote {path}", file=log)
    if unwritten:
        raise Failure("; ".join(unwritten))
    if output is not None and output.lost is not None:
        return RUN_FAILED
    return 0 if tuned.verification.passed else PROBLEMS_FOUND
