"""The all-gather dtype of a program's inputs: float16 for those that are only ever cast to float16.

A policy, a mode of AMP or autocast casts parameters where they are used, each in its own way. What is common to them
is the traced program, and that is where it is looked up.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jmp_train.policies.autocasting import scan_counts

# Hand their first operand's values on as they are, in another order or in part.
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
    """Returns the dtype that all of a program's uses of each input cast it to; without such a dtype, the input's own.

    Args:
      jaxpr: the program.
      variables: those of its inputs that are asked for.

    Returns:
      A dtype for each variable. Cast to it, and back, an input changes nothing of what the program computes.

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
    """Yields the dtype of each use of a variable, its own where that is not a cast."""
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
    """Returns the programs in an equation that take one of its operands as it is, each with the input's number."""
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
