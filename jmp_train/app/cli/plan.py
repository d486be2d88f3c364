"""`jmp-train plan`: predicts memory and time of a step on GPUs and TPUs, which may be absent."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jmp_train.app.cli.errors import PROBLEMS_FOUND, Failure, WrongCall, checking_the_call
from jmp_train.app.cli.jobs import OF_TASK, read_task_options, run_settings
from jmp_train.app.cli.option_values import fraction, one_of, path, positive
from jmp_train.app.cli.options import option
from jmp_train.app.cli.outputs import checked_outputs, show
from jmp_train.app.runs import RunSettings, batch_shapes, check_shared, has_shared, planned_step, rows_of
from jmp_train.app.tasks import TaskSource, described, errors_of_file
from jmp_train.task import Task, count_examples

if TYPE_CHECKING:
    from jmp_train.tools.planning import Machine, Plan, PlanSearch

PLANNED_GPUS = ("V100-16GB", "A100-40GB", "H100-80GB")
PLANNED_POLICIES = ("float32", "autocast_float16", "autocast_bfloat16")
PLANNED_POLICIES_OF_TPUS = ("float32", "autocast_bfloat16")
_WANTED = "it must return a jt.Task or (step, state, batch), or take the policy and return one of these"


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of `jmp-train plan`.

    Attributes:
      gpus: see below.
      tpus: see below.
      gpu_file: read your own GPUs from a TOML file
      hosts: hosts with --devices GPUs each; default: 1
      interconnect: see below.
      mesh: axes of the mesh of all devices, such as data=16 model=16; default: data alone
      shardings: how several devices store the state: replicated, zero1 or fsdp; default: replicated
      batch_size: examples over all devices; default: the task's
      find_placement: search for the fastest placement that fits, on the given devices
      price: price of an hour of one GPU or chip, such as v5e=1.2, for the least cost of steps
      memory_fraction: fraction of a GPU's memory that jax takes; default: 0.75, as in jax
      no_largest: do not search for the largest batch that fits
      buffers: print the N largest buffers at the peak
      page: write the report to FILE, an HTML page
      install: see below.
      cuda: CUDA version for --install; 13 has no V100; default: 12
    """

    gpus: tuple[str, ...] = option(str, "NAME", default=(), help=f"default: {' '.join(PLANNED_GPUS)}")
    tpus: tuple[str, ...] = option(
        str, "SLICE", default=(), help="slices of TPUs, generation and chips along each axis: v5e:2x2 v5p:4x4x8"
    )
    gpu_file: Path | None = option(path, "FILE")
    hosts: int | None = option(positive)
    interconnect: str | None = option(
        str, "RATE", help="bandwidth from a GPU to other hosts: 400Gb/s, HDR, NDR, XDR, p4d or p5; default: NDR"
    )
    mesh: tuple[str, ...] = option(str, "AXIS=N", default=())
    shardings: tuple[Literal["replicated", "zero1", "fsdp"], ...] = option(str, "NAME", default=())
    batch_size: int | None = option(positive)
    find_placement: bool = False
    price: tuple[str, ...] = option(str, "NAME=X", default=())
    memory_fraction: float | None = option(fraction)
    no_largest: bool = False
    buffers: int | None = option(positive)
    page: Path | None = option(path, "FILE")
    install: str | None = option(
        one_of(("cuda", "tpu")),
        "FOR",
        const="cuda",
        help="install XLA's compiler, once: for cuda, the default, about 600 MB, or for tpu, about 700 MB",
    )
    cuda: Literal["12", "13"] = "12"


def plan_command(args: argparse.Namespace) -> int:
    """Plans a task's or a script's step, prints and writes the plan, and returns the exit code."""
    if args.install:
        return _install(args)
    from jmp_train.app.reports import compilations_shown, json_line, write_plan
    from jmp_train.tools.aot import INSTALL, INSTALL_TPU, PluginError

    with checked_outputs(as_json=args.json, files={"--page": args.page}) as output:
        try:
            with compilations_shown(sys.stderr) if output is None else nullcontext() as progress:
                found = _plan(args, progress)
        except PluginError as error:
            text = str(error).replace(INSTALL_TPU, "jmp-train plan --install tpu")
            raise Failure(text.replace(INSTALL, "jmp-train plan --install")) from error
        title = args.task
        code = show(
            output,
            lambda: (
                f"{title}:\n{found}".replace("PlanSearch(placement=True)", "--find-placement")
                + (f"\n{found.largest_buffers(args.buffers)}" if args.buffers else "")
            ),
            lambda: json_line({"step": title}, found.to_json()),
            lambda: write_plan(args.page, title, found),
        )
        return code or (0 if all(row.fits for row in found.rows) else PROBLEMS_FOUND)


def _install(args: argparse.Namespace) -> int:
    from jmp_train.tools.aot import PluginError, install_compiler, install_tpu_compiler

    what, size = ("libtpu", 700) if args.install == "tpu" else ("XLA's compiler for CUDA", 600)
    print(f"installing {what}, about {size} MB", file=sys.stderr)
    try:
        folder = install_tpu_compiler() if args.install == "tpu" else install_compiler(args.cuda)
    except PluginError as error:
        raise Failure(str(error)) from error
    print(f"{what} is in {folder}")
    return 0


def _plan(args: argparse.Namespace, progress: Callable[[int, str], None] | None) -> "Plan":
    from jmp_train.tools.planning import PlanSearch, Workload, plan

    with checking_the_call():
        machines = _machines(args)
        search = PlanSearch(
            largest_batch=not (args.no_largest or args.find_placement),
            shardings=args.shardings or "replicated",
            mesh=_mesh(args) if args.mesh else None,
            placement=args.find_placement,
            progress=progress,
        )
    source: TaskSource = args.source
    if source.takes_policy:
        with _errors_while_planning(source):
            policies = args.policies or _default_policies(args)
            return plan(Workload(source.function, policies=policies, batch_size=args.batch_size), machines, search)
    with checking_the_call():
        given = _task_options(args)
        made = source.make(given)
    if isinstance(made, Task):
        return _plan_of_task(args, made, run_settings(args, given, made), machines, search)
    if not isinstance(made, tuple) or len(made) != 3:
        raise WrongCall(f"{args.task} returned {described(made)}; {_WANTED}")
    with _errors_while_planning(source):
        return plan(Workload(*made, policies=args.policies, batch_size=args.batch_size), machines, search)


@contextmanager
def _errors_while_planning(source: TaskSource) -> Iterator[None]:
    """Names the user's file in errors of the compiler."""
    from jmp_train.tools.aot import ExportError

    try:
        with errors_of_file(source.file):
            yield
    except ExportError as error:
        raise Failure(f"{source.file or source.name}: {error}") from error


def _plan_of_task(
    args: argparse.Namespace, task: Task, settings: RunSettings, machines: Sequence["Machine"], search: "PlanSearch"
) -> "Plan":
    from jmp_train.tools.planning import Workload, plan

    with checking_the_call():
        check_shared(task, settings)
    if settings.accumulate_steps != 1 and search.largest_batch:
        raise WrongCall(
            f"--accumulate-steps {settings.accumulate_steps}: the search for the largest batch needs 1; add "
            "--no-largest"
        )
    with checking_the_call(), errors_of_file(args.source.file):
        own = rows_of(batch_shapes(task, None)) if callable(task.train) else task.batch_size
    resizes = own is not None and not has_shared(task)  # the size of a whole graph does not depend on the batch
    batch_size = args.batch_size or own
    if batch_size is None and not callable(task.train):
        batch_size = count_examples(task.train)
    if task.shards_shared and batch_size is not None:  # any number of labels can be split over the devices
        batch_size = max(batch_size - batch_size % settings.devices, settings.devices)

    def make(policy: str) -> Any:
        step, state, batches = planned_step(task, policy, settings)
        return step, state, batches if batch_size is not None else batches(None)

    workload = Workload(make, policies=args.policies or _default_policies(args), batch_size=batch_size)
    with checking_the_call(), errors_of_file(args.source.file):
        search = dataclasses.replace(search, largest_batch=search.largest_batch and resizes)
        return plan(workload, machines, search)


def _task_options(args: argparse.Namespace) -> Any:
    """Returns the options of the task, only for its shapes, so its data may be missing."""
    names = {field.name for field in dataclasses.fields(args.source.options)} if args.source.options else set()
    if {"synthetic", "data_dir"} <= names and getattr(args, f"{OF_TASK}data_dir") is None:
        setattr(args, f"{OF_TASK}synthetic", True)
    return read_task_options(args)


def _machines(args: argparse.Namespace) -> list["Machine"]:
    from jmp_train.tools.aot import GPUS, read_gpus, tpu_slice
    from jmp_train.tools.planning import Allowances, Machine

    own = {} if args.gpu_file is None else read_gpus(args.gpu_file)
    names = args.gpus or list(own) or ([] if args.tpus else list(PLANNED_GPUS))
    known = {**GPUS, **own}
    for name in names:
        if name not in known:
            raise WrongCall(f"--gpus {name} is unknown; choose from {', '.join(known)}")
    try:
        slices = [tpu_slice(name) for name in args.tpus]
    except ValueError as error:
        raise WrongCall(f"--tpus: {error}") from error
    given = {"gpus": args.devices, "hosts": args.hosts, "interconnect": args.interconnect}
    given = {name: value for name, value in given.items() if value is not None}
    if args.memory_fraction is not None:
        given["allowances"] = Allowances(memory_fraction=args.memory_fraction)
    prices = _prices(args)
    kinds = {**{name: known[name] for name in names}, **{kind.name: kind for kind in slices}}
    if unknown := prices.keys() - {name.partition(":")[0] for name in kinds}:
        raise WrongCall(f"--price {min(unknown)} is not planned for; it must be one of {', '.join(kinds)}")
    return [Machine(kind, price=prices.get(name.partition(":")[0]), **given) for name, kind in kinds.items()]


def _mesh(args: argparse.Namespace) -> dict[str, int]:
    axes = dict(axis.partition("=")[::2] for axis in args.mesh)
    for name, length in axes.items():
        if not name or not length.isdecimal() or len(axes) < len(args.mesh):
            raise WrongCall(
                f"--mesh {' '.join(args.mesh)} must be different axes with lengths, such as data=16 model=16"
            )
    return {name: int(length) for name, length in axes.items()}


def _prices(args: argparse.Namespace) -> dict[str, float]:
    found = {}
    for text in args.price:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise WrongCall(f"--price {text} must be a name and a number, such as v5e=1.2") from None
    return found


def _default_policies(args: argparse.Namespace) -> tuple[str, ...]:
    only_tpus = args.tpus and not args.gpus and args.gpu_file is None
    return PLANNED_POLICIES_OF_TPUS if only_tpus else PLANNED_POLICIES
