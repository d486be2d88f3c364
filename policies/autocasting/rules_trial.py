"""Rules that are tried: a function's outermost autocast regions are traced by these instead of their own."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jmp_train.policies.autocasting.rules import AutocastRules


@dataclasses.dataclass(frozen=True, eq=False)
class RulesTrial:
    """Rules, and whether anything took them.

    Attributes:
      rules: what regions and half-precision policies run by.
      taken: the half types of those that did.
    """

    rules: AutocastRules
    taken: list[Any] = dataclasses.field(default_factory=list)


# A part of jit's keys, so that what was traced without the rules is traced anew.
_trial = jax.make_user_context(None)


@contextlib.contextmanager
def trying(rules: AutocastRules) -> Iterator[RulesTrial]:
    """Traces what is within it by rules.

    Args:
      rules: in place of those that each outermost region has.
    """
    trial = RulesTrial(rules)
    with _trial(trial):
        yield trial


def is_trying() -> bool:
    """Returns whether rules are tried, and no region around has taken them."""
    return _trial.value is not None


@contextlib.contextmanager
def tried_rules(rules: AutocastRules, half: Any) -> Iterator[AutocastRules]:
    """Provides the rules of a region: those that are tried, or its own. Regions within it have their own.

    Args:
      rules: of the region.
      half: its half type.
    """
    trial = _trial.value
    if trial is None:
        yield rules
        return
    trial.taken.append(half)
    with _trial(None):
        yield trial.rules
