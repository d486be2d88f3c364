"""Rules on trial: a function's outermost autocast regions run by these rules instead of their own."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jmp_train.policies.autocasting.rules import AutocastRules


@dataclasses.dataclass(frozen=True, eq=False)
class RulesTrial:
    """Rules on trial, and the half types of the regions that used them.

    Attributes:
      rules: the rules by which regions and half-precision policies run.
      taken: the half types of the regions and policies that used them.
    """

    rules: AutocastRules
    taken: list[Any] = dataclasses.field(default_factory=list)


# A part of jit's cache keys, so that functions traced without the rules are traced again.
_trial = jax.make_user_context(None)


@contextlib.contextmanager
def trying(rules: AutocastRules) -> Iterator[RulesTrial]:
    """Traces the functions called within this context by the given rules.

    Args:
      rules: they replace the rules of each outermost region.
    """
    trial = RulesTrial(rules)
    with _trial(trial):
        yield trial


def is_trying() -> bool:
    """Returns whether rules are on trial that no enclosing region has used."""
    return _trial.value is not None


@contextlib.contextmanager
def tried_rules(rules: AutocastRules, half: Any) -> Iterator[AutocastRules]:
    """Yields the rules of a region: those on trial, or its own. Regions within it use their own.

    Args:
      rules: the rules of the region.
      half: its half type.
    """
    trial = _trial.value
    if trial is None:
        yield rules
        return
    trial.taken.append(half)
    with _trial(None):
        yield trial.rules
