"""Runs long scans over large arrays as compiled programs, and measures a sample of their iterations.

Every iteration runs with its shadow in one program, whose intermediate arrays the compiler fuses away. The iterations
of the sample run once more, equation by equation, and so does the first one whose results are not finite.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_train.policies.autocasting import scan_counts
from jmp_train.policies.diagnosing.measures import is_float, widened
from jmp_train.policies.diagnosing.pairs import Pair
from jmp_train.policies.diagnosing.programs import bodies_of, dtype_of, is_measured

_ELEMENTS = 2**24  # that are measured of a scan, about
_FEWEST = 8  # iterations that are measured at least

InBody = Callable[[Any, Sequence[Pair], Any], tuple[list[Pair], jax.Array, Any]]
"""Runs a body's program on operands, in an iteration: its results, their measures and the next iteration."""


def stride_of(equation: Any) -> int:
    """Returns the number of iterations of a scan between two measured ones.

    Args:
      equation: the equation of the scan.
    """
    params = equation.params
    if any(jnp.issubdtype(dtype_of(v), jax.dtypes.extended) for v in equation.outvars):
        return 1  # no buffer is made of random keys
    measured = max(_FEWEST, _ELEMENTS // max(_elements(params["jaxpr"]), 1))
    return max(params["length"] // measured, 1)


def _elements(program: Any) -> int:
    """Returns the number of measured elements of a program's equations."""
    total = 0
    for equation in getattr(program, "jaxpr", program).eqns:
        if bodies := bodies_of(equation):
            total += equation.params.get("length", 1) * sum(map(_elements, bodies))
        elif is_measured(equation):
            total += sum(v.aval.size for v in equation.outvars)
    return total


def buffers_of(equation: Any) -> list[Pair]:
    """Returns arrays of zeros for the outputs of a scan's iterations, with shadows.

    Args:
      equation: the equation of the scan.
    """
    avals = [v.aval for v in equation.outvars[scan_counts(equation.params)[1] :]]
    return [
        Pair(jnp.zeros(x.shape, x.dtype), jnp.zeros(x.shape, widened(x.dtype)) if is_float(x.dtype) else None)
        for x in avals
    ]


def segment_of(equation: Any, in_body: InBody) -> Callable[..., Any]:
    """Returns a function that runs iterations of a scan without measuring them.

    Args:
      equation: the equation of the scan.
      in_body: runs its body.
    """
    params = equation.params
    _, n_carry = scan_counts(params)

    def run(
        consts: list[Pair], state: tuple[list[Pair], list[Pair]], xs: list[Pair], start: Any, stop: Any, watched: Any
    ) -> Any:
        """Returns the state, the number of the next iteration, and whether the last one lost finite numbers.

        Iterations run from `start` to `stop`, or, if they are watched, to the first that loses finite numbers.
        """

        def go_on(values: Any) -> jax.Array:
            _, number, lost = values
            return (number < stop) & ~(lost & watched)

        def body(values: Any) -> Any:
            (carry, ys), number, _ = values
            operands = [*consts, *carry, *row_of(equation, xs, number)]
            results, _, _ = in_body(params["jaxpr"], operands, jnp.float32(0))
            state = results[:n_carry], written(equation, ys, results[n_carry:], number)
            return state, number + 1, _is_lost(results)

        return lax.while_loop(go_on, body, (state, jnp.asarray(start, jnp.int32), jnp.asarray(False)))

    return run


def row_of(equation: Any, xs: list[Pair], number: Any) -> list[Pair]:
    """Returns the rows that an iteration of a scan reads of arrays."""
    place = _place(equation, number)
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, keepdims=False), xs)


def written(equation: Any, ys: list[Pair], row: list[Pair], number: Any) -> list[Pair]:
    """Returns arrays with the outputs of an iteration of a scan."""
    place = _place(equation, number)
    return jax.tree.map(lambda y, x: lax.dynamic_update_index_in_dim(y, x, place, 0), ys, row)


def _place(equation: Any, number: Any) -> Any:
    return equation.params["length"] - 1 - number if equation.params["reverse"] else number


def _is_lost(results: Sequence[Pair]) -> jax.Array:
    """Returns whether results have NaN, or infinities that the shadow lacks."""
    lost = jnp.asarray(False)
    for pair in results:
        if pair.shadow is not None:
            nan = jnp.isnan(pair.actual) | jnp.isnan(pair.shadow)
            lost |= jnp.any(nan | (jnp.isinf(pair.actual) & ~jnp.isinf(pair.shadow)))
    return lost
