"""Compiled programs of a tuning: float32, trials, scores, and autocast itself."""

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies import InnerGradientWarning
from jmp_train.policies.autocasting import AutocastRules, FlatCall
from jmp_train.policies.autocasting.emulating import COMPILER_OPTIONS
from jmp_train.policies.pytrees import Carried, is_array, path_name
from jmp_train.tools.tuning.precisions import HalfPrecision, ProductsInFewBits
from jmp_train.tools.tuning.scores import no_scores, scores_of
from jmp_train.tools.tuning.tolerance import Criterion, Errors, Outcome, Reference, Tolerance, errors_of
from jmp_train.tools.tuning.tuned_functions import Example, Subject, as_it_is
from jmp_train.tools.tuning.units import Unit, flags_from, index_of


class Programs:
    """Compiles each program that a tuning runs on its examples once.

    Args:
      subject: the tuned function or step.
      examples: its arguments, of the same structure, shapes and dtypes.
      units: operations whose precision is chosen.
      precision: what is chosen.
      tolerance: tolerance of the errors.
      criterion: the user's own criterion, or None.

    Attributes:
      references: float32 outcome of each example.
      tolerance: the tolerance, widened by the function's sensitivity.
      compile_seconds: time to compile all programs so far.
    """

    def __init__(
        self,
        subject: Subject,
        examples: Sequence[Example],
        units: Sequence[Unit],
        precision: HalfPrecision | ProductsInFewBits,
        tolerance: Tolerance,
        criterion: Criterion | None,
    ) -> None:
        self._subject = subject
        self._precision, self._criterion = precision, criterion
        self._numbers = index_of(units)
        self._count = len(units)
        self._call = FlatCall(examples[0], {})
        self._arrays = [self._arrays_of(example) for example in examples]
        self.compile_seconds = 0.0
        outcome = self._compiled(lambda arrays: subject.outcome(as_it_is, 1.0, *self._example(arrays)))(self._arrays[0])
        outcomes: list[Outcome] = [outcome(arrays) for arrays in self._arrays]
        rounded = [outcome(self._arrays_of(subject.rounded(example, precision.rounded))) for example in examples]
        slacks = [tolerance.slack(x, y) for x, y in zip(rounded, outcomes, strict=True)]
        self.references = list(map(Reference, outcomes, slacks))
        self.tolerance = tolerance.widened(rounded, outcomes)

    def _arrays_of(self, example: Example) -> list[Any]:
        return jax.device_put([x for x in jax.tree.leaves(example) if is_array(x)])

    def _example(self, arrays: Sequence[Any]) -> Example:
        return self._call.arguments(arrays)[0]

    def _compiled(self, run: Callable[..., Any], *, as_users: bool = False) -> Callable[..., Any]:
        """Returns a function that compiles `run` for its arguments, with all roundings or as users compile it."""
        reachable = Carried((), self._subject.outcome)

        @functools.wraps(run)
        def at_home(*args: Any) -> Any:
            with reachable.at_home():
                return run(*args)

        # These keep all roundings and, on CPUs, halve the compile time.
        sooner = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else {}
        options = None if as_users else COMPILER_OPTIONS | sooner

        def compile_for(*args: Any) -> Callable[..., Any]:
            began = time.perf_counter()
            compiled = jax.jit(at_home, compiler_options=options).lower(*args).compile()
            self.compile_seconds += time.perf_counter() - began
            return compiled

        return compile_for

    def trials(self) -> Callable[[np.ndarray, float, int], Errors]:
        """Returns the function `(flags, loss scale, example number)` -> errors of a choice."""

        def run(flags: jax.Array, scale: jax.Array, reference: Reference, arrays: list[Any]) -> Errors:
            by_flags = flags_from(flags, self._numbers)
            by_choice = functools.partial(self._precision.trial, flags=by_flags)
            return self._errors(by_choice, scale, reference, arrays)

        flags = np.ones(self._count, bool)
        compiled = self._compiled(run)(flags, np.float32(1), self.references[0], self._arrays[0])

        def errors(flags: np.ndarray, scale: float, number: int) -> Errors:
            return compiled(flags, np.float32(scale), self.references[number], self._arrays[number])

        return errors

    def verified(self, rules: AutocastRules, scale: float) -> Callable[[int], Errors]:
        """Returns the function `(example number)` -> errors of autocast itself, compiled as users compile it.

        Args:
          rules: rules of autocast.
          scale: the loss scale.
        """

        def run(scale: jax.Array, reference: Reference, arrays: list[Any]) -> Errors:
            return self._errors(lambda fn: self._precision.run(fn, rules), scale, reference, arrays)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InnerGradientWarning)  # a tuned step takes its own gradient
            compiled = self._compiled(run, as_users=True)(np.float32(scale), self.references[0], self._arrays[0])
        return lambda number: compiled(np.float32(scale), self.references[number], self._arrays[number])

    def _errors(self, transform: Any, scale: jax.Array, reference: Reference, arrays: list[Any]) -> Errors:
        outcome = self._subject.outcome(transform, scale, *self._example(arrays))
        return errors_of(outcome, reference, self._criterion)

    def scores(self) -> Callable[[float, int], np.ndarray]:
        """Returns the function `(loss scale, example number)` -> scores [units, columns]; see `scores_of`."""
        found = scores_of(self._subject, self._numbers, self._precision.half)
        slots = jnp.asarray(no_scores(self._count))

        def run(scale: jax.Array, arrays: list[Any]) -> jax.Array:
            return found(slots, scale, self._example(arrays))

        compiled = self._compiled(run)(np.float32(1), self._arrays[0])
        return lambda scale, number: np.asarray(compiled(np.float32(scale), self._arrays[number]))


def check_alike(examples: Sequence[Example]) -> None:
    """Raises ValueError unless all examples have the structure, shapes and dtypes of the first one.

    Args:
      examples: tuples of arguments.
    """
    first = jax.tree_util.tree_leaves_with_path(examples[0])
    for number, example in enumerate(examples[1:], 1):
        leaves = jax.tree_util.tree_leaves_with_path(example)
        if [path for path, _ in leaves] != [path for path, _ in first]:
            raise ValueError(f"examples[{number}] has another structure than examples[0]")
        for (path, x), (_, y) in zip(leaves, first, strict=True):
            if not is_array(x) or not is_array(y):
                same = is_array(x) == is_array(y) and (x is y or x == y)
                if not same:
                    raise ValueError(f"examples[{number}] {path_name(path)!r} is {x!r}, and {y!r} in examples[0]")
            elif (x.shape, x.dtype) != (y.shape, y.dtype):
                raise ValueError(
                    f"examples[{number}] {path_name(path)!r} is {x.dtype}{list(x.shape)}, and {y.dtype}{list(y.shape)} "
                    "in examples[0]: one program is compiled for all of them"
                )
