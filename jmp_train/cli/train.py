"""`jmp-train train`: one task in one policy or AMP mode."""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from jmp_train.cli.errors import WrongCall, checking_the_call
from jmp_train.cli.few_bits import few_bits_of, read_few_bits
from jmp_train.cli.options import (
    DEFAULT_POLICY,
    make_writable,
    provide_cpu_devices,
    read_options,
    turn_ynn_fusion_off,
)
from jmp_train.cli.rules import read_rules
from jmp_train.tasks import TaskOptions, load_task

if TYPE_CHECKING:
    from jmp_train.capsules import SkipRecorder
    from jmp_train.runs import RunLog, Saving


def train_command(args: argparse.Namespace) -> int:
    """Trains a task under one name, prints what it reports, and returns the exit code."""
    from jmp_train.launch import own_output
    from jmp_train.reports import display_on, note_outputs, note_phases, note_rules, print_table
    from jmp_train.runs import (
        Event,
        Planned,
        ResumeError,
        Stopped,
        check_run,
        check_state_dtypes,
        event_to_json,
        phase_bounds,
        train,
    )
    from jmp_train.steps import WATCHES

    turn_ynn_fusion_off()
    provide_cpu_devices(args.devices)
    name = args.name or DEFAULT_POLICY
    rules = read_rules(args.rules, [name])
    few_bits = few_bits_of(read_few_bits(args, [name]), name)
    with ExitStack() as stack:
        events = stack.enter_context(own_output()) if args.json else None
        with checking_the_call():
            task = load_task(args.task, read_options(TaskOptions, args))
            epochs = args.epochs or task.epochs
            steps = check_run(task, epochs, args.batch_size or task.batch_size, args.seed)
            phase_bounds(name, epochs * steps)
            check_state_dtypes(task, few_bits)
            signals = stack.enter_context(_signals_noted(args.checkpoint_dir is not None))
            saving = _saving(args, stack, signals)
            _check_logdir(args, name)
            recorder = _recorder(args, stack)
        log = None
        display = None
        if not args.json:
            display = stack.enter_context(display_on(sys.stdout, [name]))
            display.start(name)

        def on_event(event: Event) -> None:
            nonlocal log
            if args.logdir is not None and not isinstance(event, Planned):
                # Not before a run that goes on is known to be the one that its checkpoints are of.
                log = log or stack.enter_context(_log(args, name))
                log.write(event)
            if events is not None:
                print(json.dumps(event_to_json(event)), file=events, flush=True)
            if display is not None:
                display.show(name, event)

        on_event(Planned(epochs, epochs * steps))
        try:
            run = train(
                task,
                name,
                epochs=epochs,
                batch_size=args.batch_size,
                seed=args.seed,
                growth_interval=args.growth_interval,
                watch=WATCHES if args.watch else (),
                rules=rules,
                few_bits=few_bits,
                saving=saving,
                recorder=recorder,
                on_event=on_event,
            )
        except ResumeError as error:
            raise WrongCall(str(error)) from error
        except Stopped as stopped:
            print(f"jmp-train: {stopped}; --resume goes on", file=sys.stderr)
            return 128 + signals[0]
    if not args.json:
        print_table([run])
        for note in filter(None, (note_phases(run), note_rules(run), note_outputs(run))):
            print(note)
    return 0 if events is None or events.lost is None else 1


def _saving(args: argparse.Namespace, stack: ExitStack, signals: list[int]) -> "Saving | None":
    if args.checkpoint_dir is None:
        if args.resume or args.checkpoint_every:
            raise WrongCall("--resume and --checkpoint-every want a --checkpoint-dir")
        return None
    from jmp_train.checkpoints import CheckpointStore
    from jmp_train.runs import Saving

    make_writable("--checkpoint-dir", args.checkpoint_dir)
    store = stack.enter_context(CheckpointStore(args.checkpoint_dir))
    store.lock()
    if args.resume and not store.steps():
        print(f"jmp-train: {args.checkpoint_dir} has no checkpoint: a new run", file=sys.stderr)
    return Saving(store, args.checkpoint_every, args.resume, lambda: bool(signals))


def _recorder(args: argparse.Namespace, stack: ExitStack) -> "SkipRecorder | None":
    if args.capsules is None:
        return None
    from jmp_train.capsules import SkipRecorder

    make_writable("--capsules", args.capsules)
    return stack.enter_context(SkipRecorder(args.capsules))


def _check_logdir(args: argparse.Namespace, name: str) -> None:
    if args.logdir is not None:
        from jmp_train.runs import check_unused

        make_writable("--logdir", args.logdir)
        check_unused(args.logdir / name)


def _log(args: argparse.Namespace, name: str) -> "RunLog":
    from jmp_train.runs import RunLog

    return RunLog(args.logdir / name)


@contextmanager
def _signals_noted(wanted: bool) -> Iterator[list[int]]:
    """Notes SIGTERM, SIGINT and SIGHUP, so that the run can save; a second one interrupts."""
    received: list[int] = []
    hang_up = getattr(signal, "SIGHUP", None)  # Windows has none

    def note(number: int, frame: FrameType | None) -> None:
        # When a terminal is closed, both it and its shell may say so.
        if received and number != hang_up:
            raise KeyboardInterrupt
        received.append(number)

    kinds = [signal.SIGTERM, signal.SIGINT] if wanted else []
    if wanted and hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN:  # nohup's
        kinds.append(hang_up)
    previous = {kind: signal.signal(kind, note) for kind in kinds}
    try:
        yield received
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
