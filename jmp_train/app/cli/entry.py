"""`jmp-train`: train a task in one policy or AMP mode, compare several, diagnose, tune, plan, launch processes.

Exit codes and errors are those of `jmp_train.app.cli.results`.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jmp_train import __version__
from jmp_train.app.cli.compare import CompareOptions, compare_command
from jmp_train.app.cli.diagnose import DiagnoseOptions, diagnose_command
from jmp_train.app.cli.jobs import OF_RUNS, Call, find_task_of
from jmp_train.app.cli.option_values import Parser, count, few, path, positive
from jmp_train.app.cli.options import add_options, flag, option, read_options
from jmp_train.app.cli.plan import PlanOptions, plan_command
from jmp_train.app.cli.results import (
    INTERRUPTED,
    RUN_FAILED,
    WrongCall,
    check_outputs,
    checking_the_call,
    is_of_interrupt,
    report_error,
)
from jmp_train.app.cli.train import TrainOptions, train_command
from jmp_train.app.cli.tune import TuneOptions, tune_command
from jmp_train.app.launch import LaunchError, check_launch, lasting_output, launch, own_output
from jmp_train.app.tasks import BUILT_IN, TASK_FORMS, TaskSource, is_task_text
from jmp_train.command_start import interrupts_raised
from jmp_train.distributed import end_at_once

_TASK_HELP = f"{BUILT_IN}, {TASK_FORMS}; default: {BUILT_IN}; TASK --help shows its own options"
_LAUNCH = "launch"


class _Command(NamedTuple):
    """A command with a task: its description, its options, and the function that runs it."""

    text: str
    options: type[Any]
    run: Callable[[Call[Any]], int]


def _commands() -> dict[str, _Command]:
    return {
        "train": _Command("train a task in one policy or AMP mode", TrainOptions, train_command),
        "compare": _Command("train a task in several policies or AMP modes", CompareOptions, compare_command),
        "diagnose": _Command(
            "report the effect of half precision on each operation of a step", DiagnoseOptions, diagnose_command
        ),
        "tune": _Command("find the operations of a task that must stay in float32", TuneOptions, tune_command),
        "plan": _Command("predict memory and time of a step on GPUs, without a GPU", PlanOptions, plan_command),
    }


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Options of `jmp-train launch`.

    Attributes:
      devices_per_process: default: 1
      logdir: write DIR/rank_0.log and so on
      restarts: restart all processes after a failure, up to N times
      grace: time to save for processes that are asked to end, before they are killed; default: 5
      exit_timeout: stop processes that still run this long after the first has ended well; default: never
    """

    devices_per_process: int = option(few, default=1)
    logdir: Path | None = option(path, "DIR")
    restarts: int = option(count, default=0)
    grace: int = option(positive, "SECONDS", default=5)
    exit_timeout: int | None = option(positive, "SECONDS")


@lasting_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
      argv: the arguments; None for those of the process.

    Returns:
      The exit code, see `jmp_train.app.cli.results.EXIT_CODES`. `--help` and `--version` exit with 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        with interrupts_raised():
            code = _run(arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - of any kind, because the user gets one line
        code = INTERRUPTED if is_of_interrupt(error) else report_error(error)
    if code and jax.distributed.is_initialized():
        end_at_once(code)  # jax would wait for the other processes, which wait for this one
    return code


def _run(arguments: Sequence[str]) -> int:
    """Parses the options of the command, finds the task, parses its options in what is left, and runs the command."""
    commands = _commands()
    parser, parsers = _parser(commands)
    args, rest = parser.parse_known_args(arguments)
    if args.COMMAND not in commands:
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return _launch(args)
    command, parser = commands[args.COMMAND], parsers[args.COMMAND]
    text = _task_in(rest)
    with own_output() if "json" in args else contextlib.nullcontext() as output:
        source = find_task_of(args.COMMAND, text or BUILT_IN, getattr(args, "devices", None))
        _add_task(parser, source)
        if "help" in args:
            parser.print_help()
            parser.exit()
        given = vars(parser.parse_args(rest, args))
        if given["TASK"] != (text or BUILT_IN):
            raise WrongCall(f"{text} was read as the task; write the task before its options")
        code = command.run(Call(given["TASK"], source, read_options(command.options, given), given, output))
    return code or (RUN_FAILED if output is not None and output.lost is not None else 0)


def _parser(commands: Mapping[str, _Command]) -> tuple[Parser, dict[str, Parser]]:
    """Returns the parser of all commands, without tasks and their options, and the parser of each."""
    parser = Parser(prog="jmp-train", description="Mixed-precision training in JAX.")
    parser.add_argument("--version", action="version", version=f"jmp-train {__version__}")
    made = parser.add_subparsers(metavar="COMMAND", dest="COMMAND", title="commands")
    for name, command in commands.items():
        usage = f"jmp-train {name} [TASK] [options]"
        of_command = made.add_parser(name, help=command.text, usage=usage, add_help=False)
        of_command.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
        add_options(of_command, command.options)
        of_command.add_argument("--json", action="store_true", help="print JSON on standard output")
    launcher = made.add_parser(_LAUNCH, help="run a script as several processes on this machine")
    launcher.add_argument("-n", "--processes", type=few, required=True, metavar="N", help="the number of processes")
    add_options(launcher, LaunchOptions)
    launcher.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ...", help="a Python script and its arguments"
    )
    return parser, made.choices


def _task_in(rest: Sequence[str]) -> str | None:
    """Returns the argument that names the task; None if there is none.

    The options of the task are not known yet, nor whether they take values. So the task is what stands before the first
    of them, or the first argument in a task's form.

    Args:
      rest: the arguments without the command's own options.
    """
    if rest and not rest[0].startswith("-"):
        return rest[0]
    return next(filter(is_task_text, rest), None)


def _add_task(parser: Parser, source: TaskSource) -> None:
    """Adds a task and its options to the parser of a command."""
    parser.add_argument("TASK", nargs="?", default=BUILT_IN, help=_TASK_HELP)
    if source.options is None:
        return
    taken = {name for action in parser._actions for name in action.option_strings}
    fields = {field.name for field in dataclasses.fields(source.options) if flag(field.name) in taken}
    if clash := fields - OF_RUNS:
        names = " and ".join(map(flag, sorted(clash)))
        said = "is an option" if len(clash) == 1 else "are options"
        raise WrongCall(f"{source.name}: {names} {said} of the command; rename the field")
    add_options(parser.add_argument_group(f"options of {source.name}"), source.options, without=fields)


def _launch(args: argparse.Namespace) -> int:
    if args.COMMAND != _LAUNCH:
        raise WrongCall("a command is needed: train, compare, diagnose, tune, plan or launch; see --help")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    with checking_the_call():
        check_launch(command)
        check_outputs(folders={"--logdir": getattr(args, "logdir", None)})
    options = read_options(LaunchOptions, vars(args))
    try:
        launch(command, args.processes, **dataclasses.asdict(options))
    except LaunchError as error:
        report_error(error)
        return error.code
    return 0
