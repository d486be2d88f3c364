"""Dtypes in which a program's inputs can be gathered: float16 for inputs that are only ever cast to float16.

Policies, AMP modes and autocast all cast parameters in their own way, so the casts are read from the traced program.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jmp_train.policies.autocasting import scan_counts

# Pass on the values of their first operand, reordered or in part.
_MOVE = frozenset(
    [
        "reshape",
        "transpose",
        "squeeze",
        "broadcast_in_dim",
        "expand_dims",
        "slice",
        "dynamic_slice",
        "gather",
        "rev",
        "copy",
        "pvary",
        "pcast",
        "sharding_constraint",
    ]
)
_CALLS = frozenset(["jit", "pjit", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "shard_map"])


def all_gather_dtypes(jaxpr: Jaxpr, variables: Sequence[Any]) -> list[Any]:
    """Returns for each input the one dtype to which all of its uses cast it; otherwise the input's own dtype.

    Args:
      jaxpr: the program.
      variables: some of its inputs.

    Returns:
      A dtype per variable. Casting an input to it and back does not change the results of the program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> f = lambda w, b: (w.astype(jnp.float16).sum(), jnp.exp(b))
      >>> jaxpr = jax.make_jaxpr(f)(jnp.ones((2, 2)), jnp.ones(2)).jaxpr
      >>> [dtype.name for dtype in all_gather_dtypes(jaxpr, jaxpr.invars)]
      ['float16', 'float32']
    """
    return [_lowest_precision(variable.aval.dtype, set(_uses(jaxpr, variable))) for variable in variables]


def _lowest_precision(own: np.dtype, used: set[Any]) -> Any:
    if len(used) != 1 or not jnp.issubdtype(own, jnp.floating):
        return own
    (only,) = used
    is_lower = jnp.issubdtype(only, jnp.floating) and jnp.finfo(only).bits < jnp.finfo(own).bits
    return only if is_lower else own


def _uses(jaxpr: Jaxpr, variable: Any) -> Iterator[Any]:
    """Yields the dtype to which each use of a variable casts it, or its own if the use is no cast."""
    if any(x is variable for x in jaxpr.outvars):
        yield variable.aval.dtype
    for equation in jaxpr.eqns:
        for position, atom in enumerate(equation.invars):
            if not isinstance(atom, Literal) and atom is variable:
                yield from _use(jaxpr, equation, position)


def _use(program: Jaxpr, equation: Any, position: int) -> Iterator[Any]:
    name, own = equation.primitive.name, equation.invars[position].aval.dtype
    if name == "convert_element_type":
        yield jnp.dtype(equation.params["new_dtype"])
        return
    if name in _MOVE and position == 0:
        yield from (dtype for x in equation.outvars[:1] for dtype in _uses(program, x))
        return
    bodies = _bodies(equation, position)
    for body, inner in bodies:
        yield from _uses(body, body.invars[inner])
    if not bodies:
        yield own


def _bodies(equation: JaxprEqn, position: int) -> list[tuple[Any, int]]:
    """Returns the programs in an equation that take an operand unchanged, each with the number of that input."""
    params, name = equation.params, equation.primitive.name
    if name == "cond":
        return [(_open(branch), position - 1) for branch in params["branches"] if position]
    if name == "scan":
        consts, carry = scan_counts(params)
        in_carry = consts <= position < consts + carry
        return [] if in_carry else [(_open(params["jaxpr"]), position)]
    if name in _CALLS:
        return [(_open(params.get("jaxpr") or params["call_jaxpr"]), position)]
    return []


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)
