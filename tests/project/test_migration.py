"""Both sides of the pages about other libraries run, the other library's in its own environment, and find the same.

A block ```` ```python torch ```` is the other library's, ```` ```python ```` is ours, and ```` ```python both ````
runs after ours, where `torch["losses"]` is what the other library's blocks have left in `losses`.
"""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from process_helpers import run_python

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "migration").glob("*.md"))}
HERE, PEERS, DGL = Path(sys.executable), ROOT / ".venv-peers/bin/python", ROOT / ".venv-dgl/bin/python"
PYTHONS = {
    **dict.fromkeys(("jmp", "flax", "optax", "jraph"), HERE),
    **dict.fromkeys(("torch", "lightning", "accelerate", "pyg", "mpx"), PEERS),
    "dgl": DGL,
}
NEEDS_CUDA = {"apex"}
BLOCK = re.compile(r"^```python ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COLUMNS = 68  # of code that stands beside other code


def blocks(page: str, marker: str = "") -> str:
    """Returns the code of a page under a marker, one block after the other."""
    return "\n".join(code for name, code in BLOCK.findall(PAGES[page]) if name == marker)


def markers(page: str) -> set[str]:
    """Returns the other libraries whose code is on a page."""
    return {name for name, _ in BLOCK.findall(PAGES[page])} - {"", "both"}


COMPARED = [page for page in PAGES if markers(page) - NEEDS_CUDA]


def run(python: Path, code: str, cwd: Path) -> str:
    environment: dict[str, Any] = {} if python == HERE else {"PYTHONPATH": ""}
    return run_python("-c", code, cwd=cwd, python=python, **environment)


def test_each_page_compares_all_that_it_runs() -> None:
    assert len(COMPARED) >= 9
    for page in COMPARED:
        for marker in markers(page):
            assert marker in PYTHONS or marker in NEEDS_CUDA, f"{page}: {marker}"
            assert marker in NEEDS_CUDA or re.search(rf'\bassert.*\b{marker}\["', blocks(page, "both")), page


def test_code_that_cannot_run_here_is_python() -> None:
    for page in PAGES:
        for marker in NEEDS_CUDA:
            compile(blocks(page, marker), f"{page}.md", "exec")


def test_code_in_two_columns_fits_them() -> None:
    from side_by_side import in_columns  # and with it sphinx

    found = 0
    for page, text in PAGES.items():
        for column in re.findall(r"^::::\{container\}\n(.*?)^::::$", in_columns(text), re.MULTILINE | re.DOTALL):
            assert [line for line in column.splitlines() if len(line) > COLUMNS] == [], page
            found += 1
    assert found > 30


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_both_sides_of_a_page_run_and_find_the_same(page: str, tmp_path: Path) -> None:
    libraries = sorted(markers(page) - NEEDS_CUDA)
    missing = [library for library in libraries if not PYTHONS[library].exists()]
    if missing:
        run(HERE, blocks(page), tmp_path)
        pytest.skip(f"no environment with {missing[0]} is there: docs/contributing/pages.md says what makes one")
    compared = blocks(page, "both")
    given = []
    for library in libraries:
        names = sorted(set(re.findall(rf'\b{library}\["(\w+)"\]', compared)))
        found = f"import json; print(json.dumps({{{', '.join(f'{name!r}: {name}' for name in names)}}}))"
        numbers = run(PYTHONS[library], f"{blocks(page, library)}\n{found}", tmp_path).splitlines()[-1]
        given.append(f"{library} = json.loads({numbers!r})")
    run(HERE, "\n".join((blocks(page), "import json", *given, compared)), tmp_path)
