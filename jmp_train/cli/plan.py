"""`jmp-train plan`: what a step would need on GPUs that need not be there."""

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmp_train.cli.errors import PROBLEMS_FOUND, RUN_FAILED, Failure, WrongCall, checking_the_call
from jmp_train.cli.options import check_file, output_with_folders, read_options
from jmp_train.cli.scripts import described, errors_of_the_script, function_of, script_and_function
from jmp_train.launch import Output
from jmp_train.tasks import TASK_NAMES, TaskOptions, has_option, load_task

if TYPE_CHECKING:
    from jmp_train.planning import Plan

PLANNED_GPUS = ("V100-16GB", "A100-40GB", "H100-80GB")
PLANNED_POLICIES = ("float32", "autocast_float16", "autocast_bfloat16")
_WANTED = "wanted is (step, state, batch), or a parameter for the policy, with which it returns these"


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


def task_or_function(text: str) -> str | tuple[Path, str]:
    """Parses a task's name or SCRIPT:FUNCTION.

    Args:
      text: the argument.
    """
    if ":" in text:
        return script_and_function(text)
    if text not in TASK_NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not SCRIPT:FUNCTION, nor a task: {', '.join(TASK_NAMES)}")
    return text


def _install(args: argparse.Namespace) -> int:
    from jmp_train.aot import PluginError, install_compiler

    print("installing XLA's compiler for CUDA, about 600 MB", file=sys.stderr)
    try:
        print(f"XLA's compiler for CUDA is in {install_compiler(args.cuda)}")
    except PluginError as error:
        raise Failure(str(error)) from error
    return 0


def _plan(args: argparse.Namespace, progress: Callable[[int, str], None] | None) -> "Plan":
    import jax

    from jmp_train.planning import Allowances, plan

    jax.config.update("jax_platforms", "cpu")  # so that a GPU is free for what is measured
    with checking_the_call():
        options: dict[str, Any] = {
            "gpus": _gpus(args),
            "devices": args.devices,
            "shardings": args.shardings or "replicated",
            "find_largest": not args.no_largest,
            "remedies": True if args.remedies else None,
            "measure": args.measure,
            "progress": progress,
        }
        if args.memory_fraction is not None:
            options["allowances"] = Allowances(memory_fraction=args.memory_fraction)
    if isinstance(args.task, str):
        return _plan_of_task(args, options)
    file, name = args.task
    if args.batch_size is not None:
        options["batch_size"] = args.batch_size
    function = function_of(file, name)
    if _takes_policy(function):
        with _errors_while_planning(file):
            return plan(function, policies=args.policies or PLANNED_POLICIES, **options)
    with errors_of_the_script(file):
        made = function()
    if not isinstance(made, tuple) or len(made) != 3:
        raise WrongCall(f"{file}:{name} returned {described(made)}: {_WANTED}")
    with _errors_while_planning(file):
        return plan(*made, policies=args.policies, **options)


def _takes_policy(function: Callable[..., Any]) -> bool:
    """Says whether a script's function wants to be called with a policy."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return any(p.default is p.empty or p.name == "policy" for p in positional[:1])


@contextmanager
def _errors_while_planning(file: Path) -> Iterator[None]:
    """Lets errors that are not of the script's own code be a line, and prints where its own are."""
    from jmp_train.aot import ExportError, PluginError

    error = None
    with errors_of_the_script(file):
        try:
            yield
        except (PluginError, ExportError) as raised:
            error = raised
    if isinstance(error, ExportError):
        raise Failure(f"{file}: {error}") from error
    if error is not None:
        raise error


def _plan_of_task(args: argparse.Namespace, options: dict[str, Any]) -> "Plan":
    from jmp_train.planning import plan
    from jmp_train.runs import planned_step

    with checking_the_call():
        task = load_task(args.task, _task_options(args))
    if args.accumulate_steps != 1 and options["find_largest"]:
        raise WrongCall(
            f"--accumulate-steps {args.accumulate_steps}: the largest batch is sought by ones; --no-largest"
        )
    whole_graph = not has_option(args.task, "accumulate_steps")  # which no batch makes larger
    batch_size = args.batch_size or task.batch_size
    if task.is_partitioned:  # any number of labels is spread over all devices
        batch_size = max(batch_size - batch_size % task.devices, task.devices)

    def make(policy: str) -> Any:
        return planned_step(task, policy)

    with checking_the_call():
        return plan(
            make,
            policies=args.policies or PLANNED_POLICIES,
            batch_size=batch_size,
            **{**options, "find_largest": options["find_largest"] and not whole_graph},
        )


def _task_options(args: argparse.Namespace) -> TaskOptions:
    """Returns the options of the task, whose data need not be there: only its shapes count."""
    options = read_options(TaskOptions, args)
    if options.data_dir is None and has_option(args.task, "synthetic"):
        return dataclasses.replace(options, synthetic=True)
    return options


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

    title = args.task if isinstance(args.task, str) else ":".join(map(str, args.task))
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
