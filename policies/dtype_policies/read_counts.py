"""Finds the half values of a traced program that are read so many times that their gradients need float32 sums.

jax adds the gradients of all reads of a value in the value's own dtype. In bfloat16, the 257th of equal gradients is
lost; in float16, the 2,049th.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer
from jax.extend.core import Jaxpr, Literal, Var

from jmp_train.policies.autocasting import HALVES, OpaqueCall, traced_dtype
from jmp_train.policies.programs import Scan, bodies_of, branches_of, opened

MOST_READS = 8  # a sum of 8 gradients is off by at most 3.5 units of rounding
ELEMENTWISE = frozenset(("add", "sub", "mul", "div", "max", "min", "pow", "atan2", "rem", "nextafter", "select_n"))
_ENTERED = frozenset(("jit", "pjit", "closed_call", "remat2", "checkpoint", "scan", "cond", "shard_map"))


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramReads:
    """A traced program, and its values that are read often.

    Attributes:
      jaxpr: the program.
      consts: the values of its constants.
      often: the variables that are read often.
      reads: how many times each argument is read, at most.
      inner: by the identity of an equation, the programs that it holds, if these must be rewritten.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    often: frozenset[Var]
    reads: Sequence[float]
    inner: Mapping[int, Sequence["ProgramReads"]]

    @property
    def is_rewritten(self) -> bool:
        """True if the gradients of some of its values need float32 sums."""
        return bool(self.often or self.inner)


class ReadCounts:
    """Counts the reads of half values that may have gradients; programs that occur several times are read once."""

    def __init__(self) -> None:
        self._programs: dict[Any, ProgramReads] = {}

    def of(self, jaxpr: Any, active: Sequence[bool]) -> ProgramReads:
        """Returns the counts of a program.

        Args:
          jaxpr: a jaxpr, closed or open, which stays alive as long as the counts.
          active: whether each argument may have a gradient. Constants may if they are traced.
        """
        key = (id(jaxpr), *active)
        if key not in self._programs:
            self._programs[key] = self._counted(opened(jaxpr), getattr(jaxpr, "consts", ()), active)
        return self._programs[key]

    def _counted(self, jaxpr: Jaxpr, consts: Sequence[Any], active: Sequence[bool]) -> ProgramReads:
        live = {v for v, is_active in zip(jaxpr.invars, active, strict=True) if is_active}
        live |= {v for v, const in zip(jaxpr.constvars, consts, strict=False) if isinstance(const, Tracer)}
        reads: Any = Counter()
        inner: dict[int, Sequence[ProgramReads]] = {}
        for equation in jaxpr.eqns:
            given = [not isinstance(atom, jex.Literal) and atom in live for atom in equation.invars]
            if not any(given) or equation.primitive.name == "stop_gradient":
                continue
            live.update(v for v in equation.outvars if _is_inexact(v))
            programs = self._held(equation, given)
            try:
                times = [float(count) for count in _times(equation, programs)]
            except (TypeError, jax.errors.InconclusiveDimensionOperation):  # for symbolic shapes
                times = [math.inf] * len(equation.invars)
            for atom, is_live, count in zip(equation.invars, given, times, strict=True):
                if is_live and is_half(atom):
                    reads[atom] += count
            if any(program.is_rewritten for program in programs) or _sums_in_half(equation, given, times):
                inner[id(equation)] = programs
        often = frozenset(v for v, count in reads.items() if count > MOST_READS)
        return ProgramReads(jaxpr, consts, often, [reads[v] for v in jaxpr.invars], inner)

    def _held(self, equation: Any, given: Sequence[bool]) -> list[ProgramReads]:
        """Returns the programs of an equation that is entered."""
        name = equation.primitive.name
        if name not in _ENTERED or isinstance(equation.params.get("policy"), OpaqueCall):
            return []
        if name == "cond":
            return [self.of(branch, given[1:]) for branch in branches_of(equation) or ()]
        if name == "scan":
            scan = Scan.of(equation)
            (consts, _, xs), (_, carry, _) = scan.split(given), scan.split(equation.invars)
            given = [*consts, *map(_is_inexact, carry), *xs]  # a carried value may come from any of the operands
        return [self.of(body, given) for body in bodies_of(equation)]


def _times(equation: Any, programs: Sequence[ProgramReads]) -> Sequence[float]:
    """Returns how many times an equation reads an element of each operand, at most."""
    name, params = equation.primitive.name, equation.params
    once = [1.0] * len(equation.invars)
    if name == "scan" and programs:
        scan = Scan.of(equation)
        consts, _, _ = scan.split(programs[0].reads)
        return [*(scan.length * max(1.0, count) for count in consts), *once[len(consts) :]]
    if name in ("jit", "pjit", "closed_call") and programs:
        return programs[0].reads
    if name in ELEMENTWISE:  # operands of size 1 are broadcast
        size = equation.outvars[0].aval.size
        return [size / max(1, atom.aval.size) for atom in equation.invars]
    operand, *indices = equation.invars
    if name == "gather" and not params["unique_indices"]:
        batch = params["dimension_numbers"].operand_batching_dims
        slices = math.prod(indices[0].aval.shape[:-1])
        once[0] = max(1.0, slices / max(1, math.prod(operand.aval.shape[d] for d in batch)))
    elif name in ("broadcast_in_dim", "tile") or (
        name in ("slice", "dynamic_slice") and all(isinstance(i, jex.Literal) for i in indices)
    ):
        once[0] = equation.outvars[0].aval.size / max(1, operand.aval.size)
    return once


def _sums_in_half(equation: Any, given: Sequence[bool], times: Sequence[float]) -> bool:
    """Returns whether an equation is a loop that would add the gradients of a constant in half precision."""
    atoms = zip(equation.invars, given, times, strict=True)
    return equation.primitive.name == "scan" and any(
        is_live and is_half(atom) and count > MOST_READS for atom, is_live, count in atoms
    )


def is_half(atom: Var | Literal) -> bool:
    """Returns whether a variable or literal of a program is an array in half precision."""
    return isinstance(atom.aval, ShapedArray) and traced_dtype(atom) in HALVES


def _is_inexact(atom: Var | Literal) -> bool:
    return jnp.issubdtype(traced_dtype(atom) or jnp.int32, jnp.inexact)
