"""Outputs of commands: findings, and files and folders that are checked before a run."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jmp_train.app.cli.errors import Failure, WrongCall
from jmp_train.app.launch import Output
from jmp_train.policies.files import escaped

_NONE: Mapping[str, Path | None] = {}


@contextlib.contextmanager
def checked_outputs(
    *, folders: Mapping[str, Path | None] = _NONE, files: Mapping[str, Path | None] = _NONE
) -> Iterator[None]:
    """Checks that outputs can be written.

    Folders created for the outputs are removed if they are empty at the end.

    Args:
      folders: folders by option; None for options not given.
      files: files, likewise. Existing ones are not touched, and are later replaced by an atomic write.
    """
    made: list[Path] = []
    try:
        for option, folder in folders.items():
            made = [*make_writable(option, folder), *made]
        for option, file in files.items():
            made = [*_check_file(option, file), *made]
        yield
    finally:
        _remove_empty(made)


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


def make_writable(option: str, directory: Path | None) -> list[Path]:
    """Creates a folder, and returns the folders that did not exist, the innermost first.

    Args:
      option: the option that a `WrongCall` names if nothing can be written there.
      directory: the folder; None for none.
    """
    if directory is None:
        return []
    try:
        made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise WrongCall(f"{option} {directory}: {error.strerror}") from None
    return made


def _check_file(option: str, file: Path | None) -> list[Path]:
    """Creates the folder of a file, and returns the result of `make_writable`."""
    if file is None:
        return []
    made: list[Path] = []
    try:
        if file.exists() and not file.is_file():
            raise WrongCall(f"{option} {file} is not a regular file")
        made = make_writable(option, file.parent)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}."):  # the name may be too long
            pass
    except OSError as error:
        _remove_empty(made)
        raise WrongCall(f"{option} {file}: {error.strerror}") from None
    return made


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it is no longer empty
            folder.rmdir()
