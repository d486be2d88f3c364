"""Results of commands: findings, checks of output files and folders before a run, and failures with their exit codes.

A failure is one line on standard error. Usage errors and failed runs have different exit codes.
"""

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jmp_train.app.launch import Output
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
      jmp_train.app.cli.results.WrongCall: --data-dir nowhere is not a folder
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


_NONE: Mapping[str, Path | None] = {}


def check_outputs(*, folders: Mapping[str, Path | None] = _NONE, files: Mapping[str, Path | None] = _NONE) -> None:
    """Raises WrongCall if an output cannot be written; creates nothing.

    Args:
      folders: folders by option, which need not exist; None for options not given.
      files: files, likewise. Existing ones are later replaced by an atomic write.
    """
    for option, path in {**folders, **files}.items():
        if path is not None and (reason := _reason(path, is_file=option in files)):
            raise WrongCall(f"{option} {path}: {reason}")


def _reason(path: Path, *, is_file: bool) -> str:
    """Returns the reason why a file or a folder cannot be written; empty if there is none."""
    try:
        if is_file and path.exists() and not path.is_file():
            return "it is not a regular file"
        folder = path.parent if is_file else path
        there = next(part for part in (folder, *folder.parents) if part.exists())
        number = (0 if os.access(there, os.W_OK | os.X_OK) else errno.EACCES) if there.is_dir() else errno.ENOTDIR
    except OSError as error:
        return error.strerror or str(error)
    return os.strerror(number) if number else ""


def show(
    output: Output | None,
    text: Callable[[], str],
    subject: Mapping[str, Any],
    found: Mapping[str, Any],
    files: Mapping[Path | None, Callable[[], str | None]],
) -> None:
    """Writes a command's files, and prints its findings.

    Args:
      output: the output for `--json`; None without it.
      text: returns the findings as text.
      subject: the subject of the findings, as JSON data.
      found: the findings, as JSON data.
      files: see `write_files`; None for a file that is not asked for.

    Raises:
      Failure: a file could not be written.
    """
    from jmp_train.app.reports import json_line, print_text, showing, write_files

    written, unwritten = write_files({file: files[file] for file in files if file is not None})
    if output is None:
        with showing():
            print_text(text(), sys.stdout)
    else:
        print(json_line(subject, found), end="", file=output, flush=True)
    list_written(written, sys.stdout if output is None else sys.stderr)
    if unwritten:
        raise Failure("; ".join(unwritten))


def list_written(written: Iterable[Path], log: IO[str]) -> None:
    """Prints the names of the written files."""
    from jmp_train.app.reports import print_text

    for path in written:
        print_text(escaped(f"wrote {path}"), log)
