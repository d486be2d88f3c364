"""Traces a function, runs it with its shadow for one step or several, and finds its problems."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import FlatCall
from jmp_train.policies.dtype_policies import lost_in_cast
from jmp_train.policies.loss_scaling import DynamicLossScale, is_loss_scale, scales_in
from jmp_train.policies.optimizers import scaled_states
from jmp_train.policies.pytrees import check_values, is_float_array, path_name
from jmp_train.tools.diagnosing.arithmetic import Rounding, with_rounding
from jmp_train.tools.diagnosing.equations import Site, sites_of
from jmp_train.tools.diagnosing.evidence import Evidence, StateLeaf
from jmp_train.tools.diagnosing.findings import problems_of
from jmp_train.tools.diagnosing.measures import combined, is_low, is_whole, nothing
from jmp_train.tools.diagnosing.operation_numerics import row_of, subject_of
from jmp_train.tools.diagnosing.pairs import Pair
from jmp_train.tools.diagnosing.problems import Found
from jmp_train.tools.diagnosing.shadow import Shadowing


@dataclasses.dataclass(frozen=True)
class ShadowRun:
    """A run of a function with its shadow.

    Attributes:
      sites: sites of the rows.
      measures: [rows, columns], over all steps.
      results: the rows from which each result comes.
      names: paths of the results.
      carried: number of the arguments' arrays that are a state, with the structure of the first results.
      state: those in lower precision.
      low_results: the rows from which results in lower precision come, except copies of float32 ones.
      steps: number of runs.
      has_effects: True if it calls back into Python, or prints.
      apart: the difference of each result from its shadow: of floats as norms, of others as a share; infinite if only
        the result is not finite.
    """

    sites: list[Site]
    measures: np.ndarray
    results: list[frozenset[int]]
    names: list[str]
    carried: int
    state: list[StateLeaf]
    low_results: frozenset[int]
    steps: int
    has_effects: bool
    apart: tuple[float, ...]


def run_beside_shadow(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    steps: int,
    rounding: Rounding | None = None,
    own: Collection[int] = (),
) -> ShadowRun:
    """Runs a function with its shadow.

    Args:
      fn: a pure function.
      args: its arguments, arrays with values.
      steps: number of runs; the first results replace the first arguments of the same structure.
      rounding: how a device rounds the float32 operands of products.
      own: rows whose whole numbers and booleans the shadow computes for itself.

    Raises:
      TypeError: an argument is traced or has no values, or, with several steps, the first result has another structure
        than the first argument.
      ValueError: `steps` is not a positive integer.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be an integer of at least 1")
    check_values(args, "diagnose")
    structures: list[Any] = []

    def noted(*args: object) -> Any:
        result = fn(*args)
        leaves = jax.tree_util.tree_leaves_with_path(result)
        names = [path_name(path) for path, leaf in leaves if isinstance(leaf, jax.Array)]
        structures[:] = [names, _carried(args, result)]
        return result

    call = FlatCall(args, {})
    leaves = [leaf for leaf, is_array in zip(jax.tree.leaves(args), call.are_arrays, strict=True) if is_array]
    program = with_rounding(jax.make_jaxpr(call.of_arrays(noted))(*leaves), rounding)
    (names, carried) = structures
    if steps > 1 and not carried:
        raise TypeError("steps above 1 need a fn whose first result is like its first argument, as a train step's is")
    sites, results = sites_of(program)
    shadowing = Shadowing(own=frozenset(id(sites[row].equation) for row in own))
    measures = list[np.ndarray]()
    values, counts = _bound_to_device(leaves), np.zeros((carried, 2), np.int64)
    done, outputs = 0, list[Pair]()
    while done < steps:
        outputs, blocks = shadowing.run(program, [Pair(x) for x in values])
        measures.append(np.concatenate([nothing(0), *map(np.asarray, blocks)]))
        counts += _changes(values[:carried], outputs[:carried])
        done += 1
        old, values = values, [*(pair.actual for pair in outputs[:carried]), *values[carried:]]
        if done < steps and any(
            _is_finite(before) and not _is_finite(x) for before, x in zip(old, values, strict=True)
        ):
            break  # what comes of a lost state says nothing
    state = [
        StateLeaf(names[i], results[i], int(counts[i, 0]), int(counts[i, 1]), str(values[i].dtype))
        for i in range(carried)
        if is_low(values[i].dtype) and not _is_copy(values[i], values[:carried])
    ]
    others = [rows for i, rows in enumerate(results) if i >= carried and is_low(program.out_avals[i].dtype)]
    low_results = frozenset().union(*others, *(leaf.rows for leaf in state))
    has_effects = bool(program.effects) or any("callback" in site.equation.primitive.name for site in sites)
    apart = tuple(0.0 if pair.shadow is None else _apart(pair.actual, pair.shadow) for pair in outputs)
    matrix = combined(np.stack(measures))
    return ShadowRun(sites, matrix, results, names, carried, state, low_results, done, has_effects, apart)


def _apart(actual: jax.Array, exact: jax.Array) -> float:
    """Returns the difference of a result from its shadow: of floats as norms, infinite if only they are not finite."""
    if is_whole(actual.dtype):
        return float(jnp.mean(actual != exact))
    finite = jnp.isfinite(actual)
    if bool((jnp.isfinite(exact) & ~finite).any()):
        return math.inf
    both = (jnp.where(finite, x, 0) for x in (exact, actual.astype(exact.dtype) - exact))
    size, difference = (float(jnp.linalg.norm(jnp.ravel(x))) for x in both)
    return difference / size if size else 0.0


def _is_finite(x: jax.Array) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact) or bool(np.isfinite(np.asarray(x)).all())


def _changes(before: Sequence[Any], after: Sequence[Pair]) -> np.ndarray:
    """Returns, for each leaf in lower precision, the numbers of elements that change in the shadow and only there."""
    return np.array(
        [
            _count_changes(old, new.actual, new.shadow) if is_low(old.dtype) and new.shadow is not None else (0, 0)
            for old, new in zip(before, after, strict=True)
        ],
        np.int64,
    ).reshape(-1, 2)


@jax.jit
def _count_changes(old: jax.Array, new: jax.Array, shadow: jax.Array) -> tuple[jax.Array, jax.Array]:
    changing = old.astype(shadow.dtype) != shadow
    return jnp.sum(changing), jnp.sum(changing & (new == old))


def _is_copy(leaf: Any, leaves: Sequence[Any]) -> bool:
    """Returns whether a leaf is the rounded copy of a float32 leaf, such as its master weights."""
    masters = (x for x in leaves if x.shape == leaf.shape and x.dtype == jnp.float32)
    return any(bool((x.astype(leaf.dtype) == leaf).all()) for x in masters)


def _bound_to_device(leaves: list[Any]) -> list[Any]:
    """Returns arrays that are all bound to a device if one is, so that a second step is not recompiled."""
    bound = {x.device for x in leaves if isinstance(x, jax.Array) and x.committed and len(x.devices()) == 1}
    spread = any(len(x.devices()) > 1 for x in leaves if isinstance(x, jax.Array))
    return jax.device_put(leaves, bound.pop()) if len(bound) == 1 and not spread else leaves


def _carried(args: tuple[Any, ...], result: Any) -> int:
    """Returns the number of arrays in the first arguments that the first results replace: the state of a step."""
    results = result if isinstance(result, tuple) else (result,)
    if args and _types(result) == _types(args[0]):
        results = (result,)  # a state that is a tuple itself
    alike = itertools.takewhile(lambda pair: _types(pair[0]) == _types(pair[1]), zip(args, results, strict=False))
    return sum(_is_array(leaf) for old, _ in alike for leaf in jax.tree.leaves(old))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _types(tree: Any) -> Any:
    """Returns the structure, shapes and dtypes of a tree of arrays, which may have functions, as in equinox's models.

    A tree with other leaves equals no other tree.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not all(_is_array(leaf) or callable(leaf) for leaf in leaves):
        return object()
    return structure, [(leaf.shape, leaf.dtype) if _is_array(leaf) else id(leaf) for leaf in leaves]


@dataclasses.dataclass(frozen=True)
class Examination:
    """A run of a function with its shadow, and the problems found.

    Attributes:
      evidence: the measurements.
      found: problems with their rows, worst first.
      steps: number of runs.
      has_effects: True if it has effects outside of jax, such as printing.
      apart: the difference of each result from its shadow: of floats as norms, of others as a share; infinite if only
        the result is not finite.
      again: returns another examination, in which the shadow computes the whole numbers of some rows for itself; it
        runs once for the same rows.
      rounding: how the device rounds the float32 operands of products; None if it does not.
    """

    evidence: Evidence
    found: list[Found]
    steps: int
    has_effects: bool
    apart: tuple[float, ...]
    again: Callable[[frozenset[int]], "Examination"]
    rounding: Rounding | None = None


def examine(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    steps: int,
    rounding: Rounding | None = None,
    own: Collection[int] = (),
) -> Examination:
    """Returns the examination of a function; see `diagnose` for arguments and errors.

    Args:
      fn: a pure function.
      args: its arguments.
      steps: number of runs.
      rounding: how a device rounds the float32 operands of products.
      own: rows whose whole numbers and booleans the shadow computes for itself, in place of the actual ones.
    """
    run = run_beside_shadow(fn, args, steps, rounding, own)
    scale, dynamic = _loss_scale(args)
    arguments = {number: path_name(path) for number, (path, _) in enumerate(_arrays(args))}
    evidence = Evidence(
        rows=tuple(map(row_of, run.sites, run.measures, _subjects(run, arguments))),
        sites=run.sites,
        measures=run.measures,
        results=frozenset(row for rows in run.results for row in rows if row >= 0),
        state=run.state,
        low_results=run.low_results,
        arguments=arguments,
        collapsed=_lost_in_casts(run.sites, args, run.carried),
        nonfinite_arguments=_nonfinite(args),
        lost_state=_lost_state(args, run),
        stuck_scale=_stuck_scale(args),
        loss_scale=scale,
        dynamic=dynamic,
    )
    again = functools.cache(lambda own: examine(fn, args, steps, rounding, own))
    return Examination(evidence, problems_of(evidence), run.steps, run.has_effects, run.apart, again, rounding)


def _subjects(run: ShadowRun, arguments: Mapping[int, str]) -> list[str]:
    """Returns the descriptions of rows without a line of the user's; empty for others."""
    what = [
        f"the update of {name!r}" if number < run.carried else f"the result {name!r}"
        for number, name in enumerate(run.names)
    ]
    results = list(zip(what, run.results, strict=False))
    return [subject_of(site, row, arguments, results) for row, site in enumerate(run.sites)]


def _lost_in_casts(sites: Sequence[Site], args: tuple[object, ...], carried: int) -> dict[str, str]:
    """Returns the arguments, by path, whose values collapse when the function casts them, except those of the state."""
    leaves = _arrays(args)
    casts = [
        (-1 - source, site.equation.params["new_dtype"])
        for site in sites
        for source in site.sources
        if site.equation.primitive.name == "convert_element_type" and source < -carried
    ]
    found = {path_name(leaves[i][0]): lost_in_cast(leaves[i][1], np.dtype(dtype)) for i, dtype in casts}
    return {path: text for path, text in found.items() if text}


def _arrays(args: tuple[object, ...]) -> list[tuple[Any, Any]]:
    """Returns the arrays among the arguments, with their paths."""
    is_array = FlatCall(args, {}).are_arrays
    return [item for item, keep in zip(jax.tree_util.tree_leaves_with_path(args), is_array, strict=True) if keep]


def _loss_scale(args: object) -> tuple[float, bool]:
    """Returns the largest loss scale among the arguments, 1 without any, and whether it adapts."""
    states = [state for _, state in scaled_states(args)]
    scales = [scale for state in states for scale in scales_in(state.loss_scale)]
    numbers = [float(np.max(np.asarray(scale.loss_scale))) for scale in scales if is_loss_scale(scale)]
    return max(numbers, default=1.0), any(isinstance(scale, DynamicLossScale) for scale in scales)


def _stuck_scale(args: object) -> str:
    """Returns a sentence about a loss scale that reached its floor by skipped steps; empty if there is none."""
    for path, state in scaled_states(args):
        scales = [scale for scale in scales_in(state.loss_scale) if isinstance(scale, DynamicLossScale)]
        skips = int(np.max(np.asarray(state.consecutive_skips)))
        at_floor = [s for s in scales if np.min(np.asarray(s.loss_scale)) <= np.max(np.asarray(s.min_loss_scale))]
        if at_floor and skips:
            steps = "step was" if skips == 1 else f"{skips} steps were"
            floor = float(np.min(np.asarray(at_floor[0].loss_scale)))
            return f"The loss scale at {path!r} is at its floor of {floor:g}, and the last {steps} skipped."
    return ""


def _lost_state(args: tuple[object, ...], run: ShadowRun) -> list[str]:
    """Returns the paths of the state's leaves that are NaN; infinities may be intended, as in a first best loss."""
    leaves = _arrays(args)[: run.carried]
    return [
        path_name(path)
        for path, leaf in leaves
        if is_float_array(leaf) and np.isnan(np.asarray(leaf, np.float32)).any()
    ]


def _nonfinite(args: tuple[object, ...]) -> dict[int, str]:
    """Returns numbers and paths of the arrays among the arguments that are not finite."""
    return {
        number: path_name(path)
        for number, (path, leaf) in enumerate(_arrays(args))
        if is_float_array(leaf) and not np.isfinite(np.asarray(leaf, np.float32)).all()
    }
