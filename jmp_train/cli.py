"""`jmp-train`: train a task in one policy or AMP mode, compare several, or launch several processes.

Exit codes: 0 all is well, 1 a run failed, 2 the call is wrong. Errors are one line.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jmp_train import __version__
from jmp_train.command_options import Failure
from jmp_train.compare_command import DEFAULT_POLICIES, compare_command
from jmp_train.output import lasting_output
from jmp_train.setups import MODE_CHOICES, precision_of
from jmp_train.tasks import TASK_NAMES
from jmp_train.train_command import DEFAULT_POLICY, train_command


@lasting_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
      argv: the arguments; None for those of the process.

    Returns:
      0 or 1. A wrong call exits with 2.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except ModuleNotFoundError as error:
        return _fail(f"this needs the package {error.name}: pip install 'jmp_train[train]'")
    except (Failure, ValueError, OSError, FloatingPointError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _fail(text: str) -> int:
    print(f"jmp-train: error: {text}", file=sys.stderr)
    return 1


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jmp-train", description="Mixed-precision training in JAX.")
    parser.add_argument("--version", action="version", version=f"jmp-train {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    train = commands.add_parser("train", help="train a task in one policy or AMP mode")
    one = train.add_mutually_exclusive_group()
    one.add_argument(
        "--policy",
        type=_name,
        dest="name",
        metavar="NAME",
        help=f"such as float32, or a mode; default: {DEFAULT_POLICY}",
    )
    one.add_argument(
        "--mode", type=_name, dest="name", metavar="NAME", help=f"{MODE_CHOICES}; or a policy"
    )
    train.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="save the run in DIR")
    train.add_argument(
        "--checkpoint-every", type=_positive, metavar="STEPS", help="default: once an epoch"
    )
    train.add_argument(
        "--resume", action="store_true", help="go on from DIR's last checkpoint, if it has one"
    )
    train.set_defaults(run=train_command)

    compare = commands.add_parser("compare", help="train a task in several policies or AMP modes")
    several = compare.add_mutually_exclusive_group()
    several.add_argument(
        "--policies",
        type=_name,
        nargs="+",
        metavar="NAME",
        help=f"or modes; default: {' '.join(DEFAULT_POLICIES)}",
    )
    several.add_argument(
        "--modes",
        type=_name,
        nargs="+",
        metavar="NAME",
        help=f"{MODE_CHOICES}; or policies; prints a table of speed and memory beside the first, too",
    )
    compare.add_argument("--out", type=Path, metavar="DIR", help="write report.json, .png, .html")
    compare.set_defaults(run=compare_command)

    launch = commands.add_parser("launch", help="run a script as several processes on this machine")
    launch.add_argument(
        "-n", "--processes", type=_positive, required=True, metavar="N", help="how many"
    )
    launch.add_argument(
        "--devices-per-process", type=_positive, default=1, metavar="N", help="default: 1"
    )
    launch.add_argument("--logdir", type=Path, metavar="DIR", help="write DIR/rank_0.log and so on")
    launch.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start all anew after a failure, so many times; default: 0",
    )
    launch.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ...", help="and its arguments"
    )
    launch.set_defaults(run=_launch)

    for command in (train, compare):
        command.add_argument("task", nargs="?", default="digits", choices=TASK_NAMES)
        command.add_argument("--epochs", type=_positive, help="default: the task's")
        command.add_argument("--batch-size", type=_positive, help="default: the task's")
        command.add_argument(
            "--devices", type=_positive, default=1, help="cut each batch over so many; default: 1"
        )
        command.add_argument("--seed", type=_seed, default=0, help="default: 0")
        command.add_argument("--data-dir", type=Path, metavar="DIR", help="where the files are")
        command.add_argument("--synthetic", action="store_true", help="made-up data, same shapes")
        command.add_argument("--train-size", type=_positive, help="only the first N training rows")
        command.add_argument("--model", help="gcn or gat of karate; gcn, gat or sage of cora")
        command.add_argument(
            "--heads",
            type=_positive,
            nargs=3,
            metavar="N",
            help="of each layer of reddit's GAT; default: 1 1 1",
        )
        command.add_argument(
            "--scale",
            type=_scale,
            help="with --synthetic, the share of reddit's nodes and edges; default: 1",
        )
        command.add_argument(
            "--image-size",
            type=_positive,
            metavar="N",
            help="the side of vit-b16's images in pixels, a multiple of 16; default: 224",
        )
        command.add_argument(
            "--logdir", type=Path, metavar="DIR", help="write DIR/NAME for TensorBoard, and lines"
        )
        command.add_argument("--json", action="store_true", help="print JSON on standard output")
    return parser


def _name(text: str) -> str:
    try:
        # "half" would ask the device, which belongs to the training process.
        precision_of(text.replace("half", "float16"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {2**32 - 1}")
    return int(text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _count(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return scale


def _launch(args: argparse.Namespace) -> int:
    from jmp_train.launcher import launch

    launch(
        args.command[1:] if args.command[:1] == ["--"] else args.command,
        args.processes,
        devices_per_process=args.devices_per_process,
        logdir=args.logdir,
        restarts=args.restarts,
    )
    return 0
