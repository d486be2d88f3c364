"""`parity` compares the log-probabilities of training and inference, and finds where they diverge.

Generation with a cache and a full forward pass compute the same values in another order and in other shapes. Such
functions have few operations in common, but the same rows of numbers, so operations are matched by the rows of their
results. The search goes backwards from the results, through operations whose rows the other function lacks: the
functions diverge at one of these. It does not reach differences without effect, such as scores that are masked later.
If only the rounding differs, the first operation found is named. Otherwise, the first one that causes a large part of
the difference is named; see `contributions`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import FlatCall, none_key_explained
from jmp_train.policies.pytrees import check_flag, check_values
from jmp_train.tools.checking_parity.contributions import Divergence, RecordedProgram, named_of, program_of
from jmp_train.tools.checking_parity.counterparts import SAME, KnownRows, MatchedRows, Prints, fingerprint
from jmp_train.tools.checking_parity.log_probs import Tokens, differences_of, tokens_of
from jmp_train.tools.checking_parity.parity_report import (
    FirstDifference,
    Kind,
    OperationParity,
    Operations,
    ParityReport,
)
from jmp_train.tools.checking_parity.rerunning import Rerun
from jmp_train.tools.diagnosing import Pair, Recorded, is_low, nonfinite_allowed, record


@nonfinite_allowed()
def parity(
    train_fn: Callable[..., Any],
    infer_fn: Callable[..., Any],
    *args: object,
    where: Any = None,
    operations: bool = True,
) -> ParityReport:
    """Returns a report that compares the log-probabilities of the same tokens in training and inference.

    Reinforcement learning of a language model assumes that the sampler and the trainer compute the same probabilities.
    If the two round differently, the gradient belongs to another policy. The error is much larger in bfloat16 than in
    float16 (arXiv:2510.26788).

    Both functions run once, jitted or not, to measure the distribution of the differences. Then both are traced and run
    operation by operation, together with a float32 copy of each operation, as in `diagnose`. `parity` finds the first
    operation of each function whose values the other function does not compute. It matches values regardless of shape
    and order, so one function may be generation with a cache.

    Args:
      train_fn: a pure function that returns log-probabilities of tokens, of any float dtype: an array or a pytree of
        arrays.
      infer_fn: another one, which returns the same structure and shapes.
      *args: the arguments of both, pytrees of arrays with values, such as parameters and tokens.
      where: True for tokens to compare: booleans that broadcast to each array, or a pytree of such. None for all
        tokens.
      operations: whether to search for the operations where the functions diverge. The search takes many times as long
        as the functions.

    Returns:
      A report. Print it, or read its `mean`, `bands`, `worst` and `first_difference`.

    Raises:
      TypeError: a result is not an array of floats, `where` is not boolean, an argument has no values, or `parity` is
        called within a jax transformation.
      ValueError: the functions return different structures or shapes, or numbers above 0, or `where` selects no token.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_train as jt
      >>> def train(logits):
      ...     return jax.nn.log_softmax(logits)
      >>> def infer(logits):
      ...     return jax.nn.log_softmax(logits.astype(jnp.bfloat16)).astype(jnp.float32)
      >>> report = jt.parity(train, infer, jnp.linspace(-3, 3, 60).reshape(4, 15))
      >>> report.n_tokens, round(report.mean, 3), report.first_difference.kind
      (60, 0.005, 'rounding')
      >>> report.first_difference.infer.primitive
      'convert_element_type'

    Reference: Qi and others, "Defeating the Training-Inference Mismatch via FP16", arXiv:2510.26788, 2025.
    """
    check_flag("operations", operations)
    check_values(args, "parity")
    with none_key_explained(train_fn, args):
        trained = train_fn(*args)
    with none_key_explained(infer_fn, args):
        tokens = tokens_of(trained, infer_fn(*args), where)
    found = operations_of(train_fn, infer_fn, args, where) if operations else None
    return ParityReport(**vars(differences_of(tokens)), operations=found)


_PART_OF_ROUNDING = 64  # differences below epsilon / 64 come from few elements that are rounded the other way
_FARTHEST = 50.0  # largest difference of a token in trials, also used for NaN
_NOISE = 4e-6  # difference between orders of float32 sums


@dataclasses.dataclass(frozen=True)
class _Side:
    """A function that ran operation by operation.

    Attributes:
      recorded: its operations.
      prints: for each operation, the fingerprints of all its runs.
      results: its results as `Pair`s, a pytree.
      program: the traced program.
      arguments: the arguments of the program.
      origins: the numbers of the operations that computed the results.
    """

    recorded: list[Recorded]
    prints: list[list[Prints]]
    results: Any
    program: Any
    arguments: list[Any]
    origins: frozenset[int]


def operations_of(
    train_fn: Callable[..., Any], infer_fn: Callable[..., Any], args: tuple[Any, ...], where: Any
) -> Operations:
    """Returns a comparison of the operations of two functions, after running both operation by operation.

    Args:
      train_fn: a pure function that returns log-probabilities.
      infer_fn: another one, which returns the same structure.
      args: the arguments of both, arrays with values.
      where: the tokens to compare, see `tokens_of`.
    """
    sides = [_side(fn, args) for fn in (train_fn, infer_fn)]
    arguments = _arguments(args)
    found = []
    for side, other in (sides, sides[::-1]):
        known = KnownRows([table for prints in (*other.prints, arguments) for one in prints for table in one.tables])
        found.append([_found(known, prints) for prints in side.prints])
    rows = [
        [_row(op, f) for op, f in zip(side.recorded, own, strict=True)] for side, own in zip(sides, found, strict=True)
    ]
    shadows = _tokens(sides, lambda pair: pair.actual if pair.shadow is None else pair.shadow, where)
    kind = "rounding" if _agree(shadows) else "value"
    mean = differences_of(_tokens(sides, lambda pair: pair.actual, where)).mean
    matched = _first(sides, found, kind)
    named = Divergence(matched, ({}, {}))
    if kind == "value":
        train, infer = (_program(*each) for each in zip(sides, found, strict=True))
        named = named_of(train, infer, matched, _apart(sides, where))
    for row, contribution in zip(rows, named.contributions, strict=True):
        for number, share in contribution.items():
            row[number] = dataclasses.replace(row[number], contribution=share)
    ends = [None if n is None else row[n] for n, row in zip(named.numbers, rows, strict=True)]
    first = FirstDifference(kind, *ends) if any(ends) else None
    return Operations(tuple(rows[0]), tuple(rows[1]), first, mean)


def _program(side: _Side, found: Sequence[MatchedRows | None]) -> RecordedProgram:
    """Returns a function as a program that can run again in float32."""
    differing = frozenset(n for n, op in enumerate(side.recorded) if _differs(found[n], "value", _width(op)))
    return program_of(Rerun(side.program, side.arguments), side.recorded, side.origins, differing)


def _apart(sides: Sequence[_Side], where: Any) -> Callable[[list[Any], list[Any]], float]:
    """Returns a function of two lists of results, training's first, that returns their mean difference per token."""
    structures = [jax.tree.structure(side.results, is_leaf=_is_pair) for side in sides]

    def apart(train: list[Any], infer: list[Any]) -> float:
        first, second = (jax.tree.unflatten(s, x) for s, x in zip(structures, (train, infer), strict=True))
        try:
            tokens = tokens_of(first, second, where)
        except ValueError:  # numbers above 0, from values that do not belong there
            return _FARTHEST
        with np.errstate(invalid="ignore"):
            far = np.where(tokens.train == tokens.infer, 0.0, np.abs(tokens.train - tokens.infer))
        return float(np.minimum(np.where(np.isnan(far), _FARTHEST, far), _FARTHEST).mean())

    return apart


def _tokens(sides: Sequence[_Side], of: Callable[[Pair], Any], where: Any) -> Tokens:
    train, infer = (jax.tree.map(of, side.results, is_leaf=_is_pair) for side in sides)
    return tokens_of(train, infer, where)


def _is_pair(x: object) -> bool:
    return isinstance(x, Pair)


def _side(fn: Callable[..., Any], args: tuple[Any, ...]) -> _Side:
    call = FlatCall(args, {})
    leaves = [leaf for leaf, is_array in zip(jax.tree.leaves(args), call.are_arrays, strict=True) if is_array]
    structures = []

    def arrays(*args: object) -> Any:
        results = jax.tree.map(jnp.asarray, fn(*args))
        structures.append(jax.tree.structure(results))
        return results

    program = jax.make_jaxpr(call.of_arrays(arrays))(*leaves)
    recorded, pairs, origins = record(program, leaves, fingerprint)
    results = jax.tree.unflatten(structures[-1], pairs)
    prints = [[one for run in op.kept for one in run if one is not None] for op in recorded]
    return _Side(recorded, prints, results, program, leaves, frozenset().union(*origins))


def _found(known: KnownRows, prints: Sequence[Prints]) -> MatchedRows | None:
    """Returns the differences of an operation's rows from known ones, or of its elements if more of these are known."""
    if not prints:
        return None
    ways = [one.rows for one in prints], [one.elements for one in prints if one.elements is not None]
    complete = [np.concatenate(way) for way in ways if len(way) == len(prints)]
    return min(map(known.found, complete), key=lambda found: found.unknown)


def _arguments(args: tuple[Any, ...]) -> list[Prints]:
    """Returns the fingerprints of the arguments' rows, which both functions have."""
    leaves = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array | np.ndarray)]
    return [prints for x in leaves if (prints := fingerprint(Pair(x))) is not None]


def _first(
    sides: Sequence[_Side], found: Sequence[Sequence[MatchedRows | None]], kind: Kind
) -> tuple[int | None, int | None]:
    """Returns the numbers of the first operations in training and inference whose rows the other lacks."""
    rounding = _rounding(sides)
    limits = [(0.0, 1)] if kind == "value" else [(rounding, 2), (_NOISE, 2), (rounding, 1), (_NOISE, 1)]
    for limit, width in limits:
        train, infer = (_first_of(side, own, kind, limit, width) for side, own in zip(sides, found, strict=True))
        if train is not None or infer is not None:
            return train, infer
    return None, None


def _first_of(side: _Side, found: Sequence[MatchedRows | None], kind: Kind, limit: float, width: int) -> int | None:
    """Returns the number of the first differing operation between matching operations and the results.

    Many rows of one number match by chance, so they count as no match, and are named only if no other operation is.
    """
    reached: set[int] = set()
    waiting = set(side.origins)
    while waiting:
        number = waiting.pop()
        if _differs(found[number], kind, _width(side.recorded[number])):
            reached.add(number)
            waiting |= side.recorded[number].reads - reached
    named = (n for n in reached if _width(side.recorded[n]) >= width and _is_other(found[n], kind, limit))
    return min(named, default=None)


def _width(op: Recorded) -> int:
    """Returns the length of the rows of an operation's result."""
    shape = getattr(op.equation.outvars[0].aval, "shape", ())
    return shape[-1] if shape else 1


def _differs(found: MatchedRows | None, kind: Kind, width: int) -> bool:
    """Returns whether an operation's rows differ from the other function's by more than the order of float32 sums."""
    if found is None or width == 1:  # many rows of one number match by chance
        return True
    return found.unknown > 0 or (found.apart if kind == "value" else found.difference) > _NOISE


def _is_other(found: MatchedRows | None, kind: Kind, limit: float) -> bool:
    if found is None:
        return False
    if kind == "value":
        return found.unknown > 0
    return found.difference > limit


def _rounding(sides: Sequence[_Side]) -> float:
    """Returns the least difference that is not due to few elements, for the lowest dtype."""
    variables = [variable for side in sides for op in side.recorded for variable in op.equation.outvars]
    low = {x.aval.dtype for x in variables if is_low(getattr(x.aval, "dtype", None))}
    epsilons = (float(jnp.finfo(dtype).eps) for dtype in low)
    return max(epsilons, default=0.0) / _PART_OF_ROUNDING or _NOISE


def _agree(tokens: Tokens) -> bool:
    """Returns whether log-probabilities agree up to float32 rounding, relative for magnitudes above 1."""
    finite = np.isfinite(tokens.train) & np.isfinite(tokens.infer)
    if not np.array_equal(tokens.train[~finite], tokens.infer[~finite], equal_nan=True):
        return False
    first, second = tokens.train[finite], tokens.infer[finite]
    return bool((np.abs(first - second) <= SAME * np.maximum(np.abs(first), 1)).all())


def _row(op: Recorded, found: MatchedRows | None) -> OperationParity:
    file, _, line = op.line.rpartition(":")
    (variable, *_) = op.equation.outvars
    return OperationParity(
        primitive=op.equation.primitive.name,
        path=op.path,
        file=file,
        line=int(line or 0),
        dtype=str(getattr(variable.aval, "dtype", "")),
        shape=tuple(getattr(variable.aval, "shape", ())),
        runs=len(op.kept),
        unknown=found.unknown if found else 0.0,
        difference=found.difference if found else float("nan"),
        error=found.error if found else 0.0,
    )
