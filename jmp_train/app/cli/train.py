"""`jmp-train train`: one task in one policy or AMP mode."""

import argparse
import dataclasses
import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import jax

from jmp_train.app.cli.errors import WrongCall, checking_the_call
from jmp_train.app.cli.jobs import load_job
from jmp_train.app.cli.option_values import path, positive
from jmp_train.app.cli.options import DEFAULT_POLICY, option
from jmp_train.app.cli.outputs import checked_outputs, exit_code
from jmp_train.app.runs import (
    Compiled,
    Event,
    Planned,
    ResumeError,
    RunLog,
    Saving,
    Stopped,
    check_unused,
    event_to_json,
    train_prepared,
)
from jmp_train.app.tasks import FileError, errors_of_file
from jmp_train.checkpoints import CheckpointStore
from jmp_train.distributed import StopSignals, is_main_process
from jmp_train.steps import WATCHES
from jmp_train.tools.capsules import SkipRecorder


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Options of `jmp-train train`.

    Attributes:
      checkpoint_dir: save the run in DIR
      checkpoint_every: steps between checkpoints; default: once per epoch
      resume: resume from DIR's last checkpoint, if it has one
      capsules: write the last skipped steps to DIR, to replay them
    """

    checkpoint_dir: Path | None = option(path, "DIR")
    checkpoint_every: int | None = option(positive, "STEPS")
    resume: bool = False
    capsules: Path | None = option(path, "DIR")


def train_command(args: argparse.Namespace) -> int:
    """Trains a task under one name, prints its reports, and returns the exit code."""
    from jmp_train.app.reports import display_on, explanations, print_table, print_text, showing

    name = args.name or DEFAULT_POLICY
    is_main, has_begun = is_main_process(), False
    saves = args.checkpoint_dir is not None
    if not saves and jax.process_count() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # jax notes it, for a run that saves, and goes on
    with ExitStack() as stack:
        folders = {"--checkpoint-dir": args.checkpoint_dir, "--logdir": args.logdir, "--capsules": args.capsules}
        events = stack.enter_context(checked_outputs(as_json=args.json, folders=folders))
        with checking_the_call():
            job = load_job(args, name)
            prepared, state = job.prepare(name, watch=WATCHES if args.watch else (), with_metadata=saves)
            stop = stack.enter_context(StopSignals()) if saves else None
            saving = _saving(args, stack, stop)
            if args.logdir is not None:
                check_unused(args.logdir / name)
            recorder = None if args.capsules is None else stack.enter_context(SkipRecorder(args.capsules))
        log = None
        display = None
        if is_main and not args.json:
            display = stack.enter_context(display_on(sys.stdout, [name]))
            display.start(name)

        def on_event(event: Event) -> None:
            nonlocal log, has_begun
            has_begun = has_begun or isinstance(event, Compiled)
            if args.logdir is not None and is_main and not isinstance(event, Planned):
                # Not before the checkpoints of a resumed run are known to be its own.
                log = log or stack.enter_context(RunLog(args.logdir / name))
                log.write(event)
            if events is not None and is_main:
                print(json.dumps(event_to_json(event)), file=events, flush=True)
            if display is not None:
                display.show(name, event)

        length = prepared.length
        epochs_known = length.total is None or length.steps_per_epoch is not None
        on_event(Planned(length.epochs if epochs_known else 0, length.total))
        try:
            with errors_of_file(job.source.file):
                run = train_prepared(prepared, state, saving=saving, recorder=recorder, on_event=on_event)
        except ResumeError as error:
            raise WrongCall(str(error)) from error
        except (ValueError, TypeError, FileError) as error:
            if has_begun:
                raise
            raise WrongCall(str(error)) from error
        except Stopped as stopped:
            assert stop is not None
            code = stop.finish()
            if is_main:
                print(f"jmp-train: {stopped}; continue with --resume", file=sys.stderr)
            return code
    if is_main and not args.json:
        print_table([run])
        with showing():
            for note in explanations([run]):
                print_text(note, sys.stdout)
    return exit_code(events)


def _saving(args: argparse.Namespace, stack: ExitStack, stop: StopSignals | None) -> Saving | None:
    if stop is None:
        if args.resume or args.checkpoint_every:
            raise WrongCall("--resume and --checkpoint-every need --checkpoint-dir")
        return None
    store = stack.enter_context(CheckpointStore(args.checkpoint_dir))
    store.lock()
    if args.resume and not store.steps() and is_main_process():
        print(f"jmp-train: {args.checkpoint_dir} has no checkpoint; starting a new run", file=sys.stderr)
    return Saving(store, args.checkpoint_every, args.resume, stop.agreed)
