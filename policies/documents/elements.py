"""A document as plain data: texts, code, tables, lists, folds and charts in sections."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import TypeAlias, Union

from jmp_train.policies.documents.charts import Chart


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph; left out if it is empty.

    Attributes:
      text: the text.
      name: its id.
      look: "soft" or "failed"; empty for ordinary text.
    """

    text: str
    name: str = ""
    look: str = ""


@dataclasses.dataclass(frozen=True)
class Code:
    """Code to be copied; left out if it is empty."""

    text: str
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table that is more than its text.

    Attributes:
      text: the text.
      look: as in `Text`.
      link: where a click leads.
      color: of a dot in front of the text.
    """

    text: str
    look: str = ""
    link: str = ""
    color: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; left out if it has no rows.

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


@dataclasses.dataclass(frozen=True)
class Item:
    """An item of a list that holds several blocks; `name` and `look` as in `Text`."""

    blocks: "Sequence[Block | None]"
    name: str = ""
    look: str = ""


@dataclasses.dataclass(frozen=True)
class Items:
    """A list; left out if it is empty.

    Attributes:
      items: texts, or several blocks each.
      name: its id.
      is_numbered: whether the items have numbers.
    """

    items: Sequence[Text | Item]
    name: str = ""
    is_numbered: bool = False


@dataclasses.dataclass(frozen=True)
class Fold:
    """Blocks that are hidden until a reader opens them.

    Attributes:
      title: what is always seen.
      blocks: what is hidden.
      name: the id of the blocks. A link to it opens the fold.
      text: what is seen after the title.
      look: of this text, as in `Text`.
    """

    title: str
    blocks: "Sequence[Block | None]"
    name: str = ""
    text: str = ""
    look: str = ""


@dataclasses.dataclass(frozen=True)
class Panels:
    """Charts next to each other where there is room."""

    charts: Sequence[Chart]


@dataclasses.dataclass(frozen=True)
class Section:
    """Blocks under a title; left out if all of them are."""

    title: str
    blocks: "Sequence[Block | None]"


@dataclasses.dataclass(frozen=True)
class Document:
    """A page.

    Attributes:
      title: its heading.
      blocks: its content; None is left out.
      footer: small texts at the end.
    """

    title: str
    blocks: "Sequence[Block | None]"
    footer: Sequence[str] = ()


Block: TypeAlias = Union[Text, Code, Table, Items, Fold, Panels, Section, Chart]  # noqa: UP007 - names that follow


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
        case Items():
            return bool(block.items)
        case Section():
            return bool(shown(block.blocks))
        case _:
            return True
