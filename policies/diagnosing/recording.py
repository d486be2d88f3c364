"""Runs a traced program operation by operation beside its shadow, and keeps something of every result.

Loops and branches run as Python's do, so that each iteration's values are there; the parts of a loop's body are
compiled once. A `shard_map` is one operation here.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import join, scan_counts
from jmp_train.policies.diagnosing.devices import compiled
from jmp_train.policies.diagnosing.equations import user_line
from jmp_train.policies.diagnosing.flattening import Flat, Operation, Part, flattened, is_plain, parts_of
from jmp_train.policies.diagnosing.pairs import Pair, run_both, with_shadow
from jmp_train.policies.diagnosing.shadow import Shadowing

Keep = Callable[[Pair], Any]
"""Of a result and its shadow to what is kept of it."""


@dataclasses.dataclass
class Recorded:
    """An operation that ran, once or, within loops, many times.

    Attributes:
      equation: of the traced program.
      callers: the equations in whose bodies it is, the outermost first.
      reads: the numbers of the operations whose results it reads.
      kept: of each run what is kept of its results.
    """

    equation: Any
    callers: tuple[Any, ...]
    reads: set[int]
    kept: list[list[Any]]

    @property
    def line(self) -> str:
        """The file and line of the user's code, or of the library that the user called."""
        return user_line((*self.callers, self.equation))

    @property
    def path(self) -> str:
        """Of the modules and scopes that it is in."""
        scopes = (str(equation.source_info.name_stack) for equation in (*self.callers, self.equation))
        return functools.reduce(join, scopes, "")


@dataclasses.dataclass(frozen=True)
class _Value:
    pair: Pair
    origins: frozenset[int] = frozenset()  # the numbers of the operations whose result it is; none of an argument


def record(
    program: Any, arguments: Sequence[Any], keep: Keep
) -> tuple[list[Recorded], list[Pair], list[frozenset[int]]]:
    """Runs a program and keeps something of every result.

    Args:
      program: a traced one.
      arguments: arrays with values.
      keep: what is kept of a result.

    Returns:
      The operations in the order in which they ran first, the program's results, and the numbers of the operations
      that made these.
    """
    recorder = _Recorder(keep)
    results = recorder.run(flattened(program), [_Value(Pair(x)) for x in arguments], ())
    return recorder.operations, [value.pair for value in results], [value.origins for value in results]


class _Recorder:
    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.operations: list[Recorded] = []
        self.numbers: dict[tuple[int, ...], int] = {}
        self.bodies: dict[int, Flat] = {}

    def run(self, flat: Flat, arguments: Sequence[_Value], around: tuple[Any, ...]) -> list[_Value]:
        """Runs a program within the bodies of some equations, the outermost first."""
        values = dict(zip(flat.operands, arguments, strict=True))
        values |= {number: _Value(Pair(array)) for number, array in flat.constants.items()}
        last_use = {number: i for i, op in enumerate(flat.operations) for number in op.reads}
        last_use |= dict.fromkeys((x for x in flat.results if isinstance(x, int)), len(flat.operations))
        end = 0
        for part in parts_of(flat.operations):
            end += len(part)
            if is_plain(part[0].equation):
                self._plain(part, values, around)
            else:
                (op,) = part
                results = self._holding_program(op, [_read(x, values) for x in op.inputs], around)
                values |= dict(zip(op.writes, results, strict=True))
            for number in {x for op in part for x in (*op.reads, *op.writes)}:
                if last_use.get(number, -1) < end:
                    values.pop(number, None)  # arrays that nothing reads any more are freed
        return [_read(x, values) for x in flat.results]

    def _plain(self, part: list[Operation], values: dict[int, _Value], around: tuple[Any, ...]) -> None:
        together = Part(part, frozenset(number for op in part for number in op.writes))
        results = iter(compiled(_all_of(together), None, frozenset())([_read(x, values).pair for x in together.given]))
        for op in part:
            pairs = [next(results) for _ in op.writes]
            made = self._made(op, [_read(x, values) for x in op.inputs], pairs, around)
            values |= dict(zip(op.writes, made, strict=True))

    def _made(
        self, op: Operation, inputs: Sequence[_Value], results: Sequence[Pair], around: tuple[Any, ...]
    ) -> list[_Value]:
        """Notes that an operation ran, if it has results, and returns these."""
        if not results:
            return []
        callers = (*around, *op.callers)
        key = tuple(map(id, (*callers, op.equation)))
        if key not in self.numbers:
            self.numbers[key] = len(self.operations)
            self.operations.append(Recorded(op.equation, callers, set(), []))
        number = self.numbers[key]
        recorded = self.operations[number]
        recorded.reads.update(*(x.origins for x in inputs))
        recorded.kept.append([self.keep(pair) for pair in results])
        return [_Value(pair, frozenset((number,))) for pair in results]

    def _holding_program(self, op: Operation, inputs: list[_Value], around: tuple[Any, ...]) -> list[_Value]:
        within = (*around, *op.callers, op.equation)
        match op.equation.primitive.name:
            case "scan":
                return self._scan(op.equation.params, inputs, within)
            case "while":
                return self._while(op.equation.params, inputs, within)
            case "cond":
                index, *operands = inputs
                branches = op.equation.params["branches"]
                taken = branches[min(max(int(index.pair.actual), 0), len(branches) - 1)]
                return self.run(self._flattened(taken), operands, within)
        pairs, _ = Shadowing().run_operation(op, [x.pair for x in inputs])
        return self._made(op, inputs, pairs, around)

    def _scan(self, params: dict[str, Any], inputs: list[_Value], within: tuple[Any, ...]) -> list[_Value]:
        n_consts, n_carry = scan_counts(params)
        consts, carry, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]
        body, rows = self._flattened(params["jaxpr"]), []
        for i in reversed(range(params["length"])) if params["reverse"] else range(params["length"]):
            x = [_Value(jax.tree.map(lambda array, i=i: array[i], value.pair), value.origins) for value in xs]
            results = self.run(body, [*consts, *carry, *x], within)
            carry, row = results[:n_carry], results[n_carry:]
            rows.append(row)
        if not rows:
            outputs = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in within[-1].outvars[n_carry:]]
            return [*carry, *(_Value(Pair(x)) for x in outputs)]
        return [*carry, *map(_stacked, zip(*(rows[::-1] if params["reverse"] else rows), strict=True))]

    def _while(self, params: dict[str, Any], inputs: list[_Value], within: tuple[Any, ...]) -> list[_Value]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, carry = inputs[:n_cond], inputs[n_cond:][:n_body], inputs[n_cond + n_body :]
        condition, body = self._flattened(params["cond_jaxpr"]), self._flattened(params["body_jaxpr"])
        while np.any(self.run(condition, [*cond_consts, *carry], within)[0].pair.actual):
            carry = self.run(body, [*body_consts, *carry], within)
        return carry

    def _flattened(self, program: Any) -> Flat:
        """Returns a loop's body flattened, which is done once."""
        if id(program) not in self.bodies:
            self.bodies[id(program)] = flattened(program)
        return self.bodies[id(program)]


@functools.lru_cache(maxsize=4096)
def _all_of(part: Part) -> Callable[[list[Pair]], list[Pair]]:
    """Returns operations as a function of what they are given, to all their results."""

    def run(given: list[Pair]) -> list[Pair]:
        values = list(given)
        for op, places in zip(part.operations, part.wiring, strict=True):
            values += run_both(op.equation, [values[place] for place in places])
        return values[len(given) :]

    return run


def _stacked(row: Sequence[_Value]) -> _Value:
    """Returns what the iterations of a scan returned as one array."""
    pairs = [value.pair for value in row]
    if any(pair.shadow is not None for pair in pairs):
        pairs = [with_shadow(pair) for pair in pairs]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *pairs)
    return _Value(stacked, frozenset().union(*(value.origins for value in row)))


def _read(value: int | np.ndarray, values: dict[int, _Value]) -> _Value:
    return values[value] if isinstance(value, int) else _Value(Pair(value))
