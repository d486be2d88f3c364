"""`tune`: finds the fewest operations that must stay in float32, or the most products that can run in few bits."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_train.policies import AutocastReport, explain_autocast
from jmp_train.policies.autocasting import (
    DECIDED,
    TORCH_CUDA,
    AutocastRules,
    OperationReport,
    Recipe,
    mark_of,
    none_key_explained,
)
from jmp_train.policies.pytrees import check_count, check_number
from jmp_train.steps import TrainStep
from jmp_train.tools.diagnosing import nonfinite_allowed
from jmp_train.tools.tuning.choice_trials import BudgetSpent, Trials, first_needed, smallest_list
from jmp_train.tools.tuning.precisions import HalfPrecision, ProductsInFewBits, costs_first, precision_of
from jmp_train.tools.tuning.scores import OVERFLOWING, best_scale, lost_of, no_scores, scales_of
from jmp_train.tools.tuning.tolerance import Criterion, Errors, Reference, Tolerance, tolerance_of
from jmp_train.tools.tuning.tuned_functions import Example, Subject, steps_taken, subject_of
from jmp_train.tools.tuning.tuned_rules import Float32Entry, TunedProduct, TunedRules, Verification
from jmp_train.tools.tuning.tuning_programs import Programs, check_alike
from jmp_train.tools.tuning.units import Unit, entries_of
from jmp_train.tools.tuning.verifying import Training, verify_rules

_DEFAULT_BUDGET = 1000


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
    recipe: Recipe | None = None,
) -> TunedRules:
    """Returns rules with a smallest list of operations in float32, while all others run in half precision.

    With a dtype of 8 or 4 bits, the rules of a step in half precision get entries "fp8" for a largest set of matrix
    products, by flops, that can run in it.

    The function and its gradient are compiled once, in float32, with a run-time flag per operation that rounds as
    half precision does. Operations are ranked by adjoint times local error, and delta debugging removes those that
    are not needed in float32. `autocast` itself then verifies the rules, also on examples that the search has not
    seen. Products in few bits have flags under `autocast` itself, and are ranked by what each costs alone.

    Args:
      fn: a loss, `fn(params, ...) -> loss` or `(loss, aux)`, whose gradient by the first argument counts too; any
        other function of arrays; or a `TrainStep`.
      examples: tuples of its arguments, of the same shapes; for a step, tuples of state and batch. Use batches that
        represent training.
      *others: none; `examples` is one list.
      dtype: the half type, float16 or bfloat16; or float8_e4m3fn, float4_e2m1fn or int8, for products in few bits next
        to the half type and rules of the step's policy: bfloat16 and `TORCH_CUDA` without one.
      tolerance: bounds of the errors: a `Tolerance`; a number, for the relative error of the loss and of the
        gradient; or a function of two `Outcome`s, in half precision and in float32, that returns a boolean scalar and
        runs within `jax.jit`.
      budget: maximum number of choices to try.
      held_out: further examples for the verification only. None holds out the last one of several.
      loss_scale: loss scale of the gradient. None finds the one at which the fewest gradients leave the half type's
        range, as a dynamic loss scale does. If a step's state has a loss scale, None uses a static one unchanged, and
        finds one within the bounds of a dynamic one.
      steps: number of training steps to compare with float32; only for a `TrainStep`. For products in few bits, the
        verification fails if the losses of a tenth of them exceed float32's by more than the tolerance of the loss,
        and by more than `Tolerance.sensitivity` times as much as those of half precision do.
      progress: called after each trial with the number of trials and a text about the best one.
      recipe: how products in few bits quantize their operands, such as `MXFP8BlockScaling()`. None uses
        that of the step's policy if it has this dtype and no state, otherwise `Float8CurrentScaling`,
        `NVFP4BlockScaling` or `Int8RowwiseScaling`.

    Returns:
      A `TunedRules`; print it. Its `rules` are for `autocast`, `AutocastPolicy` and AMP modes. The same arguments give
      the same rules. After a keyboard interrupt, it has the best rules so far.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: there are no examples, or their shapes differ; no operation can run in the dtype; the function is not
        finite in float32; the tolerance is exceeded even if nothing runs in the dtype; the recipe has another dtype, or
        a state, as `DelayedScaling`.

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
    precision = precision_of(fn, dtype, recipe)
    tolerance, criterion = tolerance_of(tolerance)
    if loss_scale is not None:
        check_number("loss_scale", loss_scale, "a positive number", above=0)
    given = checked(fn, examples, others, held_out, budget, steps)
    seen = len(given) - (len(held_out) if held_out is not None else len(examples) > 1)
    with none_key_explained(fn, given[0]):
        subject, given = subject_of(fn, given)
        units = precision.units(subject, given[0])
    if not any(unit.is_free for unit in units):
        report = _report(subject, given[0], precision, precision.base)
        raise ValueError(why_no_choice(report.operations, precision.name))
    programs = Programs(subject, given, units, precision, tolerance, criterion)
    tolerance = programs.tolerance
    check_finite(programs.references)
    scales = scales_of(given, programs.references, precision.half) if loss_scale is None else (float(loss_scale),)
    trials = Trials(programs.trials(), scales[0], seen, len(units), tolerance, budget, progress, precision.kept)
    training = Training(fn, given, precision, tolerance, steps)
    verified = functools.partial(verify_rules, programs, units=units, trials=trials, seen=seen, training=training)
    if isinstance(precision, ProductsInFewBits):
        chosen = _in_few_bits(precision, units, trials, scales, verified)
    else:
        chosen = _in_half(precision, programs, units, trials, scales, seen, verified)
    verification = training.compared(chosen.verification, chosen.rules, trials.scale)
    reports = [_report(subject, given[0], precision, table) for table in (TORCH_CUDA, chosen.rules)]
    return TunedRules(
        rules=chosen.rules,
        dtype=precision.name,
        entries=tuple(chosen.entries),
        choices=sum(unit.is_free for unit in units),
        complete=chosen.complete,
        trials=trials.count,
        seconds=trials.seconds,
        compile_seconds=programs.compile_seconds,
        loss_scale=trials.scale,
        tolerance=tolerance,
        half_flops=(reports[0].half_flops_share, reports[1].half_flops_share),
        half_elements=(reports[0].half_elements_share, reports[1].half_elements_share),
        verification=verification,
        steps_taken=steps_taken(given),
        recipe=precision.recipe if isinstance(precision, ProductsInFewBits) else None,
        products=tuple(chosen.products(sum(operation.flops for operation in reports[1].operations))),
    )


class _Chosen(NamedTuple):
    """What a search found, and its verification."""

    complete: bool
    rules: AutocastRules
    verification: Verification
    entries: Sequence[Float32Entry] = ()
    products: Callable[[int], Sequence[TunedProduct]] = lambda flops: ()


def _in_few_bits(
    precision: ProductsInFewBits,
    units: Sequence[Unit],
    trials: Trials,
    scales: Sequence[float],
    verified: Callable[..., Any],
) -> _Chosen:
    """Searches the products that stay in half precision; those that cost most for their flops come first."""
    numbers = sorted((i for i, unit in enumerate(units) if unit.is_free), key=lambda i: (-units[i].flops, i))
    free = frozenset(numbers)
    trials.settle(scales, free)
    errors = _each(trials, [free - {i} for i in numbers])
    alone = {i: errors[free - {i}] for i in numbers if free - {i} in errors}
    ranking = costs_first(alone, units, trials.tolerance)
    kept, complete = _search(trials, units, ranking, precision)
    rules, verification, added = verified(kept, ranking=ranking)
    without = _each(trials, [kept - {i} for i in kept]) if complete else {}

    def products(flops: int) -> list[TunedProduct]:
        return [
            TunedProduct(
                primitive=units[i].primitives[0],
                path=units[i].path,
                line=units[i].line,
                flops_share=units[i].flops / max(1, flops),
                in_few_bits=units[i].is_free and i not in kept | added,
                alone=alone.get(i),
                without=without.get(kept - {i}) if i in kept else None,
                not_tried=units[i].not_tried,
            )
            for i in [*numbers, *(i for i, unit in enumerate(units) if unit.not_tried)]
        ]

    return _Chosen(complete, rules, verification, products=products)


def _in_half(
    precision: HalfPrecision,
    programs: Programs,
    units: Sequence[Unit],
    trials: Trials,
    scales: Sequence[float],
    seen: int,
    verified: Callable[..., Any],
) -> _Chosen:
    """Searches the operations that stay in float32; those with the largest errors come first."""
    trials.settle(scales, frozenset())
    healthy = trials.suffices(frozenset()) and verified(frozenset(), ranking=[])
    if healthy and healthy[1].passed:
        return _Chosen(True, *healthy[:2])
    ranking, scores = _ranked(programs, units, trials, scales, seen)
    kept, complete = _search(trials, units, ranking, precision)
    rules, verification, added = verified(kept, ranking=ranking)
    without = _each(trials, [kept - entry.units for entry in entries_of(kept, units)]) if complete else {}
    return _Chosen(complete, rules, verification, _entries(kept, added, units, without, scores))


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


def _search(
    trials: Trials, units: Sequence[Unit], ranking: list[int], precision: HalfPrecision | ProductsInFewBits
) -> tuple[frozenset[int], bool]:
    """Returns the units that are kept, and True if the search was completed, so that each has to be."""
    everything = frozenset(ranking)
    try:
        if not trials.suffices(frozenset()) and not trials.suffices(everything):
            raise ValueError(f"{precision.refusal}: {trials(everything).errors}")
        if isinstance(precision, ProductsInFewBits):  # fewest flops, not fewest products
            return frozenset(first_needed(ranking, trials.suffices)), True
        costly, group = (lambda i: units[i].is_product), (lambda i: units[i].group)
        return frozenset(smallest_list(ranking, costly, group, trials.suffices)), True
    except (BudgetSpent, KeyboardInterrupt):
        best = trials.best
        return everything if best is None else best.float32, False


def _each(trials: Trials, choices: Sequence[frozenset[int]]) -> dict[frozenset[int], Errors]:
    """Returns the errors of choices of units to keep, of as many as can be tried."""
    found: dict[frozenset[int], Errors] = {}
    for kept in choices:
        try:
            found[kept] = trials(kept).errors
        except (BudgetSpent, KeyboardInterrupt):
            return found
    return found


def _entries(
    kept: frozenset[int],
    added: frozenset[int],
    units: Sequence[Unit],
    without: dict[frozenset[int], Errors],
    scores: np.ndarray,
) -> list[Float32Entry]:
    return [
        Float32Entry(
            expressions=entry.expressions,
            primitives=tuple(sorted({name for i in entry.units for name in units[i].primitives})),
            path=units[min(entry.units)].path,
            line=units[min(entry.units)].line,
            operations=sum(units[i].operations for i in entry.units),
            without=without.get(kept - entry.units),
            lost=lost_of(scores[sorted(entry.units)]),
            repaired=bool(entry.units & added),
        )
        for entry in entries_of(kept | added, units)
    ]


def _report(
    subject: Subject, example: Example, precision: HalfPrecision | ProductsInFewBits, rules: AutocastRules
) -> AutocastReport:
    """Returns autocast's report of each operation under the rules."""
    reports: list[AutocastReport] = []

    def explained(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            reports.append(explain_autocast(precision.run(fn, rules), *args, **kwargs))
            return fn(*args, **kwargs)

        return run

    jax.eval_shape(lambda: subject.objective(explained, *example))
    return reports[0]


_MOST_NAMES = 8


def checked(
    fn: Callable[..., Any],
    examples: Sequence[Example],
    others: Sequence[Any],
    held_out: Sequence[Example] | None,
    budget: int,
    steps: int,
) -> list[Example]:
    """Returns all examples, the held-out ones last.

    Args:
      fn: see `tune`.
      examples: see `tune`.
      others: positional arguments after these.
      held_out: see `tune`.
      budget: see `tune`.
      steps: see `tune`.

    Raises:
      TypeError: an argument has a wrong type, or the function is already an `autocast`.
      ValueError: there are no examples, their shapes differ, or a number is too small.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function or a TrainStep, got {fn!r}")
    is_step = isinstance(fn, TrainStep)
    if mark_of(fn.loss_fn if is_step else fn) is not None:
        name = "the loss_fn of the step" if is_step else "fn"
        raise TypeError(f"{name} is an autocast(...) already: pass the plain function, for which rules are found")
    wanted = "tune(step, [(state, batch), ...])" if is_step else "tune(fn, [(params, batch), ...])"
    if others or not isinstance(examples, Sequence):
        got = f"got {type(examples).__name__}" + "".join(f" and {type(other).__name__}" for other in others)
        raise TypeError(f"examples must be one list of tuples of fn's arguments, {got}: {wanted}")
    if not examples:
        raise ValueError(f"examples is empty: tune wants tuples of arguments, with values: {wanted}")
    given = [*examples, *(held_out or ())]
    for number, example in enumerate(given):
        if not isinstance(example, tuple):
            got = type(example).__name__
            raise TypeError(f"examples[{number}] must be a tuple of arguments, got {got}: {wanted}")
    check_count("budget", budget)
    check_count("steps", steps, least=0)
    if steps and not is_step:
        raise ValueError(f"steps={steps} needs a TrainStep, whose optimizer trains")
    check_alike(given)
    return given


def check_finite(references: Sequence[Reference]) -> None:
    """Raises ValueError unless all results and gradients are finite.

    Args:
      references: float32 outcomes of all examples.
    """
    for number, (outcome, _) in enumerate(references):
        named = {f"result {i}": x for i, x in enumerate(outcome.results)} | {
            f"the gradient of {path!r}": x for path, x in outcome.gradients.items()
        }
        for name, x in named.items():
            if not bool(jnp.isfinite(x).all()):
                raise ValueError(f"examples[{number}]: {name} is not finite in float32: there is nothing to tune")


def why_no_choice(operations: Sequence[OperationReport], dtype: str) -> str:
    """Returns the reason why no operation of a function can run in half precision.

    Args:
      operations: autocast's report of the function.
      dtype: name of the half type.
    """
    said = f"no operation of fn could be {dtype}: there is nothing to tune"
    if any(DECIDED in row.path.split("/") for row in operations):
        return f"{said}. An autocast(...) within it decides already: pass the plain function"
    found = collections.Counter(row.operation for row in operations)
    names = [name for name, _ in found.most_common(_MOST_NAMES)]
    more = ", ..." if len(found) > len(names) else ""
    return f"{said}. It has {', '.join(names) + more if names else 'none'}, and no matrix product that may be half"
