"""The operations of a program traced under a half policy, and why the wide ones among them are wide.

Every float32 value has an origin: an argument that the policy does not cast, a constant, a line that
made it, or a cast of what was half. Promotion casts what was half because of the other operand, so
that of several origins the one that is no such cast is to blame.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jmp_train.policies.autocast_region import (
    DECIDED,
    HALVES,
    PRODUCTS,
    join,
    traced_dtype,
    variables_read,
)
from jmp_train.policies.operations import flops_of, held_jaxprs, is_wide, user_line_of


@dataclasses.dataclass(frozen=True)
class Origin:
    """Why a value has more than 16 bits.

    Attributes:
      what: it is, in words.
      equations: the one that made it, after those in whose bodies that is; () for arguments.
      was_half: whether it is a cast of a half value.
      of_policy: whether it is made of nothing but parameters that the policy keeps wide.
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
      equation: its own.
      callers: the equations in whose bodies it is, the outermost first.
      path: of the modules and scopes that it is in.
      repeats: how often the loops around it run it.
      origins: of its operands; None where one is half, no float or a number in the code.
    """

    equation: Any
    callers: tuple[Any, ...]
    path: str
    repeats: int
    origins: tuple[Origin | None, ...]

    @property
    def is_product(self) -> bool:
        """Whether it is a product of floats: of matrices, or a convolution."""
        return self.equation.primitive.name in PRODUCTS and (self.is_wide or self.in_half)

    @property
    def is_wide(self) -> bool:
        """Whether it reads floats of more than 16 bits."""
        return any(map(is_wide, self.equation.invars))

    @property
    def in_half(self) -> bool:
        """Whether it computes in half precision."""
        halves = any(traced_dtype(atom) in HALVES for atom in self.equation.invars)
        return halves and not self.is_wide

    @property
    def as_asked(self) -> bool:
        """Whether the user wants it wide: by a rule for a parameter, `autocast_as`, or its precision."""
        return (
            any(origin is not None and origin.of_policy for origin in self.origins)
            or DECIDED in self.path
            or _is_highest(self.equation)
        )

    @property
    def flops(self) -> int:
        """Floating-point operations, of all turns of the loops together."""
        return self.repeats * flops_of(self.equation)

    @property
    def equations(self) -> tuple[Any, ...]:
        """Its equation, after those in whose bodies it is."""
        return (*self.callers, self.equation)

    @property
    def origin(self) -> Origin | None:
        """The origin to blame that it is wide, if that is known."""
        return _to_blame(self.origins)


def traced_operations(jaxpr: Any, origins: Sequence[Origin | None]) -> list[TracedOperation]:
    """Returns the operations of a program in their order, those within loops and branches too.

    Args:
      jaxpr: a closed jaxpr.
      origins: of its arguments; None for those that are not wide.
    """
    found: list[TracedOperation] = []
    _walk(jaxpr.jaxpr, origins, (), "", 1, found)
    return found


def _walk(
    jaxpr: Any,
    origins: Sequence[Origin | None],
    callers: tuple[Any, ...],
    path: str,
    repeats: int,
    found: list[TracedOperation],
) -> list[Origin | None]:
    """Appends the operations of a jaxpr to `found` and returns the origins of its results."""
    environment: dict[Any, Origin | None] = {v: _closed_over(v) for v in jaxpr.constvars}
    environment.update(zip(jaxpr.invars, origins, strict=True))

    def read(atom: Any) -> Origin | None:
        if isinstance(atom, jex.Literal):
            return _closed_over(atom) if getattr(atom.aval, "shape", ()) else None
        return environment.get(atom)

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        scope = join(path, str(equation.source_info.name_stack))
        held = held_jaxprs(equation)
        outputs: list[Origin | None] = [None] * len(equation.outvars)
        for inner in held:
            turns = repeats * equation.params.get("length", 1)
            given = _last(inputs, len(inner.invars))
            results = _walk(inner, given, (*callers, equation), scope, turns, found)
            if len(results) == len(outputs):
                outputs = [_to_blame(pair) for pair in zip(outputs, results, strict=True)]
        if not held:
            found.append(TracedOperation(equation, callers, scope, repeats, tuple(inputs)))
            origin = _result_origin(equation, callers, inputs)
            outputs = [origin if is_wide(v) else None for v in equation.outvars]
        environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _last(inputs: list[Origin | None], count: int) -> list[Origin | None]:
    """Returns what an equation hands to a body: its last operands, after an index or another's constants."""
    return ([None] * count + inputs)[len(inputs) :]


def _closed_over(atom: Any) -> Origin | None:
    return Origin(f"a closed-over {atom.aval.str_short()}") if is_wide(atom) else None


def _result_origin(
    equation: Any, callers: tuple[Any, ...], inputs: Sequence[Origin | None]
) -> Origin:
    """Returns the origin of an equation's wide results."""
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
    wide = traced_dtype(equation.outvars[0])
    name = equation.primitive.name
    if half is not None and name == "convert_element_type":
        return Origin(f"cast from {half} to {wide}", (*callers, equation), was_half=True)
    what = f"{wide} made by {name}" if half is None else f"the {wide} result of {name}"
    return Origin(what, (*callers, equation))


def _to_blame(origins: Sequence[Origin | None]) -> Origin | None:
    known = [origin for origin in origins if origin is not None]
    return next((origin for origin in known if not origin.was_half), next(iter(known), None))


def _is_highest(equation: Any) -> bool:
    precision = equation.params.get("precision")
    if jax.config.jax_default_matmul_precision is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    both = precision if isinstance(precision, tuple) else (precision,)
    return any(p == jax.lax.Precision.HIGHEST for p in both)
