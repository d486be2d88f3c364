"""Runs a traced program again in float32, with the results of some operations replaced by other values.

Nothing is rounded to lower precision, so any remaining difference is mathematical.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_train.policies.diagnosing import (
    Flat,
    HeldPrograms,
    Key,
    Operation,
    Part,
    ValueKind,
    bound,
    compiled,
    flattened,
    in_float32,
    is_low,
    key_of,
    last_uses,
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
        self._flat = flattened(program)
        self.arguments = [_widened(x) for x in arguments]
        self._held = HeldPrograms(self._run, _KIND)
        self._operations: dict[int, Callable[[list[Any]], list[Any]]] = {}
        self._swaps: Mapping[Key, Swap] = {}
        self._runs: dict[Key, int] = {}
        self._seen: Callable[[Key, Any], None] | None = None

    def results(self, swaps: Mapping[Key, Swap], seen: Callable[[Key, Any], None] | None = None) -> list[Any]:
        """Returns the results of the program with some operations' results replaced.

        Args:
          swaps: for operations with one result, the function that replaces it.
          seen: called with the key and the result of every operation that has one result.
        """
        self._swaps, self._runs, self._seen = swaps, {}, seen
        return self._run(self._flat, self.arguments, ())

    def _run(self, flat: Flat, arguments: Sequence[Any], around: tuple[Any, ...]) -> list[Any]:
        values = dict(zip(flat.operands, arguments, strict=True))
        values |= {number: _widened(array) for number, array in flat.constants.items()}
        last_use = last_uses(flat)
        for i, op in enumerate(flat.operations):
            inputs = [values[x] if isinstance(x, int) else _widened(x) for x in op.inputs]
            results = self._operation(op, inputs, around)
            values.update(zip(op.writes, results, strict=True))
            for number in (*op.reads, *op.writes):
                if last_use.get(number, -1) <= i:
                    values.pop(number, None)
        return [values[x] if isinstance(x, int) else _widened(x) for x in flat.results]

    def _operation(self, op: Operation, inputs: list[Any], around: tuple[Any, ...]) -> list[Any]:
        results = self._held.results(op, inputs, around)
        if results is not None:
            return results
        if id(op) not in self._operations:  # its body keeps it
            self._operations[id(op)] = compiled(_of_operation(Part([op], frozenset())), None, frozenset())
        results = self._operations[id(op)](inputs)
        if len(results) == 1:
            results = [self._replaced(key_of((*around, *op.callers), op.equation), results[0])]
        return results

    def _replaced(self, key: Key, result: Any) -> Any:
        if self._seen is not None:
            self._seen(key, result)
        if key in self._swaps:
            run = self._runs[key] = self._runs.get(key, -1) + 1
            return self._swaps[key](run, result)
        return result


@functools.lru_cache(maxsize=4096)
def _of_operation(part: Part) -> Callable[[list[Any]], list[Any]]:
    """Returns an operation as a function of its float32 operands."""
    equation = part.operations[0].equation

    def run(inputs: list[Any]) -> list[Any]:
        results = in_float32(equation, inputs)
        if results is None:
            dtypes: list[Any] = [getattr(variable.aval, "dtype", None) for variable in equation.invars]
            pairs = zip(inputs, dtypes, strict=True)
            results = bound(equation, [lax.convert_element_type(x, d) if is_low(d) else x for x, d in pairs])
        return [_widened(x) for x in results]

    return run


def _widened(x: Any) -> Any:
    return lax.convert_element_type(x, np.float32) if is_low(getattr(x, "dtype", None)) else x


_KIND = ValueKind(of_array=_widened, array_of=lambda x: x, row=lambda x, i: x[i], stacked=jnp.stack)
