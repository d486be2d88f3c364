"""`jmp-train compare`: one task in several policies or AMP modes, each in its own process."""

import argparse
import dataclasses
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import IO, TYPE_CHECKING

from jmp_train.app.cli.errors import CALL_IS_WRONG, TRACEBACK, Failure, WrongCall, checking_the_call
from jmp_train.app.cli.jobs import (
    OF_RUNS,
    OF_TASK,
    few_bits_taken,
    read_few_bits,
    read_rules,
    read_task_options,
    takes_rules,
)
from jmp_train.app.cli.option_values import path
from jmp_train.app.cli.options import RunOptions, as_arguments, option
from jmp_train.app.cli.outputs import checked_outputs, exit_code, list_written
from jmp_train.app.launch import ChildProcess, signals_as_exceptions
from jmp_train.app.runs import Event, FewBits, Run, check_unused, event_from_json

if TYPE_CHECKING:
    from jmp_train.app.reports import LineDisplay

_PROCESS = Path(__file__).with_name("train_process.py")
_WARNING = "jmp-train: warning: "
_ERROR = "jmp-train: error: "
_KEPT_LINES = 1000  # of a process's standard error
_READER_SECONDS = 5.0  # exceeded only if another process, started by the first, holds the pipe

DEFAULT_POLICIES = ("float32", "autocast_float16", "autocast_bfloat16")


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Options of `jmp-train compare`.

    Attributes:
      out: write report.json, .png, .html
    """

    out: Path | None = option(path, "DIR")


class NotBegun(Failure):
    """A run that failed before its data were loaded, as it would under any policy."""


def compare_command(args: argparse.Namespace) -> int:
    """Trains under each name in its own process, so that time and memory are only those of that name.

    Prints JSON or tables, and writes the report.
    """
    from jmp_train.app.reports import (
        explanations,
        print_speed_table,
        print_table,
        print_text,
        report,
        showing,
        write_report,
    )

    names = args.modes or args.policies or DEFAULT_POLICIES
    read_rules(args, names)  # as each process will
    read_few_bits(args, names)
    with checking_the_call():
        read_task_options(args)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise WrongCall(f"{'--modes' if args.modes else '--policies'} names {repeated[0]} more than once")
    log = sys.stderr if args.json else sys.stdout
    with checked_outputs(as_json=args.json, folders={"--out": args.out, "--logdir": args.logdir}) as output:
        if args.logdir is not None:
            with checking_the_call():
                for name in names:
                    check_unused(args.logdir / name)
        runs, failures = _train_all(args, names, log)
        problems = [f"{name}: {reason}" for name, reason in failures]
        written: list[Path] = []
        if args.out is not None and runs:  # keeps an earlier report if all runs fail
            written, unwritten = write_report(args.out, args.source.name, runs, failures)
            problems += unwritten
        if output is not None:
            print(json.dumps(report(args.source.name, runs), indent=2), file=output)
        elif runs:
            print_table(runs)
            if args.modes:
                print_speed_table(runs)
        with showing():
            for text in explanations(runs):
                print_text(text, log)
        list_written(written, log)
    if problems:
        raise Failure("; ".join(problems))
    return exit_code(output)


def _train_all(args: argparse.Namespace, names: Sequence[str], log: IO[str]) -> tuple[list[Run], list[tuple[str, str]]]:
    """Returns the runs that ended well, and the name and the reason of each failure.

    Raises:
      WrongCall: the first run found the call wrong, as all others would.
      NotBegun: the first run could not begin, as none of the others could.
    """
    from jmp_train.app.reports import display_on, explain_failure

    runs, failures = [], []
    with signals_as_exceptions(), display_on(log, names) as display:
        for name in names:
            display.start(name)
            try:
                runs.append(_run_in_process(args, name, display))
            except (Failure, WrongCall) as error:
                if isinstance(error, WrongCall | NotBegun) and not runs and not failures:
                    raise
                reason = explain_failure(name, str(error))
                failures.append((name, reason))
                display.fail(name, reason)
    return runs, failures


def _run_in_process(args: argparse.Namespace, name: str, display: "LineDisplay") -> Run:
    """Returns the run; raises Failure if the process did not end well, WrongCall or NotBegun if it did not begin."""
    run, has_begun = None, False
    others: list[bytes] = []  # lines that are not events
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
            has_begun = True
            display.show(name, event)
            if isinstance(event, Run):
                run = event
        code = process.wait()
    reader.join(_READER_SECONDS)
    text = b"".join(errors.copy()).decode(errors="replace")
    if code == CALL_IS_WRONG and not has_begun:
        raise WrongCall(_reason(code, text))
    if code != 0 or run is None:
        raise (Failure if has_begun else NotBegun)(_reason(code, text))
    _pass_warnings_on(name, text, others)
    return run


def _command(args: argparse.Namespace, name: str) -> list[str]:
    """Returns the command of a run's process; -P prevents imports from the current folder."""
    command = [sys.executable, "-P"]
    command += ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site
    command += [str(_PROCESS), "train", args.task, "--policy", name, "--json"]
    taken = few_bits_taken(FewBits((), args.parameters, args.fp8), name)
    rules = args.rules if takes_rules(name) else None
    said = argparse.Namespace(**vars(args) | {"parameters": taken.parameters, "fp8": taken.fp8, "rules": rules})
    command += as_arguments(RunOptions, said)
    own = args.source.options
    return command + ([] if own is None else as_arguments(own, said, without=OF_RUNS, prefix=OF_TASK))


def _event(line: bytes) -> Event | None:
    """Returns the event in a line; None if it has none, such as a line printed by a library."""
    try:
        return event_from_json(json.loads(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _pass_warnings_on(name: str, errors: str, others: Sequence[bytes]) -> None:
    """Prints the warnings of a run that ended well."""
    texts = [line.removeprefix(_WARNING) for line in errors.splitlines() if line.startswith(_WARNING)]
    if others:
        first = others[0].decode(errors="replace").strip()
        texts.append(f"passed by {len(others)} of its lines of output, which are not events: {first[:60]!r}")
    for text in texts:
        print(f"{_WARNING}{name}: {text}", file=sys.stderr, flush=True)


def _reason(code: int | None, errors: str) -> str:
    """Returns the reason of a failure from the process's error line; without one, its whole output goes to stderr."""
    lines = errors.rstrip().splitlines()
    first = len(lines) - 1
    while first > 0 and lines[first].startswith("  "):  # files that an error lists
        first -= 1
    if lines and lines[first].startswith(_ERROR):
        if os.environ.get(TRACEBACK):
            print(*lines[:first], sep="\n", file=sys.stderr)
        return "\n".join([lines[first].removeprefix(_ERROR), *lines[first + 1 :]])
    print(errors, end="", file=sys.stderr)
    if not code:
        return "ended without a result"
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
