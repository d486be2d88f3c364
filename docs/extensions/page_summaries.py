"""Says what each page is about: to search engines as its description, and to language models in `llms.txt`.

A page's summary is its first paragraph.
"""

import html
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LENGTH = 200


def summary(doctree: nodes.document) -> str:
    """Returns a page's first paragraph, cut after a word where it is long; empty for a page without one."""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section | nodes.document):
            text = " ".join(paragraph.astext().split())
            return text if len(text) <= LENGTH else text[: LENGTH - 4].rsplit(" ", 1)[0] + " ..."
    return ""


def _describe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    if doctree is not None and (text := summary(doctree)):
        context["metatags"] += f'<meta name="description" content="{html.escape(text)}">\n'


def _write_list(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    env = app.env
    lines = [f"# {app.config.project}", "", f"> {summary(env.get_doctree('index'))}", "", "## Pages", ""]
    for page in _in_reading_order(app):
        lines.append(f"- [{env.titles[page].astext()}]({page}.html): {summary(env.get_doctree(page))}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_reading_order(app: Sphinx) -> list[str]:
    """Returns the pages as the navigation has them, the first one left out."""
    found: list[str] = []

    def visit(page: str) -> None:
        for child in app.env.toctree_includes.get(page, []):
            found.append(child)
            visit(child)

    visit("index")
    return found


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it."""
    app.connect("html-page-context", _describe)
    app.connect("build-finished", _write_list)
    return {"parallel_read_safe": True}
