"""`python -m jmp_train.diagnose SCRIPT:FUNCTION`: a diagnosis of what a function of a script returns."""

import argparse
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from jmp_train.cli.arguments import Parser, add_diagnosis_options
from jmp_train.cli.diagnose import outputs_of, show
from jmp_train.cli.errors import Failure, WrongCall
from jmp_train.cli.options import turn_ynn_fusion_off
from jmp_train.cli.running import run_command
from jmp_train.launch import lasting_output
from jmp_train.policies import diagnose

_WANTED = "wanted is a tuple of a function and its arguments, such as (step, state, batch)"


@lasting_output()
def diagnose_script_main(argv: Sequence[str] | None = None) -> int:
    """Runs `python -m jmp_train.diagnose` and returns its exit code, see `jmp_train.cli.errors.EXIT_CODES`.

    Args:
      argv: the arguments; None for those of the process.
    """
    return run_command(_parser, sys.argv[1:] if argv is None else list(argv))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m jmp_train.diagnose",
        description="What half precision does to each operation of a training step, or another function, of a script.",
    )
    parser.add_argument(
        "function",
        type=_script_and_function,
        metavar="SCRIPT:FUNCTION",
        help="such as train.py:make_step, which returns (step, state, batch), or a function and its arguments",
    )
    add_diagnosis_options(parser)
    parser.set_defaults(run=_diagnose_script)
    return parser


def _script_and_function(text: str) -> tuple[Path, str]:
    file, _, function = text.rpartition(":")
    if not file or not function.isidentifier() or "\0" in file:
        raise argparse.ArgumentTypeError(f"{text!r} is not SCRIPT:FUNCTION, such as train.py:make_step")
    return Path(file), function


def _diagnose_script(args: argparse.Namespace) -> int:
    file, function = args.function
    turn_ynn_fusion_off()
    with outputs_of(args) as output:
        fn, *arguments = _made_by(file, function)
        with _errors_of_the_script(file):
            report = diagnose(fn, *arguments, steps=args.steps)
        title = f"{file}:{function}"
        return show(report, title, {"function": title}, args, output)


def _made_by(file: Path, name: str) -> tuple[Any, ...]:
    """Returns what a script's function returns: a function and its arguments."""
    if not file.is_file():
        raise WrongCall(f"{file} is not a file")
    module = _run(file)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        has = f"it has {', '.join(own)}" if own else "it has none"
        raise WrongCall(f"{file} has no function {name!r}: {has}")
    with _errors_of_the_script(file):
        made = function()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise WrongCall(f"{file}:{name} returned {_described(made)}: {_WANTED}")
    return made


def _described(made: object) -> str:
    if not isinstance(made, tuple):
        return f"a value of type {type(made).__name__}"
    return f"a tuple whose first item is of type {type(made[0]).__name__}" if made else "an empty tuple"


def _run(file: Path) -> ModuleType:
    """Runs a script as an import does, with its folder first on the path as `python SCRIPT` has it."""
    sys.path.insert(0, str(file.resolve().parent))
    sys.argv = [str(file)]
    name = file.stem if file.stem not in sys.modules else f"diagnosed_{file.stem}"
    loader = importlib.machinery.SourceFileLoader(name, str(file.resolve()))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as dataclasses, and modules that import the script, want it
    with _errors_of_the_script(file):
        loader.exec_module(module)
    return module


@contextmanager
def _errors_of_the_script(file: Path) -> Iterator[None]:
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
