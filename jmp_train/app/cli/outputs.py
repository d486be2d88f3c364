"""Outputs of commands: JSON on standard output, and files and folders that are checked before a run."""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from jmp_train.app.cli.errors import RUN_FAILED, Failure, WrongCall
from jmp_train.app.launch import Output, own_output
from jmp_train.policies.files import escaped

_NONE: Mapping[str, Path | None] = {}


@contextlib.contextmanager
def checked_outputs(
    *, as_json: bool, folders: Mapping[str, Path | None] = _NONE, files: Mapping[str, Path | None] = _NONE
) -> Iterator[Output | None]:
    """Checks that outputs can be written, and yields the output for `--json`, or None without it.

    Folders created for the outputs are removed if they are empty at the end.

    Args:
      as_json: True if `--json` is given.
      folders: folders by option; None for options not given.
      files: files, likewise. Existing ones are not touched, and are later replaced by an atomic write.
    """
    made: list[Path] = []
    try:
        for option, folder in folders.items():
            made = [*make_writable(option, folder), *made]
        for option, file in files.items():
            made = [*_check_file(option, file), *made]
        with own_output() if as_json else contextlib.nullcontext() as output:
            yield output
    finally:
        _remove_empty(made)


def show(
    output: Output | None,
    text: Callable[[], str],
    as_json: Callable[[], str],
    write: Callable[[], tuple[list[Path], list[str]]],
) -> int:
    """Writes a command's files, prints its findings, and returns `RUN_FAILED` if its JSON was lost, otherwise 0.

    Args:
      output: see `checked_outputs`.
      text: returns the findings as text.
      as_json: returns the findings as JSON.
      write: writes the files, and returns them, and a line for each that could not be written.

    Raises:
      Failure: a file could not be written.
    """
    from jmp_train.app.reports import print_text, showing

    written, unwritten = write()
    if output is None:
        with showing():
            print_text(text(), sys.stdout)
    else:
        print(as_json(), end="", file=output, flush=True)
    list_written(written, sys.stdout if output is None else sys.stderr)
    if unwritten:
        raise Failure("; ".join(unwritten))
    return exit_code(output)


def list_written(written: Iterable[Path], log: IO[str]) -> None:
    """Prints the names of the written files."""
    from jmp_train.app.reports import print_text

    for path in written:
        print_text(escaped(f"wrote {path}"), log)


def exit_code(output: Output | None) -> int:
    """Returns `RUN_FAILED` if JSON could not be printed, otherwise 0."""
    return 0 if output is None or output.lost is None else RUN_FAILED


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
