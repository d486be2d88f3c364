"""`jmp-train`: train a task in one policy or AMP mode, compare several, diagnose, tune, plan, launch several processes.

Exit codes and errors are those of `jmp_train.cli.errors`.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from jmp_train import __version__
from jmp_train.cli.arguments import (
    Parser,
    above_zero,
    add_diagnosis_options,
    count,
    few,
    path,
    positive,
    precision_name,
    schedule_of_precisions,
)
from jmp_train.cli.arguments import (
    scale as share,
)
from jmp_train.cli.compare import DEFAULT_POLICIES, compare_command
from jmp_train.cli.dataclass_options import add_options, flag
from jmp_train.cli.diagnose import diagnose_command
from jmp_train.cli.errors import WrongCall, checking_the_call
from jmp_train.cli.jobs import OF_RUNS, OF_TASK
from jmp_train.cli.options import (
    DEFAULT_POLICY,
    BatchOptions,
    PlannedOptions,
    RunOptions,
    SetupOptions,
    provide_cpu_devices,
    turn_ynn_fusion_off,
)
from jmp_train.cli.plan import PLANNED_GPUS, PLANNED_POLICIES, plan_command
from jmp_train.cli.running import run_command
from jmp_train.cli.train import train_command
from jmp_train.cli.tune import tune_command
from jmp_train.launch import lasting_output
from jmp_train.runs import MODE_CHOICES, SCHEDULE_FORM
from jmp_train.tasks import TASK_FORMS, TASK_NAMES, find_task, is_task_text

_DEFAULT_TASK = "digits"
_VALUES: dict[Any, float] = {0: 0, "+": math.inf}  # of an option, by its nargs
_TASK_HELP = f"{', '.join(TASK_NAMES)}; {TASK_FORMS}; default: {_DEFAULT_TASK}; TASK --help shows its own options"
_SCHEDULES = (
    f"{SCHEDULE_FORM} for a schedule, as mixed_float16,0.9:float32 trains the last tenth of the steps in float32"
)


@lasting_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
      argv: the arguments; None for those of the process.

    Returns:
      The exit code, see `jmp_train.cli.errors.EXIT_CODES`. `--help` and `--version` exit with 0.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    return run_command(partial(_parser, arguments), arguments)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of a call, whose task has options of its own."""
    parser = Parser(prog="jmp-train", description="Mixed-precision training in JAX.")
    parser.add_argument("--version", action="version", version=f"jmp-train {__version__}")
    parser.set_defaults(run=_no_command)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    train = commands.add_parser("train", help="train a task in one policy or AMP mode")
    _add_name(train)
    train.add_argument("--checkpoint-dir", type=path, metavar="DIR", help="save the run in DIR")
    train.add_argument("--checkpoint-every", type=positive, metavar="STEPS", help="default: once an epoch")
    train.add_argument("--resume", action="store_true", help="go on from DIR's last checkpoint, if it has one")
    train.add_argument(
        "--capsules", type=path, metavar="DIR", help="write the last skipped steps in DIR, to replay them"
    )
    train.set_defaults(run=train_command)

    compare = commands.add_parser("compare", help="train a task in several policies or AMP modes")
    several = compare.add_mutually_exclusive_group()
    several.add_argument(
        "--policies",
        type=schedule_of_precisions,
        nargs="+",
        metavar="NAME",
        help=f"or modes, or {_SCHEDULES}; default: {' '.join(DEFAULT_POLICIES)}",
    )
    several.add_argument(
        "--modes",
        type=schedule_of_precisions,
        nargs="+",
        metavar="NAME",
        help=f"{MODE_CHOICES}; or policies; prints a table of speed and memory beside the first, too",
    )
    compare.add_argument("--out", type=path, metavar="DIR", help="write report.json, .png, .html")
    compare.set_defaults(run=compare_command)

    diagnose = commands.add_parser("diagnose", help="say what half precision does to each operation of a step")
    _add_name(diagnose)
    diagnose.add_argument("--checkpoint-dir", type=path, metavar="DIR", help="the state of the run's last checkpoint")
    diagnose.add_argument(
        "--after", type=count, metavar="STEPS", help="train so many steps before; default: 0, or up to the capsule's"
    )
    diagnose.add_argument(
        "--capsule", type=path, metavar="FILE", help="the batch of a skipped step, and its state, see train --capsules"
    )
    diagnose.set_defaults(run=diagnose_command)

    tune = commands.add_parser("tune", help="find the operations of a task that have to stay in float32")
    _add_tuning_options(tune)
    tune.set_defaults(run=tune_command)

    plan = commands.add_parser("plan", help="say what a step would need on GPUs that need not be there")
    _add_planning_options(plan)
    plan.set_defaults(run=plan_command)

    launch = commands.add_parser("launch", help="run a script as several processes on this machine")
    launch.add_argument("-n", "--processes", type=few, required=True, metavar="N", help="how many")
    launch.add_argument("--devices-per-process", type=few, default=1, metavar="N", help="default: 1")
    launch.add_argument("--logdir", type=path, metavar="DIR", help="write DIR/rank_0.log and so on")
    launch.add_argument(
        "--restarts",
        type=count,
        default=0,
        metavar="N",
        help="restart all after a failure, so many times; default: 0",
    )
    launch.add_argument(
        "--exit-timeout",
        type=positive,
        metavar="SECONDS",
        help="stop processes that run on so long after the first has ended well; default: never",
    )
    launch.add_argument("command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ...", help="and its arguments")
    launch.set_defaults(run=_launch)

    options = {
        "train": (train, RunOptions),
        "compare": (compare, RunOptions),
        "diagnose": (diagnose, SetupOptions),
        "tune": (tune, BatchOptions),
        "plan": (plan, PlannedOptions),
    }
    for name, (command, kind) in options.items():
        command.usage = f"jmp-train {name} [TASK] [options]"
        command.add_argument("task", nargs="?", default=_DEFAULT_TASK, metavar="TASK", help=_TASK_HELP)
        command.set_defaults(options=kind)
        add_options(command, kind)
    add_diagnosis_options(diagnose)
    for command in (train, compare, tune, plan):
        command.add_argument("--json", action="store_true", help="print JSON on standard output")
    if arguments and arguments[0] in options:
        _add_task(arguments, options[arguments[0]][0])
    return parser


def _add_task(arguments: Sequence[str], command: argparse.ArgumentParser) -> None:
    """Finds the task of a call, and adds its options to those of its command."""
    text = _task_in(arguments[1:], command)
    if {"-h", "--help", "--install"} & set(arguments) and text is None:
        return
    _start_jax(arguments)
    with checking_the_call():
        source = find_task(text or _DEFAULT_TASK)
    command.set_defaults(source=source)
    if source.options is None:
        return
    taken = {name for action in command._actions for name in action.option_strings}
    fields = {field.name for field in dataclasses.fields(source.options) if flag(field.name) in taken}
    if clash := fields - OF_RUNS:
        names = ", ".join(map(flag, sorted(clash)))
        raise WrongCall(f"{source.name}: {names} is an option of the command; give the field another name")
    group = command.add_argument_group(f"options of {source.name}")
    add_options(group, source.options, without=fields, prefix=OF_TASK)


def _task_in(arguments: Sequence[str], command: argparse.ArgumentParser) -> str | None:
    """Returns the argument that is the task; None if there is none.

    It is not yet known which options the task adds, and whether these take values. So it is the first argument of a
    task's form that is not a value of one of the command's own options; or the first argument of all.
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
    """Sets what jax has to know before a user's file may use it."""
    if arguments[0] == "plan":
        jax.config.update("jax_platforms", "cpu")  # so that a GPU is free for what is measured
        return
    turn_ynn_fusion_off()
    if arguments[0] == "train" and os.environ.get("JAX_NUM_PROCESSES", "1") != "1":
        from jmp_train.distributed import initialize

        initialize()
        return
    found = re.search(r"(?<!\S)--devices[ =](\d{1,4})(?!\S)", " ".join(arguments))
    with contextlib.suppress(argparse.ArgumentTypeError):  # the parser says so
        provide_cpu_devices(few(found[1]) if found else 1)


def _add_name(parser: argparse.ArgumentParser) -> None:
    """Adds the policy or mode, either of which names one precision."""
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--policy",
        type=schedule_of_precisions,
        dest="name",
        metavar="NAME",
        help=f"such as float32, or a mode, or {_SCHEDULES}; default: {DEFAULT_POLICY}",
    )
    one.add_argument(
        "--mode",
        type=schedule_of_precisions,
        dest="name",
        metavar="NAME",
        help=f"{MODE_CHOICES}; or a policy",
    )


def _add_tuning_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16", help="default: float16")
    parser.add_argument("--out", type=path, metavar="FILE", help="write the rules in FILE, for --rules")
    parser.add_argument("--page", type=path, metavar="FILE", help="write the report in FILE, an HTML page")
    parser.add_argument(
        "--checkpoint-dir", type=path, metavar="DIR", help="the state of a float32 run's last checkpoint"
    )
    parser.add_argument(
        "--after", type=count, default=0, metavar="STEPS", help="train so many steps in float32 before; default: 0"
    )
    parser.add_argument(
        "--examples", type=positive, metavar="N", help="tune for N batches, of which the last is held out; default: 4"
    )
    parser.add_argument(
        "--tolerance",
        type=above_zero,
        metavar="X",
        help="relative error of loss and gradient; default: jt.Tolerance's",
    )
    parser.add_argument("--budget", type=positive, default=1000, metavar="N", help="try so many choices at most; 1000")
    parser.add_argument(
        "--steps", type=count, default=20, metavar="N", help="train N steps beside float32 in the end; default: 20"
    )


def _add_planning_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", nargs="+", metavar="NAME", help=f"default: {' '.join(PLANNED_GPUS)}")
    parser.add_argument("--gpu-file", type=path, metavar="FILE", help="GPUs of your own, a TOML file")
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--policies",
        type=precision_name,
        nargs="+",
        metavar="NAME",
        help=f"or modes; default: {' '.join(PLANNED_POLICIES)}",
    )
    several.add_argument(
        "--modes", type=precision_name, dest="policies", nargs="+", metavar="NAME", help=f"{MODE_CHOICES}; or policies"
    )
    parser.add_argument(
        "--shardings",
        nargs="+",
        choices=("replicated", "zero1", "fsdp"),
        metavar="NAME",
        help="how several devices hold the state: replicated, zero1 or fsdp; default: replicated",
    )
    parser.add_argument("--batch-size", type=positive, metavar="N", help="over all devices; default: the task's")
    parser.add_argument(
        "--memory-fraction", type=share, metavar="X", help="of a GPU's memory that jax takes; default: 0.75, as jax's"
    )
    parser.add_argument("--no-largest", action="store_true", help="do not search for the largest batch that fits")
    parser.add_argument("--remedies", action="store_true", help="compile what could help, also where the step fits")
    parser.add_argument("--buffers", type=positive, metavar="N", help="print the N largest buffers at the peak")
    parser.add_argument("--page", type=path, metavar="FILE", help="write the report in FILE, an HTML page")
    parser.add_argument("--measure", action="store_true", help="run the step on the GPU that is here, beside the plan")
    parser.add_argument("--install", action="store_true", help="install XLA's compiler for CUDA, once, about 600 MB")
    parser.add_argument("--cuda", choices=("12", "13"), default="12", help="of --install; 13 has no V100; default: 12")


def _no_command(args: argparse.Namespace) -> int:
    raise WrongCall("a command is wanted: train, compare, diagnose, tune, plan or launch; --help says more")


def _launch(args: argparse.Namespace) -> int:
    from jmp_train.cli.options import make_writable
    from jmp_train.launch import check_launch, launch

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    with checking_the_call():
        check_launch(command, args.processes)
        if args.logdir is not None:
            make_writable("--logdir", args.logdir)
    launch(
        command,
        args.processes,
        devices_per_process=args.devices_per_process,
        logdir=args.logdir,
        restarts=args.restarts,
        exit_timeout=args.exit_timeout,
    )
    return 0
