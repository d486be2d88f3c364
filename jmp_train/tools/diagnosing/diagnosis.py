"""`diagnose` finds the operations of a function or a training step that half precision harms."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from jmp_train.policies.autocasting import AutocastRules, lines_of, none_key_explained
from jmp_train.policies.pytrees import is_nnx_object
from jmp_train.tools.diagnosing.arithmetic import dtype_of, picks, rounding_on, rounding_text
from jmp_train.tools.diagnosing.equations import epsilon_in_code
from jmp_train.tools.diagnosing.evidence import Evidence, reached
from jmp_train.tools.diagnosing.examining import examine
from jmp_train.tools.diagnosing.flattening import nonfinite_allowed
from jmp_train.tools.diagnosing.measures import is_low
from jmp_train.tools.diagnosing.numerics_report import NumericsReport
from jmp_train.tools.diagnosing.problems import Found, Problem, file_and_line, where_is
from jmp_train.tools.diagnosing.shadow import forget_programs
from jmp_train.tools.diagnosing.trials import examine_by_rules, with_trials

_LISTED = 4  # leaves
_DIRECTIONS = {"backward": "Gradients", "forward": "Results", "update": "Results of the update"}


@nonfinite_allowed()
def diagnose(fn: Callable[..., Any], *args: object, steps: int = 1, device: Any = None) -> NumericsReport:
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
      device: the device for which to diagnose: "cuda", "tpu", or a device, such as `jt.aot.GPUS["H100-80GB"]`. At jax's
        default precision, GPUs round float32 operands of products to TF32 (10 bits) from compute capability 8.0 on, and
        TPUs to bfloat16; the diagnosis then does so too. None for the rounding of the current backend.

    Returns:
      A report. Print it, or read its `problems`, `rules` and `rows`.

    Raises:
      TypeError: an argument has no values; `diagnose` is called within a jax transformation; or `steps` is above 1 and
        the first result has another structure than the first argument.
      ValueError: `steps` is not a positive integer, there is no such `device`, or an argument is sharded over the
        devices of several processes.

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
    plain, given, rounding = fn, args, rounding_on(device)
    if any(map(is_nnx_object, jax.tree.leaves(args, is_leaf=is_nnx_object))):
        fn, args = _with_changed_objects(fn), (args,)
    try:
        with none_key_explained(plain, given):
            first = examine(fn, args, steps, rounding)
        own: list[AutocastRules] = []
        found = with_trials(first, functools.cache(lambda added: examine_by_rules(first, fn, args, added, own)))
    finally:
        forget_programs()
    problems = tuple(problem for _, problem in found)
    evidence = first.evidence
    said = " ".join(filter(None, (explanation(evidence, found), rounding_text(rounding))))
    sites = zip(evidence.rows, evidence.sites, strict=True)
    rows = tuple(row for row, site in sites if row.decided or not picks(site.equation))
    return NumericsReport(problems, rows, evidence.collapsed, first.steps, said, *own[:1])


def _with_changed_objects(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of all arguments that also returns them, with its changes to flax nnx objects."""

    def pure(args: tuple[Any, ...]) -> tuple[Any, Any]:
        result = fn(*args)
        return args, result

    return pure


def explanation(evidence: Evidence, found: Sequence[Found]) -> str:
    """Returns the explanation of a diagnosis; empty if everything is finite.

    Args:
      evidence: the evidence of the diagnosis.
      found: its problems with their rows.
    """
    return " ".join(filter(None, (_lost_state(evidence), evidence.stuck_scale, _first_nonfinite(evidence, found))))


def _lost_state(evidence: Evidence) -> str:
    paths = evidence.lost_state
    if not paths:
        return ""
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    verb = "is" if len(paths) == 1 else "are"
    return f"The state is lost before this run: {', '.join(map(repr, paths[:_LISTED]))}{more} {verb} not finite."


def _first_nonfinite(evidence: Evidence, found: Sequence[Found]) -> str:
    ends, row = _ends_and_origin(evidence, any(problem.severity == "problem" for _, problem in found))
    if row is None:
        return ""
    directions = {evidence.direction(end) for end in ends}
    what = next(text for direction, text in _DIRECTIONS.items() if direction in directions)
    problem = _problem_of(evidence, row, found)
    if problem is None:
        operation = evidence.rows[row]
        place = operation.subject or file_and_line(operation.file, operation.line)
        return f"{what} are not finite, which begins with {evidence.named(row)}, {place}."
    at, rest = "at" if problem.line else "of", ""
    if problem.severity == "note" and problem.remedy.action == "loss scale":
        rest = ", and ends when the loss scale has fallen"
    elif epsilon := _vanished_epsilon(evidence, row):
        operation = evidence.rows[row]
        share = operation.nan + operation.infinite
        rest = f": {share:.0%} of {evidence.named(row)} are not finite, and its {epsilon} is 0 in {operation.dtype}"
    return f"{what} are not finite, which begins with the {problem.kind} {at} {where_is(problem)}{rest}."


def _vanished_epsilon(evidence: Evidence, row: int) -> str:
    """Returns the epsilon in a library's code that is 0 when added to a row's divisor; otherwise empty."""
    for site in (evidence.sites[i] for i in evidence.sources(row) if evidence.rows[row].primitive == "div"):
        zeros = [x for x in site.equation.invars if isinstance(x, jex.Literal) and is_low(dtype_of(x)) and not x.val]
        lines = lines_of((*site.callers, site.equation)) if zeros and site.equation.primitive.name == "add" else ()
        if line := next((line for line, _ in lines), ""):
            return epsilon_in_code(line, str(dtype_of(zeros[0]))) or ""
    return ""


def _ends_and_origin(evidence: Evidence, is_harmed: bool) -> tuple[list[int], int | None]:
    """Returns the results and gradients that are not finite, and the first row, in the program's order, that caused it.

    If float32 is finite, only values of half precision count; infinities that float32 has too may be intended.

    Args:
      evidence: the evidence of the diagnosis.
      is_harmed: True if there is a problem.
    """
    if not evidence.sites or evidence.lost_state:
        return [], None
    nan, infinite, nan_in_float32 = (evidence.column(name) for name in ("nan", "infinite", "shadow_nan"))
    if evidence.nonfinite_arguments and nan_in_float32.any():
        return [], None
    of_half = nan + infinite > nan_in_float32 + evidence.column("shadow_infinite")
    if ends := [row for row in evidence.ends if of_half[row]]:
        return ends, _origin(evidence, ends, of_half)
    ends = [row for row in evidence.ends if nan[row] and is_harmed]
    return ends, _origin(evidence, ends, nan + infinite > 0) if ends else None


def _origin(evidence: Evidence, ends: list[int], is_lost: np.ndarray) -> int:
    """Returns the first of the lost rows that leads to the ends through other lost rows."""
    lost = reached(ends, lambda row: [i for i in evidence.sources(row) if is_lost[i]])
    return min(lost, key=evidence.first_nonfinite)


def _problem_of(evidence: Evidence, row: int, found: Sequence[Found]) -> Problem | None:
    """Returns the problem of a row or of its line, otherwise the last earlier one on which it depends."""
    site, before = evidence.sites[row], evidence.before(row)
    same = [problem for i, problem in found if i == row]
    same += [p for _, p in found if p.line and f"{p.file}:{p.line}" == site.line and p.direction == site.direction]
    sources = [(i, problem) for i, problem in found if i in before and problem.severity == "problem"]
    same += [problem for _, problem in sorted(sources, key=lambda item: -item[0])]
    return same[0] if same else None
