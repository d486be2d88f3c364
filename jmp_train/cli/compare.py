"""`jmp-train compare`: one task in several policies or AMP modes, each in a process of its own."""

import argparse
import json
import logging
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import IO, TYPE_CHECKING

from jmp_train.child_processes import ChildProcess, signals_as_exceptions
from jmp_train.command_errors import CALL_IS_WRONG, Failure, WrongCall, checking_the_call
from jmp_train.command_options import make_writable, task_options
from jmp_train.extras import extra_packages
from jmp_train.output import Output, own_output
from jmp_train.records import Event, Run, event_from_json
from jmp_train.tasks import load_task

if TYPE_CHECKING:
    from jmp_train.display import Display

_PROCESS = Path(__file__).with_name("train_process.py")
_WARNING = "jmp-train: warning: "
_KEPT_LINES = 1000  # of what a process prints on standard error
_READER_SECONDS = 5.0  # longer only if something that the process has started holds the pipe

DEFAULT_POLICIES = ("float32", "autocast_float16", "autocast_bfloat16")

# What `compare` hands on to its processes, but for flags.
_HANDED_ON = (
    "seed",
    "epochs",
    "batch_size",
    "devices",
    "data_dir",
    "train_size",
    "model",
    "heads",
    "scale",
    "image_size",
    "logdir",
)


def compare_command(args: argparse.Namespace) -> int:
    """Trains under each name in a process of its own, so that time and memory are that name's."""
    if not args.json:
        _compare(args, sys.stdout, None)
        return 0
    with own_output() as output:
        _compare(args, sys.stderr, output)
    return 0 if output.lost is None else 1


def _compare(args: argparse.Namespace, log: IO[str], output: Output | None) -> None:
    """Trains, prints JSON on `output` or else tables on standard output, and writes the report."""
    from jmp_train.comparison import explanations
    from jmp_train.report import print_speed_table, print_table, report, write_report
    from jmp_train.training import count_steps

    names = args.modes or args.policies or DEFAULT_POLICIES
    with checking_the_call():
        task = load_task(args.task, task_options(args))
        epochs = args.epochs or task.epochs
        count_steps(task, epochs, args.batch_size or task.batch_size)
        del task  # its data may be large, and each process has its own
        _check_outputs(args, names)
    runs, failures = _train_all(args, names, epochs, log)
    if output is not None:
        print(json.dumps(report(args.task, runs), indent=2), file=output)
    elif runs:
        print_table(runs)
        if args.modes:
            print_speed_table(runs)
    for text in explanations(runs):
        print(text, file=log)
    problems = [f"{name}: {reason}" for name, reason in failures]
    if args.out is not None and runs:  # an earlier report is not lost to a failure
        written, unwritten = write_report(args.out, args.task, runs, failures)
        for path in written:
            print(f"wrote {path}", file=log)
        problems += unwritten
    if problems:
        raise Failure("; ".join(problems))


def _train_all(
    args: argparse.Namespace, names: Sequence[str], epochs: int, log: IO[str]
) -> tuple[list[Run], list[tuple[str, str]]]:
    """Returns the runs that ended well, and the name and the reason of each other one."""
    from jmp_train.comparison import explain_failure
    from jmp_train.display import display_on

    runs, failures = [], []
    with signals_as_exceptions(), display_on(log, names, epochs) as display:
        for name in names:
            display.start(name)
            try:
                runs.append(_run_in_process(args, name, display))
            except (Failure, WrongCall) as error:
                if isinstance(error, WrongCall) and not runs and not failures:
                    raise  # nor would the others begin
                reason = explain_failure(name, str(error))
                failures.append((name, reason))
                display.fail(name, reason)
    return runs, failures


def _check_outputs(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises an error if what a comparison is to write could not be written at its end."""
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        option = "--modes" if args.modes else "--policies"
        raise WrongCall(f"{option} names {repeated[0]} more than once")
    if args.out is not None:
        # Where HOME cannot be written to, matplotlib warns of its caches, which are no news of the runs.
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        with extra_packages():
            import matplotlib  # noqa: F401  # wanted at the end, and missed too late there

        make_writable("--out", args.out)
    if args.logdir is not None:
        from jmp_train.run_log import check_unused

        make_writable("--logdir", args.logdir)
        for name in names:
            check_unused(args.logdir / name)


def _run_in_process(args: argparse.Namespace, name: str, display: "Display") -> Run:
    """Returns the run; raises Failure if the process did not end well, WrongCall if it did not begin."""
    run = None
    others: list[bytes] = []  # lines that are no events
    errors: deque[bytes] = deque(maxlen=_KEPT_LINES)
    with ChildProcess(_command(args, name), stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
        reader.start()
        for line in process.stdout:
            event = _event(line)
            if event is None:
                others.append(line)
                continue
            display.show(name, event)
            if isinstance(event, Run):
                run = event
        code = process.wait()
    reader.join(_READER_SECONDS)
    text = b"".join(errors.copy()).decode(errors="replace")
    if code == CALL_IS_WRONG:
        raise WrongCall(f"{name}: {_reason(code, text)}")
    if code != 0 or run is None:
        raise Failure(_reason(code, text))
    _hand_on_warnings(name, text, others)
    return run


def _command(args: argparse.Namespace, name: str) -> list[str]:
    """Returns the command of a run's process; -P keeps what is in the current folder from being imported."""
    command = [sys.executable, "-P"]
    command += ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site
    command += [str(_PROCESS), "train", args.task, "--policy", name, "--json"]
    for option in _HANDED_ON:
        value = getattr(args, option)
        if value is not None:
            option = f"--{option.replace('_', '-')}"
            if isinstance(value, list):
                command += [option, *map(str, value)]
            else:
                command.append(f"{option}={value}")  # a value may begin with a dash
    if args.synthetic:
        command.append("--synthetic")
    return command


def _event(line: bytes) -> Event | None:
    """Returns the event that a line is; None if it is none, such as what a library prints."""
    try:
        return event_from_json(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _hand_on_warnings(name: str, errors: str, others: Sequence[bytes]) -> None:
    """Prints what is to be said of a run that ended well."""
    texts = [
        line.removeprefix(_WARNING) for line in errors.splitlines() if line.startswith(_WARNING)
    ]
    if others:
        first = others[0].decode(errors="replace").strip()
        texts.append(
            f"passed by {len(others)} of its lines of output, which are no events: {first[:60]!r}"
        )
    for text in texts:
        print(f"{_WARNING}{name}: {text}", file=sys.stderr, flush=True)


def _reason(code: int | None, errors: str) -> str:
    """Returns one line that says why the process failed; what else it printed goes to stderr."""
    lines = errors.strip().splitlines()
    prefix = "jmp-train: error: "
    if lines and lines[-1].startswith(prefix):
        return lines[-1].removeprefix(prefix)
    print(errors, end="", file=sys.stderr)
    if not code:
        return "ended without a result"
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
