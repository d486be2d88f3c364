"""`jmp-train plan`: what a step would need on GPUs that need not be there."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from jmp_train.cli.errors import PROBLEMS_FOUND, RUN_FAILED, Failure, WrongCall, checking_the_call
from jmp_train.cli.jobs import OF_TASK, read_task_options, run_settings
from jmp_train.cli.options import check_file, output_with_folders
from jmp_train.launch import Output
from jmp_train.runs import DEFAULT_FEW_BITS
from jmp_train.task import Task, count_examples
from jmp_train.tasks import TaskSource, described, errors_of_file

if TYPE_CHECKING:
    from jmp_train.planning import Plan

PLANNED_GPUS = ("V100-16GB", "A100-40GB", "H100-80GB")
PLANNED_POLICIES = ("float32", "autocast_float16", "autocast_bfloat16")
_WANTED = "wanted is a jt.Task, (step, state, batch), or a parameter for the policy, with which it returns these"


def plan_command(args: argparse.Namespace) -> int:
    """Plans a task or a script's step, prints and writes what is found, and returns the exit code."""
    if args.install:
        return _install(args)
    from jmp_train.aot import INSTALL, PluginError
    from jmp_train.reports import compilations_shown

    made = [] if args.page is None else check_file("--page", args.page)
    with output_with_folders(made, as_json=args.json) as output:
        try:
            with compilations_shown(sys.stderr) if output is None else nullcontext() as progress:
                found = _plan(args, progress)
        except PluginError as error:
            raise Failure(str(error).replace(INSTALL, "jmp-train plan --install")) from error
        return _show(found, args, output)


def _install(args: argparse.Namespace) -> int:
    from jmp_train.aot import PluginError, install_compiler

    print("installing XLA's compiler for CUDA, about 600 MB", file=sys.stderr)
    try:
        print(f"XLA's compiler for CUDA is in {install_compiler(args.cuda)}")
    except PluginError as error:
        raise Failure(str(error)) from error
    return 0


def _plan(args: argparse.Namespace, progress: Callable[[int, str], None] | None) -> "Plan":
    from jmp_train.planning import Allowances, plan

    with checking_the_call():
        options: dict[str, Any] = {
            "gpus": _gpus(args),
            "devices": args.devices or 1,
            "shardings": args.shardings or "replicated",
            "find_largest": not args.no_largest,
            "remedies": True if args.remedies else None,
            "measure": args.measure,
            "progress": progress,
        }
        if args.memory_fraction is not None:
            options["allowances"] = Allowances(memory_fraction=args.memory_fraction)
    source: TaskSource = args.source
    if source.takes_policy:
        with _errors_while_planning(source):
            return plan(source.function, policies=args.policies or PLANNED_POLICIES, **_with_batch_size(args, options))
    with checking_the_call():
        made = source.make(_task_options(args)) if source.options is not None else source.make()
    if isinstance(made, Task):
        return _plan_of_task(args, made, options)
    if not isinstance(made, tuple) or len(made) != 3:
        raise WrongCall(f"{args.task} returned {described(made)}: {_WANTED}")
    with _errors_while_planning(source):
        return plan(*made, policies=args.policies, **_with_batch_size(args, options))


def _with_batch_size(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    return options if args.batch_size is None else {**options, "batch_size": args.batch_size}


@contextmanager
def _errors_while_planning(source: TaskSource) -> Iterator[None]:
    """Has errors of the compiler name the user's file."""
    from jmp_train.aot import ExportError

    try:
        with errors_of_file(source.file):
            yield
    except ExportError as error:
        raise Failure(f"{source.file or source.name}: {error}") from error


def _plan_of_task(args: argparse.Namespace, task: Task, options: dict[str, Any]) -> "Plan":
    from jmp_train.planning import plan
    from jmp_train.runs import batch_shapes, check_shared, has_shared, planned_step, rows_of

    settings = run_settings(args, _task_options(args), task, None, DEFAULT_FEW_BITS)
    with checking_the_call():
        check_shared(task, settings)
    if settings.accumulate_steps != 1 and options["find_largest"]:
        raise WrongCall(
            f"--accumulate-steps {settings.accumulate_steps}: the largest batch is sought by ones; --no-largest"
        )
    own = rows_of(batch_shapes(task, None)) if callable(task.train) else task.batch_size
    resizes = own is not None and not has_shared(task)  # a whole graph is as large with any batch
    batch_size = args.batch_size or own
    if batch_size is None and not callable(task.train):
        batch_size = count_examples(task.train)
    if task.shards_shared and batch_size is not None:  # any number of labels is spread over all devices
        batch_size = max(batch_size - batch_size % settings.devices, settings.devices)

    def make(policy: str) -> Any:
        step, state, batches = planned_step(task, policy, settings)
        return step, state, batches if batch_size is not None else batches(None)

    sized = {} if batch_size is None else {"batch_size": batch_size}
    with checking_the_call(), errors_of_file(args.source.file):
        return plan(
            make,
            policies=args.policies or PLANNED_POLICIES,
            **{**options, **sized, "find_largest": options["find_largest"] and resizes},
        )


def _task_options(args: argparse.Namespace) -> Any:
    """Returns the options of the task, whose data need not be there: only its shapes count."""
    names = {field.name for field in dataclasses.fields(args.source.options)} if args.source.options else set()
    if {"synthetic", "data_dir"} <= names and getattr(args, f"{OF_TASK}data_dir") is None:
        setattr(args, f"{OF_TASK}synthetic", True)
    return read_task_options(args)


def _gpus(args: argparse.Namespace) -> list[Any]:
    from jmp_train.aot import GPUS, read_gpus

    own = {} if args.gpu_file is None else read_gpus(args.gpu_file)
    names = args.gpus or (list(own) or list(PLANNED_GPUS))
    known = {**GPUS, **own}
    for name in names:
        if name not in known:
            raise WrongCall(f"--gpus {name}: there is no such GPU; there are {', '.join(known)}")
    return [known[name] for name in names]


def _show(found: "Plan", args: argparse.Namespace, output: Output | None) -> int:
    """Prints what was found, writes the page, and returns the exit code."""
    from jmp_train.reports import plan_json, write_plan

    title = args.task
    log = sys.stdout if output is None else sys.stderr
    if output is None:
        print(f"{title}:\n{found}")
        if args.buffers:
            print(found.largest_buffers(args.buffers))
    else:
        print(plan_json({"step": title}, found), end="", file=output, flush=True)
    written, unwritten = write_plan(args.page, title, found)
    for path in written:
        print(f"wrote {path}", file=log)
    if unwritten:
        raise Failure("; ".join(unwritten))
    if output is not None and output.lost is not None:
        return RUN_FAILED
    return 0 if all(row.fits for row in found.rows) else PROBLEMS_FOUND
