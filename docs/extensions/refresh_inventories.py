"""Looks up where other projects document the names that are in `docs/inventories`; the one step that needs the network.

    python docs/extensions/refresh_inventories.py jax.vmap optax.adam

adds these names, and asks for all others anew. An inventory is a text file in the first version of Sphinx's format,
with no more than the names that our pages have. A name that its project does not document is an error.
"""

import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from sphinx.util.inventory import InventoryFile

INVENTORIES = Path(__file__).parents[1] / "inventories"
SITES = {
    "flax": "https://flax.readthedocs.io/en/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "jraph": "https://jraph.readthedocs.io/en/latest/",
    "numpy": "https://numpy.org/doc/stable/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "python": "https://docs.python.org/3/",
}


def names_in(inventory: str) -> list[str]:
    """Returns the names that an inventory of ours has."""
    return [line.split()[0] for line in inventory.splitlines()[3:]]


def excerpt(project: str, published: bytes, names: Iterable[str]) -> str:
    """Returns an inventory with some of the names of a published one.

    Args:
      project: its name.
      published: the contents of its `objects.inv`.
      names: full names, of modules too.

    Raises:
      ValueError: a name is not in it, or has another anchor than its name, which the format cannot say.
    """
    inventory = InventoryFile.loads(published, uri="").data
    rows, missing, version = [], [], ""
    for name in sorted(set(names)):
        kind = next((kind for kind in inventory if kind.startswith("py:") and name in inventory[kind]), None)
        if kind is None:
            missing.append(name)
            continue
        item = inventory[kind][name]
        page, _, anchor = item.uri.partition("#")
        if anchor not in (name, f"module-{name}"):
            raise ValueError(f"{project} documents {name} at {item.uri}, an anchor that is not its name")
        kind = "mod" if kind == "py:module" else kind.removeprefix("py:")
        rows.append(f"{name} {kind} {page}")
        version = item.project_version
    if missing:
        raise ValueError(f"{project} does not document {', '.join(missing)}")
    head = ["# Sphinx inventory version 1", f"# Project: {project}", f"# Version: {version}"]
    return "\n".join([*head, *rows]) + "\n"


def refresh(project: str, site: str, added: Iterable[str]) -> None:
    """Writes the inventory of a project anew.

    Args:
      project: its name, with which the names begin, but for those of Python.
      site: the address of its documentation.
      added: names that the inventory does not have yet.
    """
    file = INVENTORIES / f"{project}.inv"
    with urllib.request.urlopen(f"{site}objects.inv", timeout=60) as answer:
        file.write_text(excerpt(project, answer.read(), [*names_in(file.read_text()), *added]))


def main(added: list[str]) -> None:
    """Writes all inventories anew, with further names."""
    for project, site in SITES.items():
        others = tuple(f"{other}." for other in SITES if other != project)
        own = [name for name in added if name.startswith(f"{project}.")]
        refresh(project, site, own if project != "python" else [name for name in added if not name.startswith(others)])


if __name__ == "__main__":
    main(sys.argv[1:])
