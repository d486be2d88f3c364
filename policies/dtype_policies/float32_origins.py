"""Lists the operations of a program traced under a half policy, and the reasons why some are in float32.

Every float32 value has an origin: an argument that the policy does not cast, a constant, a line that
created it, or a cast of a half-precision value. Promotion casts a half-precision value because of the other operand.
So among several origins, the one that is not such a cast is to blame.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jmp_train.policies.autocasting import (
    DECIDED,
    HALVES,
    PRODUCTS,
    flops_of,
    held_jaxprs,
    is_exact,
    is_float32,
    join,
    traced_dtype,
    user_line_of,
    variables_read,
)


@dataclasses.dataclass(frozen=True)
class Origin:
    """The reason why a value has more than 16 bits.

    Attributes:
      what: a description of it.
      equations: the equation that created it, after its callers; () for arguments.
      was_half: True if it is a cast of a half-precision value.
      of_policy: True if it is computed only from parameters that the policy keeps in float32.
    """

    what: str
    equations: tuple[Any, ...] = ()
    was_half: bool = False
    of_policy: bool = False

    @property
    def line(self) -> str:
        """The user's line; "" for arguments."""
        return user_line_of(self.equations)

    def __str__(self) -> str:
        return f"{self.what} at {line}" if (line := self.line) else self.what


@dataclasses.dataclass(frozen=True)
class TracedOperation:
    """An operation of a traced program.

    Attributes:
      equation: its own equation.
      callers: the equations whose bodies contain it, the outermost first.
      path: path of its modules and scopes.
      repeats: number of times that the loops around it run it.
      origins: origins of its operands; None for half-precision values, other types and numbers in the code.
    """

    equation: Any
    callers: tuple[Any, ...]
    path: str
    repeats: int
    origins: tuple[Origin | None, ...]

    @property
    def is_product(self) -> bool:
        """True for a matrix product or a convolution of floats."""
        return self.equation.primitive.name in PRODUCTS and (self.is_float32 or self.in_half)

    @property
    def is_float32(self) -> bool:
        """True if it reads floats of more than 16 bits."""
        return any(map(is_float32, self.equation.invars))

    @property
    def in_half(self) -> bool:
        """True if it computes in half precision or in 8 bits."""
        dtypes = [dtype for atom in self.equation.invars if (dtype := traced_dtype(atom)) is not None]
        return any(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes) and not self.is_float32

    @property
    def as_asked(self) -> bool:
        """True if the user requested float32: by a rule for a parameter, `autocast_as`, or its precision."""
        return (
            any(origin is not None and origin.of_policy for origin in self.origins)
            or DECIDED in self.path
            or is_exact(self.equation)
        )

    @property
    def flops(self) -> int:
        """The number of floating-point operations in all iterations of the loops together."""
        return self.repeats * flops_of(self.equation)

    @property
    def equations(self) -> tuple[Any, ...]:
        """Its callers and its own equation."""
        return (*self.callers, self.equation)

    @property
    def origin(self) -> Origin | None:
        """The origin to blame for float32, if it is known."""
        return _to_blame(self.origins)


def traced_operations(jaxpr: ClosedJaxpr, origins: Sequence[Origin | None]) -> list[TracedOperation]:
    """Returns the operations of a program in order, including those within loops and branches.

    Args:
      jaxpr: a closed jaxpr.
      origins: origins of its arguments; None for those that are not float32.
    """
    found: list[TracedOperation] = []
    _walk(jaxpr.jaxpr, origins, (), "", 1, found)
    return found


def _walk(
    jaxpr: Jaxpr,
    origins: Sequence[Origin | None],
    callers: tuple[Any, ...],
    path: str,
    repeats: int,
    found: list[TracedOperation],
) -> list[Origin | None]:
    """Appends the operations of a jaxpr to `found` and returns the origins of its results."""
    environment: dict[Any, Origin | None] = {v: _closed_over(v) for v in jaxpr.constvars}
    environment.update(zip(jaxpr.invars, origins, strict=True))

    def read(atom: Var | Literal) -> Origin | None:
        if isinstance(atom, jex.Literal):
            return _closed_over(atom) if getattr(atom.aval, "shape", ()) else None
        return environment.get(atom)

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        scope = join(path, str(equation.source_info.name_stack))
        held = held_jaxprs(equation)
        outputs: list[Origin | None] = [None] * len(equation.outvars)
        for inner in held:
            iterations = repeats * equation.params.get("length", 1)
            given = _last(inputs, len(inner.invars))
            results = _walk(inner, given, (*callers, equation), scope, iterations, found)
            if len(results) == len(outputs):
                outputs = [_to_blame(pair) for pair in zip(outputs, results, strict=True)]
        if not held:
            found.append(TracedOperation(equation, callers, scope, repeats, tuple(inputs)))
            origin = _result_origin(equation, callers, inputs)
            outputs = [origin if is_float32(v) else None for v in equation.outvars]
        environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _last(inputs: list[Origin | None], count: int) -> list[Origin | None]:
    """Returns the origins of the last operands, which an equation passes to a body after an index or constants."""
    return ([None] * count + inputs)[len(inputs) :]


def _closed_over(atom: Var | Literal) -> Origin | None:
    return Origin(f"a closed-over {atom.aval.str_short()}") if is_float32(atom) else None


def _result_origin(equation: JaxprEqn, callers: tuple[Any, ...], inputs: Sequence[Origin | None]) -> Origin:
    """Returns the origin of an equation's float32 results."""
    read = variables_read(equation)
    blamed = _to_blame(inputs)
    if blamed is not None:
        of_policy = all(
            origin is not None and origin.of_policy
            for atom, origin in zip(equation.invars, inputs, strict=True)
            if not isinstance(atom, jex.Literal)
        )
        return dataclasses.replace(blamed, of_policy=of_policy)
    half = next((traced_dtype(atom) for atom in read if traced_dtype(atom) in HALVES), None)
    dtype = traced_dtype(equation.outvars[0])
    name = equation.primitive.name
    if half is not None and name == "convert_element_type":
        return Origin(f"cast from {half} to {dtype}", (*callers, equation), was_half=True)
    what = f"{dtype} made by {name}" if half is None else f"the {dtype} result of {name}"
    return Origin(what, (*callers, equation))


def _to_blame(origins: Sequence[Origin | None]) -> Origin | None:
    known = [origin for origin in origins if origin is not None]
    return next((origin for origin in known if not origin.was_half), next(iter(known), None))
