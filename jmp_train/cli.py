"""`jmp-train`: train a task in one policy, or compare policies side by side.

Exit codes: 0 all is well, 1 a run failed, 2 the call is wrong. Errors are one line.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any, NoReturn

from jmp_train import __version__
from jmp_train.policies.policy import get_policy
from jmp_train.tasks import TASK_NAMES, load_task

if TYPE_CHECKING:
    from jmp_train.training import Run

DEFAULT_POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


class _Failure(Exception):
    """A run that did not end well; its text is the line that the user sees."""


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
    except (_Failure, ValueError, OSError, FloatingPointError) as error:
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

    train = commands.add_parser("train", help="train a task in one policy")
    train.add_argument("--policy", type=_policy_name, default="float32", help="default: float32")
    train.set_defaults(run=_train)

    compare = commands.add_parser("compare", help="train a task in several policies")
    compare.add_argument(
        "--policies",
        type=_policy_name,
        nargs="+",
        default=DEFAULT_POLICIES,
        help=f"default: {' '.join(DEFAULT_POLICIES)}",
    )
    compare.add_argument("--out", type=Path, metavar="DIR", help="write DIR/report.json")
    compare.set_defaults(run=_compare)

    for command in (train, compare):
        command.add_argument("task", nargs="?", default="digits", choices=TASK_NAMES)
        command.add_argument("--epochs", type=_positive, help="default: the task's")
        command.add_argument("--batch-size", type=_positive, help="default: the task's")
        command.add_argument("--seed", type=_natural, default=0, help="default: 0")
        command.add_argument("--json", action="store_true", help="print JSON on standard output")
    return parser


def _policy_name(text: str) -> str:
    try:
        # "half" would ask the device, which belongs to the training process.
        get_policy(text.replace("half", "float16"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _train(args: argparse.Namespace) -> int:
    from jmp_train.memory import peak_memory
    from jmp_train.report import epoch_json, epoch_line, print_table, run_report
    from jmp_train.training import Epoch, train

    _turn_ynn_fusion_off()
    task = load_task(args.task)
    epochs = args.epochs or task.epochs

    def show(epoch: Epoch) -> None:
        line = epoch_line(args.policy, epoch, epochs)
        print(json.dumps(epoch_json(epoch)) if args.json else line, flush=True)

    run = train(
        task,
        args.policy,
        epochs=epochs,
        batch_size=args.batch_size,
        seed=args.seed,
        on_epoch=show,
    )
    memory_of = peak_memory()[1]
    if args.json:
        print(json.dumps({**run_report(run), "memory_of": memory_of}))
    else:
        print_table([run], memory_of)
    return 0


def _turn_ynn_fusion_off() -> None:
    """Keeps XLA from a fusion that leaves bfloat16 results unwritten on CPUs (jaxlib 0.11, 0.12)."""
    flag, flags = "--xla_cpu_experimental_ynn_fusion_type=", os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _compare(args: argparse.Namespace) -> int:
    """Trains each policy in a process of its own, so that time and memory are that policy's."""
    from jmp_train.report import print_table, report, write_report
    from jmp_train.training import count_steps

    task = load_task(args.task)
    epochs = args.epochs or task.epochs
    count_steps(task, epochs, args.batch_size or task.batch_size)
    if args.out is not None:
        _make_writable(args.out)
    log = sys.stderr if args.json else sys.stdout
    runs, failures = [], []
    for policy in args.policies:
        try:
            runs.append(_run_in_process(args, policy, epochs, log))
        except _Failure as failure:
            failures.append(f"{policy}: {failure}")
    content = report(args.task, [run for run, _ in runs])
    if args.out is not None and runs:  # an earlier report is not lost to a failure
        print(f"wrote {write_report(args.out, content)}", file=log)
    if args.json:
        print(json.dumps(content, indent=2))
    elif runs:
        print_table([run for run, _ in runs], runs[0][1])
    if failures:
        raise _Failure("; ".join(failures))
    return 0


def _run_in_process(
    args: argparse.Namespace, policy: str, total: int, log: Any
) -> tuple["Run", str]:
    """Returns the run, and whose memory it reports; raises _Failure if the process did not end well."""
    from jmp_train.report import epoch_from_json, epoch_line
    from jmp_train.training import Run

    epochs, result = [], None
    with tempfile.TemporaryFile("w+") as errors, _start(args, policy, errors) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                fields = json.loads(line)
                if "test_accuracy" in fields:
                    result = fields
                    continue
                epochs.append(epoch := epoch_from_json(fields))
                print(epoch_line(policy, epoch, total), file=log, flush=True)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        errors.seek(0)
        text = errors.read()
    if code != 0 or result is None:
        raise _Failure(_reason(code, text))
    return Run(policy, result["test_accuracy"], tuple(epochs)), result["memory_of"]


def _start(args: argparse.Namespace, policy: str, errors: Any) -> Popen[str]:
    command = [sys.executable, "-m", "jmp_train", "train", args.task, "--policy", policy, "--json"]
    command += ["--seed", str(args.seed)]
    for option in ("epochs", "batch_size"):
        value = getattr(args, option)
        if value is not None:
            command += [f"--{option.replace('_', '-')}", str(value)]
    return Popen(command, stdout=PIPE, stderr=errors, text=True)


def _reason(code: int, errors: str) -> str:
    """Returns one line that says why the process failed; what else it printed goes to stderr."""
    lines = errors.strip().splitlines()
    prefix = "jmp-train: error: "
    if lines and lines[-1].startswith(prefix):
        return lines[-1].removeprefix(prefix)
    print(errors, end="", file=sys.stderr)
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _Failure(f"--out {directory}: {error.strerror}") from None
