"""Reads and writes tables of rules as TOML files: arrays of [name, rule] pairs, in order."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jmp_train.policies.files import escaped, read_toml, write_atomically
from jmp_train.policies.pytrees import checked_path

_FORMAT, _VERSION = "jmp_train autocast rules", 1
_HEADER = """\
# Rules of jmp_train's autocast, which AutocastRules.load(FILE) reads.
# Of paths and operations, which are regular expressions, the first entry that matches counts.
"""
_SHORT_ESCAPES = {"\b": r"\b", "\t": r"\t", "\n": r"\n", "\f": r"\f", "\r": r"\r", '"': r"\"", "\\": r"\\"}

Pairs = Sequence[tuple[str, str]]


def write_tables(path: str | Path, tables: Mapping[str, Pairs], comment: str = "") -> None:
    """Writes tables atomically to a file, without those that are empty.

    Args:
      path: the path of the file, which is replaced if it exists. Its folder must exist.
      tables: (name, rule) pairs by name of the table.
      comment: lines that come first, as comments; characters that comments cannot hold are escaped.

    Raises:
      ValueError: a name has a character that UTF-8 cannot encode.
      OSError: the file cannot be written.
    """
    content = [f"{_comment(comment)}{_HEADER}format = {_quoted(_FORMAT)}\nversion = {_VERSION}\n"]
    for table, pairs in tables.items():
        if pairs:
            entries = "".join(f"  [{_quoted(name)}, {_quoted(rule)}],\n" for name, rule in pairs)
            content.append(f"\n{table} = [\n{entries}]\n")
    write_atomically(checked_path("path", path), "".join(content).encode())


def read_tables(path: str | Path, tables: Iterable[str]) -> dict[str, tuple[tuple[str, Any], ...]]:
    """Returns the tables in a file, as (name, rule) pairs of strings.

    Args:
      path: the path of the file.
      tables: the known names of tables.

    Raises:
      ValueError: the file is not TOML, has another kind or version, or has an unknown table or an entry that is not a
        pair of strings. The message names the file, the table and the entry.
      OSError: the file is missing or cannot be read.
    """
    content = read_toml(checked_path("path", path))
    kind, version = content.pop("format", None), content.pop("version", None)
    if kind != _FORMAT:
        found = "none" if kind is None else reprlib.repr(kind)
        raise ValueError(f"{path} is not a file of autocast rules: format must be {_FORMAT!r}, got {found}")
    if version != _VERSION:
        found = "none" if version is None else reprlib.repr(version)
        raise ValueError(f"{path}: version must be {_VERSION}, got {found}")
    tables = tuple(tables)
    for table in content:
        if table not in tables:
            raise ValueError(f"{path} has an unknown table {reprlib.repr(table)}; choose from {', '.join(tables)}")
    return {table: _pairs(f"{path}: {table}", entries) for table, entries in content.items()}


def _comment(text: str) -> str:
    return "".join(f"{f'# {escaped(line)}'.rstrip()}\n" for line in text.splitlines())


def _pairs(where: str, entries: object) -> tuple[tuple[str, Any], ...]:
    wanted = 'such as ["exp", "float32"]'
    if not isinstance(entries, list):
        raise ValueError(f"{where} must be a list of pairs {wanted}, got {reprlib.repr(entries)}")
    for number, entry in enumerate(entries, 1):
        is_pair = isinstance(entry, list) and len(entry) == 2 and all(isinstance(text, str) for text in entry)
        if not is_pair:
            raise ValueError(f"{where}: entry {number} must be a pair of strings, {wanted}, got {reprlib.repr(entry)}")
    return tuple((name, rule) for name, rule in entries)


def _quoted(text: str) -> str:
    r"""Returns a TOML string, in single quotes without escapes if it has backslashes, as regular expressions do.

    Example:
      >>> print(_quoted("exp"), _quoted(r"head\.0$"), _quoted("\\ '\n"))
      "exp" 'head\.0$' "\\ '\n"
    """
    if "\\" in text and "'" not in text and text.isprintable():
        return f"'{text}'"
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    if character.isprintable():
        return character
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"{character!r} is half of a surrogate pair, which cannot be written to a file")
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
