"""`diagnose` finds the operations of a function or a training step that half precision harms."""

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
    """Returns a report of the operations that half precision harms.

    The function is traced once, as by `jax.jit`. The forward pass, backward pass and update of a training step are one
    program, including the bodies of `jit`, `scan`, `while`, `cond`, `remat`, custom derivatives and `shard_map`. Each
    equation is evaluated three times: in its own dtypes; in float32; and in its own dtypes on the float32 operands. The
    third result separates the error of the operation itself from the errors of its operands.

    A scan with many iterations over large arrays runs as a whole, and a sample of its iterations is measured: at least
    eight at equal distances, and the first one with results that are not finite.

    Args:
      fn: a pure function, with or without `jax.jit`, such as a `train_step` with its policy. It may be wrapped in any
        parallel transformation.
      *args: its arguments, pytrees of arrays with values.
      steps: the number of times to run the function. After each run, its first results replace the first arguments of
        the same structure: the state, or the model and the optimizer state. The runs end early if the state is not
        finite.

    Returns:
      A report. Print it, or read its `problems`, `rules` and `rows`.

    Raises:
      TypeError: an argument has no values; `diagnose` is called within a jax transformation; or `steps` is above 1 and
        the first result has another structure than the first argument.
      ValueError: `steps` is not a positive integer, or an argument is sharded over the devices of several processes.

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

    Reference: the float32 evaluation follows FpDebug (Benz, Hildebrandt and Hack, PLDI 2012); the error of the
    operation itself follows Herbgrind (Sanchez-Stern and others, PLDI 2018).
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
    """Returns a function of all arguments that also returns them, with its changes to flax nnx objects."""

    def pure(args: tuple[Any, ...]) -> tuple[Any, Any]:
        result = fn(*args)
        return args, result

    return pure
