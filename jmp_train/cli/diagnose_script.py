"""`python -m jmp_train.diagnose SCRIPT:FUNCTION`: a diagnosis of what a function of a script returns."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmp_train.cli.arguments import Parser, add_diagnosis_options
from jmp_train.cli.diagnose import outputs_of, show
from jmp_train.cli.errors import WrongCall
from jmp_train.cli.options import turn_ynn_fusion_off
from jmp_train.cli.running import run_command
from jmp_train.cli.scripts import described, errors_of_the_script, function_of, script_and_function
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
        type=script_and_function,
        metavar="SCRIPT:FUNCTION",
        help="such as train.py:make_step, which returns (step, state, batch), or a function and its arguments",
    )
    add_diagnosis_options(parser)
    parser.set_defaults(run=_diagnose_script)
    return parser


def _diagnose_script(args: argparse.Namespace) -> int:
    file, function = args.function
    turn_ynn_fusion_off()
    with outputs_of(args) as output:
        fn, *arguments = _made_by(file, function)
        with errors_of_the_script(file):
            report = diagnose(fn, *arguments, steps=args.steps)
        title = f"{file}:{function}"
        return show(report, title, {"function": title}, args, output)


def _made_by(file: Path, name: str) -> tuple[Any, ...]:
    """Returns what a script's function returns: a function and its arguments."""
    function = function_of(file, name)
    with errors_of_the_script(file):
        made = function()
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise WrongCall(f"{file}:{name} returned {described(made)}: {_WANTED}")
    return made
