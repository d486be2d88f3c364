"""`plan`: predicts memory and time of a training step on absent GPUs and TPUs."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jmp_train.tools.aot import (
    GPU,
    PASSES,
    TPU,
    Costs,
    Device,
    Devices,
    Product,
    buffers_at_peak,
    devices_here,
    measure_program,
    read_hlo,
)
from jmp_train.tools.planning.allowances import Allowances
from jmp_train.tools.planning.arguments import arguments_of
from jmp_train.tools.planning.batches import LargestBatch, largest_batch
from jmp_train.tools.planning.compiler import Compiler
from jmp_train.tools.planning.remedies import Remedy, changes
from jmp_train.tools.planning.report import Plan
from jmp_train.tools.planning.rows import PlanRow
from jmp_train.tools.planning.search import candidates, searched
from jmp_train.tools.planning.targets import (
    Target,
    checked_gpus,
    checked_interconnect,
    checked_placements,
    checked_prices,
    checked_tpus,
    every_target,
    placements_of_slice,
    price_of,
    targets_of,
)
from jmp_train.tools.planning.variants import REPLICATED, Placement, Precision, Shardings, variants_of

DEFAULT_GPUS = ("V100-16GB", "A100-40GB", "H100-80GB")

_EXACT = ", not rounded (precision 'highest')"
_FLOAT16 = re.compile(r"\bf16\[")
_EMULATED = (
    "float16 is emulated: TPUs have no units for it, and libtpu converts it; use bfloat16, which needs no loss scale"
)


def plan(
    step: Callable[..., Any],
    state: Any = None,
    batch: Any = None,
    *,
    gpus: str | GPU | Sequence[str | GPU] | None = None,
    tpus: str | TPU | Sequence[str | TPU] = (),
    policies: Precision | Sequence[Precision] | None = None,
    devices: int | Sequence[int] = 1,
    hosts: int | Sequence[int] = 1,
    interconnect: str | float = "NDR",
    mesh: Mapping[str, int] | None = None,
    shardings: Shardings | Sequence[Shardings] = REPLICATED,
    batch_size: int | None = None,
    find_placement: bool = False,
    price: Mapping[str, float] | None = None,
    find_largest: bool = True,
    remedies: bool | None = None,
    allowances: Allowances | None = None,
    donate: bool = True,
    measure: bool = False,
    jobs: int | None = None,
    timeout: float = 1800,
    progress: Callable[[int, str], None] | None = None,
) -> Plan:
    """Compiles a training step for absent GPUs and TPUs, and returns its memory and time on each.

    Shapes suffice for state and batch. The step is traced here, and compiled by XLA's own compiler for CUDA or TPUs in
    separate processes; `jt.aot.install_compiler()` and `jt.aot.install_tpu_compiler()` install them, once. Results are
    cached in `$JMP_TRAIN_CACHE` or ~/.cache/jmp_train.

    Args:
      step: a function `(state, batch) -> anything`, such as a `TrainStep`, not yet parallel. Without `state` and
        `batch`, a function of a policy that returns `(step, state, batch)`.
      state: pytree of arrays or `jax.ShapeDtypeStruct`.
      batch: the same, with the examples along all first axes; or, for batches that grow otherwise, such as graphs, a
        function of the number of examples.
      gpus: names of `jt.aot.GPUS`, or `GPU`s of your own; None for a V100, an A100 and an H100 if there are no `tpus`.
      tpus: names of slices of TPUs, generation and chips along each axis: "v5e:2x2", "v5p:8x8x16". All devices of a
        slice share the batch.
      policies: one or several names, `Policy`s or AMP modes in which to plan a `TrainStep`; the state's parameters and
        optimizer state are made anew for each. AMP modes want an optimizer without a loss scale. None for the step as
        it is.
      devices: number of GPUs of each host that share the batch, or several numbers. A slice of TPUs has its own.
      hosts: number of hosts with that many GPUs, or several numbers.
      interconnect: bandwidth from a GPU to other hosts, in one direction: "400Gb/s", bytes per second, or one of "HDR",
        "NDR", "XDR" (an adapter of InfiniBand for each GPU), "p4d", "p5" (instances of AWS).
      mesh: the axes of the mesh of all devices and their lengths, such as {"data": 16, "model": 16}; the batch is split
        along "data". None for this one axis.
      shardings: shardings of the state over several devices: "replicated"; "zero1" or "fsdp", over "data"; rules of
        `specs_by_path` for the parameters; a function of the state's shapes and a mesh that returns shardings; or
        several of these.
      find_placement: whether to search for the fastest placement that fits, instead of planning the given one: over
        "replicated", "zero1", "fsdp", and rules in `shardings` over meshes with an axis for them; where a step does not
        fit, also micro-batches and rematerialization. At most 40 programs are compiled. `Plan.fastest`,
        `Plan.smallest` and `Plan.cuts` have the result; largest batches and remedies are not searched for.
      price: the price of an hour of one GPU, or of one chip of a generation of TPUs: {"v5e": 1.2, "H100-80GB": 3.0}.
        Rows then have the least cost of a step.
      batch_size: examples of a step, over all devices; None for those of `batch`.
      find_largest: whether to search for the largest batch that fits, which takes about five compilations. Without
        it, a batch without a common first axis, such as a graph, is planned as it is, as one example.
      remedies: True to compile remedies; None to do so if the step does not fit.
      allowances: memory that a step cannot have; None for `Allowances()`, in which jax takes 75% of a GPU's.
      donate: whether the next state takes the place of the last.
      measure: whether to run the step, too, for the rows whose GPUs are here, with zeros as arguments and each in a
        process of its own; this process should have JAX_PLATFORMS=cpu, so that it does not hold the GPU.
      jobs: number of simultaneous compilations; None for as many as cores and memory allow.
      timeout: seconds after which a compilation is killed.
      progress: called with the number of programs compiled so far and the name of the next.

    Returns:
      A `Plan`; printed, it is a table.

    Raises:
      TypeError: an argument is of another type.
      ValueError: there is no such GPU, slice, policy or sharding, the batch cannot be shared by the devices, or
        nothing can be measured here.
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
        raise TypeError(f"allowances must be jt.planning.Allowances, got {type(allowances).__name__}")
    room = Allowances() if allowances is None else allowances
    slices = checked_tpus(tpus)
    kinds = [*_gpus_or_default(gpus, slices), *slices]
    bandwidth = checked_interconnect(interconnect)
    of_gpus = checked_placements(devices, shardings, mesh, hosts) if len(kinds) > len(slices) else []

    def placements(kind: Device) -> Sequence[Placement]:
        if find_placement:
            return candidates(kind, shardings, mesh, devices, hosts)
        return placements_of_slice(kind, shardings, mesh) if isinstance(kind, TPU) else of_gpus

    prices = checked_prices(price, kinds)
    variants = variants_of(step, state, batch, batch_size, policies, grows=find_largest and not find_placement)

    def compile_all(wanted: Sequence[Target]) -> list[PlanRow]:
        compiler = Compiler(donate, timeout, progress, bandwidth)
        return compiler.each(lambda target: _row(compiler, target, room, prices), wanted, jobs)

    if find_placement:
        usable = lambda target: room.usable_bytes(target.kind, target.placement.devices)
        rows, cuts = searched(every_target(kinds, variants, placements), usable, compile_all)
        return Plan(tuple(rows), room, tuple(cuts))
    targets = targets_of(kinds, variants, placements)
    here = _devices_of(targets) if measure else None
    compiler = Compiler(donate, timeout, progress, bandwidth)

    def planned(target: Target) -> PlanRow:
        row = _row(compiler, target, room, prices)
        return dataclasses.replace(
            row,
            largest=_largest_batch(compiler, target, row.usable_bytes) if find_largest else None,
            remedies=_remedies(compiler, target, row.usable_bytes) if _wanted(remedies, row) else (),
        )

    rows = compiler.each(planned, targets, jobs)
    if here is not None:  # one at a time, when nothing is compiled any more
        rows = [_measured(compiler, target, row, here) for target, row in zip(targets, rows, strict=True)]
    return Plan(tuple(rows), room)


def _gpus_or_default(gpus: str | GPU | Sequence[str | GPU] | None, slices: Sequence[TPU]) -> list[GPU]:
    """Returns the requested GPUs; by default three, or none if there are TPUs."""
    if slices and not isinstance(gpus, str | GPU) and not gpus:
        return []
    return checked_gpus(DEFAULT_GPUS if gpus is None else gpus)


def _row(compiler: Compiler, target: Target, allowances: Allowances, prices: Mapping[str, float]) -> PlanRow:
    """Returns the row of a step with the requested batch size."""
    size = target.variant.batch_size
    compiled = compiler(target, size)
    hlo = read_hlo(compiled.hlo)
    costs = compiler.costs(target, compiled, hlo)
    arguments = arguments_of(compiler.exported(target, size).paths, target.variant.state)
    return PlanRow(
        kind=target.kind,
        policy=target.variant.policy,
        placement=target.placement,
        batch_size=size,
        peak_bytes=compiled.allocated_bytes,
        live_bytes=compiled.peak_bytes,
        usable_bytes=allowances.usable_bytes(target.kind, target.placement.devices),
        largest=None,
        costs=costs,
        buffers=buffers_at_peak(
            compiled.buffer_assignment,
            compiled.live_range,
            hlo,
            arguments,
            platform=target.kind.platform,
            temp_bytes=compiled.temp_bytes if target.kind.platform == "tpu" else 0,
        ),
        remedies=(),
        notes=tuple(_notes(target.kind, compiled.hlo, costs)),
        price_per_hour=price_of(target.kind, target.placement.devices, prices),
    )


def _notes(device: Device, hlo: str, costs: Costs) -> Iterator[str]:
    """Yields notes about the precision of a program on a device.

    The dtypes of products on GPUs are in `costs`; a note tells TF32 from float32 if the program has the latter.
    """
    if isinstance(device, TPU) and _FLOAT16.search(hlo):
        yield _EMULATED
    shares: Counter[str] = Counter()
    for kernel in costs.kernels:
        for product in kernel.products:
            shares[_computed(device, product)] += kernel.times * product.operations
    total = sum(shares.values())
    if total and (isinstance(device, TPU) or any(name.endswith(_EXACT) for name in shares)):
        parts = (f"{count / total:.3g} in {name}" if len(shares) > 1 else name for name, count in shares.most_common())
        yield f"products: {', '.join(parts)}"


def _computed(device: Device, product: Product) -> str:
    """Returns how a device computes products of a dtype, XLA's name, at a precision of jax."""
    dtype, precision = product.dtype, product.precision
    if isinstance(device, GPU):
        how = f" rounded to TF32 (precision {precision!r})" if product.allow_tf32 else _EXACT
        return dtype + how if dtype in ("f32", "c64") and "tfloat32" in device.rates else dtype
    if dtype == "f16":  # in some programs, libtpu leaves the conversion to its last stage
        return "f16, emulated"
    if dtype not in ("f32", "f64", "c64", "c128"):
        return dtype
    passes = PASSES[precision]
    return f"{dtype} by {passes} pass{'es' * (passes > 1)} in bfloat16 (precision {precision!r})"


def _largest_batch(compiler: Compiler, target: Target, usable: int) -> LargestBatch | None:
    def bytes_of(size: int) -> int:
        return compiler(target, size).allocated_bytes

    return largest_batch(bytes_of, usable, target.variant.batch_size, target.multiple)


def _wanted(remedies: bool | None, row: PlanRow) -> bool:
    return not row.fits if remedies is None else remedies


def _remedies(compiler: Compiler, target: Target, usable: int) -> tuple[Remedy, ...]:
    found = []
    half = "mixed_bfloat16" if isinstance(target.kind, TPU) else "mixed_float16"
    for name, code, variant, placement in changes(target.variant, target.placement, half):
        changed = Target(target.kind, variant, placement)
        compiled = compiler(changed, variant.batch_size)
        needed, seconds = compiled.allocated_bytes, compiler.costs(changed, compiled, read_hlo(compiled.hlo)).seconds
        found.append(Remedy(name, code, needed, needed <= usable, seconds))
    return tuple(sorted(found, key=lambda remedy: remedy.peak_bytes))


def _devices_of(targets: Sequence[Target]) -> Devices:
    """Returns the present devices of a planned kind."""
    here, planned = devices_here(), {target.kind.name: target.kind for target in targets}
    if all(kind.description != here.device for kind in planned.values()):
        raise ValueError(f"measure: here is {here.device}, which none of {', '.join(planned)} is")
    return here


def _measured(compiler: Compiler, target: Target, row: PlanRow, here: Devices) -> PlanRow:
    if target.kind.description != here.device or target.placement.devices > here.devices or not row.fits:
        return row
    return dataclasses.replace(row, measured=measure_program(compiler.exported(target, row.batch_size)))
