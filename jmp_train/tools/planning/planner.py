"""`plan`: predicts memory and time of a training step on absent GPUs and TPUs."""

import dataclasses
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

from jmp_train.tools.aot import (
    CompiledProgram,
    ExportedProgram,
    Network,
    buffers_at_peak,
    compile_program,
    program_costs,
    read_hlo,
)
from jmp_train.tools.planning.arguments import arguments_of
from jmp_train.tools.planning.batches import LargestBatch, largest_batch
from jmp_train.tools.planning.machines import Machine
from jmp_train.tools.planning.placements import PlanSearch, several
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
