"""The search for a placement: the fastest way, by its bound, to split a step over the given devices so that it fits.

The replicated state is compiled first, then the other shardings and meshes, unless the first fits and takes no longer
than only its products, which no sharding reduces. For those that do not fit, micro-batches and rematerialization
follow; then both together. Each placement that is not compiled has a reason.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jmp_train.policies.autocasting import multiplies
from jmp_train.steps import TrainStep
from jmp_train.tools.planning.machines import Machine
from jmp_train.tools.planning.placements import REPLICATED, Placement
from jmp_train.tools.planning.plan_rows import PlanRow, gigabytes, milliseconds
from jmp_train.tools.planning.segments import in_segments
from jmp_train.tools.planning.workloads import Variant

MOST_COMPILED = 40
_SEGMENTS = 8
_PARTS, _REMATERIALIZED = "4 micro-batches", "rematerialization"


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """The subject of a plan's row: a step in one precision on some devices of one kind.

    Attributes:
      machine: the devices.
      variant: the step in one precision.
      placement: the number of devices and the shardings of the state.
    """

    machine: Machine
    variant: Variant
    placement: Placement

    @property
    def multiple(self) -> int:
        """Batch sizes must be multiples of this number."""
        return self.variant.multiple(self.placement)

    def __str__(self) -> str:
        return f"{self.machine.kind.name}, {self.variant.policy}, {self.placement}"


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


def searched(
    targets: Sequence[Target], compile_all: Callable[[Sequence[Target]], list[PlanRow]]
) -> tuple[list[PlanRow], list[Cut]]:
    """Returns the compiled rows, the fastest that fit first, and the cuts.

    Args:
      targets: the placements to try, in each precision.
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
        reason = _too_large(target)
        if reason is None:
            first.append(target)
        else:
            cuts.append(_cut(target, reason))
    whole = compiled([target for target in first if _is_replicated(target)])
    at_bound = {
        (id(target.machine), id(target.variant)): row
        for target, row in whole
        if row.fits and _is_bound_by_products(target, row)
    }
    others = []
    for target in (target for target in first if not _is_replicated(target)):
        if (row := at_bound.get((id(target.machine), id(target.variant)))) is None:
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
    unsolved = [changed for target, name, changed in second if name == _PARTS and id(target) not in solved]
    compiled([both for changed in unsolved for name, both in _changed(changed) if name == _REMATERIALIZED])
    return sorted(rows, key=lambda row: (not row.fits, row.step_seconds_bound)), cuts


def _too_large(target: Target) -> str | None:
    """Returns the reason not to compile a target, or None."""
    if target.variant.batch_size % target.multiple:
        return f"batch {target.variant.batch_size} is not a multiple of {target.multiple}"
    least, usable = target.variant.state_bytes(target.placement), target.machine.usable_bytes
    if least > usable:
        return f"the state alone takes {gigabytes(least)} of {gigabytes(usable)}"
    return None


def _is_replicated(target: Target) -> bool:
    """Returns whether each device computes its part of the batch with all of the state."""
    placed = target.placement
    return placed.shardings == REPLICATED and placed.batch_parts == placed.devices


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
    step, variant = target.variant.step, target.variant
    if not isinstance(step, TrainStep):
        return
    steps: dict[str, Any] = {}
    for parts in (2, 4):
        total = parts * step.accumulate_steps
        if variant.batch_size // target.placement.batch_parts % total == 0:
            steps[f"{total} micro-batches"] = dataclasses.replace(step, accumulate_steps=total)
    steps[_REMATERIALIZED] = dataclasses.replace(step, loss_fn=in_segments(step.loss_fn, _SEGMENTS))
    for name, changed in steps.items():
        new = dataclasses.replace(variant, step=changed, policy=f"{variant.policy}, {name}")
        yield name, dataclasses.replace(target, variant=new)


def _cut(target: Target, reason: str) -> Cut:
    return Cut(target.machine.kind.name, target.variant.policy, str(target.placement), reason)
