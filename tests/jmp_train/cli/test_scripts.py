"""Functions of users' scripts; what `diagnose` does with them is tested there."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jmp_train.cli.errors import Failure, WrongCall
from jmp_train.cli.scripts import described, errors_of_the_script, function_of, script_and_function

pytestmark = pytest.mark.quick


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_the_last_colon_separates() -> None:
    assert script_and_function("C:/steps/a:b.py:make") == (Path("C:/steps/a:b.py"), "make")


@pytest.mark.parametrize("text", ["make", ":make", "a.py:", "a.py:a.b", "a.py:3", "a\0.py:make"])
def test_what_is_no_script_and_function(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not SCRIPT:FUNCTION, such as train\.py:make_step"):
        script_and_function(text)


def test_a_script_sees_itself_as_python_runs_it(folder: Path) -> None:
    (folder / "neighbor_of_it.py").write_text("NAME = 'neighbor'")
    (folder / "seen.py").write_text(
        "import sys\nfrom neighbor_of_it import NAME\ndef make():\n    return NAME, sys.argv, __name__\n"
    )
    file = folder / "seen.py"
    assert function_of(file, "make")() == ("neighbor", [str(file)], "seen")


def test_a_script_may_define_dataclasses_and_read_its_annotations(folder: Path) -> None:
    (folder / "classes.py").write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Config:\n    width: int = 3\n"
        "def make():\n    return Config()\n"
    )
    assert function_of(folder / "classes.py", "make")().width == 3


def test_what_is_missing_is_a_wrong_call(folder: Path) -> None:
    (folder / "empty.py").write_text("import os\n")
    with pytest.raises(WrongCall, match="is not a file"):
        function_of(folder / "none.py", "make")
    with pytest.raises(WrongCall, match=r"empty\.py has no function 'make': it has none"):
        function_of(folder / "empty.py", "make")
    with pytest.raises(WrongCall, match="is not a file"):
        function_of(folder, "make")


def test_what_a_script_raises_is_a_line_and_its_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "fails.py").write_text("raise ValueError('first\\nsecond')\n")
    with pytest.raises(Failure, match=r"fails\.py: ValueError: first$"):
        function_of(folder / "fails.py", "make")
    assert 'fails.py", line 1' in capsys.readouterr().err
    (folder / "ends.py").write_text("import sys\nsys.exit(4)\n")
    with pytest.raises(WrongCall, match=r"ends the process \(exit code 4\)"):
        function_of(folder / "ends.py", "make")
    with pytest.raises(KeyboardInterrupt), errors_of_the_script(folder / "x.py"):
        raise KeyboardInterrupt


def test_descriptions() -> None:
    assert described(3) == "a value of type int"
    assert described(()) == "an empty tuple"
    assert described(("a", 1)) == "a tuple whose first item is of type str"
