"""What `make dist` refuses before it builds anything."""

from pathlib import Path

import dist
import pytest

import jmp_train as jt

pytestmark = pytest.mark.quick

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2027-01-31\n\n- New.\n\n## [0.1.0] - 2026-11-23\n\n"


def test_the_version_is_written_once() -> None:
    assert dist.version() == jt.__version__
    assert f'"{dist.version()}"' not in (dist.ROOT / "pyproject.toml").read_text()
    assert "\nversion:" not in (dist.ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    ("changelog", "version", "message"),
    [
        (CHANGELOG, "0.3.0", r"has 0 sections \[0\.3\.0\]"),
        (CHANGELOG + CHANGELOG, "0.2.0", r"has 2 sections \[0\.2\.0\]"),
        (CHANGELOG, "0.1.0", r"the section \[0\.1\.0\] has no entries"),
        (CHANGELOG.replace("2027-01-31", "soon"), "0.2.0", r"wanted is '\[0\.2\.0\] - YYYY-MM-DD'"),
    ],
)
def test_a_release_without_its_section_of_the_changelog_is_refused(changelog: str, version: str, message: str) -> None:
    dist.check_changelog(CHANGELOG, "0.2.0")
    with pytest.raises(dist.DistError, match=message):
        dist.check_changelog(changelog, version)


def test_a_tag_that_is_not_the_versions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    dist.check_tag(f"v{dist.version()}")
    assert dist.main(["--tag", "v9.9.9"]) == 1
    assert capsys.readouterr().err.startswith(f"dist: the tag v9.9.9 is not v{dist.version()}, the version in ")


def test_a_missing_python_is_said_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dist.main(["--pythons", "3.99", "--out", str(tmp_path / "dist")]) == 1
    assert "dist: NOT TESTED on Python 3.99, which is not here: install it" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()
    assert dist.interpreters(["3.98", "3.99"], allow_missing=True) == {}
    assert "!! NOT TESTED on Python 3.98 and 3.99, which are not here !!" in capsys.readouterr().err


def test_a_python_is_taken_if_it_is_the_version_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "versions" / "3.97.1" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    python = folder / "python"
    for body, found in (("exit 1", None), ("exit 0", str(python))):
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
        assert dist.find_python("3.97") == found
