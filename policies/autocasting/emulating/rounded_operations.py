"""Operations in float32 that round as half precision does if a run-time flag is set, in derivatives too.

Rounding is a cast to the half type and back, so it has the half type's range, subnormal numbers and ties. The compiler
must not remove it, so compile programs with `COMPILER_OPTIONS`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.primitives import DERIVED_IN_FLOAT32, LAYOUT, names
from jmp_train.policies.autocasting.values import FLOAT32, replaced
from jmp_train.policies.programs import INLINED, Reading

COMPILER_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}

Bit = bool | jax.Array  # known at trace time, or a boolean scalar of the program

# Sums stay in float32 until they are read; the other operations move, pick or cast numbers that are already rounded.
_EXACT = LAYOUT | names(
    "reduce_sum reduce_max reduce_min reduce_and reduce_or cumsum scatter-add scatter_add neg abs sign max min "
    "select_n convert_element_type concatenate pad dynamic_slice gather"
)


def both(first: Bit, second: Bit) -> Bit:
    """Returns a bit that is set if both bits are."""
    if isinstance(first, bool):
        return second if first else False
    if isinstance(second, bool):
        return first if second else False
    return lax.bitwise_and(first, second)


def either(first: Bit, second: Bit) -> Bit:
    """Returns a bit that is set if at least one of two bits is."""
    if isinstance(first, bool):
        return True if first else second
    if isinstance(second, bool):
        return True if second else first
    return lax.bitwise_or(first, second)


def rounded(x: jax.Array, half: DTypeLike, active: Bit = True) -> jax.Array:
    """Returns float32 numbers rounded to a half type; the derivative is that of the cast, which also rounds.

    Args:
      x: any floating array.
      half: float16 or bfloat16.
      active: whether to round.
    """
    if active is False or jnp.result_type(x) != FLOAT32:
        return x
    cast = lax.convert_element_type(lax.convert_element_type(x, half), FLOAT32)
    return cast if active is True else lax.select_n(active, x, cast)


def rounded_operation(
    run: Callable[..., Any], arrays: Sequence[jax.Array], half: DTypeLike, active: Bit, *, wide: bool = False
) -> list[jax.Array]:
    """Runs an operation as half precision does: rounds its operands, its results and each step of its derivative.

    Args:
      run: the operation. It takes arrays, the floating ones in float32, and returns one array or a list.
      arrays: its operands.
      half: float16 or bfloat16.
      active: whether to round.
      wide: True if the result is not rounded, as for a product with a float32 accumulator.
    """
    if active is False:
        return _listed(run(*arrays))
    program = jax.make_jaxpr(run)(*arrays)
    in_float32 = all(equation.primitive.name in DERIVED_IN_FLOAT32 for equation in program.jaxpr.eqns)

    def operation(program: Any, arrays: Sequence[Any], active: Bit) -> list[Any]:
        results = _Rounding(half, False if in_float32 else active).evaluate(program, arrays)
        return [rounded(x, half, active) for x in results] if in_float32 else results

    def operands(active: Bit, arrays: Sequence[Any]) -> list[Any]:
        return [rounded(x, half, active) for x in arrays]

    @jax.custom_jvp
    def emulated(active: jax.Array, *arrays: jax.Array) -> list[Any]:
        return operation(program, operands(active, arrays), False if wide else active)

    @functools.partial(emulated.defjvp, symbolic_zeros=True)
    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        (active, *arrays), (_, *dots) = primals, tangents
        moves = [not _is_zero(dot) for dot in dots]
        results = emulated(active, *arrays)

        def along(arrays: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
            def of_moving(*moving: object) -> list[Any]:
                return _listed(run(*replaced(arrays, moves, moving)))

            return jax.jvp(of_moving, tuple(compress(arrays, moves)), tuple(dots))[1]

        inputs = operands(active, arrays), operands(active, list(compress(dots, moves)))
        found = operation(jax.make_jaxpr(along)(*inputs), jax.tree.leaves(inputs), active)
        return results, [_like(result, dot) for result, dot in zip(results, found, strict=True)]

    return emulated(jnp.asarray(active), *arrays)


def _logistic(x: jax.Array, params: dict[str, Any], step: Callable[[jax.Array], jax.Array]) -> jax.Array:
    del params
    one = lax.full_like(x, 1)
    return step(lax.div(one, step(lax.add(one, step(lax.exp(lax.neg(x)))))))


# Operations that jax or XLA expands into several, each of which rounds.
_EXPANDED = {"logistic": _logistic}


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero) or jnp.result_type(tangent) == jax.dtypes.float0


def _like(result: jax.Array, dot: Any) -> Any:
    """Returns a tangent of a result; tangents of integers have their own type."""
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return dot
    return np.zeros(result.shape, jax.dtypes.float0)


@dataclasses.dataclass(frozen=True)
class _Rounding(Reading[Any]):
    """Runs a program operation by operation, and rounds the results of operations that compute."""

    half: DTypeLike
    active: Bit

    table = INLINED

    def bind(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        name, step = equation.primitive.name, functools.partial(rounded, half=self.half, active=self.active)
        if name in _EXPANDED:
            return [_EXPANDED[name](inputs[0], equation.params, step)]
        results = super().bind(equation, inputs)
        return results if name in _EXACT else list(map(step, results))
