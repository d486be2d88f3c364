"""Failures of a command: one line on standard error, exit codes for usage errors and for failed runs."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

from jmp_train.app.runs import Failed
from jmp_train.app.tasks import FileError
from jmp_train.extras import remedy
from jmp_train.policies.files import escaped

RUN_FAILED = 1
CALL_IS_WRONG = 2
PROBLEMS_FOUND = 3
INTERRUPTED = 130  # 128 + SIGINT, the convention of shells

TRACEBACK = "JMP_TRAIN_TRACEBACK"
EXIT_CODES = (
    "Exit codes: 0 all is well; 1 a run failed; 2 the call is wrong, that is an option, or a file or "
    "folder that it names, and nothing was trained; 3 a diagnosis found problems, tuned "
    "rules do not hold, or a planned step does not fit; 128 + n stopped by signal n, as 130 by Ctrl-C. "
    "Output that cannot be written or shown does not stop a run; if it is that of --json, the code is 1. "
    f"An error is one line; {TRACEBACK}=1 in the environment shows where it was raised."
)

_HALF_LINE = 300  # characters of a line before and after the part that is left out


class Failure(Exception):
    """A run that did not end well; the message is the line for the user."""


class WrongCall(Exception):
    """A call that cannot run as given; the message is the line for the user."""


def check_different(option: str, names: Sequence[str]) -> None:
    """Raises WrongCall if an option has one of its values more than once."""
    for name in names:
        if names.count(name) > 1:
            raise WrongCall(f"{option} names {name} more than once")


@contextlib.contextmanager
def checking_the_call() -> Iterator[None]:
    """Turns errors about options, files and tasks, which are checked before a run, into a `WrongCall`.

    Example:
      >>> with checking_the_call():
      ...     raise FileNotFoundError("--data-dir nowhere is not a folder")
      Traceback (most recent call last):
      ...
      jmp_train.app.cli.errors.WrongCall: --data-dir nowhere is not a folder
    """
    try:
        yield
    except (ValueError, TypeError, OSError, FileError) as error:
        raise WrongCall(_first_line(error) if isinstance(error, TypeError) else _text(error)) from error


def report_error(error: Exception) -> int:
    """Prints an error and returns the exit code."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    print(f"jmp-train: error: {one_line(_text(error))}", file=sys.stderr)
    return CALL_IS_WRONG if isinstance(error, WrongCall) else RUN_FAILED


def failed(error: Exception) -> Failed:
    """Returns an error as an event, for the process that started this one."""
    return Failed(one_line(_text(error)), isinstance(error, WrongCall))


def warn(text: str) -> None:
    """Prints a warning as one line on standard error."""
    print(f"jmp-train: warning: {text}", file=sys.stderr, flush=True)


def is_of_interrupt(error: Exception) -> bool:
    """Returns whether an error came from Ctrl-C in an extension module during its import.

    Other errors after Ctrl-C come from cleaning up, and are reported.
    """
    cause: BaseException | None = error if isinstance(error, ImportError) else None
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def one_line(text: str) -> str:
    r"""Returns a text without control characters, and without the middle of very long lines.

    Args:
      text: the text; lines below the first are kept if they are indented by two spaces, as in lists of files.

    Example:
      >>> one_line("file is\n\x1b[31mno folder")
      'file is\\n\\x1b[31mno folder'
    """
    return "\n  ".join(_escaped(line) for line in text.split("\n  "))


def _escaped(line: str) -> str:
    line = escaped(line)
    return line if len(line) <= 2 * _HALF_LINE else f"{line[:_HALF_LINE]}…{line[-_HALF_LINE:]}"


def _text(error: Exception) -> str:
    """Returns an error's message; for an unexpected error its type and the first line of its message."""
    match error:
        case ModuleNotFoundError():
            return remedy(error.name)
        case OSError(filename=str(name), strerror=str(reason)):
            return f"{name}: {reason}"
        case Failure() | WrongCall() | FileError() | ValueError() | OSError() | FloatingPointError():
            return str(error)
    kind = "out of memory" if isinstance(error, MemoryError) else type(error).__name__
    return ": ".join(part for part in (kind, _first_line(error)) if part) + f" ({TRACEBACK}=1 shows where)"


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")
