"""The blocks of a document as plain data: texts, code, tables, charts, and sections of them."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import TypeAlias, Union

from jmp_train.policies.documents.charts import Chart, Color

# Of all blocks: `name` is the id, `look` the class, such as "soft" or "failed". Without content they are left out.


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    name: str = ""
    look: str = ""


@dataclasses.dataclass(frozen=True)
class Code:
    """Code to be copied."""

    text: str
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than its text: `link` is where a click leads, `color` that of a dot before it."""

    text: str
    look: str = ""
    link: str = ""
    color: Color = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      heads: the titles of the columns.
      rows: the cells, as many in each row as there are titles.
      name: its id.
      texts: the numbers of the columns that are aligned to the left.
      note: below the table.
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
    """Charts next to each other where there is room."""

    charts: Sequence[Chart]


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks under a title.

    Attributes:
      title: the heading.
      blocks: the content; None is left out.
      name: its id.
      look: its class, or that of the title of a fold.
      is_folded: whether the blocks are hidden until a reader opens them, or follows a link to the section.
    """

    title: str
    blocks: "Sequence[Block | None]"
    name: str = ""
    look: str = ""
    is_folded: bool = False


Block: TypeAlias = Union[Text, Code, Table, Panels, Section, Chart]  # noqa: UP007 - a name that follows


def shown(blocks: Sequence[Block | None]) -> list[Block]:
    """Returns the blocks that have a content.

    Example:
      >>> shown([None, Text(""), Section("Code", [Code("")]), Text("a")])
      [Text(text='a', name='', look='')]
    """
    return [block for block in blocks if block is not None and _has_content(block)]


def _has_content(block: Block) -> bool:
    match block:
        case Text() | Code():
            return bool(block.text)
        case Table():
            return bool(block.rows)
        case Section():
            return bool(shown(block.blocks))
        case _:
            return True
