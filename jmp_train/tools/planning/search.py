"""The search for a placement: the fastest way, by its bound, to split a step over the given devices so that it fits.

The replicated state is compiled first, then the other shardings and meshes, unless the first fits and takes no longer
than its products alone, which no sharding reduces. For those that do not fit, micro-batches and rematerialization
follow; then both together. Each placement that is not compiled has a reason.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jmp_train.policies.autocasting import multiplies
from jmp_train.steps import TrainStep
from jmp_train.tools.aot import TPU, Device
from jmp_train.tools.planning.remedies import changes
from jmp_train.tools.planning.rows import PlanRow, gigabytes, milliseconds
from jmp_train.tools.planning.targets import Target, checked_placements, placements_of_slice
from jmp_train.tools.planning.variants import DATA, FSDP, REPLICATED, ZERO1, Placement, several

MOST_COMPILED = 40
_LENGTHS = (2, 4, 8, 16)  # of the axis that rules shard over
_CHANGES = ("2 micro-batches", "4 micro-batches", "rematerialization")

CompileAll = Callable[[Sequence[Target]], list[PlanRow]]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A placement that was not compiled.

    Attributes:
      device: the GPU or slice of TPUs.
      policy: the precision, and changes of the step.
      placement: the devices and shardings of the step.
      reason: why it was not compiled.
    """

    device: str
    policy: str
    placement: str
    reason: str


def candidates(
    kind: Device, shardings: Any, mesh: Mapping[str, int] | None, devices: Any, hosts: Any
) -> list[Placement]:
    """Returns the placements to try: replicated, ZeRO-1 and FSDP, and rules over meshes with an axis for them.

    Args:
      kind: the GPU, or the slice of TPUs.
      shardings: see `plan`; rules and functions are tried too.
      mesh: see `plan`; None for those that the number of devices allows.
      devices: see `plan`.
      hosts: see `plan`.

    Raises:
      ValueError: see `checked_placements`.
    """

    def placed(shardings: Any, mesh: Mapping[str, int] | None) -> list[Placement]:
        if isinstance(kind, TPU):
            return placements_of_slice(kind, shardings, mesh)
        return checked_placements(devices, shardings, mesh, hosts)

    found = placed((REPLICATED, ZERO1, FSDP), mesh)
    for own in several("shardings", shardings, (str, Callable, Mapping)):
        if isinstance(own, str):
            continue
        axes = _axes(own) if isinstance(own, Mapping) else []
        if mesh is not None or len(axes) != 1:
            found += placed(own, mesh)
            continue
        for base in placed(own, None):
            lengths = [n for n in _LENGTHS if base.devices % n == 0]
            found += [dataclasses.replace(base, mesh=((DATA, base.devices // n), (axes[0], n))) for n in lengths]
    return list(dict.fromkeys(found))


def searched(
    targets: Sequence[Target], usable: Callable[[Target], int], compile_all: CompileAll
) -> tuple[list[PlanRow], list[Cut]]:
    """Returns the compiled rows, the fastest that fit first, and the cuts.

    Args:
      targets: see `candidates`, for each precision.
      usable: returns the memory that a target's program can have on a device.
      compile_all: returns the rows of some targets.

    """
    cuts: list[Cut] = []
    rows: list[PlanRow] = []

    def compiled(wanted: Sequence[Target]) -> list[tuple[Target, PlanRow]]:
        room = max(0, MOST_COMPILED - len(rows))
        cuts.extend(_cut(target, f"{MOST_COMPILED} programs were compiled") for target in wanted[room:])
        made = compile_all(wanted[:room])
        rows.extend(made)
        return list(zip(wanted[:room], made, strict=True))

    first = []
    for target in targets:
        reason = _too_large(target, usable(target))
        if reason is None:
            first.append(target)
        else:
            cuts.append(_cut(target, reason))
    whole = compiled([target for target in first if _is_replicated(target)])
    at_bound = {_devices(target): row for target, row in whole if row.fits and _is_bound_by_products(target, row)}
    others = []
    for target in (target for target in first if not _is_replicated(target)):
        if (row := at_bound.get(_devices(target))) is None:
            others.append(target)
        else:
            least = milliseconds(row.costs.products_seconds)
            cuts.append(_cut(target, f"{row.placement} takes {least}, the time of its products alone"))
    misfits = []
    for target, row in [*whole, *compiled(others)]:
        if row.fits:
            cuts += [_cut(changed, "fits without, and with less arithmetic") for _, changed in _changed(target)]
        else:
            misfits.append(target)
    second = [(target, name, changed) for target in misfits for name, changed in _changed(target)]
    helped = {id(t): r.fits for t, r in compiled([changed for *_, changed in second])}
    solved = {id(target) for target, _, changed in second if helped.get(id(changed))}
    unsolved = [changed for target, name, changed in second if name == _CHANGES[1] and id(target) not in solved]
    compiled([both for changed in unsolved for name, both in _changed(changed) if name == _CHANGES[2]])
    return sorted(rows, key=lambda row: (not row.fits, row.step_seconds_bound)), cuts


def _too_large(target: Target, usable: int) -> str | None:
    """Returns the reason not to compile a target, or None."""
    if target.variant.batch_size % target.multiple:
        return f"batch {target.variant.batch_size} is not a multiple of {target.multiple}"
    least = target.variant.state_bytes(target.placement)
    if least > usable:
        return f"the state alone takes {gigabytes(least)} of {gigabytes(usable)}"
    return None


def _is_replicated(target: Target) -> bool:
    """Returns whether each device computes its part of the batch with all of the state."""
    placed = target.placement
    return placed.shardings == REPLICATED and placed.batch_parts == placed.devices


def _devices(target: Target) -> tuple[Any, ...]:
    """Returns the key that placements of a step on the same devices share."""
    return id(target.kind), id(target.variant), target.placement.devices, target.placement.hosts


def _is_bound_by_products(target: Target, row: PlanRow) -> bool:
    """Returns whether no sharding of a replicated step can be faster by its bound.

    Shardings split the same products. Only an optimizer with products of its own repeats them on each device.
    """
    step, state = target.variant.step, target.variant.state
    if row.step_seconds_bound > row.costs.products_seconds or not isinstance(step, TrainStep):
        return False
    update = jax.make_jaxpr(step.optimizer.update)(state.params, state.opt_state, state.params)
    return not multiplies(update)


def _changed(target: Target) -> Iterator[tuple[str, Target]]:
    """Yields micro-batches and rematerialization of a target, as targets with names of their own."""
    for name, _, variant, placement in changes(target.variant, target.placement):
        if name in _CHANGES and placement == target.placement:
            variant = dataclasses.replace(variant, policy=f"{target.variant.policy}, {name}")
            yield name, Target(target.kind, variant, placement)


def _cut(target: Target, reason: str) -> Cut:
    return Cut(target.kind.name, target.variant.policy, str(target.placement), reason)


def _axes(rules: Mapping[str, Any]) -> list[str]:
    """Returns the axes that rules name, without the batch's."""
    entries = [entry for spec in rules.values() for entry in (spec or ())]
    names = [name for entry in entries for name in (entry if isinstance(entry, tuple) else (entry,))]
    return [name for name in dict.fromkeys(names) if isinstance(name, str) and name != DATA]
