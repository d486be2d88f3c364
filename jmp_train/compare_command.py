"""`jmp-train compare`: one task in several policies or AMP modes, each in a process of its own."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any

from jmp_train.command_errors import Failure, WrongCall, checking_the_call
from jmp_train.command_options import make_writable, task_options
from jmp_train.tasks import load_task

if TYPE_CHECKING:
    from jmp_train.display import Display
    from jmp_train.records import Run

DEFAULT_POLICIES = ("float32", "autocast_float16", "autocast_bfloat16")

# What `compare` hands on to its processes, but for flags.
_HANDED_ON = (
    "seed",
    "epochs",
    "batch_size",
    "devices",
    "data_dir",
    "train_size",
    "model",
    "heads",
    "scale",
    "image_size",
    "logdir",
)


def compare_command(args: argparse.Namespace) -> int:
    """Trains under each name in a process of its own, so that time and memory are that name's."""
    from jmp_train.comparison import explain_failure, explanations
    from jmp_train.display import display_on
    from jmp_train.report import print_speed_table, print_table, report, write_report
    from jmp_train.training import count_steps

    names = args.modes or args.policies or DEFAULT_POLICIES
    with checking_the_call():
        task = load_task(args.task, task_options(args))
        epochs = args.epochs or task.epochs
        count_steps(task, epochs, args.batch_size or task.batch_size)
        del task  # its data may be large, and each process has its own
        _check_outputs(args, names)
    log = sys.stderr if args.json else sys.stdout
    runs, failures = [], []
    with display_on(log, names, epochs) as display:
        for name in names:
            display.start(name)
            try:
                runs.append(_run_in_process(args, name, display))
            except Failure as failure:
                reason = explain_failure(name, str(failure))
                failures.append((name, reason))
                display.fail(name, reason)
    if args.out is not None and runs:  # an earlier report is not lost to a failure
        for path in write_report(args.out, args.task, runs, failures):
            print(f"wrote {path}", file=log)
    if args.json:
        print(json.dumps(report(args.task, runs), indent=2))
    elif runs:
        print_table(runs)
        if args.modes:
            print_speed_table(runs)
    for text in explanations(runs):
        print(text, file=log)
    if failures:
        raise Failure("; ".join(f"{name}: {reason}" for name, reason in failures))
    return 0


def _check_outputs(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises an error if what a comparison is to write could not be written at its end."""
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        option = "--modes" if args.modes else "--policies"
        raise WrongCall(f"{option} names {repeated[0]} more than once")
    if args.out is not None:
        import matplotlib  # noqa: F401  # wanted at the end, and missed too late there

        make_writable("--out", args.out)
    if args.logdir is not None:
        from jmp_train.run_log import check_unused

        make_writable("--logdir", args.logdir)
        for name in names:
            check_unused(args.logdir / name)


def _run_in_process(args: argparse.Namespace, name: str, display: "Display") -> "Run":
    """Returns the run; raises Failure if the process did not end well."""
    from jmp_train.records import Run, event_from_json

    run = None
    with tempfile.TemporaryFile("w+") as errors, _start(args, name, errors) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = event_from_json(json.loads(line))
                display.show(name, event)
                if isinstance(event, Run):
                    run = event
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        errors.seek(0)
        text = errors.read()
    if code != 0 or run is None:
        raise Failure(_reason(code, text))
    return run


def _start(args: argparse.Namespace, name: str, errors: Any) -> Popen[str]:
    command = [sys.executable, "-m", "jmp_train", "train", args.task, "--policy", name, "--json"]
    for option in _HANDED_ON:
        value = getattr(args, option)
        if value is not None:
            values = value if isinstance(value, list) else [value]
            command += [f"--{option.replace('_', '-')}", *map(str, values)]
    if args.synthetic:
        command.append("--synthetic")
    return Popen(command, stdout=PIPE, stderr=errors, text=True)


def _reason(code: int, errors: str) -> str:
    """Returns one line that says why the process failed; what else it printed goes to stderr."""
    lines = errors.strip().splitlines()
    prefix = "jmp-train: error: "
    if lines and lines[-1].startswith(prefix):
        return lines[-1].removeprefix(prefix)
    print(errors, end="", file=sys.stderr)
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
