"""`in_segments` rematerializes a function: its backward pass recomputes segments, so fewer values are stored."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun


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
