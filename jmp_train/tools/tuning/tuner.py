"""`tune`: finds a smallest list of operations that must stay in float32."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_train.policies import MOSTLY_HALF, AutocastPolicy, AutocastReport, explain_autocast
from jmp_train.policies.autocasting import TORCH_CUDA, AutocastRules, autocast, none_key_explained
from jmp_train.policies.dtype_policies import FirstTrace
from jmp_train.policies.pytrees import check_half, check_number
from jmp_train.tools.diagnosing import nonfinite_allowed
from jmp_train.tools.tuning.checks import check_finite, checked, why_no_choice
from jmp_train.tools.tuning.choice_trials import BudgetSpent, Trials, needed, smallest_list
from jmp_train.tools.tuning.scores import OVERFLOWING, best_scale, lost_of, no_scores, scales_of, with_loss_scale_at
from jmp_train.tools.tuning.tolerance import Criterion, Errors, Tolerance, as_numbers, tolerance_of
from jmp_train.tools.tuning.tuned_entries import Float32Entry, Verification
from jmp_train.tools.tuning.tuned_functions import Example, Subject, steps_taken, subject_of
from jmp_train.tools.tuning.tuned_rules import TunedRules
from jmp_train.tools.tuning.tuning_programs import Programs
from jmp_train.tools.tuning.units import Unit, entries_of, find_units

_DEFAULT_BUDGET = 1000
_MOST_REPAIRS = 16  # more added units are not tried one by one, since each trial compiles


@nonfinite_allowed()
def tune(
    fn: Callable[..., Any],
    examples: Sequence[Example],
    *others: Any,
    dtype: DTypeLike = "float16",
    tolerance: Tolerance | float | Criterion | None = None,
    budget: int = _DEFAULT_BUDGET,
    held_out: Sequence[Example] | None = None,
    loss_scale: float | None = None,
    steps: int = 0,
    progress: Callable[[int, str], None] | None = None,
) -> TunedRules:
    """Returns rules with a smallest list of operations in float32, while all others run in half precision.

    The function and its gradient are compiled once, in float32, with a run-time flag per operation that rounds as
    half precision does. Operations are ranked by adjoint times local error, and delta debugging removes those that
    are not needed in float32. `autocast` itself then verifies the rules, also on examples that the search has not
    seen.

    Args:
      fn: a loss, `fn(params, ...) -> loss` or `(loss, aux)`, whose gradient by the first argument counts too; any
        other function of arrays; or a `TrainStep`.
      examples: tuples of its arguments, of the same shapes; for a step, tuples of state and batch. Use batches that
        represent training.
      *others: none; `examples` is one list.
      dtype: the half type, float16 or bfloat16.
      tolerance: bounds of the errors: a `Tolerance`; a number, for the relative error of the loss and of the
        gradient; or a function of two `Outcome`s, in half precision and in float32, that returns a boolean scalar and
        runs within `jax.jit`.
      budget: maximum number of choices to try.
      held_out: further examples for the verification only. None holds out the last one of several.
      loss_scale: loss scale of the gradient. None finds the one at which the fewest gradients leave the half type's
        range, as a dynamic loss scale does. If a step's state has a loss scale, None uses a static one unchanged, and
        finds one within the bounds of a dynamic one.
      steps: number of training steps to compare with float32; only for a `TrainStep`.
      progress: called after each trial with the number of trials and a text about the best one.

    Returns:
      A `TunedRules`; print it. Its `rules` are for `autocast`, `AutocastPolicy` and AMP modes. The same arguments give
      the same rules. After a keyboard interrupt, it has the best rules so far.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: there are no examples, or their shapes differ; no operation can run in half precision; the function
        is not finite in float32; the tolerance is exceeded even if everything is float32.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_train as jt
      >>> def loss(w, x):
      ...     h = x @ w
      ...     return jnp.mean(h**3)
      >>> w = jnp.full((8, 8), 10.0)
      >>> tuned = jt.tune(loss, [(w, jnp.full((4, 8), x)) for x in (1.0, 0.5, 0.9)])
      >>> [entry.primitives for entry in tuned.entries], tuned.verification.passed
      ([('integer_pow',)], True)
      >>> half_loss = jt.autocast(loss, jnp.float16, rules=tuned.rules)

    Reference: ranking as in ADAPT (Menon and others, SC 2018), search as in Precimonious (Rubio-Gonzalez and others,
    SC 2013), by the delta debugging of Zeller and Hildebrandt, IEEE TSE 28(2), 2002.
    """
    half = check_half(dtype, "dtype")
    tolerance, criterion = tolerance_of(tolerance)
    if loss_scale is not None:
        check_number("loss_scale", loss_scale, "a positive number", above=0)
    given = checked(fn, examples, others, held_out, budget, steps)
    seen = len(given) - (len(held_out) if held_out is not None else len(examples) > 1)
    with none_key_explained(fn, given[0]):
        subject, given = subject_of(fn, given)
        units = find_units(subject, given[0], half)
    if not units:
        raise ValueError(why_no_choice(_report(subject, given[0], half, MOSTLY_HALF).operations, half.name))
    programs = Programs(subject, given, units, half, tolerance, criterion)
    tolerance = programs.tolerance
    check_finite(programs.references)
    scales = scales_of(given, programs.references, half) if loss_scale is None else (float(loss_scale),)
    trials = Trials(programs.trials(), scales[0], seen, len(units), tolerance, budget, progress)
    ranking, scores = list(range(len(units))), no_scores(len(units))
    trials.settle(scales, frozenset())
    healthy = trials.suffices(frozenset()) and _verified(
        programs, frozenset(), units, [], trials.scale, tolerance, seen
    )
    if healthy and healthy[1].passed:
        kept, complete, (rules, verification, added) = frozenset(), True, healthy
    else:
        ranking, scores = _ranked(programs, units, trials, scales, seen)
        kept, complete = _search(trials, units, ranking)
        rules, verification, added = _verified(programs, kept, units, ranking, trials.scale, tolerance, seen)
    without = _without(trials, kept, units) if complete else {}
    scale = trials.scale
    if steps:
        verification = _trained(verification, fn, given, half, rules, scale, steps)
    reports = [_report(subject, given[0], half, table) for table in (TORCH_CUDA, rules)]
    return TunedRules(
        rules=rules,
        dtype=half.name,
        entries=tuple(_entries(kept | added, units, without, added, scores)),
        choices=len(units),
        complete=complete,
        trials=trials.count,
        seconds=trials.seconds,
        compile_seconds=programs.compile_seconds,
        loss_scale=scale,
        tolerance=tolerance,
        half_flops=(reports[0].half_flops_share, reports[1].half_flops_share),
        half_elements=(reports[0].half_elements_share, reports[1].half_elements_share),
        verification=verification,
        steps_taken=steps_taken(given),
    )


def _ranked(
    programs: Programs, units: Sequence[Unit], trials: Trials, scales: Sequence[float], seen: int
) -> tuple[list[int], np.ndarray]:
    """Returns the numbers of the units, the most important first, and their scores; sets the loss scale."""
    try:
        run = programs.scores()
    except (ValueError, TypeError, NotImplementedError):  # a program without a derivative, such as a while loop
        return sorted(range(len(units)), key=lambda i: units[i].flops), no_scores(len(units))
    found = {scale: np.sum([run(scale, number) for number in range(seen)], 0) for scale in scales}
    trials.scale = best_scale(found)
    overflowing = found[trials.scale][:, OVERFLOWING] > 0  # whatever the loss scale is
    trials.settle(scales, frozenset(np.flatnonzero(overflowing).tolist()))
    scores = found[trials.scale]
    return sorted(range(len(units)), key=lambda i: (-scores[i, 0], i)), scores


def _search(trials: Trials, units: Sequence[Unit], ranking: list[int]) -> tuple[frozenset[int], bool]:
    """Returns the units that stay in float32, and True if the search was completed, so that each is needed."""
    everything = frozenset(ranking)
    try:
        if not trials.suffices(frozenset()) and not trials.suffices(everything):
            raise ValueError(
                f"even if all operations run in float32 the tolerance is exceeded: {trials(everything).errors}"
            )
        found = smallest_list(ranking, lambda i: units[i].is_product, lambda i: units[i].group, trials.suffices)
        return frozenset(found), True
    except (BudgetSpent, KeyboardInterrupt):
        best = trials.best
        return everything if best is None else best.float32, False


def _without(trials: Trials, kept: frozenset[int], units: Sequence[Unit]) -> dict[frozenset[int], Errors]:
    """Returns the errors without each entry, by the units of the entry."""
    found: dict[frozenset[int], Errors] = {}
    for entry in entries_of(kept, units):
        try:
            found[entry.units] = trials(kept - entry.units).errors
        except (BudgetSpent, KeyboardInterrupt):
            return found
    return found


def _rules(kept: frozenset[int], units: Sequence[Unit]) -> AutocastRules:
    expressions = [x for entry in entries_of(kept, units) for x in entry.expressions]
    return MOSTLY_HALF.replace(operations=dict.fromkeys(expressions, "float32"))


def _verified(
    programs: Programs,
    kept: frozenset[int],
    units: Sequence[Unit],
    ranking: list[int],
    scale: float,
    tolerance: Tolerance,
    seen: int,
) -> tuple[AutocastRules, Verification, frozenset[int]]:
    """Returns the rules, their verification by autocast itself, and the units added to pass it, if some suffice."""
    rest = [i for i in ranking if i not in kept]
    found: dict[frozenset[int], tuple[AutocastRules, Verification]] = {}

    def verify(added: frozenset[int]) -> bool:
        if added not in found:
            rules = _rules(kept | added, units)
            run = programs.verified(rules, scale)
            errors = [as_numbers(run(i)) for i in range(len(programs.references))]
            worst = max(errors, key=lambda e: (not tolerance.passes(e), not e.finite, e.gradient, e.loss))
            found[added] = rules, Verification(all(map(tolerance.passes, errors)), worst, len(errors) - seen)
        return found[added][1].passed

    counts = [0, *(2**i for i in range(len(rest).bit_length())), len(rest)]
    passing = next((count for count in counts if verify(frozenset(rest[:count]))), 0)
    added = needed(rest[:passing], verify) if 0 < passing <= _MOST_REPAIRS else rest[:passing]
    rules, verification = found[frozenset(added)]
    return rules, verification, frozenset(added)


def _entries(
    kept: frozenset[int],
    units: Sequence[Unit],
    without: dict[frozenset[int], Errors],
    added: frozenset[int],
    scores: np.ndarray,
) -> list[Float32Entry]:
    return [
        Float32Entry(
            expressions=entry.expressions,
            primitives=tuple(sorted({name for i in entry.units for name in units[i].primitives})),
            path=units[min(entry.units)].path,
            line=units[min(entry.units)].addresses[0].partition("@")[2].rpartition(" from ")[2],
            operations=sum(units[i].operations for i in entry.units),
            without=without.get(entry.units),
            lost=lost_of(scores[sorted(entry.units)]),
            repaired=bool(entry.units & added),
        )
        for entry in entries_of(kept, units)
    ]


def _report(subject: Subject, example: Example, half: Any, rules: AutocastRules) -> AutocastReport:
    """Returns autocast's report of each operation under the rules."""
    reports: list[AutocastReport] = []

    def explained(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            reports.append(explain_autocast(autocast(fn, half, rules=rules), *args, **kwargs))
            return fn(*args, **kwargs)

        return run

    jax.eval_shape(lambda: subject.objective(explained, *example))
    return reports[0]


def _trained(
    verification: Verification,
    fn: Any,
    examples: Sequence[Example],
    half: Any,
    rules: AutocastRules,
    scale: float,
    steps: int,
) -> Verification:
    """Returns the verification with losses of training in float32 and with the rules, from the loss scale found."""
    f32 = jnp.float32
    policies = (None, AutocastPolicy(f32, f32, f32, fn.reduce_dtype, autocast_dtype=half, rules=rules))
    losses = []
    for policy in policies:
        step = jax.jit(dataclasses.replace(fn, policy=policy, first_trace=FirstTrace.past()))
        state, found = with_loss_scale_at(examples[0][0], scale), []
        for number in range(steps):
            state, metrics = step(state, examples[number % len(examples)][1])
            found.append(metrics["loss"])
        losses.append(tuple(float(x) for x in found))
    return dataclasses.replace(verification, float32_losses=losses[0], tuned_losses=losses[1])
