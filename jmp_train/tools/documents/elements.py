"""Blocks of a document as plain data, and renderings of blocks, numbers and records as text and JSON."""

import dataclasses
import math
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias, Union

from jmp_train.policies.files import aligned, escaped
from jmp_train.tools.documents.charts import Chart, Color

# In all blocks, `name` is the HTML id and `look` the HTML class, such as "soft". Renderers skip blocks without content.


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    name: str = ""
    look: str = ""


@dataclasses.dataclass(frozen=True)
class Code:
    """Code that users can copy."""

    text: str
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A table cell with more than text: `link` is the target of a click, `color` the color of a dot before the text."""

    text: str
    look: str = ""
    link: str = ""
    color: Color = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      heads: the titles of the columns.
      rows: the cells; each row has one cell per title.
      name: the HTML id.
      texts: numbers of the columns that are aligned to the left.
      note: text below the table.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    name: str = ""
    texts: Collection[int] = (0,)
    note: str = ""

    @property
    def plain_rows(self) -> list[list[str]]:
        """The texts of the cells."""
        return [[cell.text if isinstance(cell, Cell) else cell for cell in row] for row in self.rows]


@dataclasses.dataclass(frozen=True)
class Panels:
    """Charts side by side, if the page is wide enough."""

    charts: Sequence[Chart]


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks under a title.

    Attributes:
      title: the heading.
      blocks: the content; None is skipped.
      name: the HTML id.
      look: the HTML class of the section, or of the title if the section is folded.
      is_folded: whether the blocks are hidden until a reader opens them, or follows a link to the section.
    """

    title: str
    blocks: "Sequence[Element | None]"
    name: str = ""
    look: str = ""
    is_folded: bool = False


Element: TypeAlias = Union[Text, Code, Table, Panels, Section, Chart]  # noqa: UP007 - a name that follows


def shown(blocks: Sequence[Element | None]) -> list[Element]:
    """Returns the blocks that have content.

    Example:
      >>> shown([None, Text(""), Section("Code", [Code("")]), Text("a")])
      [Text(text='a', name='', look='')]
    """
    return [block for block in blocks if block is not None and _has_content(block)]


def _has_content(block: Element) -> bool:
    match block:
        case Text() | Code():
            return bool(block.text)
        case Table():
            return bool(block.rows)
        case Section():
            return bool(shown(block.blocks))
        case _:
            return True


def text(blocks: Sequence[Element | None], width: int = 100, indent: str = "") -> str:
    """Returns blocks as lines of text, with indented sections and without charts.

    Args:
      blocks: blocks of a document.
      width: width of the lines; tables may be wider, code is cut.
      indent: beginning of all lines.

    Example:
      >>> print(text([Section("problem: overflow", [Code("y = x * x"), Text("it reaches 90000")])]))
      problem: overflow
          y = x * x
        it reaches 90000
    """
    return "\n".join(line for block in shown(blocks) for line in _lines(block, width, indent))


def _lines(block: Element, width: int, indent: str) -> list[str]:
    match block:
        case Text(said):
            lines = escaped(said, "\n\t")
            return textwrap.wrap(lines, width, initial_indent=indent, subsequent_indent=f"{indent}  ")
        case Code(code):
            return [f"{indent}  {line}"[:width] for line in escaped(code, "\n\t").splitlines()]
        case Table(heads):
            return [indent + line for line in aligned([heads, *block.plain_rows])]
        case Section(title, blocks):
            return [*_lines(Text(title), width, indent), *text(blocks, width, f"{indent}  ").splitlines()]
        case _:
            return []


def with_unit(value: float, unit: str) -> str:
    """Returns a number with three digits and a decimal prefix.

    Example:
      >>> with_unit(312e12, "flop/s"), with_unit(0, "B"), with_unit(1536, "B"), with_unit(999_600_000, "B")
      ('312 Tflop/s', '0 B', '1.54 kB', '1 GB')
    """
    power = min(max(int(math.log10(value) // 3), 0), 6) if value > 0 else 0
    if value > 0 and float(f"{value / 1000**power:.3g}") >= 1000 and power < 6:
        power += 1
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}{unit}"


def counted(count: int, name: str) -> str:
    """Returns a number with its noun.

    Example:
      >>> counted(1, "step"), counted(0, "step")
      ('1 step', '0 steps')
    """
    return f"{count} {name}{'s' * (count != 1)}"


def as_json(value: Any) -> Any:
    """Returns data as JSON values: dataclasses as dictionaries, tuples as lists, non-finite numbers as None.

    Example:
      >>> as_json({"a": (1, float("nan"))})
      {'a': [1, None]}
    """
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if (as_dict := getattr(value, "_asdict", None)) is not None:  # a named tuple
        value = as_dict()
    if isinstance(value, dict):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
