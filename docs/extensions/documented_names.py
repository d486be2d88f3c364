"""Which names the pages of the API reference document; read from their sources, without Sphinx."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

API = Path(__file__).parents[1] / "api"


def documented_names(folder: Path = API) -> dict[str, str]:
    """Returns the full names of all that pages document, by name: those of `fn` as `fn.sum`.

    Args:
      folder: of the pages.

    Raises:
      ValueError: a name is documented twice.
    """
    found = listed_names(folder)
    rest = {
        name: f"{module}.{name}"
        for _, module, entry in _entries(folder)
        if entry.endswith(".*")
        for name in names_from(module, entry)
    }
    return rest | found


def listed_names(folder: Path = API) -> dict[str, str]:
    """Returns the same of the names that pages give themselves, not as those of a package.

    Args:
      folder: of the pages.

    Raises:
      ValueError: a name is documented twice.
    """
    found: dict[str, str] = {}
    for page, module, entry in _entries(folder):
        if entry.endswith(".*"):
            continue
        name = f"fn.{entry}" if module.endswith(".fn") else entry
        if name in found:
            raise ValueError(f"{page}: {module}.{entry} is documented twice, as {found[name]} too")
        found[name] = f"{module}.{entry}"
    return found


def names_from(module: str, package: str) -> list[str]:
    """Returns the names that an `__init__` imports from a package.

    Args:
      module: the module with that `__init__`: `jmp_train.graphs`.
      package: with a star: `layers.*`.
    """
    source = Path(str(importlib.import_module(module).__file__)).read_text()
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    start = f"{module}.{package.removesuffix('*')}"
    return [alias.name for node in imports if f"{node.module}.".startswith(start) for alias in node.names]


def _entries(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the page's name, the module and the name, or the package with a star, of each line below `api`."""
    for page in sorted(folder.glob("*.rst")):
        blocks = re.findall(r"^\.\. api:: (\S+)\n\n((?:   \S.*\n)+)", page.read_text(), re.MULTILINE)
        for module, block in blocks:
            for entry in re.findall(r"^   (\w+(?:\.\*)?)", block, re.MULTILINE):
                yield page.name, module, entry
