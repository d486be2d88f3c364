"""Which names the pages of the API reference document; read from their sources, without Sphinx."""

import re
from pathlib import Path

API = Path(__file__).parents[1] / "api"


def documented_names(folder: Path = API) -> dict[str, str]:
    """Returns the full names of all that pages document, by name: those of `fn` as `fn.sum`.

    Args:
      folder: of the pages.

    Raises:
      ValueError: a name is documented twice.
    """
    found: dict[str, str] = {}
    for page in sorted(folder.glob("*.rst")):
        blocks = re.findall(r"^\.\. api:: (\S+)\n\n((?:   \S.*\n)+)", page.read_text(), re.MULTILINE)
        for module, block in blocks:
            for name in re.findall(r"^   (\w+)", block, re.MULTILINE):
                short = f"fn.{name}" if module.endswith(".fn") else name
                if short in found:
                    raise ValueError(f"{page.name}: {module}.{name} is documented twice, as {found[short]} too")
                found[short] = f"{module}.{name}"
    return found
