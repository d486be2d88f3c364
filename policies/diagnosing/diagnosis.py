"""`diagnose`: what half precision does to every operation of a function or a training step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.policies.autocasting import FlatCall
from jmp_train.policies.diagnosing.equations import Site
from jmp_train.policies.diagnosing.evidence import Evidence
from jmp_train.policies.diagnosing.explaining import explanation
from jmp_train.policies.diagnosing.findings import problems_of
from jmp_train.policies.diagnosing.report import NumericsReport
from jmp_train.policies.diagnosing.rows import row_of
from jmp_train.policies.diagnosing.subjects import subject_of
from jmp_train.policies.diagnosing.tracing import Run, run_beside_shadow
from jmp_train.policies.dtype_policies import lost_in_cast
from jmp_train.policies.loss_scaling import DynamicLossScale, is_loss_scale, scales_in
from jmp_train.policies.optimizers import scaled_states
from jmp_train.policies.pytrees import is_float_array, is_nnx_object, path_name


def diagnose(fn: Callable[..., Any], *args: object, steps: int = 1) -> NumericsReport:
    """Runs a function beside a float32 shadow of itself, and says which operations half precision harms.

    The function is traced once, as `jax.jit` does: forward pass, backward pass and update of a training step are one
    program, with what is within `jit`, `scan`, `while`, `cond`, `remat`, custom derivatives and `shard_map`. Each of
    its equations is evaluated in its own dtypes, in float32 beside it, and in its own dtypes on the float32 operands,
    which parts the error of the operation itself from what it inherits.

    Args:
      fn: a pure function, with or without `jax.jit`, such as a `train_step` with its policy, in whatever parallel
        transform.
      *args: its arguments, pytrees of arrays with values.
      steps: how often it is run, each time with its first results, as far as these are like its first arguments (the
        state, or model and optimizer's state), in place of these; no further than to a state that is not finite.

    Returns:
      A report: print it, or look at its `problems`, `rules` and `rows`.

    Raises:
      TypeError: an argument has no values, or it is called within a transform of jax; `steps` is above 1 and the
        first result is unlike the first argument.
      ValueError: `steps` is no positive integer; an argument is spread over the devices of several processes.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_train as jt
      >>> def norm(x):
      ...     return x / jnp.sqrt(jnp.sum(x * x))
      >>> report = jt.diagnose(norm, jnp.full(4, 300.0, jnp.float16))
      >>> [(problem.kind, problem.primitive) for problem in report.problems]
      [('overflow', 'mul')]
      >>> safe = jt.autocast(norm, jnp.float16, rules=report.rules)
      >>> jt.diagnose(safe, jnp.full(4, 300.0, jnp.float16)).problems
      ()

    Reference: the shadow is that of FpDebug (Benz, Hildebrandt and Hack, PLDI 2012), the local error of an operation
    that of Herbgrind (Sanchez-Stern and others, PLDI 2018).
    """
    if any(map(is_nnx_object, jax.tree.leaves(args, is_leaf=is_nnx_object))):
        fn, args = _with_changed_objects(fn), (args,)
    run = run_beside_shadow(fn, args, steps)
    scale, dynamic = _loss_scale(args)
    arguments = {number: path_name(path) for number, (path, _) in enumerate(_arrays(args))}
    collapsed = _lost_in_casts(run.sites, args, run.carried)
    rows = tuple(map(row_of, run.sites, run.measures, _subjects(run, arguments)))
    evidence = Evidence(
        rows=rows,
        sites=run.sites,
        measures=run.measures,
        results=frozenset(row for rows in run.results for row in rows if row >= 0),
        state=run.state,
        low_results=run.low_results,
        arguments=arguments,
        collapsed=collapsed,
        nonfinite_arguments=_nonfinite(args),
        lost_state=_lost_state(args, run),
        stuck_scale=_stuck_scale(args),
        loss_scale=scale,
        dynamic=dynamic,
    )
    found = problems_of(evidence)
    problems = tuple(problem for _, problem in found)
    return NumericsReport(problems, rows, collapsed, run.steps, explanation(evidence, found))


def _with_changed_objects(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of all arguments that also returns them, with what it has done to flax nnx objects."""

    def pure(args: tuple[Any, ...]) -> tuple[Any, Any]:
        result = fn(*args)
        return args, result

    return pure


def _subjects(run: Run, arguments: Mapping[int, str]) -> list[str]:
    """Returns what each row is if no line of the user's made it, else empty."""
    what = [
        f"the update of {name!r}" if number < run.carried else f"the result {name!r}"
        for number, name in enumerate(run.names)
    ]
    results = list(zip(what, run.results, strict=False))
    return [subject_of(site, row, arguments, results) for row, site in enumerate(run.sites)]


def _lost_in_casts(sites: Sequence[Site], args: tuple[object, ...], carried: int) -> dict[str, str]:
    """Returns which arguments' values, but for the state's, collapse where the function casts them, by path."""
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
    """Returns the largest loss scale among the arguments, 1 where there is none, and whether it adapts."""
    states = [state for _, state in scaled_states(args)]
    scales = [scale for state in states for scale in scales_in(state.loss_scale)]
    numbers = [float(np.max(np.asarray(scale.loss_scale))) for scale in scales if is_loss_scale(scale)]
    return max(numbers, default=1.0), any(isinstance(scale, DynamicLossScale) for scale in scales)


def _stuck_scale(args: object) -> str:
    """Returns a sentence about a loss scale that is at its floor after skipped steps; empty if there is none."""
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
    """Returns the paths of the state's leaves that are NaN; infinite ones may be meant, as the best loss so far."""
    leaves = _arrays(args)[: run.carried]
    return [
        path_name(path)
        for path, leaf in leaves
        if is_float_array(leaf) and np.isnan(np.asarray(leaf, np.float32)).any()
    ]


def _nonfinite(args: tuple[object, ...]) -> dict[int, str]:
    """Returns which arrays among the arguments are not finite: their numbers and paths."""
    return {
        number: path_name(path)
        for number, (path, leaf) in enumerate(_arrays(args))
        if is_float_array(leaf) and not np.isfinite(np.asarray(leaf, np.float32)).all()
    }
