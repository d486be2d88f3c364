"""`jmp-train`: train a task in one policy or AMP mode, compare several, or launch several processes.

Exit codes: 0 all is well, 1 a run failed, 2 the call is wrong. Errors are one line.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from jmp_train import __version__
from jmp_train.policies.cpu_convolutions import FUSION_FLAG
from jmp_train.setups import MODE_CHOICES, precision_of
from jmp_train.tasks import TASK_NAMES, load_task
from jmp_train.tasks.task import TaskOptions

if TYPE_CHECKING:
    from jmp_train.display import Display
    from jmp_train.records import Run
    from jmp_train.resuming import Saving

DEFAULT_POLICY = "autocast_float16"
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
    train.set_defaults(run=_train)

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
    compare.set_defaults(run=_compare)

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


def _train(args: argparse.Namespace) -> int:
    from jmp_train.comparison import note_outputs
    from jmp_train.display import display_on
    from jmp_train.records import Event, event_to_json
    from jmp_train.report import print_table
    from jmp_train.resuming import Stopped
    from jmp_train.training import train

    _turn_ynn_fusion_off()
    _provide_cpu_devices(args.devices)
    task = load_task(args.task, _task_options(args))
    epochs = args.epochs or task.epochs
    name = args.name or DEFAULT_POLICY
    with ExitStack() as stack:
        signals = stack.enter_context(_signals_noted(args.checkpoint_dir is not None))
        saving = _saving(args, stack, signals)
        log = None
        if args.logdir is not None:
            from jmp_train.run_log import RunLog

            log = stack.enter_context(RunLog(args.logdir / name))
        display = None
        if not args.json:
            display = stack.enter_context(display_on(sys.stdout, [name], epochs))
            display.start(name)

        def on_event(event: Event) -> None:
            if log is not None:
                log.write(event)
            if display is None:
                print(json.dumps(event_to_json(event)), flush=True)
            else:
                display.show(name, event)

        try:
            run = train(
                task,
                name,
                epochs=epochs,
                batch_size=args.batch_size,
                seed=args.seed,
                saving=saving,
                on_event=on_event,
            )
        except Stopped as stopped:
            print(f"jmp-train: {stopped}; --resume goes on", file=sys.stderr)
            return 128 + signals[0]
    if not args.json:
        print_table([run])
        if note := note_outputs(run):
            print(note)
    return 0


def _saving(args: argparse.Namespace, stack: ExitStack, signals: list[int]) -> "Saving | None":
    if args.checkpoint_dir is None:
        if args.resume or args.checkpoint_every:
            raise _Failure("--resume and --checkpoint-every want a --checkpoint-dir")
        return None
    from jmp_train.checkpoint import CheckpointStore
    from jmp_train.resuming import Saving

    store = stack.enter_context(CheckpointStore(args.checkpoint_dir))
    return Saving(store, args.checkpoint_every, args.resume, lambda: bool(signals))


@contextmanager
def _signals_noted(wanted: bool) -> Iterator[list[int]]:
    """Notes SIGTERM and SIGINT, so that the run can save; the second one interrupts."""
    numbers: list[int] = []

    def note(number: int, frame: Any) -> None:
        if numbers:
            raise KeyboardInterrupt
        numbers.append(number)

    kinds = (signal.SIGTERM, signal.SIGINT) if wanted else ()
    previous = {kind: signal.signal(kind, note) for kind in kinds}
    try:
        yield numbers
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def _task_options(args: argparse.Namespace) -> TaskOptions:
    return TaskOptions(
        data_dir=args.data_dir,
        synthetic=args.synthetic,
        train_size=args.train_size,
        model=args.model,
        heads=None if args.heads is None else tuple(args.heads),
        scale=args.scale,
        image_size=args.image_size,
        devices=args.devices,
    )


def _turn_ynn_fusion_off() -> None:
    """Keeps XLA from a fusion that leaves bfloat16 results unwritten on CPUs (jaxlib 0.11, 0.12)."""
    flags = os.environ.get("XLA_FLAGS", "")
    if FUSION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSION_FLAG}".strip()


def _provide_cpu_devices(count: int) -> None:
    """Lets jax, which has not started yet, cut a CPU into that many devices; accelerators stay as they are."""
    if count == 1:
        return
    from jmp_train.launcher import threads_for

    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < count:
        jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(threads_for(count)))


def _compare(args: argparse.Namespace) -> int:
    """Trains under each name in a process of its own, so that time and memory are that name's."""
    from jmp_train.comparison import explain_failure, explanations
    from jmp_train.display import display_on
    from jmp_train.report import print_speed_table, print_table, report, write_report
    from jmp_train.training import count_steps

    task = load_task(args.task, _task_options(args))
    epochs = args.epochs or task.epochs
    count_steps(task, epochs, args.batch_size or task.batch_size)
    del task  # its data may be large, and each process has its own
    names = args.modes or args.policies or DEFAULT_POLICIES
    _check_outputs(args, names)
    log = sys.stderr if args.json else sys.stdout
    runs, failures = [], []
    with display_on(log, names, epochs) as display:
        for name in names:
            display.start(name)
            try:
                runs.append(_run_in_process(args, name, display))
            except _Failure as failure:
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
        raise _Failure("; ".join(f"{name}: {reason}" for name, reason in failures))
    return 0


def _check_outputs(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises an error if what a comparison is to write could not be written at its end."""
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        option = "--modes" if args.modes else "--policies"
        raise _Failure(f"{option} names {repeated[0]} more than once")
    if args.out is not None:
        import matplotlib  # noqa: F401  # wanted at the end, and missed too late there

        _make_writable("--out", args.out)
    if args.logdir is not None:
        from jmp_train.run_log import check_unused

        _make_writable("--logdir", args.logdir)
        for name in names:
            check_unused(args.logdir / name)


def _run_in_process(args: argparse.Namespace, name: str, display: "Display") -> "Run":
    """Returns the run; raises _Failure if the process did not end well."""
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
        raise _Failure(_reason(code, text))
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


def _make_writable(option: str, directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _Failure(f"{option} {directory}: {error.strerror}") from None
