"""Runs a function with its shadow, and finds its problems."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.policies.autocasting import FlatCall
from jmp_train.policies.diagnosing.equations import Site
from jmp_train.policies.diagnosing.evidence import Evidence
from jmp_train.policies.diagnosing.findings import problems_of
from jmp_train.policies.diagnosing.problems import Problem
from jmp_train.policies.diagnosing.rows import row_of
from jmp_train.policies.diagnosing.subjects import subject_of
from jmp_train.policies.diagnosing.tracing import Run, run_beside_shadow
from jmp_train.policies.dtype_policies import lost_in_cast
from jmp_train.policies.loss_scaling import DynamicLossScale, is_loss_scale, scales_in
from jmp_train.policies.optimizers import scaled_states
from jmp_train.policies.pytrees import is_float_array, path_name


@dataclasses.dataclass(frozen=True)
class Examination:
    """A run of a function with its shadow, and the problems found.

    Attributes:
      evidence: the measurements.
      found: problems with their rows, worst first.
      steps: number of runs.
      has_effects: True if it has effects outside of jax, such as printing.
      outputs: the floats among its last results, in float32.
    """

    evidence: Evidence
    found: list[tuple[int, Problem]]
    steps: int
    has_effects: bool
    outputs: Sequence[jax.Array] = ()


def examine(fn: Callable[..., Any], args: tuple[Any, ...], steps: int) -> Examination:
    """Returns the examination of a function; see `diagnose` for arguments and errors.

    Args:
      fn: a pure function.
      args: its arguments.
      steps: number of runs.
    """
    run = run_beside_shadow(fn, args, steps)
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
    return Examination(evidence, problems_of(evidence), run.steps, run.has_effects, run.outputs)


def _subjects(run: Run, arguments: Mapping[int, str]) -> list[str]:
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


def _lost_state(args: tuple[object, ...], run: Run) -> list[str]:
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
