"""Runs a traced program operation by operation with its shadow, and stores a summary of every result.

Loops and branches run in Python, so that each iteration's values are available; the parts of a loop's body are compiled
once. A `shard_map` is one operation here.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import join, scan_counts
from jmp_train.policies.diagnosing.devices import compiled
from jmp_train.policies.diagnosing.equations import user_line
from jmp_train.policies.diagnosing.flattening import Flat, Operation, Part, flattened, is_plain, last_uses, parts_of
from jmp_train.policies.diagnosing.pairs import Pair, run_both, with_shadow
from jmp_train.policies.diagnosing.shadow import Shadowing

Keep = Callable[[Pair], Any]
"""Of a result and its shadow to what is kept of it."""
Key = tuple[int, ...]
"""Which operation of a traced program: the identities of the equations around it, and its own."""
V = TypeVar("V")
Callers = tuple[Any, ...]
"""The equations in whose bodies something runs, the outermost first."""


def key_of(callers: Sequence[Any], equation: Any) -> Key:
    """Returns the key of an operation of a program; it is valid as long as that program lives.

    Args:
      callers: the equations in whose bodies it is, the outermost first.
      equation: the equation of the operation.
    """
    return tuple(map(id, (*callers, equation)))


@dataclasses.dataclass
class Recorded:
    """An operation that ran, once or, within loops, many times.

    Attributes:
      equation: the equation of the traced program.
      callers: the equations in whose bodies it is, the outermost first.
      reads: numbers of the operations whose results it reads.
      kept: the summaries of its results, for each run.
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
        """The path of modules and scopes around it."""
        scopes = (str(equation.source_info.name_stack) for equation in (*self.callers, self.equation))
        return functools.reduce(join, scopes, "")


@dataclasses.dataclass(frozen=True)
class _Value:
    pair: Pair
    origins: frozenset[int] = frozenset()  # the numbers of the operations whose result it is; none of an argument


def record(
    program: Any, arguments: Sequence[Any], keep: Keep
) -> tuple[list[Recorded], list[Pair], list[frozenset[int]]]:
    """Runs a program and stores a summary of every result.

    Args:
      program: a traced program.
      arguments: arrays with values.
      keep: returns the summary of a result.

    Returns:
      The operations in the order of their first run, the program's results, and the numbers of the operations that
      computed them.
    """
    recorder = _Recorder(keep)
    results = recorder.run(flattened(program), [_Value(Pair(x)) for x in arguments], ())
    return recorder.operations, [value.pair for value in results], [value.origins for value in results]


class _Recorder:
    def __init__(self, keep: Keep) -> None:
        self.keep = keep
        self.operations: list[Recorded] = []
        self.numbers: dict[Key, int] = {}
        self.held = HeldPrograms(self.run, _KIND)

    def run(self, flat: Flat, arguments: Sequence[_Value], around: tuple[Any, ...]) -> list[_Value]:
        """Runs a program within the bodies of some equations, the outermost first."""
        values = dict(zip(flat.operands, arguments, strict=True))
        values |= {number: _Value(Pair(array)) for number, array in flat.constants.items()}
        last_use = last_uses(flat)
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
        """Records an operation that ran, if it has results, and returns them."""
        if not results:
            return []
        callers = (*around, *op.callers)
        key = key_of(callers, op.equation)
        if key not in self.numbers:
            self.numbers[key] = len(self.operations)
            self.operations.append(Recorded(op.equation, callers, set(), []))
        number = self.numbers[key]
        recorded = self.operations[number]
        recorded.reads.update(*(x.origins for x in inputs))
        recorded.kept.append([self.keep(pair) for pair in results])
        return [_Value(pair, frozenset((number,))) for pair in results]

    def _holding_program(self, op: Operation, inputs: list[_Value], around: tuple[Any, ...]) -> list[_Value]:
        results = self.held.results(op, inputs, around)
        if results is not None:
            return results
        pairs, _ = Shadowing().run_operation(op, [x.pair for x in inputs])
        return self._made(op, inputs, pairs, around)


@functools.lru_cache(maxsize=4096)
def _all_of(part: Part) -> Callable[[list[Pair]], list[Pair]]:
    """Returns operations as a function from their inputs to all their results."""

    def run(given: list[Pair]) -> list[Pair]:
        values = list(given)
        for op, places in zip(part.operations, part.wiring, strict=True):
            values += run_both(op.equation, [values[place] for place in places])
        return values[len(given) :]

    return run


def _stacked(row: Sequence[_Value]) -> _Value:
    """Returns the outputs of a scan's iterations as one array."""
    pairs = [value.pair for value in row]
    if any(pair.shadow is not None for pair in pairs):
        pairs = [with_shadow(pair) for pair in pairs]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *pairs)
    return _Value(stacked, frozenset().union(*(value.origins for value in row)))


def _row(value: _Value, index: int) -> _Value:
    return _Value(jax.tree.map(lambda array: array[index], value.pair), value.origins)


def _read(value: int | np.ndarray, values: dict[int, _Value]) -> _Value:
    return values[value] if isinstance(value, int) else _Value(Pair(value))


@dataclasses.dataclass(frozen=True)
class ValueKind(Generic[V]):
    """The operations of loops on values, which may be more than arrays.

    Attributes:
      of_array: returns an array as a value.
      array_of: returns the array of a value, which decides about loops and branches.
      row: returns the part of a value at an index of its first axis.
      stacked: returns values as one, along a new first axis.
    """

    of_array: Callable[[Any], V]
    array_of: Callable[[V], Any]
    row: Callable[[V, int], V]
    stacked: Callable[[Sequence[V]], V]


class HeldPrograms(Generic[V]):
    """Runs the bodies of scans, while loops and branches on values; each body is flattened once.

    Args:
      run: returns the results of a flat program, given its arguments and the equations around it.
      kind: kind of the values.
    """

    def __init__(self, run: Callable[[Flat, Sequence[V], Callers], list[V]], kind: ValueKind[V]) -> None:
        self._run, self._kind = run, kind
        self._bodies: dict[int, Flat] = {}

    def results(self, op: Operation, inputs: Sequence[V], around: Callers) -> list[V] | None:
        """Returns the results of an operation; None if it is no scan, while loop or branch.

        Args:
          op: the operation.
          inputs: its operands.
          around: the equations around its program.
        """
        params, within = op.equation.params, (*around, *op.callers, op.equation)
        match op.equation.primitive.name:
            case "scan":
                return self._scan(params, inputs, within)
            case "while":
                return self._while(params, inputs, within)
            case "cond":
                index, branches = int(self._kind.array_of(inputs[0])), params["branches"]
                return self._run(self._body(branches[min(max(index, 0), len(branches) - 1)]), inputs[1:], within)
        return None

    def _scan(self, params: dict[str, Any], inputs: Sequence[V], within: Callers) -> list[V]:
        n_consts, n_carry = scan_counts(params)
        consts, carry, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]
        body, rows = self._body(params["jaxpr"]), []
        for i in reversed(range(params["length"])) if params["reverse"] else range(params["length"]):
            results = self._run(body, [*consts, *carry, *(self._kind.row(x, i) for x in xs)], within)
            carry, row = results[:n_carry], results[n_carry:]
            rows.append(row)
        if not rows:
            outputs = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in within[-1].outvars[n_carry:]]
            return [*carry, *map(self._kind.of_array, outputs)]
        return [*carry, *map(self._kind.stacked, zip(*(rows[::-1] if params["reverse"] else rows), strict=True))]

    def _while(self, params: dict[str, Any], inputs: Sequence[V], within: Callers) -> list[V]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, carry = inputs[:n_cond], inputs[n_cond:][:n_body], inputs[n_cond + n_body :]
        condition, body = self._body(params["cond_jaxpr"]), self._body(params["body_jaxpr"])
        while np.any(self._kind.array_of(self._run(condition, [*cond_consts, *carry], within)[0])):
            carry = self._run(body, [*body_consts, *carry], within)
        return list(carry)

    def _body(self, program: Any) -> Flat:
        if id(program) not in self._bodies:
            self._bodies[id(program)] = flattened(program)
        return self._bodies[id(program)]


_KIND = ValueKind(
    of_array=lambda array: _Value(Pair(array)), array_of=lambda value: value.pair.actual, row=_row, stacked=_stacked
)
