"""The source of a task: `digits`, `path/to/file.py`, `path/to/file.py:function`, or `package.module:function`."""

import ast
import dataclasses
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from jmp_train.app.tasks import digits
from jmp_train.task import Task

BUILT_IN = "digits"
TASK_FORMS = "path/to/file.py, path/to/file.py:function, or package.module:function"
_FORM = re.compile(r"[^\0]+:[^\W\d]\w*")
_FUNCTION = "task"  # of a file that is named without one


class FileError(Exception):
    """A failure of a user's own file; the message is one line with its file and line."""


@dataclasses.dataclass(frozen=True)
class TaskSource:
    """A function that creates a task, with its properties known before the call.

    Attributes:
      name: name of the task in reports and checkpoints.
      function: the function.
      options: the dataclass of the function's options; None if it takes none.
      file: the user's file or module; None for `digits`.
      takes_policy: True if the function has a parameter for a policy's name in place of options.
    """

    name: str
    function: Any
    options: type[Any] | None = None
    file: Path | None = None
    takes_policy: bool = False

    def make(self, options: Any = None) -> Any:
        """Returns the result of the function.

        Args:
          options: argument of the function; None if it takes none.

        Raises:
          FileError: the user's function fails.
        """
        if not callable(self.function):
            return self.function
        with errors_of_file(self.file):
            return self.function() if self.options is None else self.function(options)

    def task(self, options: Any = None) -> Task:
        """Returns the task; raises ValueError if the function returns something else. See `make`."""
        made = self.make(options)
        if not isinstance(made, Task):
            raise ValueError(f"{self.name} must return a jt.Task, got {described(made)}")
        return made

    def definitions(self) -> dict[str, str]:
        """Returns the user's file name as "file", and 8 hexadecimal digits of each definition's digest by its name.

        Statements that define nothing, such as imports, share one entry.
        """
        if self.file is None:
            return {}
        rest, found = [], {"file": self.file.name}
        for node in ast.parse(self.file.read_bytes()).body:
            text = ast.dump(node)
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                found[node.name] = _digest(text)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found[", ".join(ast.unparse(target) for target in targets)] = _digest(text)
            else:
                rest.append(text)
        return found | {"other statements": _digest("\n".join(rest))}


def is_task_text(text: str) -> bool:
    """Returns True for the name of a task, now or in version 0.1, and for text in the form of a user's task.

    Example:
      >>> [is_task_text(text) for text in ("digits", "my.py", "my.py:task", "0.9:float32", "gat")]
      [True, True, True, True, False]
    """
    return text == BUILT_IN or text.endswith(".py") or _FORM.fullmatch(text) is not None


def find_task(text: str) -> TaskSource:
    """Returns the source of a task; imports a user's file.

    Args:
      text: "digits" or one of `TASK_FORMS`.

    Raises:
      ValueError: there is no such task, file, module or function, or its parameters are not those of a task.
      FileError: the file fails.
    """
    if text == BUILT_IN:
        return TaskSource(text, digits.task, digits.Options)
    place, name = (text, _FUNCTION) if text.endswith(".py") else text.rpartition(":")[::2]
    if not (text.endswith(".py") or _FORM.fullmatch(text)):
        raise ValueError(f"{text!r} is not a task: {BUILT_IN}, {TASK_FORMS}")
    if place.endswith(".py") or "/" in place or "\\" in place:
        file = Path(place)
        if not file.is_file():
            raise ValueError(f"{file} is not a file")
        module = _run(file)
    else:
        module, file = _import(place)
    function = getattr(module, name, None)
    if function is None:
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        has = f"it has {', '.join(own)}" if own else "it has none"
        raise ValueError(f"{place} has no function {name!r}: {has}")
    if not (callable(function) or isinstance(function, Task)):
        raise ValueError(f"{text} must be a function that returns a jt.Task, got a {type(function).__name__}")
    title = f"{file.name}:{name}" if place.endswith(".py") else text
    return TaskSource(title, function, *_parameters(title, function, file))


def _parameters(title: str, function: Any, file: Path) -> tuple[type[Any] | None, Path, bool]:
    """Returns the dataclass of a function's options, its file, and whether it takes a policy instead."""
    if not callable(function):
        return None, file, False
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    if sum(p.default is p.empty for p in [*positional, *keywords]) > len(positional[:1]):
        raise ValueError(f"{title} must take one parameter at most: a dataclass of options")
    if not positional:
        return None, file, False
    first = positional[0]
    try:
        kind = typing.get_type_hints(function).get(first.name, type(first.default))
    except NameError as error:
        raise ValueError(f"{title}: {error}, in an annotation") from error
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind, file, False
    if first.default is not first.empty and first.name != "policy":
        return None, file, False
    return None, file, True


def described(made: object) -> str:
    """Returns a description of a function's result for error messages."""
    if not isinstance(made, tuple):
        return "None" if made is None else f"a value of type {type(made).__name__}"
    return f"a tuple whose first item is of type {type(made[0]).__name__}" if made else "an empty tuple"


@contextmanager
def errors_of_file(file: Path | None) -> Iterator[None]:
    """Turns an exception raised through a user's file into a `FileError` with its line; others pass.

    Args:
      file: the user's file; None if there is none.
    """
    try:
        yield
    except SystemExit as error:
        if file is None:
            raise
        code = 0 if error.code is None else error.code
        raise FileError(
            f"{_place(file, error) or file}: it calls sys.exit({code!r}); move code that runs as a command below "
            "if __name__ == '__main__'"
        ) from error
    except Exception as error:  # of any kind, because it is the user's code
        place = None if file is None or isinstance(error, FileError) else _place(file, error)
        if place is None:
            raise
        first = next((text for text in str(error).splitlines() if text.strip()), "")
        first = str(error) if isinstance(error, FileNotFoundError) else first  # which may list files
        notes = [note for note in getattr(error, "__notes__", ()) if note.isprintable()]  # jax's have many lines
        raise FileError("; ".join([": ".join(filter(None, [place, type(error).__name__, first])), *notes])) from error


def _place(file: Path, error: BaseException) -> str | None:
    """Returns the innermost place in a user's files that an exception passed through, as "file:line"; None without one.

    These are the file and the files in its folder, except installed packages. A syntax error has its own place.
    """
    folder = file.resolve().parent
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] != "jmp_train"
    ]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 1))
    for name, line in reversed(places):
        path = Path(name)
        if path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & {*path.parts}:
            return f"{file.parent / path.relative_to(folder)}:{line}"
    return None


def _import(name: str) -> tuple[ModuleType, Path]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError(
            f"there is no module {name!r} among the installed packages and the folders of PYTHONPATH; write a "
            "file of the current folder as file.py:function"
        )
    file = Path(spec.origin)
    with errors_of_file(file):
        return importlib.import_module(name), file


def _run(file: Path) -> ModuleType:
    """Imports a file, with its folder first on the path, as for `python FILE`."""
    path = str(file.resolve())
    sys.path.insert(0, str(file.resolve().parent))
    name = file.stem if file.stem not in sys.modules else f"script_{file.stem}"
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # needed by dataclasses, and by modules that import the file
    sys.argv = [str(file)]
    with errors_of_file(file):
        loader.exec_module(module)
    return module


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
