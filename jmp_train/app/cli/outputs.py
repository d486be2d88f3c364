"""Outputs of commands: findings, and files and folders that are checked before a run."""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from jmp_train.app.cli.errors import Failure, WrongCall
from jmp_train.app.launch import Output
from jmp_train.policies.files import escaped

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
