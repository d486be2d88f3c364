"""Checks of `tune`: wrong arguments, and functions with nothing to tune."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jmp_train.policies.autocasting import DECIDED, OperationReport, mark_of
from jmp_train.policies.pytrees import check_count
from jmp_train.steps import TrainStep
from jmp_train.tools.tuning.tolerance import Reference
from jmp_train.tools.tuning.tuned_functions import Example
from jmp_train.tools.tuning.tuning_programs import check_alike

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
