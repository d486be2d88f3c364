"""Mends two faults of sphinx.ext.viewcode, whose pages show the sources of what is documented.

It takes all names of a file to be documented in the module of the first of them, so that the links back miss those
that another module offers; and it lists modules of which it has no page.
"""

import re
from typing import Any

from sphinx.application import Sphinx


def documented_name(name: str, names: set[str]) -> str:
    """Returns which of the names is meant by one that may have another module; the name itself where none is.

    Args:
      name: with a module.
      names: what is documented.
    """
    tail = name
    while tail and name not in names:
        tail = tail.partition(".")[2]
        # A method of the same name is not meant.
        found = [full for full in names if full.endswith(f".{tail}") and full.removesuffix(f".{tail}") not in names]
        if tail and len(found) == 1:
            return found[0]
    return name


def _mend_links(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    if page.startswith("_modules/"):
        objects = app.env.domains.python_domain.objects
        names = {name for name, found in objects.items() if not found.aliased}

        def changed(match: re.Match[str]) -> str:
            return f'{match[1]}#{documented_name(match[2], names)}"'

        context["body"] = re.sub(r'(class="viewcode-back" href="[^"#]*)#([^"]*)"', changed, context["body"])


def _forget_modules_without_page(app: Sphinx) -> list[tuple[str, dict[str, Any], str]]:
    modules: dict[str, Any] = getattr(app.env, "_viewcode_modules", {})
    for name in [name for name, found in modules.items() if not found]:
        del modules[name]
    return []


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it; modules are forgotten before viewcode makes its pages."""
    app.connect("html-page-context", _mend_links)
    app.connect("html-collect-pages", _forget_modules_without_page, priority=400)
    return {"parallel_read_safe": True}
