"""Files: foreign ones are opened if they are plain, up to a limit of size; own ones are written atomically.

A pipe may never have a writer, and a device may never end. What the system cannot read is an OSError with the file's
name; what the content does not allow is a `DamagedError`.

Every error names the file. An atomic write leaves a file with either its whole new content or its old one. Text from
files and of users is printed without control characters.
"""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

AnyPath = str | os.PathLike[str]
_LONGEST = 200  # characters of a file's text in an error
_LONGEST_TOML = 2**24  # a rule of one operation takes about 100 bytes
_NOT_WAITING = getattr(os, "O_NONBLOCK", 0)  # if a pipe took the file's place


class DamagedError(ValueError):
    """A file is damaged, too large, or of another kind; the message names the file or its part."""


@contextlib.contextmanager
def open_plain(path: AnyPath, *, max_bytes: int | None = None, follow: bool = True) -> Iterator[BufferedReader]:
    """Opens a plain file for reading bytes.

    Args:
      path: the file.
      max_bytes: the largest size; None for any.
      follow: False to refuse a symbolic link.

    Yields:
      The open file. Errors of the code within the `with` are named, see `faults_named`.

    Raises:
      DamagedError: the file is larger than `max_bytes`, or is a folder, a pipe, a socket or a device.
      OSError: the file is missing or cannot be read.

    Example:
      >>> import pathlib, tempfile
      >>> file = pathlib.Path(tempfile.mkdtemp()) / "two_bytes"
      >>> _ = file.write_bytes(b"ab")
      >>> with open_plain(file) as opened:
      ...     opened.read()
      b'ab'
      >>> with open_plain("/dev/null"):
      ...     pass
      Traceback (most recent call last):
      jmp_train.policies.files.plain_files.DamagedError: /dev/null is not a regular file
    """
    flags = _NOT_WAITING | (0 if follow else getattr(os, "O_NOFOLLOW", 0))
    _check_is_plain(os.stat(path, follow_symlinks=follow), path)
    with faults_named(path), open(path, "rb", opener=lambda name, given: os.open(name, given | flags)) as file:
        found = os.fstat(file.fileno())
        _check_is_plain(found, path)
        if max_bytes is not None and found.st_size > max_bytes:
            raise DamagedError(f"{path} is too large: it has {found.st_size} bytes, more than the limit of {max_bytes}")
        yield file


def read_plain(path: AnyPath, *, max_bytes: int, follow: bool = True) -> bytes:
    """Returns the content of a plain file; see `open_plain`.

    Args:
      path: the file.
      max_bytes: the largest size to read.
      follow: False to refuse a symbolic link.

    Raises:
      DamagedError: see `open_plain`; or the file's size changes while it is read.
      OSError: see `open_plain`.
    """
    with open_plain(path, max_bytes=max_bytes, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
        if len(content) != size:
            raise DamagedError(f"{path} changed while it was read")
        return content


def parse_json(what: object, content: bytes) -> Any:
    """Returns the data in a JSON text.

    Args:
      what: the file, and the part of it, for the message.
      content: the text in UTF-8.

    Raises:
      DamagedError: it is not JSON, is nested too deeply, or an object has a key twice.

    Example:
      >>> parse_json("file", b'{"a": 1, "a": 2}')
      Traceback (most recent call last):
      jmp_train.policies.files.plain_files.DamagedError: file cannot be parsed: it has the key 'a' twice
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{what} cannot be parsed: {printable(error)}") from None


def read_toml(path: AnyPath) -> dict[str, Any]:
    """Returns the content of a TOML file, of 16 MiB at most; some editors begin it with a byte order mark.

    Args:
      path: the file.

    Raises:
      DamagedError: the file is not TOML; see also `open_plain`.
      OSError: see `open_plain`.
    """
    import tomllib  # slow to import

    content = read_plain(path, max_bytes=_LONGEST_TOML)
    try:
        return tomllib.loads(content.decode("utf-8-sig").replace("\r\n", "\n"))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is not a TOML file: {error}") from error


@contextlib.contextmanager
def faults_named(path: AnyPath) -> Iterator[None]:
    """Turns errors of reading or writing without a file name, and a lack of memory, into an OSError with the name."""
    try:
        yield
    except MemoryError:
        raise OSError(errno.ENOMEM, "does not fit into memory", str(path)) from None
    except OSError as error:
        if error.filename is not None:
            raise
        number = errno.EIO if error.errno is None else error.errno
        raise OSError(number, error.strerror or printable(error), str(path)) from None


@contextlib.contextmanager
def damage_named(what: object) -> Iterator[None]:
    """Turns the errors of code that trusts a file's content into a DamagedError that names the file.

    Args:
      what: the file, and the part of it, for the message.

    Example:
      >>> with damage_named("file: leaf 3"):
      ...     {}["shape"]
      Traceback (most recent call last):
      jmp_train.policies.files.plain_files.DamagedError: file: leaf 3: KeyError 'shape'
    """
    try:
        yield
    except DamagedError:
        raise
    except ValueError as error:
        raise DamagedError(f"{what}: {printable(error)}") from error
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RecursionError,
        StopIteration,
        TypeError,
    ) as e:
        raise DamagedError(f"{what}: {type(e).__name__} {printable(e)}".rstrip()) from e


def printable(text: object) -> str:
    r"""Returns the first line of a text from a file, truncated, without control characters.

    Example:
      >>> printable("\x1b[31mred\nblue")
      '\\x1b[31mred'
    """
    line = escaped(str(text).partition("\n")[0])
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _check_is_plain(found: os.stat_result, path: AnyPath) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError(f"{path} is not a regular file")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the key {printable(repr(twice))} twice")
    return found


def escaped(text: str, keep: str = "") -> str:
    r"""Returns a text with escapes in place of control characters, halves of surrogate pairs and the like.

    Args:
      text: a text with names of users, which may have any characters.
      keep: control characters that stay.

    Example:
      >>> print(escaped("f1[micro]\x1b[31m\n"))
      f1[micro]\x1b[31m\n
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with aligned columns.

    Args:
      rows: rows of equally many cells; the first one is the head.

    Example:
      >>> aligned([("operation", "in"), ("mul", "f32")])
      ['operation  in', 'mul        f32']
    """
    rows = [[*map(escaped, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_LONGEST_NAME = 220  # bytes of the part of a name that its temporary file has too; most file systems allow 255


def write_atomically(path: Path, content: bytes | Iterable[Any]) -> Path:
    """Writes a file atomically: writes a temporary file in the same folder, then renames it.

    A process that is killed meanwhile leaves the temporary file, whose name begins with a dot.

    Args:
      path: the file, in an existing folder. An existing file is replaced; who has it open reads on in the old one.
      content: the whole content, or its parts, which are bytes or arrays of bytes.

    Returns:
      The path.
    """
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST_NAME])
    temporary = path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with faults_named(path), temporary.open("xb") as file:
            size = sum(file.write(part) for part in ([content] if isinstance(content, bytes) else content))
            file.flush()
            os.fsync(file.fileno())  # before the rename, which may reach the disk first
        if (found := temporary.stat().st_size) != size:
            raise OSError(errno.EIO, f"has {found} bytes instead of {size}", str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not all systems sync folders; the file is whole anyway
        sync(path.parent)
    return path


def sync(path: Path) -> None:
    """Flushes writes to a file, or renames in a folder, to the disk.

    Args:
      path: path of the file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Returns the folder for caches: `$JMP_TRAIN_CACHE`, or jmp_train in `$XDG_CACHE_HOME` or ~/.cache.

    Example:
      >>> os.environ["JMP_TRAIN_CACHE"] = "/scratch/jmp_train"
      >>> str(cache_folder())
      '/scratch/jmp_train'
      >>> del os.environ["JMP_TRAIN_CACHE"]
    """
    if own := os.environ.get("JMP_TRAIN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jmp_train"
