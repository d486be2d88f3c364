"""`jmp-train plan`: predicts memory and time of a step on GPUs and TPUs, which may be absent."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jmp_train.app.cli.jobs import Call, run_settings
from jmp_train.app.cli.option_values import fraction, machine_named, number, pair_of, path, positive, precision_name
from jmp_train.app.cli.options import PlannedOptions, names_option, option
from jmp_train.app.cli.results import (
    PROBLEMS_FOUND,
    Failure,
    WrongCall,
    check_different,
    check_outputs,
    checking_the_call,
    show,
)
from jmp_train.app.runs import (
    MODE_CHOICES,
    RunSettings,
    batch_shapes,
    check_shared,
    examples_in,
    has_shared,
    planned_step,
)
from jmp_train.app.tasks import TaskSource, described, errors_of_file
from jmp_train.task import Task, count_examples

if TYPE_CHECKING:
    from jmp_train.tools.planning import Machine, Plan, PlanSearch

PLANNED_GPUS = ("V100-16GB", "A100-40GB", "H100-80GB")
PLANNED_POLICIES = ("float32", "autocast_float16", "autocast_bfloat16")
PLANNED_POLICIES_OF_TPUS = ("float32", "autocast_bfloat16")
_WANTED = "it must return a jt.Task or (step, state, batch), or take the policy and return one of these"


@dataclasses.dataclass(frozen=True)
class PlanOptions(PlannedOptions):
    """Options of `jmp-train plan`.

    Attributes:
      policies: see below.
      modes: see below.
      gpus: see below.
      tpus: see below.
      gpu_file: read your own GPUs from a TOML file
      hosts: hosts with --devices GPUs each; default: 1
      interconnect: see below.
      mesh: axes of the mesh of all devices, such as data=16 model=16; default: only data
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

    policies: tuple[str, ...] = names_option(
        precision_name, default=(), help=f"or modes; default: {' '.join(PLANNED_POLICIES)}"
    )
    modes: tuple[str, ...] = names_option(precision_name, default=(), help=f"{MODE_CHOICES}; or policies")
    gpus: tuple[str, ...] = option(str, "NAME", default=(), help=f"default: {' '.join(PLANNED_GPUS)}")
    tpus: tuple[str, ...] = option(
        str, "SLICE", default=(), help="slices of TPUs, generation and chips along each axis: v5e:2x2 v5p:4x4x8"
    )
    gpu_file: Path | None = option(path, "FILE")
    hosts: int | None = option(positive)
    interconnect: str | None = option(
        str, "RATE", help="bandwidth from a GPU to other hosts: 400Gb/s, HDR, NDR, XDR, p4d or p5; default: NDR"
    )
    mesh: tuple[tuple[str, int], ...] = option(pair_of(positive, "AXIS=N, such as data=16"), "AXIS=N", default=())
    shardings: tuple[Literal["replicated", "zero1", "fsdp"], ...] = option(str, "NAME", default=())
    batch_size: int | None = option(positive)
    find_placement: bool = False
    price: tuple[tuple[str, float], ...] = option(pair_of(number, "NAME=X, such as v5e=1.2"), "NAME=X", default=())
    memory_fraction: float | None = option(fraction)
    no_largest: bool = False
    buffers: int | None = option(positive)
    page: Path | None = option(path, "FILE")
    install: Literal["cuda", "tpu"] | None = option(
        str,
        "FOR",
        const="cuda",
        help="install XLA's compiler, once: for cuda, the default, about 600 MB, or for tpu, about 700 MB",
    )
    cuda: Literal["12", "13"] = "12"

    @property
    def names(self) -> tuple[str, ...]:
        """The policies or modes; empty for the default."""
        return self.policies or self.modes

    @property
    def names_or_default(self) -> tuple[str, ...]:
        """The policies or modes; if all devices are TPUs, the default has no float16."""
        only_tpus = self.tpus and not self.gpus and self.gpu_file is None
        return self.names or (PLANNED_POLICIES_OF_TPUS if only_tpus else PLANNED_POLICIES)


def plan_command(call: Call[PlanOptions]) -> int:
    """Plans a task's or a script's step, prints and writes the plan, and returns the exit code."""
    options, title = call.options, call.text
    if options.install:
        return _install(options)
    from jmp_train.app.reports import compilations_shown
    from jmp_train.tools.aot import INSTALL, INSTALL_TPU, PluginError

    check_outputs(files={"--page": options.page})
    try:
        with compilations_shown(sys.stderr) if call.output is None else nullcontext() as progress:
            found = _plan(call, progress)
    except PluginError as error:
        text = str(error).replace(INSTALL_TPU, "jmp-train plan --install tpu")
        raise Failure(text.replace(INSTALL, "jmp-train plan --install")) from error
    show(
        call.output,
        lambda: (
            f"{title}:\n{found}".replace("PlanSearch(placement=True)", "--find-placement")
            + (f"\n{found.largest_buffers(options.buffers)}" if options.buffers else "")
        ),
        {"step": title},
        found.to_json(),
        {options.page: lambda: found.to_html(title)},
    )
    return 0 if all(row.fits for row in found.rows) else PROBLEMS_FOUND


def _install(options: PlanOptions) -> int:
    from jmp_train.tools.aot import PluginError, install_compiler, install_tpu_compiler

    what, size = ("libtpu", 700) if options.install == "tpu" else ("XLA's compiler for CUDA", 600)
    print(f"installing {what}, about {size} MB", file=sys.stderr)
    try:
        folder = install_tpu_compiler() if options.install == "tpu" else install_compiler(options.cuda)
    except PluginError as error:
        raise Failure(str(error)) from error
    print(f"{what} is in {folder}")
    return 0


def _plan(call: Call[PlanOptions], progress: Callable[[int, str], None] | None) -> "Plan":
    from jmp_train.tools.planning import PlanSearch, Workload, plan

    options, source = call.options, call.source
    check_different("--mesh", [axis for axis, _ in options.mesh])
    check_different("--price", [name for name, _ in options.price])
    with checking_the_call():
        machines = _machines(options)
        search = PlanSearch(
            largest_batch=not (options.no_largest or options.find_placement),
            shardings=options.shardings or "replicated",
            mesh=dict(options.mesh) or None,
            placement=options.find_placement,
            progress=progress,
        )
    if source.takes_policy:
        workload = Workload(source.function, policies=options.names_or_default, batch_size=options.batch_size)
        with _errors_while_planning(source):
            return plan(workload, machines, search)
    with checking_the_call():
        fields = () if source.options is None else dataclasses.fields(source.options)
        # Only the shapes are needed, so the task's data may be missing.
        has_synthetic = {"synthetic", "data_dir"} <= {field.name for field in fields}
        of_task = call.task_options(**({"synthetic": True} if has_synthetic and "data_dir" not in call.of_task else {}))
        made = source.make(of_task)
    if isinstance(made, Task):
        return _plan_of_task(call, made, run_settings(call, of_task, made), machines, search)
    if not isinstance(made, tuple) or len(made) != 3:
        raise WrongCall(f"{call.text} returned {described(made)}; {_WANTED}")
    with _errors_while_planning(source):
        return plan(Workload(*made, policies=options.names or None, batch_size=options.batch_size), machines, search)


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
    call: Call[PlanOptions], task: Task, settings: RunSettings, machines: Sequence["Machine"], search: "PlanSearch"
) -> "Plan":
    from jmp_train.tools.planning import Workload, plan

    with checking_the_call():
        check_shared(task, settings)
    if settings.accumulate_steps != 1 and search.largest_batch:
        raise WrongCall(
            f"--accumulate-steps {settings.accumulate_steps}: the search for the largest batch needs 1; add "
            "--no-largest"
        )
    with checking_the_call(), errors_of_file(call.source.file):
        own = examples_in(batch_shapes(task, None)) if callable(task.train) else task.batch_size
    resizes = own is not None and not has_shared(task)  # the size of a whole graph does not depend on the batch
    batch_size = call.options.batch_size or own
    if batch_size is None and not callable(task.train):
        batch_size = count_examples(task.train)
    if task.shards_shared and batch_size is not None:  # any number of labels can be split over the devices
        batch_size = max(batch_size - batch_size % settings.devices, settings.devices)

    def make(policy: str) -> Any:
        step, state, batches = planned_step(task, policy, settings)
        return step, state, batches if batch_size is not None else batches(None)

    workload = Workload(make, policies=call.options.names_or_default, batch_size=batch_size)
    with checking_the_call(), errors_of_file(call.source.file):
        search = dataclasses.replace(search, largest_batch=search.largest_batch and resizes)
        return plan(workload, machines, search)


def _machines(options: PlanOptions) -> list["Machine"]:
    from jmp_train.tools.aot import read_gpus
    from jmp_train.tools.planning import Allowances, Machine

    own = {} if options.gpu_file is None else read_gpus(options.gpu_file)
    names = options.gpus or list(own) or ([] if options.tpus else list(PLANNED_GPUS))
    kinds = {name: own.get(name) or machine_named("--gpus", name).device for name in names}
    kinds |= {name: machine_named("--tpus", name).device for name in options.tpus}
    given = {"gpus": options.devices, "hosts": options.hosts, "interconnect": options.interconnect}
    given = {name: value for name, value in given.items() if value is not None}
    if options.memory_fraction is not None:
        given["allowances"] = Allowances(memory_fraction=options.memory_fraction)
    prices = dict(options.price)
    if unknown := prices.keys() - {name.partition(":")[0] for name in kinds}:
        raise WrongCall(f"--price {min(unknown)} is not planned for; it must be one of {', '.join(kinds)}")
    return [Machine(kind, price=prices.get(name.partition(":")[0]), **given) for name, kind in kinds.items()]
