"""`jmp-train train`: one task in one policy or AMP mode."""

import dataclasses
import json
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import jax

from jmp_train.app.cli.jobs import Call, load_job
from jmp_train.app.cli.option_values import path, positive
from jmp_train.app.cli.options import NameOptions, RunOptions, option
from jmp_train.app.cli.results import WrongCall, check_outputs, checking_the_call, warn
from jmp_train.app.runs import (
    Compiled,
    Event,
    Planned,
    ResumeError,
    Run,
    RunLog,
    Saving,
    Stopped,
    Warned,
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
class TrainOptions(RunOptions, NameOptions):
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


def train_command(call: Call[TrainOptions]) -> int:
    """Trains a task under one name, prints its reports, and returns the exit code."""
    from jmp_train.app.reports import display_on, explanations, print_tables, print_text, showing

    is_main, display, name = is_main_process(), None, call.options.name
    with ExitStack() as stack:

        def on_event(event: Event) -> None:
            nonlocal display
            if isinstance(event, Warned):
                warn(event.text)
            if is_main and call.output is not None:
                print(json.dumps(event_to_json(event)), file=call.output, flush=True)
            elif is_main:
                if display is None:
                    display = stack.enter_context(display_on(sys.stdout, [name]))
                    display.start(name)
                display.show(name, event)

        ended = train_call(call, on_event)
    if isinstance(ended, int):
        return ended
    if is_main and call.output is None:
        print_tables([ended])
        with showing():
            for note in explanations([ended]):
                print_text(note, sys.stdout)
    return 0


def train_call(call: Call[TrainOptions], on_event: Callable[[Event], None]) -> Run | int:
    """Trains a task under one name.

    Args:
      call: the call.
      on_event: see `train`; it also gets a `Planned` and each `Warned`.

    Returns:
      The run; or the exit code if a signal stopped it, which it has reported.

    Raises:
      WrongCall: the call is wrong, and nothing was trained.
      Exception: the run failed.
    """
    options, name, has_begun, log = call.options, call.options.name, False, None
    saves = options.checkpoint_dir is not None
    if not saves and jax.process_count() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # jax notes it, for a run that saves, and goes on
    with ExitStack() as stack:
        folders = {
            "--checkpoint-dir": options.checkpoint_dir,
            "--logdir": options.logdir,
            "--capsules": options.capsules,
        }
        check_outputs(folders=folders)
        with checking_the_call():
            job = load_job(call, name)
            prepared, state = job.prepare(name, watch=WATCHES if options.watch else (), with_metadata=saves)
            stop = stack.enter_context(StopSignals()) if saves else None
            saving = _saving(options, stack, stop)
            if options.logdir is not None:
                check_unused(options.logdir / name)
            recorder = None if options.capsules is None else stack.enter_context(SkipRecorder(options.capsules))

        def logged(event: Event) -> None:
            nonlocal log, has_begun
            has_begun = has_begun or isinstance(event, Compiled)
            if options.logdir is not None and is_main_process():
                # Not before the checkpoints of a resumed run are known to be its own.
                log = log or stack.enter_context(RunLog(options.logdir / name, lambda text: on_event(Warned(text))))
                log.write(event)
            on_event(event)

        length = prepared.length
        epochs_known = length.total is None or length.steps_per_epoch is not None
        on_event(Planned(length.epochs if epochs_known else 0, length.total))
        try:
            with errors_of_file(job.source.file):
                return train_prepared(prepared, state, saving=saving, recorder=recorder, on_event=logged)
        except ResumeError as error:
            raise WrongCall(str(error)) from error
        except (ValueError, TypeError, FileError) as error:
            if has_begun:
                raise
            raise WrongCall(str(error)) from error
        except Stopped as stopped:
            assert stop is not None
            code = stop.finish()
            if is_main_process():
                print(f"jmp-train: {stopped}; continue with --resume", file=sys.stderr)
            return code


def _saving(options: TrainOptions, stack: ExitStack, stop: StopSignals | None) -> Saving | None:
    if stop is None or options.checkpoint_dir is None:
        if options.resume or options.checkpoint_every:
            raise WrongCall("--resume and --checkpoint-every need --checkpoint-dir")
        return None
    store = stack.enter_context(CheckpointStore(options.checkpoint_dir))
    store.lock()
    if options.resume and not store.steps() and is_main_process():
        print(f"jmp-train: {options.checkpoint_dir} has no checkpoint; starting a new run", file=sys.stderr)
    return Saving(store, options.checkpoint_every, options.resume, stop.agreed)
