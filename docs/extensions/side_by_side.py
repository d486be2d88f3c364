"""Shows another library's code and ours in two columns, and one below the other where the screen is narrow.

In the Markdown they are two blocks, one after the other: ```` ```python torch ````, then ```` ```python ````.
"""

import re

from sphinx.application import Sphinx

_CODE = r"(?:(?!^```).)*^```"  # of one block, to its end
_PAIR = re.compile(rf"^(```python (\w+)\n{_CODE})\n\n(```python\n{_CODE})$", re.MULTILINE | re.DOTALL)
_COLUMNS = """\
:::::{{container}} sides
::::{{container}}
`{name}`

{theirs}
::::
::::{{container}}
`jmp_train`

{ours}
::::
:::::"""


def in_columns(text: str) -> str:
    """Returns a page's Markdown with each such pair of blocks in two columns."""
    return _PAIR.sub(lambda pair: _COLUMNS.format(name=pair[2], theirs=pair[1], ours=pair[3]), text)


def _show(app: Sphinx, name: str, source: list[str]) -> None:
    if name.startswith("migration/"):
        source[0] = in_columns(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects what rewrites the pages."""
    app.connect("source-read", _show)
    return {"parallel_read_safe": True}
