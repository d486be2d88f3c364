"""Random faults of `mutate.py`: which can be planted, where, and that a test notices one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from mutate import drawn_faults, equivalent_faults, faults_of, stages_of
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
    ],
)
def test_an_expression_has_these_faults(old: str, new: list[str]) -> None:
    text = f"é = {old}\n"  # offsets of the syntax tree count bytes
    assert [fault.planted(text) for fault in faults_of("m.py", text)] == [f"é = {code}\n" for code in new]


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
    files = {file for file, *_ in listed}
    known = {fault.key for file in files for fault in faults_of(file, (ROOT / file).read_text())}
    assert listed.keys() <= known and all(listed.values())


def test_a_modules_own_tests_come_first() -> None:
    file = "policies/optimizers/kahan.py"
    assert (ROOT / file).exists()
    first, room = stages_of(file)
    assert first[0] == file and room == ["tests/policies/optimizers"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_fault_is_caught_and_the_tree_stays_as_it_is() -> None:
    before = (ROOT / "policies/pytrees/finite.py").read_bytes()
    options = ["--room", "policies/pytrees", "--count", "2", "--room-only"]
    command = [sys.executable, str(Path(ROOT, "tests/mutate.py")), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert "of 2 caught by the tests of their room" in done.stdout, done.stderr
    assert (ROOT / "policies/pytrees/finite.py").read_bytes() == before
