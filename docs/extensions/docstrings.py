"""Turns the docstrings' Markdown into what Sphinx reads: code in backticks, lists, code by indentation.

A name in backticks becomes a link where the API reference has it, and else code.
"""

import functools
import itertools
import re
from typing import Any

from documented_names import documented_names
from sphinx.application import Sphinx

_ROW = re.compile(r"\s*\|.*\|")
_DASHES = re.compile(r"\s*\|( ?-+ ?\|)+")
_ITEM = re.compile(r"^\s*(\*|\d+\.) ")
_UNTYPED_SECTIONS = {"Returns:", "Yields:", "Reference:", "References:", "Source:"}


def to_restructured_text(lines: list[str], full_names: dict[str, str]) -> list[str]:
    """Returns a docstring's lines with links, and with the blank lines that lists and code need.

    Args:
      lines: as they are in the source.
      full_names: of all that is documented, by the names that docstrings use.
    """
    found: list[str] = []
    for line in _without_tables(lines):
        before = found[-1] if found else ""
        if _ITEM.match(line) and before.strip() and not _within_item(found):
            found.append("")
        if line.startswith("    ") and not before.strip() and _is_plain_text(found):
            found += ["::", ""]
        found.append(_untyped(line) if before.strip() in _UNTYPED_SECTIONS else line)
    return _marked("\n".join(found), full_names).split("\n")


def _without_tables(lines: list[str]) -> list[str]:
    """Returns the lines with Markdown's tables as `list-table`, whose second row, of dashes, is left out."""
    found: list[str] = []
    for line, after in itertools.pairwise([*lines, ""]):
        if _DASHES.fullmatch(after):
            found += [".. list-table::", "   :header-rows: 1", ""]
        if not _ROW.fullmatch(line):
            found.append(line)
        elif not _DASHES.fullmatch(line):
            cells = [cell.strip() for cell in line.strip(" |").split(" | ")]
            found += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(cells)]
    return found


def _untyped(line: str) -> str:
    """Returns a line of which napoleon takes nothing for a type, as it does of what is before the first colon."""
    return re.sub(r"^(\s*)(?=\S)", r"\1: ", line)


def _within_item(lines: list[str]) -> bool:
    for line in reversed(lines):
        if not line.strip():
            return False
        if _ITEM.match(line):
            return True
    return False


def _is_plain_text(lines: list[str]) -> bool:
    """Whether the last line that is not blank belongs to a paragraph and not to a section or to code."""
    last = next((line for line in reversed(lines) if line.strip()), " ")
    return not last.startswith(" ") and last != "::"


def _marked(text: str, full_names: dict[str, str]) -> str:
    """Returns a text with its code marked; examples stay as they are."""
    parts = re.split(r"(^\s*>>> .*(?:\n.+)*)", text, flags=re.MULTILINE)
    return "".join(part if i % 2 else _marked_prose(part, full_names) for i, part in enumerate(parts))


def _marked_prose(text: str, full_names: dict[str, str]) -> str:
    parts = re.split(r"(?<!`)`([^`]+)`(?!`)", text)
    for i, part in enumerate(parts):
        if i % 2:
            follows = parts[i + 1][:1]
            parts[i] = _code(" ".join(part.split()), full_names) + ("\\ " if follows.isalnum() else "")
        else:
            parts[i] = part.replace("|", "\\|")
    return "".join(parts)


def _code(code: str, full_names: dict[str, str]) -> str:
    short = re.sub(r"^(jt|jmp_train|graphs)\.", "", code)
    full = full_names.get(short.partition("(")[0]) if short.endswith(")") or "(" not in short else None
    return f":py:obj:`{code} <{full}>`" if full else f"``{code}``"


@functools.cache
def all_full_names() -> dict[str, str]:
    """Returns the full names of all that the API reference documents, by the names that docstrings use."""
    return documented_names()


def _process(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_restructured_text(lines, all_full_names())
    if what == "property" and lines:
        lines[0] = _untyped(lines[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it, before napoleon reads sections."""
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True}
