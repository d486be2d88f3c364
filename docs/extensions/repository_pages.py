"""Shows pages of the repository that lie outside of `docs`, and leads links to them there.

The pages are read in the repository too, where their links lead to files; so these stay as they are, and are
rewritten when a page is read here.
"""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN = {
    "project/benchmarks": ROOT / "benchmarks" / "README.md",
    "project/examples": ROOT / "examples" / "README.md",
    "project/changelog": ROOT / "CHANGELOG.md",
    "project/contributing": ROOT / "CONTRIBUTING.md",
}
_PAGES = {path: DOCS / f"{name}.md" for name, path in SHOWN.items()} | {DOCS / "README.md": DOCS / "index.md"}
_PAGES[ROOT / "README.md"] = DOCS / "index.md"


def with_links_here(text: str, origin: Path, page: Path) -> str:
    """Returns a page's text with links to files as they are to be from where it is shown.

    Args:
      text: in Markdown.
      origin: the file that it is of.
      page: the file in `docs` in whose place it is shown.
    """

    def changed(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        target = Path(os.path.normpath(origin.parent / path))
        target = _PAGES.get(target, target)
        return f"]({os.path.relpath(target, page.parent)}{mark}{anchor})"

    return re.sub(r"\]\((?!https?:|mailto:|#)([^)\s]+)\)", changed, text)


def _show(app: Sphinx, name: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(name))
    origin = SHOWN.get(name, page)
    if origin.suffix == ".md":
        text = with_links_here(origin.read_text() if name in SHOWN else source[0], origin, page)
        source[0] = re.sub(r"^## \[([^]]+)\]", r"## \1", text, flags=re.MULTILINE)  # a changelog's versions


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects what rewrites the pages."""
    app.connect("source-read", _show)
    return {"parallel_read_safe": True}
