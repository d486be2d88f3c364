"""A test that is skipped for a reason that `tests/allowed_skips.txt` does not list fails the session."""

from pathlib import Path

import pytest
from process_helpers import shell

pytestmark = pytest.mark.full

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest

@pytest.mark.skip(reason="listed: because")
def test_listed(): ...

@pytest.mark.skipif(True, reason="{reason}")
def test_other(): ...

@pytest.mark.xfail(reason="known")
def test_xfail(): raise AssertionError

def test_passes(): ...
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("reason", "code"), [("listed: too", 0), ("not listed", 1), ("not listed: too", 1)])
def test_a_skip_for_an_unlisted_reason_fails_the_session(tmp_path: Path, reason: str, code: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(TESTS.format(reason=reason))
    (tmp_path / "skips.txt").write_text("# reasons\n\nlisted: .*\n")
    found, output, _ = shell("$PYTHON -m pytest -p no:cacheprovider --allowed-skips skips.txt", tmp_path)
    assert found == code, output
    assert (f"test_it.py::test_other: {reason}" in output) == bool(code)
    assert "test_listed:" not in output
