"""Loops and branches: how they split operands, and what of them runs by a reading in Python or as facts."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_train.policies.programs.reading import RUN_ONCE, Enter, bodies_of, opened, scan_counts


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan.

    Attributes:
      program: its body.
      counts: numbers of constants and of carried values.
      options: those of `lax.scan`: length, reverse, unroll.
    """

    program: Any
    counts: tuple[int, int]
    options: dict[str, Any]

    @staticmethod
    def of(equation: Any) -> "Scan":
        """Returns the scan that an equation is."""
        params = equation.params
        names = ("length", "reverse", "unroll", "_split_transpose")
        return Scan(params["jaxpr"], scan_counts(params), {name: params[name] for name in names if name in params})

    @property
    def length(self) -> int:
        """The number of iterations."""
        return self.options["length"]

    def row(self, number: Any) -> Any:
        """Returns the number of the row that an iteration reads and writes."""
        return self.length - 1 - number if self.options["reverse"] else number

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns constants, carried values and arrays with a row per iteration, of operands."""
        consts, carry = self.counts
        return list(operands[:consts]), list(operands[consts:][:carry]), list(operands[consts + carry :])


@dataclasses.dataclass(frozen=True)
class While:
    """A `while` loop.

    Attributes:
      program: its body.
      condition: the program that computes whether it continues.
      counts: numbers of constants of condition and body.
    """

    program: Any
    condition: Any
    counts: tuple[int, int]

    @staticmethod
    def of(equation: Any) -> "While":
        """Returns the loop that an equation is."""
        params = equation.params
        counts = params["cond_nconsts"], params["body_nconsts"]
        return While(params["body_jaxpr"], params["cond_jaxpr"], counts)

    @property
    def stops_each(self) -> bool:
        """True under `vmap` if the condition has a boolean per element, each of which stops by itself."""
        return bool(opened(self.condition).outvars[0].aval.shape)

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns constants of the condition, constants of the body and carried values, of operands."""
        cond, body = self.counts
        return list(operands[:cond]), list(operands[cond:][:body]), list(operands[cond + body :])


def _stop_by_themselves(running: Any) -> bool:
    return running is not None and np.ndim(running) > 0


def select(running: Any, new: Any, old: Any) -> Any:
    """Returns the new values of those elements of arrays that go on, and the old ones of others.

    Args:
      running: True, or an array of booleans, one per element. Its axes are the first ones of arrays that have a value
        per element; others have none, and are the new ones.
      new: a pytree of arrays.
      old: another one.
    """
    if not _stop_by_themselves(running):
        return new

    def chosen(x: Any, y: Any) -> Any:
        each = np.shape(x)[: np.ndim(running)] == np.shape(running)
        return lax.select(lax.broadcast_in_dim(running, np.shape(x), range(np.ndim(running))), x, y) if each else x

    return jax.tree.map(chosen, new, old)


@contextlib.contextmanager
def references_kept(running: Any, values: Sequence[Any]) -> Iterator[None]:
    """Keeps what references refer to, for those elements of a `while` loop under `vmap` that have stopped.

    Args:
      running: see `select`; True or None if no element stops by itself.
      values: the arrays that the body reads; those that are no references are ignored.
    """
    refs = [x for x in values if isinstance(x, jax.Ref)] if _stop_by_themselves(running) else []
    before = [ref[...] for ref in refs]
    yield
    for ref, old in zip(refs, before, strict=True):
        ref[...] = select(running, ref[...], old)


def _call(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    return reading.evaluate(bodies_of(equation)[0], inputs)


def _scan_in_python(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    scan, rows = Scan.of(equation), list[Any]()
    consts, carry, xs = scan.split(inputs)
    for i in map(scan.row, range(scan.length)):
        row = [reading.mapped(lambda x, i=i: x[i], x) for x in xs]
        results = reading.evaluate(scan.program, [*consts, *carry, *row])
        carry = results[: len(carry)]
        rows.append(results[len(carry) :])
    if not rows:
        outputs = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in equation.outvars[len(carry) :]]
        return [*carry, *map(reading.constant, outputs)]
    ordered = zip(*(rows[scan.row(i)] for i in range(scan.length)), strict=True)
    return [*carry, *(reading.mapped(lambda *x: jnp.stack(x), *ys) for ys in ordered)]


def _while_in_python(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    loop = While.of(equation)
    cond_consts, body_consts, carry = loop.split(inputs)

    def go_on() -> Any:
        return reading.holds(loop.condition, [*cond_consts, *carry])

    while np.any(running := go_on()):
        with references_kept(running, jax.tree.leaves(list(map(reading.packed, body_consts)))):
            new = reading.evaluate(loop.program, [*body_consts, *carry])
        pairs = zip(new, carry, strict=True)
        carry = [reading.mapped(lambda *x: select(running, *x), *pair) for pair in pairs] if loop.stops_each else new
    return carry


def _cond_in_python(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    index, *operands = inputs
    bodies = bodies_of(equation)
    return reading.evaluate(bodies[min(max(int(reading.array(index)), 0), len(bodies) - 1)], operands)


def _scan_abstractly(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    scan = Scan.of(equation)
    return _looped(reading, scan.program, *scan.split(inputs))


def _while_abstractly(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    loop = While.of(equation)
    _, consts, carry = loop.split(inputs)
    return _looped(reading, loop.program, consts, carry, [])


def _looped(reading: Any, program: Any, consts: list[Any], carry: list[Any], xs: list[Any]) -> list[Any]:
    """Reads the body of a loop twice, the second time with the facts that hold in all iterations."""
    first = reading.trial().evaluate(program, [*consts, *carry, *xs])
    carry = [reading.joined(pair) for pair in zip(carry, first, strict=False)]
    results = reading.evaluate(program, [*consts, *carry, *xs])
    after = map(reading.joined, zip(results, carry, strict=False))
    return [*after, *results[len(carry) :]]


def _cond_abstractly(reading: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    index, *operands = inputs
    results = [reading.evaluate(body, operands) for body in bodies_of(equation)]
    return [reading.joined([*found, index]) for found in zip(*results, strict=True)]


INLINED: dict[str, Enter] = dict.fromkeys(RUN_ONCE, _call)
"""Programs that run once, in place, also those of remat and of custom derivatives."""
IN_PYTHON: dict[str, Enter] = {
    **INLINED,
    "scan": _scan_in_python,
    "while": _while_in_python,
    "cond": _cond_in_python,
}
"""Loops and branches run in Python, on known arrays: a reading sees the values of each iteration."""
ABSTRACTLY: dict[str, Enter] = {
    **INLINED,
    "scan": _scan_abstractly,
    "while": _while_abstractly,
    "cond": _cond_abstractly,
    "shard_map": _call,
}
"""Programs read for facts about their values: all branches, and a loop as often as it takes to know its start."""
