"""The search for a placement: the fastest way, by its bound, to split a step over the given devices so that it fits.

The replicated state is compiled first, then the other shardings and meshes, unless the first fits and takes no longer
than only its products, which no sharding reduces. For those that do not fit, micro-batches and rematerialization
follow; then both together. Each placement that is not compiled has a reason.

`in_segments` rematerializes a function: its backward pass recomputes segments, so fewer values are stored.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jmp_train.policies.autocasting import multiplies
from jmp_train.steps import TrainStep
from jmp_train.tools.planning.placements import REPLICATED, Machine, Placement
from jmp_train.tools.planning.plan_rows import PlanRow, gigabytes, milliseconds
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


def in_segments(fn: Callable[..., Any], segments: int) -> Callable[..., Any]:
    """Returns the function with its operations in segments, each under `jax.checkpoint`.

    It computes the same. The gradient stores only the inputs of each segment and recomputes the rest, about a third
    more arithmetic. Segments produce similar numbers of bytes, and the cuts are where the fewest bytes pass. A loop is
    a single operation, which is not cut.

    Args:
      fn: takes and returns pytrees of arrays.
      segments: largest number of segments; at least 1.

    Example:
      >>> import jax.numpy as jnp
      >>> wave = lambda x: jnp.sin(jnp.sin(jnp.sin(x)))
      >>> float(jax.grad(in_segments(wave, 3))(1.0)) == float(jax.grad(wave)(1.0))
      True

    Reference: Chen et al., "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174.
    """

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)

        def flat(*leaves: Any) -> Any:
            return fn(*jax.tree.unflatten(structure, leaves))

        program, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        results = _run_in_segments(program, _cuts(program.jaxpr, segments), leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _run_in_segments(program: ClosedJaxpr, cuts: Sequence[int], leaves: Sequence[Any]) -> list[Any]:
    jaxpr = program.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(jaxpr.invars, leaves, strict=True))
    needed_later = _last_uses(jaxpr)
    for start, stop in zip((0, *cuts), (*cuts, len(jaxpr.eqns)), strict=True):
        equations = jaxpr.eqns[start:stop]
        made = [v for e in equations for v in e.outvars]
        inputs = list(dict.fromkeys(v for e in equations for v in e.invars if _is_variable(v) and v in values))
        outputs = [v for v in made if needed_later.get(v, -1) >= stop]
        names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        part = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=equations, debug_info=names)
        run = jaxpr_as_fun(ClosedJaxpr(part, ()))
        last = stop == len(jaxpr.eqns)  # its values are used at once: computing them again would gain nothing
        found = (run if last else jax.checkpoint(run))(*(values[v] for v in inputs))
        values |= dict(zip(outputs, found, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _cuts(jaxpr: Jaxpr, segments: int) -> list[int]:
    """Returns the equations before which to cut: near even fractions of the bytes, where the fewest bytes pass."""
    made = [sum(_bytes(v) for v in equation.outvars) for equation in jaxpr.eqns]
    last = _last_uses(jaxpr)
    handed_on, alive = [], 0
    ends: dict[int, int] = {}
    for i, equation in enumerate(jaxpr.eqns):
        handed_on.append(alive)  # at a cut before this equation
        for v in equation.outvars:
            if last.get(v, -1) > i:
                alive += _bytes(v)
                ends[last[v]] = ends.get(last[v], 0) + _bytes(v)
        alive -= ends.pop(i, 0)
    total, so_far, cuts, window = sum(made), 0, [], []
    goals = [total * k / segments for k in range(1, segments)]
    for i, n_bytes in enumerate(made):
        if goals and so_far >= goals[0] - total / (2 * segments):
            window.append(i)
        so_far += n_bytes
        if goals and so_far >= goals[0] + total / (4 * segments):
            if window:
                cuts.append(min(window, key=lambda j: (handed_on[j], -j)))
            goals, window = goals[1:], []
    return sorted({cut for cut in cuts if cut > 0})


def _last_uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """Returns the last equation that uses each variable; results are used after the last one."""
    last = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.invars if _is_variable(v)}
    return last | {v: len(jaxpr.eqns) for v in jaxpr.outvars if _is_variable(v)}


def _bytes(variable: Any) -> int:
    shape, dtype = getattr(variable.aval, "shape", ()), getattr(variable.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


def _is_variable(x: object) -> bool:
    return not isinstance(x, Literal)
