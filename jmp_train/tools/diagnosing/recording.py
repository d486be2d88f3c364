"""Runs a traced program operation by operation with its shadow, and stores a summary of every result.

Loops and branches run in Python, so that each iteration's values are available; the parts of a loop's body are compiled
once. A `shard_map` is one operation here.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.policies.programs import IN_PYTHON, Place, Reading
from jmp_train.tools.diagnosing.equations import user_line
from jmp_train.tools.diagnosing.flattening import (
    Flat,
    FlatOperation,
    ProgramPart,
    compiled,
    flattened,
    is_plain,
    last_uses,
    parts_of,
)
from jmp_train.tools.diagnosing.pairs import Pair, run_both, with_shadow
from jmp_train.tools.diagnosing.shadow import Shadowing

Keep = Callable[[Pair], Any]
"""Of a result and its shadow to what is kept of it."""
Key = tuple[int, ...]
"""Which operation of a traced program: the identities of the equations around it, and its own."""


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
        return Place(self.equation, self.callers).path


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
    results = recorder.evaluate(program, [_Value(Pair(x)) for x in arguments])
    return recorder.operations, [value.pair for value in results], [value.origins for value in results]


@dataclasses.dataclass(frozen=True)
class _Recorder(Reading[_Value]):
    """Runs the operations of a program part by part.

    Attributes:
      keep: see `record`.
      operations: those that ran.
      numbers: their places.
      flats: programs with calls inlined, by identity.
      around: the equations in whose bodies it runs, the outermost first.
    """

    keep: Keep
    operations: list[Recorded] = dataclasses.field(default_factory=list)
    numbers: dict[Key, int] = dataclasses.field(default_factory=dict)
    flats: dict[int, Flat] = dataclasses.field(default_factory=dict)
    around: tuple[Any, ...] = ()

    table = IN_PYTHON

    def within(self, equation: Any) -> "_Recorder":
        return dataclasses.replace(self, around=(*self.around, equation))

    def constant(self, array: Any) -> _Value:
        return _Value(Pair(array))

    def array(self, value: _Value) -> Any:
        return value.pair.actual

    def packed(self, value: _Value) -> Pair:
        return value.pair

    def mapped(self, function: Callable[..., Any], *values: _Value) -> _Value:
        pairs = [value.pair for value in values]
        if any(pair.shadow is not None for pair in pairs):
            pairs = [with_shadow(pair) for pair in pairs]
        return _Value(jax.tree.map(function, *pairs), frozenset().union(*(value.origins for value in values)))

    def evaluate(self, program: Any, inputs: Sequence[_Value]) -> list[_Value]:
        if id(program) not in self.flats:
            self.flats[id(program)] = flattened(program)
        flat = self.flats[id(program)]
        values = dict(zip(flat.operands, inputs, strict=True))
        values |= {number: _Value(Pair(array)) for number, array in flat.constants.items()}
        last_use = last_uses(flat)
        end = 0
        for part in parts_of(flat.operations):
            end += len(part)
            if is_plain(part[0].equation):
                self._plain(part, values)
            else:
                (op,) = part
                results = self._holding_program(op, [_read(x, values) for x in op.inputs])
                values |= dict(zip(op.writes, results, strict=True))
            for number in {x for op in part for x in (*op.reads, *op.writes)}:
                if last_use.get(number, -1) < end:
                    values.pop(number, None)  # arrays that nothing reads any more are freed
        return [_read(x, values) for x in flat.results]

    def _plain(self, part: list[FlatOperation], values: dict[int, _Value]) -> None:
        together = ProgramPart(part, frozenset(number for op in part for number in op.writes))
        results = iter(compiled(_all_of(together), None, frozenset())([_read(x, values).pair for x in together.given]))
        for op in part:
            pairs = [next(results) for _ in op.writes]
            made = self._made(op, [_read(x, values) for x in op.inputs], pairs)
            values |= dict(zip(op.writes, made, strict=True))

    def _made(self, op: FlatOperation, inputs: Sequence[_Value], results: Sequence[Pair]) -> list[_Value]:
        """Records an operation that ran, if it has results, and returns them."""
        if not results:
            return []
        callers = (*self.around, *op.callers)
        key = key_of(callers, op.equation)
        if key not in self.numbers:
            self.numbers[key] = len(self.operations)
            self.operations.append(Recorded(op.equation, callers, set(), []))
        number = self.numbers[key]
        recorded = self.operations[number]
        recorded.reads.update(*(x.origins for x in inputs))
        recorded.kept.append([self.keep(pair) for pair in results])
        return [_Value(pair, frozenset((number,))) for pair in results]

    def _holding_program(self, op: FlatOperation, inputs: list[_Value]) -> list[_Value]:
        results = dataclasses.replace(self, around=(*self.around, *op.callers)).enter(op.equation, inputs)
        if results is not None:
            return list(results)
        pairs, _ = Shadowing().run_operation(op, [x.pair for x in inputs])
        return self._made(op, inputs, pairs)


@functools.lru_cache(maxsize=4096)
def _all_of(part: ProgramPart) -> Callable[[list[Pair]], list[Pair]]:
    """Returns operations as a function from their inputs to all their results."""

    def run(given: list[Pair]) -> list[Pair]:
        values = list(given)
        for op, places in zip(part.operations, part.wiring, strict=True):
            values += run_both(op.equation, [values[place] for place in places])
        return values[len(given) :]

    return run


def _read(value: int | np.ndarray, values: dict[int, _Value]) -> _Value:
    return values[value] if isinstance(value, int) else _Value(Pair(value))
