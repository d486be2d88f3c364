"""Runs the programs inside of operations (scans, while loops, branches) by Python's loops, one body at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import scan_counts
from jmp_train.policies.diagnosing.flattening import Flat, Operation, flattened

V = TypeVar("V")

Callers = tuple[Any, ...]
"""The equations in whose bodies something runs, the outermost first."""


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
