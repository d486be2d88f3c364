"""Loops, branches and `shard_map`s as functions of pairs, each compiled as one program that measures its body."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from jmp_train.policies.programs import IN_JAX, Reading, Scan, bodies_of, walk
from jmp_train.tools.diagnosing.arithmetic import count_rows, dtype_of, is_measured
from jmp_train.tools.diagnosing.measures import combine, combined, nothing
from jmp_train.tools.diagnosing.pairs import Pair, with_shadow

_ELEMENTS = 2**24  # that are measured of a scan, about
_FEWEST = 8  # iterations that are measured at least
InBody = Callable[..., tuple[list[Pair], jax.Array, Any]]
"""Runs a body's program on operands, in an iteration, for the elements that have not stopped, if some have: its
results, their measures and the next iteration."""


@dataclasses.dataclass
class _Bodies(Reading[Pair]):
    """Runs the bodies of an equation, and adds up the measures of all runs.

    Attributes:
      equation: the equation.
      in_body: runs a body.
      passed: the measures [rows, columns] of the runs so far, and the number of the next iteration.
      running: the elements of a `while` loop under `vmap` that still run; None for all.
      number: the number of the branch.
    """

    equation: Any
    in_body: InBody
    passed: Any
    running: Any = None
    number: int = 0

    table = IN_JAX

    def evaluate(self, program: Any, inputs: Sequence[Pair]) -> list[Pair]:
        measures, iteration = self.passed
        outputs, found, iteration = self.in_body(program, inputs, iteration, self.running)
        rows = [nothing(count_rows(body)) for body in bodies_of(self.equation)]
        measures = combine(measures, jnp.concatenate([*rows[: self.number], found, *rows[self.number + 1 :]]))
        self.passed = measures, iteration + int(self.equation.primitive.name in ("scan", "while"))
        return outputs

    def body(self, rows: Any = (), count: int = 0, state: Any = (), running: Any = None) -> "_Bodies":
        return dataclasses.replace(self, passed=state, running=_both(self.running, running))

    def branch(self, number: int) -> "_Bodies":
        return dataclasses.replace(self, number=number)

    def branches(self, equation: Any) -> list[Any]:
        return bodies_of(equation)

    def state(self) -> Any:
        return self.passed

    def absorb(self, state: Any, *, of_devices: bool = False) -> None:
        self.passed = (combined(state[0]), state[1].max()) if of_devices else state

    def holds(self, condition: Any, values: list[Pair]) -> Any:
        return jex.jaxpr_as_fun(condition)(*(pair.actual for pair in values))[0]

    def array(self, value: Pair) -> Any:
        return value.actual

    def given(self, value: Pair) -> Pair:
        return value

    def packed(self, value: Pair) -> Pair:
        return value

    def start(self, program: Any, init: list[Pair], atoms: Sequence[Any], operands: Any) -> list[Pair]:
        return list(map(with_shadow, init))


def _both(around: Any, going: Any) -> Any:
    """Returns which elements run in a loop within another one, given those of each; None for all."""
    if around is None or going is None:
        return going if around is None else around
    few, many = sorted((around, going), key=jnp.ndim)
    if many.shape[: few.ndim] != few.shape:
        return going
    return many & lax.broadcast_in_dim(few, many.shape, range(few.ndim))


def measuring(equation: Any, in_body: InBody, own: Any) -> Callable[..., Any]:
    """Returns an equation that holds programs as a function of pairs, which measures its bodies.

    Args:
      equation: the equation.
      in_body: runs a body.
      own: its last argument.
    """

    def run(inputs: list[Pair], iteration: Any, running: Any = None) -> Any:
        first = nothing(sum(map(count_rows, bodies_of(equation)))), jnp.asarray(iteration)
        bodies = _Bodies(equation, functools.partial(in_body, own), first, running)
        return IN_JAX[equation.primitive.name](bodies, equation, inputs), *bodies.passed

    return run


def stride_of(equation: Any) -> int:
    """Returns the number of iterations of a scan between two measured ones.

    Args:
      equation: the equation of the scan.
    """
    scan = Scan.of(equation)
    if any(jnp.issubdtype(dtype_of(v), jax.dtypes.extended) for v in equation.outvars):
        return 1  # no buffer is made of random keys
    measured = max(_FEWEST, _ELEMENTS // max(_elements(scan.program), 1))
    return max(scan.length // measured, 1)


def _elements(program: Any) -> int:
    """Returns the number of measured elements of a program's equations."""
    measured = (place for place in walk(program, bodies_of) if is_measured(place.equation))
    return sum(place.repeats * sum(v.aval.size for v in place.equation.outvars) for place in measured)


def buffers_of(equation: Any, *, own: bool) -> list[Pair]:
    """Returns arrays of zeros for the outputs of a scan's iterations, with shadows.

    Args:
      equation: the equation of the scan.
      own: True if whole numbers have shadows too.
    """
    avals = [v.aval for v in equation.outvars[Scan.of(equation).counts[1] :]]
    return [with_shadow(Pair(jnp.zeros(x.shape, x.dtype)), own=own) for x in avals]


def rows_of(equation: Any) -> tuple[Callable[..., list[Pair]], Callable[..., list[Pair]]]:
    """Returns a function that reads the rows of an iteration of arrays, and one that writes them.

    Args:
      equation: the equation of the scan.
    """
    row = Scan.of(equation).row

    def read(xs: list[Pair], number: Any) -> list[Pair]:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row(number), keepdims=False), xs)

    def write(ys: list[Pair], outputs: list[Pair], number: Any) -> list[Pair]:
        return jax.tree.map(lambda y, x: lax.dynamic_update_index_in_dim(y, x, row(number), 0), ys, outputs)

    return read, write


def segment_of(equation: Any, in_body: InBody, own: Any) -> Callable[..., Any]:
    """Returns a function that runs iterations of a scan without measuring them.

    Args:
      equation: the equation of the scan.
      in_body: runs its body.
      own: its last argument.
    """
    scan, (read, write) = Scan.of(equation), rows_of(equation)

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
            results, _, _ = in_body(own, scan.program, [*consts, *carry, *read(xs, number)], jnp.float32(0))
            state = results[: len(carry)], write(ys, results[len(carry) :], number)
            return state, number + 1, _is_lost(results)

        return lax.while_loop(go_on, body, (state, jnp.asarray(start, jnp.int32), jnp.asarray(False)))

    return run


def _is_lost(results: Sequence[Pair]) -> jax.Array:
    """Returns whether results have NaN, or infinities that the shadow lacks."""
    lost = jnp.asarray(False)
    for pair in results:
        if pair.shadow is not None:
            nan = jnp.isnan(pair.actual) | jnp.isnan(pair.shadow)
            lost |= jnp.any(nan | (jnp.isinf(pair.actual) & ~jnp.isinf(pair.shadow)))
    return lost
