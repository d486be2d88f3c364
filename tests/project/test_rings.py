"""Every file of tests has a ring, and what the rings' options choose."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).resolve().parent.parent
RINGS = {"quick", "full", "gpu"}
FILES = sorted(TESTS.rglob("test_*.py"))

EXAMPLE = """
import pytest

pytestmark = pytest.mark.quick


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("x", range(10))
def test_cases(x):
    pass


@pytest.mark.full
def test_long():
    pass


def test_short():
    pass
"""


def markers(file: Path) -> set[str]:
    """Returns the markers in the value of a file's `pytestmark`."""
    found = re.search(r"^pytestmark = ([^\[\n]*|\[.*?\])$", file.read_text(), re.MULTILINE | re.DOTALL)
    return set(re.findall(r"mark\.(\w+)", found[1])) if found else set()


def test_every_file_has_one_ring() -> None:
    wrong = [str(file.relative_to(TESTS)) for file in FILES if len(markers(file) & RINGS) != 1]
    assert not wrong, f"pytestmark lacks one of {sorted(RINGS)}, or has several: {wrong}"


class Recorder:
    """Notes the tests that are left when others have been deselected."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.name for item in session.items]


def chosen(folder: Path, *options: str) -> list[str]:
    recorder = Recorder()
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-o", "timeout="]
    pytest.main([*arguments, "-c", str(TESTS.parent / "pyproject.toml"), str(folder), *options], plugins=[recorder])
    return recorder.names


@pytest.mark.full
def test_rings_and_shares_part_the_tests(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").symlink_to(TESTS / "conftest.py")
    (tmp_path / "test_example.py").write_text(EXAMPLE)
    everything = chosen(tmp_path)
    quick = chosen(tmp_path, "-m", "quick and not full")
    rest = chosen(tmp_path, "-m", "full")
    assert len(everything) == 12
    assert sorted(quick + rest) == sorted(everything)
    assert len([name for name in quick if name.startswith("test_cases[")]) == 2
    assert "test_short" in quick
    assert "test_long" in rest
    shares = [chosen(tmp_path, "-m", "full", "--share", f"{index}/3") for index in (3, 7, 2)]
    assert sorted(name for share in shares for name in share) == sorted(rest)
    assert max(map(len, shares)) < len(rest)
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("import pytest\n@pytest.mark.full\ndef test_other(): ...\n")
    shares = [chosen(tmp_path, "-m", "full", "--share", f"{index}/12") for index in range(3, 15)]
    assert sorted(name for share in shares for name in share) == sorted([*rest, *["test_other"] * 6])
