"""Runs a traced program again in float32, with the results of some operations replaced by other values.

Nothing is rounded to lower precision, so any remaining difference is mathematical.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from jmp_train.policies.programs import IN_PYTHON, Reading
from jmp_train.tools.diagnosing import (
    Key,
    ProgramPart,
    bound,
    compiled,
    float32_results,
    has_references,
    is_low,
    key_of,
    operation_of,
)

Swap = Callable[[int, Any], Any]
"""From the number of a run of an operation, and the result, to the value that takes its place."""


class Rerun:
    """A traced program that can run repeatedly.

    Args:
      program: the traced program.
      arguments: arrays with values.

    Attributes:
      arguments: the arguments of the program, in float32 if they had lower precision.
    """

    def __init__(self, program: Any, arguments: Sequence[Any]) -> None:
        self.arguments = [_widened(x) for x in arguments]
        self._program = program
        self._operations: dict[int, Callable[[list[Any]], list[Any]]] = {}

    def results(self, swaps: Mapping[Key, Swap], seen: Callable[[Key, Any], None] | None = None) -> list[Any]:
        """Returns the results of the program with some operations' results replaced.

        Args:
          swaps: for operations with one result, the function that replaces it.
          seen: called with the key and the result of every operation that has one result.
        """
        return _Again(self._operations, swaps, seen).evaluate(self._program, self.arguments)


@dataclasses.dataclass(frozen=True)
class _Again(Reading[Any]):
    """Runs a program in float32, one operation after the other.

    Attributes:
      operations: compiled operations, by identity of the equation, which their bodies keep.
      swaps: see `Rerun.results`.
      seen: see `Rerun.results`.
      runs: how often each replaced operation has run, but once.
      callers: the equations in whose bodies it runs, the outermost first.
    """

    operations: dict[int, Callable[[list[Any]], list[Any]]]
    swaps: Mapping[Key, Swap]
    seen: Callable[[Key, Any], None] | None
    runs: dict[Key, int] = dataclasses.field(default_factory=dict)
    callers: tuple[Any, ...] = ()

    table = IN_PYTHON

    def within(self, equation: Any) -> "_Again":
        return dataclasses.replace(self, callers=(*self.callers, equation))

    def constant(self, array: Any) -> Any:
        return _widened(array)

    def bind(self, equation: Any, inputs: list[Any]) -> list[Any]:
        op = operation_of(equation)
        if id(equation) not in self.operations:
            run = _of_operation(ProgramPart([op], frozenset()))
            self.operations[id(equation)] = run if has_references(equation) else compiled(run, None, frozenset())
        results = self.operations[id(equation)]([*inputs, *op.inputs[len(inputs) :]])
        return results if len(results) != 1 else [self._replaced(key_of(self.callers, equation), results[0])]

    def _replaced(self, key: Key, result: Any) -> Any:
        if self.seen is not None:
            self.seen(key, result)
        if key in self.swaps:
            run = self.runs[key] = self.runs.get(key, -1) + 1
            return self.swaps[key](run, result)
        return result


@functools.lru_cache(maxsize=4096)
def _of_operation(part: ProgramPart) -> Callable[[list[Any]], list[Any]]:
    """Returns an operation as a function of its float32 operands."""
    equation = part.operations[0].equation

    def run(inputs: list[Any]) -> list[Any]:
        results = float32_results(equation, inputs)
        if results is None:
            dtypes: list[Any] = [getattr(variable.aval, "dtype", None) for variable in equation.invars]
            pairs = zip(inputs, dtypes, strict=True)
            results = bound(equation, [lax.convert_element_type(x, d) if is_low(d) else x for x, d in pairs])
        return [_widened(x) for x in results]

    return run


def _widened(x: Any) -> Any:
    return lax.convert_element_type(x, np.float32) if is_low(getattr(x, "dtype", None)) else x
