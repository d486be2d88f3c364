"""Makes the decisions on a program's equations that do not depend on values, before the equations run."""

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
    """An equation, and the decisions on it.

    Attributes:
      equation: the equation.
      scope: the names of the scopes around it, within the program.
      rule: the rule from a table, None if no table has one; after `settle`, the rule by which the equation runs.
      reason: the reason for the rule.
      place: for products in 8 bits, the name under which their scales are stored; otherwise "".
      in_float32: True if all readers of its result compute in float32.
      in_half: True if all readers of its result compute in half, and the gradient of at least one needs the result.
      is_logits: True for a product that only a softmax in float32 reads.
      is_added: True if its result is only added, so that no gradient needs it.
      dtypes: the dtype of each operand, None for unchanged. They depend on values; see `settle`.
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
    """Returns the steps of a program in order, with all decisions that do not depend on values."""
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
    """Returns one place per equation: "" unless it may be or hold a product in 8 bits with scales from outside."""
    counts: Counter[str] = Counter()
    may_multiply = {"dot_general", *region.handlers} if region.delayed else ()
    return [
        place_of(equation, join("", str(equation.source_info.name_stack)), region.place, counts)
        if equation.primitive.name in may_multiply
        else ""
        for equation in jaxpr.eqns
    ]
