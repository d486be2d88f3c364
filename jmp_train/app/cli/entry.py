"""`jmp-train`: train a task in one policy or AMP mode, compare several, diagnose, tune, plan, launch processes.

Exit codes and errors are those of `jmp_train.app.cli.errors`.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jmp_train import __version__
from jmp_train.app.cli.compare import DEFAULT_POLICIES, CompareOptions, compare_command
from jmp_train.app.cli.diagnose import DiagnoseOptions, diagnose_command
from jmp_train.app.cli.errors import INTERRUPTED, WrongCall, checking_the_call, is_of_interrupt, report_error
from jmp_train.app.cli.jobs import OF_RUNS, OF_TASK
from jmp_train.app.cli.option_values import Parser, count, few, path, positive, precision_name, schedule_of_precisions
from jmp_train.app.cli.options import (
    DEFAULT_POLICY,
    BatchOptions,
    PlannedOptions,
    RunOptions,
    SetupOptions,
    add_options,
    flag,
    option,
)
from jmp_train.app.cli.outputs import make_writable
from jmp_train.app.cli.plan import PLANNED_POLICIES, PlanOptions, plan_command
from jmp_train.app.cli.train import TrainOptions, train_command
from jmp_train.app.cli.tune import TuneOptions, tune_command
from jmp_train.app.launch import LaunchError, check_launch, lasting_output, launch, threads_for
from jmp_train.app.runs import MODE_CHOICES, SCHEDULE_FORM
from jmp_train.app.tasks import BUILT_IN, TASK_FORMS, find_task, is_task_text
from jmp_train.command_start import interrupts_raised
from jmp_train.distributed import end_at_once, initialize
from jmp_train.policies.autocasting import FUSION_FLAG

_VALUES: dict[Any, float] = {0: 0, "+": math.inf}  # number of values of an option, by its nargs
_TASK_HELP = f"{BUILT_IN}, {TASK_FORMS}; default: {BUILT_IN}; TASK --help shows its own options"
_SCHEDULES = f"{SCHEDULE_FORM} for a schedule; mixed_float16,0.9:float32 trains the last tenth of the steps in float32"
_COMMANDS = {
    "train": "train a task in one policy or AMP mode",
    "compare": "train a task in several policies or AMP modes",
    "diagnose": "report the effect of half precision on each operation of a step",
    "tune": "find the operations of a task that must stay in float32",
    "plan": "predict memory and time of a step on GPUs, without a GPU",
    "launch": "run a script as several processes on this machine",
}
_ONE = {
    "--policy": f"such as float32, or a mode, or {_SCHEDULES}; default: {DEFAULT_POLICY}",
    "--mode": f"{MODE_CHOICES}; or a policy",
}
_COMPARED = {
    "--policies": f"or modes, or {_SCHEDULES}; default: {' '.join(DEFAULT_POLICIES)}",
    "--modes": f"{MODE_CHOICES}; or policies; also prints a table of speed and memory relative to the first",
}
_PLANNED = {
    "--policies": f"or modes; default: {' '.join(PLANNED_POLICIES)}",
    "--modes": f"{MODE_CHOICES}; or policies",
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
      The exit code, see `jmp_train.app.cli.errors.EXIT_CODES`. `--help` and `--version` exit with 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        with interrupts_raised():
            args = _parser(arguments).parse_args(arguments)
            code = args.run(args)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:  # noqa: BLE001 - of any kind, because the user gets one line
        code = INTERRUPTED if is_of_interrupt(error) else report_error(error)
    if code and jax.distributed.is_initialized():
        end_at_once(code)  # jax would wait for the other processes, which wait for this one
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of a call, with the options of its task."""
    parser = Parser(prog="jmp-train", description="Mixed-precision training in JAX.")
    parser.add_argument("--version", action="version", version=f"jmp-train {__version__}")
    parser.set_defaults(run=_no_command)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    made = {name: commands.add_parser(name, help=text) for name, text in _COMMANDS.items()}
    _add_names(made["train"], _ONE, type=schedule_of_precisions, dest="name")
    _add_names(made["compare"], _COMPARED, type=schedule_of_precisions, nargs="+")
    _add_names(made["diagnose"], _ONE, type=schedule_of_precisions, dest="name")
    _add_names(made["plan"], _PLANNED, type=precision_name, nargs="+", dest="policies")
    for name, run, own, shared in (
        ("train", train_command, TrainOptions, RunOptions),
        ("compare", compare_command, CompareOptions, RunOptions),
        ("diagnose", diagnose_command, DiagnoseOptions, SetupOptions),
        ("tune", tune_command, TuneOptions, BatchOptions),
        ("plan", plan_command, PlanOptions, PlannedOptions),
    ):
        command = made[name]
        command.usage = f"jmp-train {name} [TASK] [options]"
        command.add_argument("task", nargs="?", default=BUILT_IN, metavar="TASK", help=_TASK_HELP)
        command.set_defaults(run=run, options=shared)
        add_options(command, own)
        add_options(command, shared)
        command.add_argument("--json", action="store_true", help="print JSON on standard output")
        if arguments and arguments[0] == name:
            _add_task(arguments, command)
    launcher = made["launch"]
    launcher.add_argument("-n", "--processes", type=few, required=True, metavar="N", help="the number of processes")
    add_options(launcher, LaunchOptions)
    launcher.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ...", help="a Python script and its arguments"
    )
    launcher.set_defaults(run=_launch)
    return parser


def _add_names(parser: argparse.ArgumentParser, helps: Mapping[str, str], **said: Any) -> None:
    """Adds options for policies and for modes. A call has one of them; either also takes names of the other kind."""
    exclusive = parser.add_mutually_exclusive_group()
    for name, text in helps.items():
        exclusive.add_argument(name, metavar="NAME", help=text, **said)


def _add_task(arguments: Sequence[str], command: argparse.ArgumentParser) -> None:
    """Finds the task of a call, and adds its options to those of its command."""
    text = _task_in(arguments[1:], command)
    if {"-h", "--help", "--install"} & set(arguments) and text is None:
        return
    _start_jax(arguments)
    with checking_the_call():
        source = find_task(text or BUILT_IN)
    command.set_defaults(source=source)
    if source.options is None:
        return
    taken = {name for action in command._actions for name in action.option_strings}
    fields = {field.name for field in dataclasses.fields(source.options) if flag(field.name) in taken}
    if clash := fields - OF_RUNS:
        names = " and ".join(map(flag, sorted(clash)))
        said = "is an option" if len(clash) == 1 else "are options"
        raise WrongCall(f"{source.name}: {names} {said} of the command; rename the field")
    group = command.add_argument_group(f"options of {source.name}")
    add_options(group, source.options, without=fields, prefix=OF_TASK)


def _task_in(arguments: Sequence[str], command: argparse.ArgumentParser) -> str | None:
    """Returns the argument that names the task; None if there is none.

    The options of the task are not known yet, nor whether they take values. So the task is the first argument in a
    task's form that is not a value of one of the command's own options, or the first argument of all.
    """
    actions = {name: action for action in command._actions for name in action.option_strings}
    left: float = 0
    candidates = []
    for place, text in enumerate(arguments):
        if text == "--":
            break
        if text.startswith("-") and len(text) > 1:
            action = actions.get(text)
            left = 0 if action is None else _VALUES.get(action.nargs, 1)
        elif left:
            left -= 1
        elif is_task_text(text) or not place:
            candidates.append(text)
    return next(filter(is_task_text, candidates), next(iter(candidates), None))


def _start_jax(arguments: Sequence[str]) -> None:
    """Sets options of jax that must be set before a user's file may use it."""
    several = os.environ.get("JAX_NUM_PROCESSES", "1") != "1"
    if several and arguments[0] != "train":
        raise WrongCall(f"{arguments[0]} runs in one process; of the commands, only train runs in several")
    if arguments[0] == "plan":
        jax.config.update("jax_platforms", "cpu")  # so that a GPU stays free for measurements
        return
    turn_ynn_fusion_off()
    if several:
        initialize()
        return
    found = re.search(r"(?<!\S)--devices[ =](\d{1,4})(?!\S)", " ".join(arguments))
    with contextlib.suppress(argparse.ArgumentTypeError):  # the parser reports it
        provide_cpu_devices(few(found[1]) if found else 1)


def turn_ynn_fusion_off() -> None:
    """Disables a fusion in XLA that leaves bfloat16 results unwritten on CPUs (jaxlib 0.11, 0.12)."""
    flags = os.environ.get("XLA_FLAGS", "")
    if FUSION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSION_FLAG}".strip()


def provide_cpu_devices(count: int) -> None:
    """Splits a CPU into this many devices, before jax starts; accelerators are not changed."""
    if count == 1:
        return
    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < count:
        with contextlib.suppress(RuntimeError):  # jax has started, and its devices are fixed
            jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(threads_for(count)))


def _no_command(args: argparse.Namespace) -> int:
    raise WrongCall("a command is needed: train, compare, diagnose, tune, plan or launch; see --help")


def _launch(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    with checking_the_call():
        check_launch(command)
        make_writable("--logdir", args.logdir)
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(LaunchOptions)}
    try:
        launch(command, args.processes, **given)
    except LaunchError as error:
        report_error(error)
        return error.code
    return 0
