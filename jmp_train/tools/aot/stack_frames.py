"""The lines of Python from which instructions come, read from the text of HLO."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class StackFrame:
    """A line of Python that was executed while the program was traced.

    Attributes:
      file: its path.
      line: its number, from 1.
      function: the qualified name of its function, "" if the text does not have it.
    """

    file: str
    line: int
    function: str


def read_stack_frames(lines: Iterable[str]) -> dict[int, tuple[StackFrame, int | None]]:
    """Returns the stack frames by number, each with the number of the one that called it.

    Args:
      lines: the lines of the text before its computations.

    Example:
      >>> read_stack_frames('''FileNames
      ... 1 "train.py"
      ...
      ... FunctionNames
      ... 1 "loss"
      ...
      ... FileLocations
      ... 1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
      ...
      ... StackFrames
      ... 1 {file_location_id=1 parent_frame_id=1}'''.splitlines())
      {1: (StackFrame(file='train.py', line=12, function='loss'), None)}
    """
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    table: dict[int, str] | None = None
    for line in lines:
        number, _, value = line.partition(" ")
        if line in tables:
            table = tables[line]
        elif table is not None and number.isdecimal():
            table[int(number)] = value
        else:
            table = None
    files, functions, locations, frames = tables.values()
    parents = {number: _number("parent_frame_id", value) for number, value in frames.items()}
    none = min(parents.values(), default=0)  # the parent of an outermost frame: 1, or 0 if frames are numbered from 0
    return {
        number: (
            _frame(locations.get(_number("file_location_id", value), ""), files, functions),
            None if parents[number] == none else parents[number] - none,
        )
        for number, value in frames.items()
    }


def _frame(location: str, files: Mapping[int, str], functions: Mapping[int, str]) -> StackFrame:
    file, function = (
        names.get(_number(key, location), "").strip('"')
        for names, key in ((files, "file_name_id"), (functions, "function_name_id"))
    )
    return StackFrame(file, _number("line", location), function)


def _number(key: str, text: str) -> int:
    """Returns the number after `key=` in a text, 0 if there is none."""
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else 0


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
