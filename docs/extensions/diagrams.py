"""Puts the diagrams of `docs/images` into pages as they are, so that they are light or dark as the page is.

As images they would follow the reader's system alone, and shrink to what a phone is wide.
"""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx


def _put_into_page(app: Sphinx, doctree: nodes.document) -> None:
    for image in list(doctree.findall(nodes.image)):
        file = Path(app.env.doc2path(app.env.docname)).parent / image["uri"]
        if file.name.startswith("how_") and file.suffix == ".svg":
            app.env.note_dependency(str(file.resolve()))
            html = f'<div class="diagram-frame">\n{file.read_text()}</div>'
            image.replace_self(nodes.raw("", html, format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it, before Sphinx copies images."""
    app.connect("doctree-read", _put_into_page, priority=400)
    return {"parallel_read_safe": True}
