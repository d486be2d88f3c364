"""Random faults of `mutate.py`: which can be planted, where, and that a test notices one."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coverage import CoverageData
from line_tests import Recording, checksum, room_of, statement_lines
from mutate import drawn_faults, equivalent_faults, faults_of
from mutations import ROOT

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x < 1", ["(x <= 1)", "x < (2)"]),
        ("x in (y, z)", ["(x not in (y, z))"]),
        ("x + y", ["(x - y)"]),
        ("x and not y", ["(x or not y)", "x and (y)"]),
        ("-x", ["(x)"]),
        ("f(True, 0.5, 'text')", ["f((False), 0.5, 'text')", "f(True, (1.0), 'text')"]),
        ("jnp.where(x, y, z)", ["(jnp.where(x, z, y))"]),
        ("lax.stop_gradient(x)", ["(x)"]),
        ("x.sum(axis=-1)", ["(x.sum(axis=0))", "x.sum(axis=-(2))"]),
        ("x.sum(axis=0)", ["(x.sum(axis=-1))", "x.sum(axis=(1))"]),
        ("f'{x + 1}'", []),
        ("zip(x, y, strict=True)", []),
    ],
)
def test_an_expression_has_these_faults(old: str, new: list[str]) -> None:
    text = f"é = {old}\n"  # offsets of the syntax tree count bytes
    faults = faults_of("m.py", text)
    assert [fault.planted(text) for fault in faults] == [f"é = {code}\n" for code in new]
    assert [fault.planted_line for fault in faults] == [f"é = {code}" for code in new]


def test_annotations_errors_and_imports_have_none() -> None:
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    y = 1\n"
        "def f(x: Literal[1] = None) -> Literal[2]:\n    raise ValueError(x + 1)\n"
    )
    assert not faults_of("m.py", text)


def test_drawn_faults_can_be_planted_and_are_the_same_for_a_seed() -> None:
    rooms = ("policies/quantizing", "graphs/readout")
    faults = drawn_faults(rooms, 20, seed=3)
    assert len(set(faults)) == 20 and faults == drawn_faults(rooms, 20, seed=3) != drawn_faults(rooms, 20, seed=4)
    for fault in faults:
        text = (ROOT / fault.file).read_text()
        assert ast.dump(ast.parse(fault.planted(text))) != ast.dump(ast.parse(text))


def test_equivalent_faults_are_still_faults_of_their_files() -> None:
    listed = equivalent_faults()
    files = {file for file, _ in listed}
    faults = [fault for file in files for fault in faults_of(file, (ROOT / file).read_text())]
    known = {(fault.file, fault.planted_line) for fault in faults}
    assert listed.keys() <= known and all(listed.values())


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("policies/optimizers/kahan.py", "policies/optimizers"),
        ("policies/autocasting/fp8/recipes.py", "policies/autocasting"),
        ("jmp_train/task.py", "jmp_train"),
        ("tests/policies/optimizers/test_kahan.py::test_it[a::b]", "policies/optimizers"),
        ("tests/jmp_train/test_task.py::test_it", "jmp_train"),
        ("jmp_train/policies/optimizers/kahan.py::policies.optimizers.kahan", "policies/optimizers"),
    ],
)
def test_a_test_has_the_room_of_its_module(name: str, room: str) -> None:
    assert room_of(name) == room


@pytest.mark.parametrize(
    ("line", "lines"), [(1, [1, 2]), (2, [1, 2]), (3, [3]), (4, [4, 5, 6]), (6, [4, 5, 6]), (7, [7])]
)
def test_a_statement_has_these_lines(line: int, lines: list[int]) -> None:
    text = "def f(x,\n      y=1):\n    if x:\n        y = [\n            2,\n        ]\n    return y\n"
    assert list(statement_lines(text, line)) == lines


MODULE = "policies/room/m.py"
OWN, OTHER = "tests/policies/room/test_m.py", "tests/policies/room/test_other.py"
ELSEWHERE = "tests/policies/test_else.py"
HEAD = "import pytest\nfrom policies.room.m import least\npytestmark = [pytest.mark.quick]\n"
PROJECT = {
    "pyproject.toml": '[tool.coverage.run]\nsource = ["policies"]\n',
    "conftest.py": "def pytest_configure(config):\n    config.addinivalue_line('markers', 'quick')\n",
    MODULE: "def least(x, y):\n    if x < y:\n        return x\n    return y\n",
    OTHER: f"{HEAD}def test_both(): assert least(1, 2) == least(2, 1)\n",
    OWN: f"{HEAD}def test_first(): assert least(1, 2) == 1\ndef test_last(): assert least(2, 1) == 1\n",
    ELSEWHERE: f"{HEAD}def test_else(): assert least(3, 4) == 3\n",
}


def recorded(folder: Path, lines: dict[str, list[int]]) -> Recording:
    """Returns a recording of tests that ran these lines of `MODULE` and cost a second each."""
    data = CoverageData(str(folder / "lines"))
    for test, numbers in lines.items():
        data.set_context(f"{test}|run" if test else "")
        data.add_lines({str(folder / MODULE): numbers})
    data.write()
    rows = [{"name": test, "kind": "test", "cpu": 1.0} for test in lines if test]
    (folder / "costs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "texts.json").write_text(json.dumps({MODULE: checksum(PROJECT[MODULE])}))
    return Recording(folder)


def test_tests_of_a_line_come_by_room_file_and_cost(tmp_path: Path) -> None:
    first, last, other, elsewhere = f"{OWN}::test_first", f"{OWN}::test_last", f"{OTHER}::t", f"{ELSEWHERE}::t"
    recording = recorded(tmp_path, {"": [1], elsewhere: [2, 3], other: [2, 3, 4], last: [2, 4], first: [2, 3]})
    text = PROJECT[MODULE]
    assert recording.tests(MODULE, text, 4) == [last, other, first]  # the last may have missed what was cached
    assert recording.tests(MODULE, text, 3) == [first, other, last, elsewhere]
    assert recording.tests(MODULE, text, 1) == [first, last, other, elsewhere]  # run by the import: tests of any line
    assert recording.tests(MODULE, f"\n{text}", 4) == [first, last, other, elsewhere]  # its lines are not known
    assert recording.tests("policies/room/new.py", "x = 1\n", 1) == [other, first, last]
    assert not recording.tests("graphs/room/new.py", "x = 1\n", 1)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def printed(project: Path, script: str, *arguments: str) -> str:
    """Returns the last line that a script prints in the project, with the modules of `tests` at hand."""
    command = [sys.executable, "-c", f"import json, sys, line_tests, mutations\nfrom pathlib import Path\n{script}"]
    environment = {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{ROOT / 'tests'}"}
    options: dict[str, Any] = {"cwd": project, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, *arguments], check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().rpartition("\n")[-1]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_recording_has_the_lines_of_each_test(project: Path) -> None:
    printed(project, f"line_tests.ROOT = Path.cwd()\nline_tests.record(Path('recording').resolve(), ['{MODULE}'])")
    recording = Recording(project / "recording")
    names = {f"{OWN}::test_first", f"{OWN}::test_last", f"{OTHER}::test_both", f"{ELSEWHERE}::test_else"}
    assert recording.costs.keys() == names and recording.texts == {MODULE: checksum(PROJECT[MODULE])}
    assert recording.lines(MODULE)[4] == {f"{OWN}::test_last", f"{OTHER}::test_both"}
    assert recording.lines(MODULE)[1] == set()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_tests_run_in_a_fork_up_to_the_first_that_fails(project: Path) -> None:
    script = (
        "with mutations.compiled_once():\n"
        "    line_tests.preload()\n"
        "    outcome = line_tests.outcome_of(Path.cwd(), *json.loads(sys.argv[1]))\n"
        "    print(json.dumps([outcome.failed, outcome.left_out]))\n"
    )
    first, last, both = f"{OWN}::test_first", f"{OWN}::test_last", f"{OTHER}::test_both"

    def outcome(tests: list[str], most_cpu: float = 120.0) -> list[Any]:
        return json.loads(printed(project, script, json.dumps([tests, [first, both], most_cpu])))

    assert outcome([both, first]) == [None, 0]
    assert outcome([both, first], most_cpu=0.0) == [None, 2]  # the time is up after the one that is not known
    module = project / MODULE
    module.write_text(PROJECT[MODULE].replace("x < y", "x > y"))
    assert outcome([both, first]) == [last, 0]
    assert outcome([both]) == [None, 0]
    module.write_text("import nothing_of_this_name\n")
    assert outcome([both]) == [OTHER, 0]
    module.write_text(PROJECT[MODULE].replace("return x\n", "import os; os.abort()\n"))
    assert outcome([both]) == ["ends by signal 6", 0]
