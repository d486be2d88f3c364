"""`plan`: what a training step would need on GPUs that need not be there."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jmp_train.aot import (
    GPU,
    GPUS,
    Devices,
    buffers_at_peak,
    devices_here,
    measure_program,
    program_costs,
    read_hlo,
)
from jmp_train.planning.allowances import Allowances
from jmp_train.planning.arguments import arguments_of
from jmp_train.planning.compiler import Compiler
from jmp_train.planning.largest_batch import LargestBatch, largest_batch
from jmp_train.planning.remedies import Remedy, changes
from jmp_train.planning.report import Plan
from jmp_train.planning.rows import PlanRow
from jmp_train.planning.variants import (
    REPLICATED,
    Placement,
    Precision,
    Shardings,
    Variant,
    checked_placements,
    several,
    variants_of,
)

DEFAULT_GPUS = ("V100-16GB", "A100-40GB", "H100-80GB")
_BYTES_A_COMPILATION = 4 * 2**30


def plan(
    step: Callable[..., Any],
    state: Any = None,
    batch: Any = None,
    *,
    gpus: str | GPU | Sequence[str | GPU] = DEFAULT_GPUS,
    policies: Precision | Sequence[Precision] | None = None,
    devices: int | Sequence[int] = 1,
    shardings: Shardings | Sequence[Shardings] = REPLICATED,
    batch_size: int | None = None,
    find_largest: bool = True,
    remedies: bool | None = None,
    allowances: Allowances | None = None,
    donate: bool = True,
    measure: bool = False,
    jobs: int | None = None,
    timeout: float = 1800,
    progress: Callable[[int, str], None] | None = None,
) -> Plan:
    """Compiles a training step for GPUs that need not be there, and says what it needs of each.

    Shapes suffice for state and batch. The step is traced here, and compiled by XLA's own compiler for CUDA in
    processes of their own; `jt.aot.install_compiler()` installs it, once. What was compiled is kept in
    `$JMP_TRAIN_CACHE` or ~/.cache/jmp_train.

    Args:
      step: a function `(state, batch) -> anything`, such as a `TrainStep`, not yet parallel. Without `state` and
        `batch`, a function of a policy that returns `(step, state, batch)`.
      state: pytree of arrays or `jax.ShapeDtypeStruct`.
      batch: the same, with the examples along all first axes, which is what grows; or a function of the number of
        examples, for batches that grow otherwise, such as graphs.
      gpus: names of `jt.aot.GPUS`, or `GPU`s of your own.
      policies: one or several names, `Policy`s or AMP modes in which to plan a `TrainStep`; the state's parameters and
        optimizer state are made anew for each. AMP modes want an optimizer without a loss scale. None for the step as
        it is.
      devices: how many GPUs, in one host, share the batch; or several such numbers.
      shardings: how several devices hold the state: "replicated", "zero1", "fsdp", or a function of the state's shapes
        and a mesh that returns shardings; or several of these.
      batch_size: examples of a step, over all devices; None for those of `batch`.
      find_largest: whether to search for the largest batch that fits, which takes about five compilations. Without
        it, a batch without a common first axis, such as a graph, is planned as it is, as one example.
      remedies: whether to compile what could help; None for where the step does not fit.
      allowances: what a GPU's memory has to hold beside the step; None for `Allowances()`, in which jax takes 75 % of
        it.
      donate: whether the next state takes the place of the last.
      measure: whether to run the step, too, for the rows whose GPUs are here, with zeros as arguments and each in a
        process of its own; this process should have JAX_PLATFORMS=cpu, so that it does not hold the GPU.
      jobs: how many programs to compile at one time; None for as many as there are cores and memory for.
      timeout: seconds after which a compilation is killed.
      progress: called with the number of programs compiled so far and what comes next.

    Returns:
      A `Plan`; printed, it is a table.

    Raises:
      TypeError: an argument is of another type.
      ValueError: there is no such GPU, policy or sharding, the batch cannot be shared by the devices, or there is
        nothing to measure here.
      PluginError: the compiler is not there; the message has the command.
      RuntimeError: a compilation failed.
      TimeoutError: it took longer than `timeout`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> step = jt.train_step(jt.stateless(lambda w, x: ((x @ w) ** 2).mean()), optax.adam(1e-3))
      >>> state = jax.eval_shape(lambda: jt.TrainState.create(jnp.zeros((1024, 1024)), optax.adam(1e-3)))
      >>> batch = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
      >>> plan = jt.plan(step, state, batch, gpus="A100-40GB", policies=["float32", "mixed_float16"])  # doctest: +SKIP
      >>> [row.fits for row in plan.rows]  # doctest: +SKIP
      [True, True]
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs={jobs!r} must be at least 1")
    if not isinstance(allowances, Allowances | None):
        raise TypeError(f"allowances must be jt.Allowances, got {type(allowances).__name__}")
    targets = _targets(gpus)
    placements = checked_placements(devices, shardings)
    variants = variants_of(step, state, batch, batch_size, policies, grows=find_largest)
    for variant in variants:
        for placement in placements:
            _check_divides(variant, placement)
    compiler = Compiler(donate, timeout, progress)
    room = Allowances() if allowances is None else allowances

    def row(gpu: GPU, variant: Variant, placement: Placement) -> PlanRow:
        return _row(compiler, room, gpu, variant, placement, find_largest, remedies)

    here = _here(targets) if measure else None
    todo = [(gpu, variant, placement) for gpu in targets for variant in variants for placement in placements]
    with ThreadPoolExecutor(jobs or _jobs()) as pool:
        futures = [pool.submit(row, *one) for one in todo]
        try:
            compiler.trace_for(futures)
            rows = [future.result() for future in futures]
        except BaseException:  # Ctrl-C too
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if here is not None:  # one at a time, when nothing is compiled any more
        rows = [_measured(compiler, here, row, *one) for row, one in zip(rows, todo, strict=True)]
    return Plan(tuple(rows), room)


def _here(targets: Sequence[GPU]) -> Devices:
    """Returns the devices that are here, of a GPU that is planned for."""
    here = devices_here()
    if all(gpu.description != here.device for gpu in targets):
        raise ValueError(f"measure: here is {here.device}, which none of {', '.join(g.name for g in targets)} is")
    return here


def _measured(
    compiler: Compiler, here: Devices, row: PlanRow, gpu: GPU, variant: Variant, placement: Placement
) -> PlanRow:
    if gpu.description != here.device or placement.devices > here.devices or not row.fits:
        return row
    return dataclasses.replace(row, measured=measure_program(compiler.exported(variant, placement, row.batch_size)))


def _row(
    compiler: Compiler,
    allowances: Allowances,
    gpu: GPU,
    variant: Variant,
    placement: Placement,
    find_largest: bool,
    remedies: bool | None,
) -> PlanRow:
    size = variant.batch_size
    compiled = compiler(gpu, variant, placement, size)
    usable = allowances.usable_bytes(gpu, placement.devices)
    fits = compiled.allocated_bytes <= usable
    hlo = read_hlo(compiled.hlo)
    paths = compiler.exported(variant, placement, size).paths
    helped = remedies or (remedies is None and not fits)
    return PlanRow(
        gpu=gpu,
        policy=variant.policy,
        placement=placement,
        batch_size=size,
        peak_bytes=compiled.allocated_bytes,
        live_bytes=compiled.peak_bytes,
        usable_bytes=usable,
        largest=_largest(compiler, usable, gpu, variant, placement) if find_largest else None,
        costs=program_costs(hlo, gpu),
        buffers=buffers_at_peak(
            compiled.buffer_assignment, compiled.live_range, hlo, arguments_of(paths, variant.state)
        ),
        remedies=_remedies(compiler, usable, gpu, variant, placement) if helped else (),
    )


def _largest(compiler: Compiler, usable: int, gpu: GPU, variant: Variant, placement: Placement) -> LargestBatch | None:
    def bytes_of(size: int) -> int:
        return compiler(gpu, variant, placement, size).allocated_bytes

    return largest_batch(bytes_of, usable, variant.batch_size, variant.multiple(placement))


def _remedies(compiler: Compiler, usable: int, gpu: GPU, variant: Variant, placement: Placement) -> tuple[Remedy, ...]:
    found = []
    for name, code, changed, where in changes(variant, placement):
        compiled = compiler(gpu, changed, where, variant.batch_size)
        needed, seconds = compiled.allocated_bytes, program_costs(read_hlo(compiled.hlo), gpu).seconds
        found.append(Remedy(name, code, needed, needed <= usable, seconds))
    return tuple(sorted(found, key=lambda remedy: remedy.peak_bytes))


def _targets(gpus: str | GPU | Sequence[str | GPU]) -> list[GPU]:
    found = several("gpus", gpus, (str, GPU))
    for gpu in found:
        if not isinstance(gpu, GPU) and gpu not in GPUS:
            raise ValueError(f"gpus has {gpu!r}, which must be one of {', '.join(GPUS)}, or a jt.aot.GPU")
    return [gpu if isinstance(gpu, GPU) else GPUS[gpu] for gpu in found]


def _check_divides(variant: Variant, placement: Placement) -> None:
    multiple = variant.multiple(placement)
    if variant.batch_size % multiple:
        raise ValueError(
            f"batch_size={variant.batch_size} must be a multiple of {multiple} for {placement} and its micro-batches"
        )


def _jobs() -> int:
    """Returns how many compilations cores and memory allow at one time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _available_bytes() // _BYTES_A_COMPILATION))


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return _BYTES_A_COMPILATION
    sizes: Mapping[str, int] = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    return sizes.get("MemAvailable", _BYTES_A_COMPILATION)
