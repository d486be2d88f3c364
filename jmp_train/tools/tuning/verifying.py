"""Verifies rules: by the errors of autocast itself, and by training."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.policies import AutocastPolicy
from jmp_train.policies.autocasting import DEFAULT_RECIPE, AutocastRules
from jmp_train.policies.dtype_policies import FirstTrace
from jmp_train.tools.tuning.choice_trials import Trials, needed
from jmp_train.tools.tuning.precisions import HalfPrecision, ProductsInFewBits
from jmp_train.tools.tuning.scores import with_loss_scale_at
from jmp_train.tools.tuning.tolerance import Tolerance, as_numbers, curve_error
from jmp_train.tools.tuning.tuned_functions import Example
from jmp_train.tools.tuning.tuned_rules import Verification
from jmp_train.tools.tuning.tuning_programs import Programs
from jmp_train.tools.tuning.units import Unit

_MOST_REPAIRS = 16  # more added units are not tried one by one, since each trial compiles


@dataclasses.dataclass(frozen=True)
class Training:
    """Steps of training from the first example's state, on the examples' batches in turn.

    Attributes:
      fn: the step.
      examples: tuples of state and batch.
      precision: what was chosen.
      tolerance: tolerance of the errors.
      steps: number of steps; 0 for none.
      baselines: losses in float32 and in half precision by loss scale, of rules that were judged.
    """

    fn: Any
    examples: Sequence[Example]
    precision: HalfPrecision | ProductsInFewBits
    tolerance: Tolerance
    steps: int
    baselines: dict[float, Any] = dataclasses.field(default_factory=dict)

    def losses(self, rules: AutocastRules | None, scale: float) -> tuple[float, ...]:
        """Returns the losses in float32 or by rules, from a loss scale."""
        f32, policy = jnp.float32, None
        if rules is not None:
            recipe = getattr(self.precision, "recipe", DEFAULT_RECIPE)
            policy = AutocastPolicy(f32, f32, f32, self.fn.reduce_dtype, self.precision.half, rules, recipe)
        step = jax.jit(dataclasses.replace(self.fn, policy=policy, first_trace=FirstTrace.past()))
        state, found = with_loss_scale_at(self.examples[0][0], scale), []
        for number in range(self.steps):
            state, metrics = step(state, self.examples[number % len(self.examples)][1])
            found.append(metrics["loss"])
        return tuple(float(x) for x in found)

    def judged(self, verification: Verification, rules: AutocastRules, scale: float) -> Verification:
        """Returns the verification of products in few bits with the curve of losses, which has to be tolerated too.

        Args:
          verification: the verification by the errors.
          rules: the rules.
          scale: the loss scale.
        """
        if not (self.steps and verification.passed and isinstance(self.precision, ProductsInFewBits)):
            return verification
        if scale not in self.baselines:
            self.baselines[scale] = self.losses(None, scale), self.losses(self.precision.base, scale)
        (exact, half), tuned = self.baselines[scale], self.losses(rules, scale)
        error, of_half = curve_error(tuned, exact), curve_error(half, exact)
        return dataclasses.replace(
            verification,
            passed=math.isfinite(error) and error <= max(self.tolerance.loss, self.tolerance.sensitivity * of_half),
            float32_losses=exact,
            tuned_losses=tuned,
            curve=(error, of_half),
        )

    def compared(self, verification: Verification, rules: AutocastRules, scale: float) -> Verification:
        """Returns the verification with losses in float32 and by rules; takes the arguments of `judged`."""
        if not self.steps or verification.float32_losses:
            return verification
        float32, tuned = self.losses(None, scale), self.losses(rules, scale)
        return dataclasses.replace(verification, float32_losses=float32, tuned_losses=tuned)


def verify_rules(
    programs: Programs,
    kept: frozenset[int],
    *,
    units: Sequence[Unit],
    ranking: list[int],
    trials: Trials,
    seen: int,
    training: Training,
) -> tuple[AutocastRules, Verification, frozenset[int]]:
    """Returns the rules, their verification by autocast itself, and the units added to pass it, if some suffice.

    Args:
      programs: the programs of the tuning.
      kept: the units that are kept.
      units: all units.
      ranking: units to add, those most likely to be needed first.
      trials: the trials, with the loss scale.
      seen: number of examples that the search has seen.
      training: judges the curve of losses.
    """
    rest, passes = [i for i in ranking if i not in kept], programs.tolerance.passes
    found: dict[frozenset[int], tuple[AutocastRules, Verification]] = {}

    @functools.cache
    def lost() -> set[int]:
        """Returns the examples that half precision fails without products in few bits, as of a router that decides."""
        if not isinstance(training.precision, ProductsInFewBits):
            return set()
        run = programs.verified(training.precision.base, trials.scale)
        errors = [as_numbers(run(i)) for i in range(len(programs.references))]
        return {i for i, e in enumerate(errors) if e.finite and not passes(e)}

    def verify(added: frozenset[int]) -> bool:
        if added not in found:
            rules = training.precision.rules(kept | added, units)
            run = programs.verified(rules, trials.scale)
            errors = [as_numbers(run(i)) for i in range(len(programs.references))]
            counted = [e for i, e in enumerate(errors) if passes(e) or i not in lost()] or errors
            worst = max(counted, key=lambda e: (not passes(e), not e.finite, e.gradient, e.loss))
            uncounted = len(errors) - len(counted)
            verification = Verification(all(map(passes, counted)), worst, len(errors) - seen, uncounted=uncounted)
            found[added] = rules, training.judged(verification, rules, trials.scale)
        return found[added][1].passed

    counts = [0, *(2**i for i in range(len(rest).bit_length())), len(rest)]
    passing = next((count for count in counts if verify(frozenset(rest[:count]))), 0)
    at_once = 1 if isinstance(training.precision, ProductsInFewBits) else None  # as in the search
    added = needed(rest[:passing], verify, at_once) if 0 < passing <= _MOST_REPAIRS else rest[:passing]
    rules, verification = found[frozenset(added)]
    return rules, verification, frozenset(added)
