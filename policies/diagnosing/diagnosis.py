"""`diagnose`: what half precision does to every operation of a function or a training step."""

from collections.abc import Callable
from typing import Any

import jax

from jmp_train.policies.autocasting import none_key_explained
from jmp_train.policies.diagnosing.examining import examine
from jmp_train.policies.diagnosing.explaining import explanation
from jmp_train.policies.diagnosing.report import NumericsReport
from jmp_train.policies.diagnosing.shadow import forget_programs
from jmp_train.policies.diagnosing.trials import examine_by_rules, with_trials
from jmp_train.policies.pytrees import is_nnx_object


def diagnose(fn: Callable[..., Any], *args: object, steps: int = 1) -> NumericsReport:
    """Runs a function beside a float32 shadow of itself, and says which operations half precision harms.

    The function is traced once, as `jax.jit` does: forward pass, backward pass and update of a training step are one
    program, with what is within `jit`, `scan`, `while`, `cond`, `remat`, custom derivatives and `shard_map`. Each of
    its equations is evaluated in its own dtypes, in float32 beside it, and in its own dtypes on the float32 operands,
    which parts the error of the operation itself from what it inherits.

    Args:
      fn: a pure function, with or without `jax.jit`, such as a `train_step` with its policy, in whatever parallel
        transform.
      *args: its arguments, pytrees of arrays with values.
      steps: how often it is run, each time with its first results, as far as these are like its first arguments (the
        state, or model and optimizer's state), in place of these; no further than to a state that is not finite.

    Returns:
      A report: print it, or look at its `problems`, `rules` and `rows`.

    Raises:
      TypeError: an argument has no values, or it is called within a transform of jax; `steps` is above 1 and the
        first result is unlike the first argument.
      ValueError: `steps` is no positive integer; an argument is spread over the devices of several processes.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_train as jt
      >>> def norm(x):
      ...     return x / jnp.sqrt(jnp.sum(x * x))
      >>> report = jt.diagnose(norm, jnp.full(4, 300.0, jnp.float16))
      >>> [(problem.kind, problem.primitive) for problem in report.problems]
      [('overflow', 'mul')]
      >>> safe = jt.autocast(norm, jnp.float16, rules=report.rules)
      >>> jt.diagnose(safe, jnp.full(4, 300.0, jnp.float16)).problems
      ()

    Reference: the shadow is that of FpDebug (Benz, Hildebrandt and Hack, PLDI 2012), the local error of an operation
    that of Herbgrind (Sanchez-Stern and others, PLDI 2018).
    """
    plain, given = fn, args
    if any(map(is_nnx_object, jax.tree.leaves(args, is_leaf=is_nnx_object))):
        fn, args = _with_changed_objects(fn), (args,)
    try:
        with none_key_explained(plain, given):
            first = examine(fn, args, steps)
        found = with_trials(first, lambda rules: examine_by_rules(first, fn, args, rules))
    finally:
        forget_programs()
    problems = tuple(problem for _, problem in found)
    evidence = first.evidence
    return NumericsReport(problems, evidence.rows, evidence.collapsed, first.steps, explanation(evidence, found))


def _with_changed_objects(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of all arguments that also returns them, with what it has done to flax nnx objects."""

    def pure(args: tuple[Any, ...]) -> tuple[Any, Any]:
        result = fn(*args)
        return args, result

    return pure
