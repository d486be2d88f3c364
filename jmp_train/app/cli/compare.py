"""`jmp-train compare`: one task in several policies or AMP modes, each in its own process."""

import base64
import dataclasses
import json
import os
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE
from typing import IO, TYPE_CHECKING, Any

from jmp_train.app.cli.jobs import Call, check_precisions, find_task_of, options_for
from jmp_train.app.cli.option_values import path
from jmp_train.app.cli.options import SCHEDULES, RunOptions, names_option, option
from jmp_train.app.cli.results import (
    RUN_FAILED,
    TRACEBACK,
    Failure,
    WrongCall,
    check_different,
    check_outputs,
    checking_the_call,
    failed,
    list_written,
    warn,
)
from jmp_train.app.cli.train import TrainOptions, train_call
from jmp_train.app.launch import ChildProcess, lasting_output, own_output, signals_as_exceptions
from jmp_train.app.runs import (
    MODE_CHOICES,
    Event,
    Failed,
    Run,
    Warned,
    check_unused,
)

if TYPE_CHECKING:
    from jmp_train.app.reports import LineDisplay

# This same package, wherever it is, and nothing else of its folder. `python -P -m jmp_train` would not find the one
# in the current folder, as in a checkout, or would find another.
_PROCESS = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import jmp_train; del sys.path[0]; "
    "from jmp_train.app.cli.compare import run_child; sys.exit(run_child(sys.argv[1]))"
)
_SENT = b"jmp_train event "  # the beginning of an event among the lines of a process
_KEPT_LINES = 1000  # of a process's standard error
_READER_SECONDS = 5.0  # exceeded only if another process, started by the first, holds the pipe

DEFAULT_POLICIES = ("float32", "autocast_float16", "autocast_bfloat16")


@dataclasses.dataclass(frozen=True)
class CompareOptions(RunOptions):
    """Options of `jmp-train compare`.

    Attributes:
      policies: see below.
      modes: see below.
      out: write report.json, .svg, .html
    """

    policies: tuple[str, ...] = names_option(
        default=DEFAULT_POLICIES, help=f"or modes, or {SCHEDULES}; default: {' '.join(DEFAULT_POLICIES)}"
    )
    modes: tuple[str, ...] = names_option(
        default=(),
        help=f"{MODE_CHOICES}; or policies; also prints a table of speed and memory relative to the first",
    )
    out: Path | None = option(path, "DIR")


class RunFailure(Failure):
    """A run in its own process that did not end well.

    Attributes:
      failed: the failure.
      has_begun: False if it failed before its data were loaded, as it would under any policy.
    """

    def __init__(self, failed: Failed, has_begun: bool) -> None:
        super().__init__(failed.reason)
        self.failed = failed
        self.has_begun = has_begun


def compare_command(call: Call[CompareOptions]) -> int:
    """Trains under each name in its own process, so that time and memory are only those of that name.

    Prints JSON or tables, and writes the report.
    """
    from jmp_train.app.reports import (
        explanations,
        print_tables,
        print_text,
        report,
        showing,
        write_report,
    )

    options, output = call.options, call.output
    names = options.modes or options.policies
    check_precisions(options, names)  # as each process will
    with checking_the_call():
        call.task_options()
    check_different("--modes" if options.modes else "--policies", names)
    log = sys.stdout if output is None else sys.stderr
    check_outputs(folders={"--out": options.out, "--logdir": options.logdir})
    if options.logdir is not None:
        with checking_the_call():
            for name in names:
                check_unused(options.logdir / name)
    runs, failures = _train_all(call, names, log)
    problems = [f"{name}: {reason}" for name, reason in failures]
    written: list[Path] = []
    if options.out is not None and runs:  # keeps an earlier report if all runs fail
        written, unwritten = write_report(options.out, call.source.name, runs, failures)
        problems += unwritten
    if output is not None:
        print(json.dumps(report(call.source.name, runs), indent=2), file=output)
    elif runs:
        print_tables(runs, has_speeds=bool(options.modes))
    with showing():
        for text in explanations(runs):
            print_text(text, log)
    list_written(written, log)
    if problems:
        raise Failure("; ".join(problems))
    return 0


def _train_all(
    call: Call[CompareOptions], names: Sequence[str], log: IO[str]
) -> tuple[list[Run], list[tuple[str, str]]]:
    """Returns the runs that ended well, and the name and the reason of each failure.

    Raises:
      WrongCall: the first run found the call wrong, as all others would.
      Failure: the first run could not begin, as none of the others could.
    """
    from jmp_train.app.reports import display_on

    runs, failures = [], []
    with signals_as_exceptions(), display_on(log, names) as display:
        for name in names:
            display.start(name)
            try:
                runs.append(_run_in_process(call, name, display))
            except RunFailure as failure:
                if not (failure.has_begun or runs or failures):
                    raise WrongCall(str(failure)) if failure.failed.is_wrong_call else failure from None
                failures.append((name, str(failure)))
                display.fail(name, str(failure))
    return runs, failures


def _run_in_process(call: Call[CompareOptions], name: str, display: "LineDisplay") -> Run:
    """Returns the run; raises RunFailure if the process did not end well."""
    event, has_begun = None, False
    errors: deque[bytes] = deque(maxlen=_KEPT_LINES)
    with ChildProcess([*_command(), call_as_text(call, name)], stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
        reader.start()
        for line in process.stdout:
            sent = line.partition(_SENT)[2]  # nothing in other lines, such as those printed when Python starts
            event = _from_text(sent) if sent else event
            if isinstance(event, Warned):
                warn(f"{name}: {event.text}")
            elif event is not None and not isinstance(event, Failed):
                has_begun = True
                display.show(name, event)
        code = process.wait()
    if isinstance(event, Run) and code == 0:
        return event
    reader.join(_READER_SECONDS)
    if os.environ.get(TRACEBACK) or not isinstance(event, Failed):
        print(b"".join(errors.copy()).decode(errors="replace"), end="", file=sys.stderr)
    raise RunFailure(event if isinstance(event, Failed) else Failed(_reason(code)), has_begun)


def _command() -> list[str]:
    """Returns the command of a run's process; -P prevents imports from the current folder."""
    ignored = ["-E"] * sys.flags.ignore_environment + ["-s"] * sys.flags.no_user_site
    return [sys.executable, "-P", *ignored, "-c", _PROCESS, str(Path(__file__).parents[3])]


def _reason(code: int | None) -> str:
    """Returns the reason of a failure that the process did not report."""
    if not code:
        return "ended without a result"
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def call_as_text(call: Call[RunOptions], name: str) -> str:
    """Returns the call of a run in its own process, as text.

    Args:
      call: the call of `compare`.
      name: the policy, mode or schedule of the run, which gets those of the options that apply to it.
    """
    options = options_for(call.options, name)
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(RunOptions)}
    # The task's options on their own, because their types may be known only once the task's file is imported.
    return _as_text((call.text, TrainOptions(**given, policy=name), _as_text(call.of_task)))


def call_from_text(text: str) -> Call[TrainOptions]:
    """Returns the call that `call_as_text` converted."""
    task, options, of_task = _from_text(text)
    source = find_task_of("train", task, options.devices)
    return Call(task, source, options, _from_text(of_task))


def _as_text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _from_text(text: str | bytes) -> Any:
    return pickle.loads(base64.b64decode(text))


def run_child(text: str) -> int:
    """Trains a call in this process, prints its events, and returns the exit code.

    Args:
      text: from `call_as_text`.
    """
    with lasting_output(), own_output() as output:

        def send(event: Event) -> None:
            print(f"{_SENT.decode()}{_as_text(event)}", file=output, flush=True)

        try:
            train_call(call_from_text(text), send)
        except Exception as error:  # noqa: BLE001 - of any kind, because it is reported
            if os.environ.get(TRACEBACK):
                traceback.print_exception(error)
            send(failed(error))
            return RUN_FAILED
    return 0
