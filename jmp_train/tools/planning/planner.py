"""`plan`: predicts memory and time of a training step on absent GPUs and TPUs."""

import dataclasses
import os
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from jmp_train.policies.pytrees import flax_nnx
from jmp_train.tools.aot import (
    Argument,
    CompiledProgram,
    ExportedProgram,
    Network,
    buffers_at_peak,
    compile_program,
    is_shape,
    program_costs,
    read_hlo,
)
from jmp_train.tools.planning.batches import LargestBatch, largest_batch
from jmp_train.tools.planning.placements import Machine, PlanSearch, several
from jmp_train.tools.planning.plan_report import Plan
from jmp_train.tools.planning.plan_rows import PlanRow
from jmp_train.tools.planning.search import Target, searched
from jmp_train.tools.planning.workloads import Workload

DEFAULT_MACHINES = ("V100-16GB", "A100-40GB", "H100-80GB")
_BYTES_A_COMPILATION = 4 * 2**30


def plan(
    workload: Workload,
    machines: str | Machine | Sequence[str | Machine] = DEFAULT_MACHINES,
    search: PlanSearch | None = None,
) -> Plan:
    """Compiles a training step for absent GPUs and TPUs, and returns its memory and time on each.

    The step is traced here, and compiled by XLA's own compiler for CUDA or TPUs in separate processes, as many at a
    time as cores and memory allow; `jt.aot.install_compiler()` and `jt.aot.install_tpu_compiler()` install them, once.
    Results are cached in `$JMP_TRAIN_CACHE` or ~/.cache/jmp_train.

    Args:
      workload: the step, its state and batch, and the precisions.
      machines: names of GPUs and slices of TPUs, such as "A100-40GB" and "v5e:4x4", or `Machine`s.
      search: what to search for; None for the largest batch that fits.

    Returns:
      A `Plan`; printed, it is a table.

    Raises:
      TypeError: an argument is of another type.
      ValueError: there is no such GPU, slice, policy or sharding, or the batch cannot be shared by the devices.
      PluginError: the compiler is not there; the message has the command.
      RuntimeError: a compilation failed.
      TimeoutError: it took longer than half an hour.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> step = jt.train_step(jt.stateless(lambda w, x: ((x @ w) ** 2).mean()), optax.adam(1e-3))
      >>> state = jax.eval_shape(lambda: jt.TrainState.create(jnp.zeros((1024, 1024)), optax.adam(1e-3)))
      >>> batch = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> workload = Workload(step, state, batch, policies=["float32", "mixed_float16"])
      >>> [row.fits for row in jt.plan(workload, "A100-40GB").rows]  # doctest: +SKIP
      [True, True]
    """
    if not isinstance(workload, Workload):
        raise TypeError(f"workload must be a jt.planning.Workload, got {type(workload).__name__}")
    search = PlanSearch() if search is None else search
    given = several("machines", machines, (str, Machine))
    finds_batch = search.largest_batch and not search.placement
    variants = workload.variants(grows=finds_batch)
    targets = [
        Target(machine, variant, placement)
        for machine in (one if isinstance(one, Machine) else Machine(one) for one in given)
        for variant in variants
        for placement in search.placements(machine)
    ]

    def compile_all(wanted: Sequence[Target]) -> list[PlanRow]:
        return _compiled([_planned(target, finds_batch=finds_batch) for target in wanted], search.progress)

    if search.placement:
        rows, cuts = searched(targets, compile_all)
        return Plan(tuple(rows), tuple(cuts))
    for target in targets:
        if (size := target.variant.batch_size) % target.multiple:
            parts = f"a multiple of {target.multiple} for {target.placement} and its micro-batches"
            raise ValueError(f"batch_size={size} must be {parts}")
    return Plan(tuple(compile_all(targets)))


Compiling = Generator[tuple[Target, int], tuple[ExportedProgram, CompiledProgram], PlanRow]
"""Yields programs to compile, a target and its batch size, receives them, and returns a row."""


def _planned(target: Target, *, finds_batch: bool) -> Compiling:
    """Returns the row of a step with the requested batch size."""
    size, machine, placed = target.variant.batch_size, target.machine, target.placement
    exported, compiled = yield target, size
    hlo = read_hlo(compiled.hlo)
    links = (placed.hosts, machine.bandwidth_to_hosts, compiled.coordinates)
    row = PlanRow(
        machine=machine,
        policy=target.variant.policy,
        placement=placed,
        batch_size=size,
        peak_bytes=compiled.allocated_bytes,
        live_bytes=compiled.peak_bytes,
        costs=program_costs(hlo, machine.kind, Network(machine.kind, placed.axes, *links)),
        buffers=buffers_at_peak(
            compiled.buffer_assignment,
            compiled.live_range,
            hlo,
            arguments_of(exported.paths, target.variant.state),
            platform=machine.kind.platform,
            temp_bytes=compiled.temp_bytes if machine.kind.platform == "tpu" else 0,
        ),
    )
    return dataclasses.replace(row, largest=(yield from _largest(target))) if finds_batch else row


def _largest(target: Target) -> Generator[tuple[Target, int], tuple[Any, CompiledProgram], LargestBatch | None]:
    """Returns the largest batch that fits: the search starts again whenever it misses the bytes of a size."""
    known: dict[int, int] = {}
    usable, start = target.machine.usable_bytes, target.variant.batch_size
    while True:
        try:
            return largest_batch(known.__getitem__, usable, start, target.multiple)
        except KeyError as missing:
            (size,) = missing.args
        _, compiled = yield target, size
        known[size] = compiled.allocated_bytes


def _compiled(tasks: Sequence[Compiling], progress: Callable[[int, str], None] | None) -> list[PlanRow]:
    """Returns the rows of tasks, whose programs are compiled side by side, each traced once for all GPUs or TPUs.

    Traces depend on contexts of the tracing thread: jax.default_matmul_precision, jax.set_mesh, haiku's policies. So
    this thread traces, and others wait for the compiling processes. The first error, or Ctrl-C, ends them all.
    """
    rows: dict[int, PlanRow] = {}
    running: dict[Future[Any], int] = {}
    traced: dict[tuple[Any, ...], ExportedProgram] = {}
    compiled, stop = 0, Event()

    def run(target: Target, size: int, program: ExportedProgram) -> tuple[ExportedProgram, CompiledProgram]:
        if progress is not None:
            progress(compiled, f"{target}, batch {size}")
        return program, compile_program(program, target.machine.kind, hosts=target.placement.hosts, stop=stop)

    def resume(number: int, answer: Any) -> None:
        try:
            target, size = tasks[number].send(answer)
        except StopIteration as end:
            rows[number] = end.value
            return
        key = target.variant, target.placement, size, target.machine.kind.platform
        if key not in traced:
            traced[key] = target.variant.exported(*key[1:])
        running[pool.submit(run, target, size, traced[key])] = number

    with ThreadPoolExecutor(_jobs()) as pool:
        try:
            for number in range(len(tasks)):
                resume(number, None)
            while running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    compiled += 1
                    resume(running.pop(done), done.result())
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [rows[number] for number in range(len(tasks))]


def _jobs() -> int:
    """Returns the number of simultaneous compilations that cores and memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _available_bytes() // _BYTES_A_COMPILATION))


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return _BYTES_A_COMPILATION
    sizes = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return sizes.get("MemAvailable", _BYTES_A_COMPILATION)


PARAMETERS, OPTIMIZER_STATE, MODEL_STATE, OTHERS = "parameters", "optimizer state", "model state", "other arguments"
_NAMES = {
    **dict.fromkeys(("params", "parameters"), PARAMETERS),
    **dict.fromkeys(("opt_state", "opt_states", "optimizer", "optimizer_state"), OPTIMIZER_STATE),
    **dict.fromkeys(("model_state", "batch_stats"), MODEL_STATE),
}
_OPTIMIZERS = ("optax.", "jmp_train.policies.")  # modules, whose classes "...State" hold what optimizers carry


def arguments_of(paths: Sequence[str], state: Any) -> dict[int, Argument]:
    """Returns the arguments of a step by their numbers, each in its group.

    Args:
      paths: paths of state and batch, such as "state.params['kernel']".
      state: its shapes: a `TrainState`, flax's, nnx objects, or optax's states in tuples and dicts next to parameters.
        Parameters are then all other floats.

    Example:
      >>> import optax
      >>> params = {"w": jax.ShapeDtypeStruct((3,), "float32")}
      >>> state = (params, jax.eval_shape(optax.adam(1e-3).init, params))
      >>> paths = ["state[0]['w']", "state[1][0].count", "state[1][0].mu['w']", "state[1][0].nu['w']", "batch['x']"]
      >>> [argument.group for argument in arguments_of(paths, state).values()]
      ['parameters', 'optimizer state', 'optimizer state', 'optimizer state', 'batch']
    """
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: _group_of(x) is not None)[0]
    grouped = [
        (leaf, _group_of(node) or _group_by_name(path))
        for path, node in nodes
        for leaf in filter(is_shape, jax.tree.leaves(node))
    ]
    groups = [group for _, group in grouped]
    if PARAMETERS not in groups and any(_group_of(node) == OPTIMIZER_STATE for _, node in nodes):
        groups = [PARAMETERS if group == OTHERS and _is_float(leaf) else group for leaf, group in grouped]
    groups += ["batch"] * (len(paths) - len(groups))
    return {i: Argument(path, group) for i, (path, group) in enumerate(zip(paths, groups, strict=True))}


def _group_by_name(path: KeyPath) -> str:
    names = (str(getattr(key, "name", getattr(key, "key", ""))) for key in path)
    return next((_NAMES[name] for name in names if name in _NAMES), OTHERS)


def _group_of(node: object) -> str | None:
    """Returns the group of a node's arrays if its type determines it."""
    kind, nnx, equinox = type(node), flax_nnx(), sys.modules.get("equinox")
    if kind.__module__.startswith(_OPTIMIZERS) and kind.__name__.endswith("State"):
        return OPTIMIZER_STATE
    if nnx is not None and isinstance(node, nnx.Variable):
        kinds = {nnx.OptState: OPTIMIZER_STATE, nnx.Param: PARAMETERS, nnx.BatchStat: MODEL_STATE}
        return next((group for kind, group in kinds.items() if isinstance(node, kind)), OTHERS)
    if equinox is not None and isinstance(node, equinox.nn.State):
        return MODEL_STATE
    return None


def _is_float(shape: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(shape.dtype, jnp.inexact)
