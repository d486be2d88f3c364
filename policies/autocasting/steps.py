"""What a program decides on each equation before it runs: passes over the equations, each deciding one thing."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jmp_train.policies.autocasting.attention_logits import logits_of
from jmp_train.policies.autocasting.fp8 import place_of
from jmp_train.policies.autocasting.readers import readers_of
from jmp_train.policies.autocasting.region import Region, join
from jmp_train.policies.autocasting.rules import Rule


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """An equation, and what its program decides on it.

    Attributes:
      equation: the equation.
      scope: the names that it is in, within the program.
      rule: the rule that a table gives it, None if no table does; in the end, the rule that it runs by.
      reason: where the rule is from.
      place: the name by which its scales are looked up, of products in 8 bits; "" of all else.
      in_float32: True if all that reads its result computes in float32.
      in_half: True if all that reads its result computes in half, and something reads it that a gradient needs it for.
      is_logits: True for a product that a softmax in float32 reads, and nothing else.
      is_added: True if there are only sums of its result, whose gradients do not need it.
      dtypes: of each operand, None for "as it is"; they depend on values, see `settle`.
    """

    equation: JaxprEqn
    scope: str
    rule: Rule | None
    reason: str
    place: str
    in_float32: bool
    in_half: bool
    is_logits: bool
    is_added: bool
    dtypes: Sequence[Any] = ()


def steps_of(region: Region, jaxpr: Jaxpr) -> list[Step]:
    """Returns the equations of a program in their order, with all that does not depend on values."""
    readers, logits = readers_of(region, jaxpr), logits_of(region, jaxpr)
    return [
        Step(
            equation,
            str(equation.source_info.name_stack),
            *region.rule_of(equation),
            place,
            in_float32=not readers.in_float32.isdisjoint(equation.outvars),
            in_half=not readers.in_half.isdisjoint(equation.outvars),
            is_logits=not logits.isdisjoint(equation.outvars),
            is_added=not readers.only_add.isdisjoint(equation.outvars),
        )
        for equation, place in zip(jaxpr.eqns, _places(region, jaxpr), strict=True)
    ]


def _places(region: Region, jaxpr: Jaxpr) -> list[str]:
    """Returns the place of each equation that may be or hold a product in 8 bits with scales from outside, else ""."""
    counts: Counter[str] = Counter()
    may_multiply = {"dot_general", *region.handlers} if region.delayed else ()
    return [
        place_of(equation, join("", str(equation.source_info.name_stack)), region.place, counts)
        if equation.primitive.name in may_multiply
        else ""
        for equation in jaxpr.eqns
    ]
