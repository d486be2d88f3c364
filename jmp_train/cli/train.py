"""`jmp-train train`: one task in one policy or AMP mode."""

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import jax

from jmp_train.capsules import SkipRecorder
from jmp_train.checkpoints import CheckpointStore
from jmp_train.cli.errors import WrongCall, checking_the_call
from jmp_train.cli.jobs import load_job
from jmp_train.cli.option_values import path, positive
from jmp_train.cli.options import DEFAULT_POLICY, option
from jmp_train.cli.outputs import checked_outputs, exit_code
from jmp_train.distributed import is_main_process
from jmp_train.runs import (
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
from jmp_train.steps import WATCHES
from jmp_train.tasks import FileError, errors_of_file


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
    from jmp_train.reports import display_on, explanations, print_table

    name = args.name or DEFAULT_POLICY
    is_main, has_begun = is_main_process(), False
    with ExitStack() as stack:
        folders = {"--checkpoint-dir": args.checkpoint_dir, "--logdir": args.logdir, "--capsules": args.capsules}
        events = stack.enter_context(checked_outputs(as_json=args.json, folders=folders))
        with checking_the_call():
            job = load_job(args, name)
            prepared, state = job.prepare(
                name, watch=WATCHES if args.watch else (), with_metadata=args.checkpoint_dir is not None
            )
            # Several processes would have to agree when to stop.
            can_stop = args.checkpoint_dir is not None and jax.process_count() == 1
            signals = stack.enter_context(_signals_noted(can_stop))
            saving = _saving(args, stack, signals)
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
            print(f"jmp-train: {stopped}; continue with --resume", file=sys.stderr)
            return 128 + signals[0]
    if is_main and not args.json:
        print_table([run])
        for note in explanations([run]):
            print(note)
    return exit_code(events)


def _saving(args: argparse.Namespace, stack: ExitStack, signals: list[int]) -> Saving | None:
    if args.checkpoint_dir is None:
        if args.resume or args.checkpoint_every:
            raise WrongCall("--resume and --checkpoint-every need --checkpoint-dir")
        return None
    store = stack.enter_context(CheckpointStore(args.checkpoint_dir))
    store.lock()
    if args.resume and not store.steps():
        print(f"jmp-train: {args.checkpoint_dir} has no checkpoint; starting a new run", file=sys.stderr)
    return Saving(store, args.checkpoint_every, args.resume, lambda: bool(signals))


@contextmanager
def _signals_noted(wanted: bool) -> Iterator[list[int]]:
    """Records SIGTERM, SIGINT and SIGHUP, so that the run can save; a second one interrupts."""
    received: list[int] = []
    hang_up = getattr(signal, "SIGHUP", None)  # None on Windows

    def note(number: int, frame: FrameType | None) -> None:
        # When a terminal is closed, both it and its shell may send one.
        if received and number != hang_up:
            raise KeyboardInterrupt
        received.append(number)

    kinds = [signal.SIGTERM, signal.SIGINT] if wanted else []
    if wanted and hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN:  # ignored under nohup
        kinds.append(hang_up)
    previous = {kind: signal.signal(kind, note) for kind in kinds}
    try:
        yield received
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
