"""Loops, branches and `shard_map`s as functions of pairs, each compiled as one program that measures its body."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jmp_train.policies.diagnosing.arithmetic import count_rows, dtype_of, is_measured
from jmp_train.policies.diagnosing.devices import each_device, mapped
from jmp_train.policies.diagnosing.measures import combine, combined, is_float, nothing
from jmp_train.policies.diagnosing.pairs import Pair, with_shadow
from jmp_train.policies.programs import Scan, While, bodies_of, manual_axes, references_kept, select, walk

_ELEMENTS = 2**24  # that are measured of a scan, about
_FEWEST = 8  # iterations that are measured at least
InBody = Callable[..., tuple[list[Pair], jax.Array, Any]]
"""Runs a body's program on operands, in an iteration, for the elements that have not stopped, if some have: its
results, their measures and the next iteration."""


def _scan(equation: Any, in_body: InBody) -> Callable[..., Any]:
    scan = Scan.of(equation)
    rows = count_rows(scan.program)

    def run(inputs: list[Pair], iteration: Any, running: Any = None) -> Any:
        consts, start, xs = scan.split(inputs)

        def body(carry: Any, x: list[Pair]) -> Any:
            values, matrix, iteration = carry
            outputs, found, iteration = in_body(scan.program, [*consts, *values, *x], iteration, running)
            return (outputs[: len(start)], combine(matrix, found), iteration + 1), outputs[len(start) :]

        first = [with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        (values, matrix, iteration), ys = lax.scan(body, first, xs, **scan.options)
        return [*values, *ys], matrix, iteration

    return run


def _while(equation: Any, in_body: InBody) -> Callable[..., Any]:
    loop = While.of(equation)
    rows = count_rows(loop.program)

    def run(inputs: list[Pair], iteration: Any, running: Any = None) -> Any:
        cond_consts, body_consts, start = loop.split(inputs)

        def going_on(carry: Any) -> Any:
            return jex.jaxpr_as_fun(loop.condition)(*(pair.actual for pair in (*cond_consts, *carry[0])))[0]

        def body(carry: Any) -> Any:
            values, matrix, iteration = carry
            going = going_on(carry) if loop.stops_each else None
            both = _both(running, going)
            with references_kept(going, jax.tree.leaves(body_consts)):
                outputs, found, iteration = in_body(loop.program, [*body_consts, *values], iteration, both)
            return select(going, outputs, values), combine(matrix, found), iteration + 1

        first = [with_shadow(pair) for pair in start], nothing(rows), jnp.asarray(iteration)
        return lax.while_loop(lambda carry: jnp.any(going_on(carry)), body, first)

    return run


def _both(around: Any, going: Any) -> Any:
    """Returns which elements run in a loop within another one, given those of each; None for all."""
    if around is None or going is None:
        return going if around is None else around
    few, many = sorted((around, going), key=jnp.ndim)
    if many.shape[: few.ndim] != few.shape:
        return going
    return many & lax.broadcast_in_dim(few, many.shape, range(few.ndim))


def _cond(equation: Any, in_body: InBody) -> Callable[..., Any]:
    branches = bodies_of(equation)
    counts = [count_rows(branch) for branch in branches]

    def taken(number: int) -> Callable[..., Any]:
        def branch(operands: list[Pair], iteration: jax.Array, running: Any) -> Any:
            results, found, iteration = in_body(branches[number], operands, iteration, running)
            matrices: list[Any] = [nothing(count) for count in counts]
            matrices[number] = found
            return results, jnp.concatenate(matrices), iteration

        return branch

    def run(inputs: list[Pair], iteration: Any, running: Any = None) -> Any:
        index, *operands = inputs
        programs = [taken(number) for number in range(len(branches))]
        return lax.switch(index.actual, programs, operands, jnp.asarray(iteration), running)

    return run


def _shard_map(equation: Any, in_body: InBody) -> Callable[..., Any]:
    """Returns a `shard_map` inside of a program that is compiled as a whole."""
    params = equation.params
    mesh, axes = params["mesh"], manual_axes(params)
    each = each_device(mesh, axes)

    def run(inputs: list[Pair], iteration: Any, running: Any = None) -> Any:
        del running  # all elements count

        def body(inputs: list[Pair], iteration: jax.Array) -> Any:
            results, matrix, iteration = in_body(params["jaxpr"], inputs, iteration)
            floats = [pair if is_float(dtype_of(pair.actual)) else Pair(pair.actual) for pair in results]
            return floats, matrix[None], iteration[None]

        specs = [
            Pair(spec, None if pair.shadow is None else spec)
            for pair, spec in zip(inputs, params["in_specs"], strict=True)
        ]
        out_specs = [
            Pair(spec, spec if is_float(dtype_of(variable)) else None)
            for variable, spec in zip(equation.outvars, params["out_specs"], strict=True)
        ]
        on_devices = mapped(body, mesh, axes, (specs, P()), (out_specs, each, each))
        results, matrices, iterations = on_devices(inputs, jnp.asarray(iteration))
        return results, combined(matrices), iterations.max()

    return run


PROGRAMS = {"scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map}
"""By the name of an operation, what returns it as a function of pairs."""


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


def segment_of(equation: Any, in_body: InBody) -> Callable[..., Any]:
    """Returns a function that runs iterations of a scan without measuring them.

    Args:
      equation: the equation of the scan.
      in_body: runs its body.
    """
    scan = Scan.of(equation)

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
            results, _, _ = in_body(scan.program, operands, jnp.float32(0))
            state = results[: len(carry)], written(equation, ys, results[len(carry) :], number)
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
    scan = Scan.of(equation)
    return scan.length - 1 - number if scan.options["reverse"] else number


def _is_lost(results: Sequence[Pair]) -> jax.Array:
    """Returns whether results have NaN, or infinities that the shadow lacks."""
    lost = jnp.asarray(False)
    for pair in results:
        if pair.shadow is not None:
            nan = jnp.isnan(pair.actual) | jnp.isnan(pair.shadow)
            lost |= jnp.any(nan | (jnp.isinf(pair.actual) & ~jnp.isinf(pair.shadow)))
    return lost
