"""`.ci/lint-github` finds faults in workflows, forms and CITATION.cff; workflows have no more rights than needed."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from process_helpers import shell

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CHECKOUT = "actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd"


@pytest.fixture(name="copy")
def fixture_copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    shutil.copy(ROOT / "CITATION.cff", tmp_path)
    return tmp_path


@pytest.mark.quick_cases(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("CITATION.cff", "", "", ""),
        (".github/workflows/tests.yml", "matrix.parts", "matrix.part", 'property "part" is not defined'),
        (".github/workflows/docs.yml", "needs: build", "needs: built", 'does not exist in "needs"|needs job "built"'),
        (".github/workflows/release.yml", CHECKOUT, "actions/checkout@v6", "unpinned-uses"),
        (".github/workflows/nightly.yml", "contents: read", "contents: write", "excessive-permissions"),
        (".github/workflows/docs.yml", "cancel-in-progress", "cancel", "cancel"),
        (".github/ISSUE_TEMPLATE/bug_report.yml", "type: textarea", "type: textfield", r"bug_report\.yml"),
        ("CITATION.cff", "cff-version: 1.2.0\n", "", "'cff-version' is a required property"),
    ],
)
def test_a_planted_fault_is_found(copy: Path, name: str, old: str, new: str, message: str) -> None:
    text = (copy / name).read_text()
    assert old in text
    (copy / name).write_text(text.replace(old, new))
    code, *output = shell(f"{ROOT}/.ci/lint-github {copy}", ROOT, BIN=str(Path(sys.executable).parent))
    assert (code == 0) == (old == new), output
    assert re.search(message, "".join(output))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_by_commit_with_the_version_beside(path: Path) -> None:
    text = path.read_text()
    used = re.findall(r"uses: (?!\./)(.*)", text)
    assert used or "uses: ./" in text
    for one in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)


def test_only_what_publishes_may_write() -> None:
    found: dict[str, Any] = {path.stem: yaml.safe_load(path.read_text()) for path in WORKFLOWS}
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in found.values())
    more = {
        (name, job): settings["permissions"]
        for name, workflow in found.items()
        for job, settings in workflow["jobs"].items()
        if "permissions" in settings
    }
    assert more == {
        ("docs", "publish"): {"pages": "write", "id-token": "write"},
        ("release", "publish"): {"id-token": "write"},
    }
    assert found["release"]["jobs"]["publish"]["needs"] == ["tests", "dist"]


def test_the_workflow_of_tests_runs_all_parts() -> None:
    (workflow,) = (yaml.safe_load(path.read_text()) for path in WORKFLOWS if path.stem == "tests")
    parts = {
        part for one in workflow["jobs"]["tests"]["strategy"]["matrix"]["include"] for part in one["parts"].split()
    }
    script = (ROOT / ".ci" / "run").read_text()
    everything = re.search(r"parts=\(([a-z -]+)\)", script)
    assert everything is not None
    assert parts == set(everything[1].split())
    code, _, error = shell(".ci/run tests", ROOT)
    assert (code, error) == (2, f"no part tests: {everything[1]}\n")
