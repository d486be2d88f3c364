"""Where tasks come from: names, users' files and modules; their errors are one line."""

import sys
from pathlib import Path
from typing import Any

import pytest

from jmp_train.app.tasks import FileError, digits, errors_of_file, find_task, is_task_text
from jmp_train.app.tasks.sources import described

pytestmark = pytest.mark.quick

JOB = """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Options:
    width: int = 3
class Net: pass
rate = 0.1
def task(options: Options):
    return options.width
def plain():
    return 1
def of_policy(policy):
    return policy
def with_default(size=3):
    return size
def two(options: Options, more):
    return more
"""


def written(folder: Path, text: str, name: str = "job_of_a_user.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_what_has_the_form_of_a_task() -> None:
    for text in ("digits", "a.py", "a.py:task", "C:/steps/a:b.py:make", "package.module:task"):
        assert is_task_text(text), text
    for text in ("make", ":make", "a.py:", "a.py:a.b", "a.py:3", "a\0.py:make", ""):
        assert not is_task_text(text), text
        with pytest.raises(ValueError, match=r"is not a task: digits, .*, path/to/file\.py:function, or package"):
            find_task(text)


def test_a_file_is_named_with_or_without_its_function(folder: Path) -> None:
    file = written(folder, JOB)
    assert find_task(str(file)).name == find_task(f"{file}:task").name == "job_of_a_user.py:task"
    with pytest.raises(ValueError, match=r"empty\.py has no function 'task': it has none"):
        find_task(str(written(folder, "", "empty.py")))


def test_the_built_in_task_comes_by_the_same_road() -> None:
    source = find_task("digits")
    assert (source.options, source.function, source.file) == (digits.Options, digits.task, None)
    assert find_task("jmp_train.app.tasks.digits:task").options is digits.Options


def test_a_file_sees_itself_as_python_runs_it(folder: Path) -> None:
    written(folder, "NAME = 'neighbor'", "neighbor_of_it.py")
    file = written(
        folder, "import sys\nfrom neighbor_of_it import NAME\ndef make():\n    return NAME, sys.argv, __name__\n"
    )
    assert find_task(f"{file}:make").make() == ("neighbor", [str(file)], "job_of_a_user")


def test_parameters_are_options_or_a_policy(folder: Path) -> None:
    file = written(folder, JOB)
    source = find_task(f"{file}:task")
    assert source.name == "job_of_a_user.py:task"
    assert source.options is not None
    assert source.make(source.options(width=5)) == 5
    assert find_task(f"{file}:plain").make() == 1
    assert find_task(f"{file}:with_default").make() == 3
    assert find_task(f"{file}:of_policy").takes_policy
    with pytest.raises(ValueError, match="must take one parameter at most: a dataclass of options"):
        find_task(f"{file}:two")


def test_annotations_may_be_text(folder: Path) -> None:
    file = written(folder, "from __future__ import annotations\n" + JOB)
    assert find_task(f"{file}:task").options is not None


def test_modules_are_found_on_the_path_and_not_in_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, JOB, "module_of_a_user.py")
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"there is no module 'module_of_a_user' among .* as file.py:function"):
        find_task("module_of_a_user:plain")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    source = find_task("module_of_a_user:plain")
    assert (source.name, source.file, source.make()) == ("module_of_a_user:plain", folder / "module_of_a_user.py", 1)


def test_what_is_missing_is_named(folder: Path) -> None:
    empty, job = written(folder, "import os\n", "empty.py"), written(folder, JOB)
    for text, message in (
        (folder / "none.py", "is not a file"),
        (empty, r"empty\.py has no function 'made': it has none"),
        (job, r"has no function 'made': it has Options, Net, task, plain, of_policy, with_default, two"),
    ):
        with pytest.raises(ValueError, match=message):
            find_task(f"{text}:made")
    with pytest.raises(ValueError, match=r":rate must be a function that returns a jt\.Task, got a float"):
        find_task(f"{job}:rate")
    with pytest.raises(ValueError, match=r"job_of_a_user\.py:plain must return a jt\.Task, got a value of type int"):
        find_task(f"{job}:plain").task()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nraise ValueError('first\\nsecond')\n", r"job_of_a_user\.py:2: ValueError: first$"),
        ("def f():\n    return {}['k']\nf()\n", r"job_of_a_user\.py:2: KeyError: 'k'$"),
        ("x = (\n", r"job_of_a_user\.py:1: SyntaxError: '\(' was never closed"),
        ("import no_such_package\n", r"job_of_a_user\.py:1: ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys\nsys.exit(4)\n", r"job_of_a_user\.py:2: it calls sys\.exit\(4\); move code that runs as a"),
    ],
)
def test_what_a_file_raises_is_one_line_with_its_own(text: str, message: str, folder: Path) -> None:
    with pytest.raises(FileError, match=message):
        find_task(f"{written(folder, text)}:task")


def test_errors_that_are_not_of_the_file_pass() -> None:
    with pytest.raises(KeyboardInterrupt), errors_of_file(Path("/elsewhere/x.py")):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match=r"^mine$"), errors_of_file(Path("/elsewhere/x.py")):
        raise ValueError("mine")
    with pytest.raises(SystemExit), errors_of_file(None):
        sys.exit(3)


def test_definitions_say_which_have_changed(folder: Path) -> None:
    def changed(old: str, new: str) -> set[Any]:
        pairs = []
        for text in (JOB, JOB.replace(old, new)):
            pairs.append(find_task(f"{written(folder, text)}:task").definitions())
        assert next(iter(pairs[0])) == "file"
        return {name for name in {*pairs[0], *pairs[1]} if pairs[0].get(name) != pairs[1].get(name)}

    assert changed("return 1", "return 2") == {"plain"}
    assert changed("class Net: pass", "class Net: x = 1") == {"Net"}
    assert changed("rate = 0.1", "rate = 0.2") == {"rate"}
    assert changed("import dataclasses\n", "import dataclasses, os\n") == {"other statements"}
    assert changed("def plain", "def other") == {"plain", "other"}
    assert changed("return 1", "return 1  # one") == set()


def test_descriptions() -> None:
    assert described(3) == "a value of type int"
    assert described(None) == "None"
    assert described(()) == "an empty tuple"
    assert described(("a", 1)) == "a tuple whose first item is of type str"
