"""Functions of users' scripts, named on the command line as SCRIPT:FUNCTION."""

import argparse
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from jmp_train.cli.errors import Failure, WrongCall


def script_and_function(text: str) -> tuple[Path, str]:
    """Parses SCRIPT:FUNCTION.

    Args:
      text: such as "train.py:make_step".

    Example:
      >>> script_and_function("train.py:make_step")[1]
      'make_step'
    """
    file, _, function = text.rpartition(":")
    if not file or not function.isidentifier() or "\0" in file:
        raise argparse.ArgumentTypeError(f"{text!r} is not SCRIPT:FUNCTION, such as train.py:make_step")
    return Path(file), function


def function_of(file: Path, name: str) -> Callable[..., Any]:
    """Returns a function of a script, which is run as an import does.

    Args:
      file: the script.
      name: the function's.

    Raises:
      WrongCall: there is no such file or function, or the script ends the process.
      Failure: the script fails; where is printed.
    """
    if not file.is_file():
        raise WrongCall(f"{file} is not a file")
    module = _run(file)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        has = f"it has {', '.join(own)}" if own else "it has none"
        raise WrongCall(f"{file} has no function {name!r}: {has}")
    return function


def described(made: object) -> str:
    """Returns what a function has returned, for an error's text."""
    if not isinstance(made, tuple):
        return f"a value of type {type(made).__name__}"
    return f"a tuple whose first item is of type {type(made[0]).__name__}" if made else "an empty tuple"


@contextmanager
def errors_of_the_script(file: Path) -> Iterator[None]:
    """Prints where a script's own code failed, and raises a Failure that says so in a line."""
    try:
        yield
    except SystemExit as error:
        raise WrongCall(
            f"{file} ends the process (exit code {error.code}); what it does as a command belongs below "
            "if __name__ == '__main__'"
        ) from error
    except Exception as error:  # whatever its author wrote
        traceback.print_exception(error)
        first = next(iter(str(error).splitlines()), "")
        raise Failure(f"{file}: {type(error).__name__}: {first}") from error


def _run(file: Path) -> ModuleType:
    """Runs a script as an import does, with its folder first on the path as `python SCRIPT` has it."""
    sys.path.insert(0, str(file.resolve().parent))
    sys.argv = [str(file)]
    name = file.stem if file.stem not in sys.modules else f"script_{file.stem}"
    loader = importlib.machinery.SourceFileLoader(name, str(file.resolve()))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as dataclasses, and modules that import the script, want it
    with errors_of_the_script(file):
        loader.exec_module(module)
    return module
