"""Documents as HTML that needs no scripts and no network, light or dark as its surroundings are."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmp_train.policies.documents.elements import Block, shown
from jmp_train.policies.documents.pictures import MARK_STYLE, css_color, svg, with_colors


def page(title: str, blocks: Sequence[Block | None], footer: Sequence[str] = ()) -> str:
    """Returns a whole page.

    Args:
      title: its heading.
      blocks: its content; None is left out.
      footer: small texts at the end.

    Example:
      >>> from jmp_train.policies.documents.elements import Text
      >>> "<p>1 &lt; 2</p>" in page("Numbers", [Text("1 < 2")])
      True
    """
    return f"{_macros().page(title, blocks, footer)}".strip()


def fragment(blocks: Sequence[Block | None]) -> str:
    """Returns blocks as HTML without a page around it, for notebooks."""
    return f"{_macros().blocks(blocks)}".strip()


@functools.cache
def _macros() -> Any:
    """Returns the macros of the template."""
    from jinja2 import Environment, StrictUndefined

    made = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    made.filters |= {
        "shown": shown,
        "kind": lambda block: type(block).__name__,
        "svg": svg,
        "color": css_color,
        "colored": lambda css: with_colors(css + MARK_STYLE),
    }
    return made.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).module
