"""Says in words what a notebook's plot shows, for who does not see it: what the code calls its axes."""

import re

from docutils import nodes
from sphinx.application import Sphinx


def description(code: str) -> str:
    """Returns what a plot shows, by the labels in the code that drew it; empty where it has none.

    Args:
      code: of matplotlib.
    """
    x, y = (re.search(rf'{axis}label="([^"]*)"', code) for axis in "xy")
    return f"Plot: {' by '.join(label[1] for label in (y, x) if label)}" if x or y else ""


def _describe(app: Sphinx, doctree: nodes.document) -> None:
    for cell in doctree.findall(nodes.container):
        if "cell" not in cell["classes"]:
            continue
        code = "\n".join(
            block.astext() for block in cell.findall(nodes.literal_block) if block.get("language") != "none"
        )
        for image in cell.findall(nodes.image):
            image["alt"] = image.get("alt") or description(code)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it."""
    app.connect("doctree-read", _describe)
    return {"parallel_read_safe": True}
