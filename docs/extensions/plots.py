"""Plots of notebooks: drawn to suit light pages and dark, and described by what their code calls their axes."""

import os
import re
from pathlib import Path

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
    for image in doctree.findall(nodes.image):
        image["classes"].append("dark-light")  # the theme puts no white card behind it


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it, and tells the notebooks' kernels, which inherit the environment, where matplotlib's settings are."""
    os.environ["MATPLOTLIBRC"] = str(Path(__file__).parents[1] / "matplotlibrc")
    app.connect("doctree-read", _describe)
    return {"parallel_read_safe": True}
