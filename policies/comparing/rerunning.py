"""Runs a traced program once more in float32, with the results of some operations replaced by other values.

Nothing is rounded to lower precision, so that what is left of a difference is one of the mathematics.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_train.policies.autocasting import scan_counts
from jmp_train.policies.diagnosing import Flat, Operation, Part, bound, compiled, flattened, in_float32, is_low

Key = tuple[int, ...]
"""Which operation of a traced program: the identities of the equations around it, and its own."""
Swap = Callable[[int, Any], Any]
"""From the number of a run of an operation, and the result, to the value that takes its place."""


def key_of(callers: Sequence[Any], equation: Any) -> Key:
    """Returns the key of an operation of a program; it is valid as long as that program lives.

    Args:
      callers: the equations in whose bodies it is, the outermost first.
      equation: its own.
    """
    return tuple(map(id, (*callers, equation)))


class Rerun:
    """A traced program that can be run again and again.

    Args:
      program: a traced one.
      arguments: arrays with values.

    Attributes:
      arguments: of the program, those in lower precision as float32.
    """

    def __init__(self, program: Any, arguments: Sequence[Any]) -> None:
        self._flat = flattened(program)
        self.arguments = [_widened(x) for x in arguments]
        self._bodies: dict[int, Flat] = {}
        self._operations: dict[int, Callable[[list[Any]], list[Any]]] = {}
        self._swaps: Mapping[Key, Swap] = {}
        self._runs: dict[Key, int] = {}
        self._seen: Callable[[Key, Any], None] | None = None

    def results(self, swaps: Mapping[Key, Swap], seen: Callable[[Key, Any], None] | None = None) -> list[Any]:
        """Runs the program and returns its results.

        Args:
          swaps: for operations with one result, what replaces it.
          seen: called with the key and the result of every operation that has one result.
        """
        self._swaps, self._runs, self._seen = swaps, {}, seen
        return self._run(self._flat, self.arguments, ())

    def _run(self, flat: Flat, arguments: Sequence[Any], around: tuple[Any, ...]) -> list[Any]:
        values = dict(zip(flat.operands, arguments, strict=True))
        values |= {number: _widened(array) for number, array in flat.constants.items()}
        last_use = {number: i for i, op in enumerate(flat.operations) for number in op.reads}
        last_use |= dict.fromkeys((x for x in flat.results if isinstance(x, int)), len(flat.operations))
        for i, op in enumerate(flat.operations):
            inputs = [values[x] if isinstance(x, int) else _widened(x) for x in op.inputs]
            results = self._operation(op, inputs, around)
            values.update(zip(op.writes, results, strict=True))
            for number in (*op.reads, *op.writes):
                if last_use.get(number, -1) <= i:
                    values.pop(number, None)
        return [values[x] if isinstance(x, int) else _widened(x) for x in flat.results]

    def _operation(self, op: Operation, inputs: list[Any], around: tuple[Any, ...]) -> list[Any]:
        params, within = op.equation.params, (*around, *op.callers, op.equation)
        match op.equation.primitive.name:
            case "scan":
                return self._scan(params, inputs, within)
            case "while":
                return self._while(params, inputs, within)
            case "cond":
                index, branches = int(inputs[0]), params["branches"]
                return self._run(self._body(branches[min(max(index, 0), len(branches) - 1)]), inputs[1:], within)
        if id(op) not in self._operations:  # which is kept by its body
            self._operations[id(op)] = _compiled(Part([op], frozenset()))
        results = self._operations[id(op)](inputs)
        return [self._replaced(key_of(within[:-1], op.equation), results[0])] if len(results) == 1 else results

    def _replaced(self, key: Key, result: Any) -> Any:
        if self._seen is not None:
            self._seen(key, result)
        if key in self._swaps:
            run = self._runs[key] = self._runs.get(key, -1) + 1
            return self._swaps[key](run, result)
        return result

    def _scan(self, params: dict[str, Any], inputs: list[Any], within: tuple[Any, ...]) -> list[Any]:
        n_consts, n_carry = scan_counts(params)
        consts, carry, xs = inputs[:n_consts], inputs[n_consts:][:n_carry], inputs[n_consts + n_carry :]
        body, rows = self._body(params["jaxpr"]), []
        for i in reversed(range(params["length"])) if params["reverse"] else range(params["length"]):
            results = self._run(body, [*consts, *carry, *(x[i] for x in xs)], within)
            carry, row = results[:n_carry], results[n_carry:]
            rows.append(row)
        if not rows:
            outputs = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in within[-1].outvars[n_carry:]]
            return [*carry, *map(_widened, outputs)]
        return [*carry, *(jnp.stack(column) for column in zip(*rows[:: -1 if params["reverse"] else 1], strict=True))]

    def _while(self, params: dict[str, Any], inputs: list[Any], within: tuple[Any, ...]) -> list[Any]:
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts, carry = inputs[:n_cond], inputs[n_cond:][:n_body], inputs[n_cond + n_body :]
        condition, body = self._body(params["cond_jaxpr"]), self._body(params["body_jaxpr"])
        while np.any(self._run(condition, [*cond_consts, *carry], within)[0]):
            carry = self._run(body, [*body_consts, *carry], within)
        return carry

    def _body(self, program: Any) -> Flat:
        """Returns a loop's body flattened, which is done once."""
        if id(program) not in self._bodies:
            self._bodies[id(program)] = flattened(program)
        return self._bodies[id(program)]


def _compiled(part: Part) -> Callable[[list[Any]], list[Any]]:
    return compiled(_of_operation(part), None, frozenset())


@functools.lru_cache(maxsize=4096)
def _of_operation(part: Part) -> Callable[[list[Any]], list[Any]]:
    """Returns an operation as a function of what it is given in float32."""
    equation = part.operations[0].equation

    def run(inputs: list[Any]) -> list[Any]:
        results = in_float32(equation, inputs)
        if results is None:
            own = [_cast(x, getattr(v.aval, "dtype", None)) for x, v in zip(inputs, equation.invars, strict=True)]
            results = bound(equation, own)
        return [_widened(x) for x in results]

    return run


def _cast(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(x, dtype) if is_low(dtype) else x


def _widened(x: Any) -> Any:
    return lax.convert_element_type(x, np.float32) if is_low(getattr(x, "dtype", None)) else x
