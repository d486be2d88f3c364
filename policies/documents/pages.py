"""Documents as HTML that needs no scripts and no network, light or dark as its surroundings are."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jmp_train.policies.documents.elements import Block, Cell, Document, shown
from jmp_train.policies.documents.pictures import MARK_STYLE, svg, themed_color, with_colors

if TYPE_CHECKING:
    from jinja2 import Template


def page(document: Document) -> str:
    """Returns a document as a whole page.

    Example:
      >>> from jmp_train.policies.documents.elements import Text
      >>> "<p>1 &lt; 2</p>" in page(Document("Numbers", [Text("1 < 2")]))
      True
    """
    return _template().render(document=document)


def fragment(blocks: Sequence[Block | None]) -> str:
    """Returns blocks as HTML without a page around it, for notebooks."""
    return str(_template().make_module().blocks(blocks)).strip()  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    names = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    names.filters |= {
        "shown": shown,
        "kind": lambda block: type(block).__name__,
        "svg": lambda chart, has_legend: Markup(svg(chart, has_legend=has_legend)),
        "themed": themed_color,
        "cell": lambda cell: cell if isinstance(cell, Cell) else Cell(cell),
        "colors": lambda css: Markup(with_colors(css, themed=True)),
    }
    names.globals["mark_style"] = MARK_STYLE
    return names.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
