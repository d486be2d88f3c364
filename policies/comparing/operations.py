"""The operations of two functions beside each other, and the first of each that the other has not.

Functions that compute the same in another order and in other shapes, as generation with a cache and a full forward
pass do, have few operations in common, but the same rows of numbers. So an operation is looked for by the rows of its
result. From the results backwards, along what is read, through operations whose rows the other function does not have:
the first of these is where the functions part. What differs and is mended again, such as scores that are masked later,
is not reached that way.
"""

import dataclasses
import linecache
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import FlatCall
from jmp_train.policies.comparing.differences import differences_of
from jmp_train.policies.comparing.fingerprints import Prints, fingerprint
from jmp_train.policies.comparing.log_probs import Tokens, tokens_of
from jmp_train.policies.comparing.matching import SAME, Found, KnownRows, is_column_of
from jmp_train.policies.diagnosing import Pair, Recorded, is_low, record

_PART_OF_ROUNDING = 64  # below an epsilon by this, differences are those of few elements rounded the other way
_LAYOUTS = frozenset(("scatter", "dynamic_update_slice", "transpose"))  # by which caches have features before places
_NOISE = 4e-6  # what another order of float32 sums makes

Kind = Literal["value", "rounding"]


@dataclasses.dataclass(frozen=True)
class OperationParity:
    """An operation of one of the functions, beside the other function.

    Attributes:
      primitive: the name of its jax primitive.
      path: of the modules and scopes that it is in.
      file: of the user's line, or of the library that the user called.
      line: number of that line; 0 where it is not known.
      dtype: of its result.
      shape: of its result.
      runs: how often it ran.
      unknown: share of its result's rows that the other function has nowhere, even in float32.
      difference: mean difference of its rows from the same ones of the other function, relative to a row's norm; NaN
        if none is known.
      error: mean difference of its rows from those in float32, likewise.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> rows = jt.parity(lambda x: x * 2, lambda x: x + x, -jnp.ones((2, 3))).operations
      >>> [(row.primitive, row.shape, row.difference) for row in (*rows.train, *rows.infer)]
      [('mul', (2, 3), 0.0), ('add', (2, 3), 0.0)]
    """

    primitive: str
    path: str
    file: str
    line: int
    dtype: str
    shape: tuple[int, ...]
    runs: int
    unknown: float
    difference: float
    error: float

    @property
    def code(self) -> str:
        """The line itself, where its file can be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """Where two functions part.

    Attributes:
      kind: "value" where they differ even if both are computed in float32, "rounding" where only then they agree.
      train: the first operation of training with results that inference has not; None if there is none.
      infer: the first operation of inference with results that training has not; None if there is none.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> first = jt.parity(lambda x: x * 2, lambda x: (x + 0.1) * 2, -jnp.ones((2, 3))).first_difference
      >>> first.kind, first.train.primitive, first.infer.primitive
      ('value', 'mul', 'add')
    """

    kind: Kind
    train: OperationParity | None
    infer: OperationParity | None


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of both functions.

    Attributes:
      train: in the order in which they run.
      infer: likewise.
      first: where they part; None where no operation differs.
      mean: of |log p_train - log p_infer|, each operation run by itself; NaN if that is not finite.
    """

    train: tuple[OperationParity, ...]
    infer: tuple[OperationParity, ...]
    first: FirstDifference | None
    mean: float


@dataclasses.dataclass(frozen=True)
class _Side:
    """A function that was run operation by operation.

    Attributes:
      recorded: its operations.
      prints: of each the fingerprints of all its runs.
      results: its results as `Pair`s, a pytree.
      origins: the numbers of the operations that made these.
    """

    recorded: list[Recorded]
    prints: list[list[Prints]]
    results: Any
    origins: frozenset[int]

    @property
    def each(self) -> Iterator[tuple[Recorded, list[Prints]]]:
        """The operations, each with its fingerprints."""
        return zip(self.recorded, self.prints, strict=True)


def operations_of(
    train_fn: Callable[..., Any], infer_fn: Callable[..., Any], args: tuple[Any, ...], where: Any
) -> Operations:
    """Runs two functions operation by operation and compares what these compute.

    Args:
      train_fn: a pure function to log-probabilities.
      infer_fn: likewise, of the same structure.
      args: of both, arrays with values.
      where: which tokens count, see `tokens_of`.
    """
    sides = [_side(fn, args) for fn in (train_fn, infer_fn)]
    arguments = _arguments(args)
    found = []
    for side, other in (sides, sides[::-1]):
        known = KnownRows([table for prints in (*other.prints, arguments) for one in prints for table in one.tables])
        columns = [np.unique(_numbers(prints)) for op, prints in other.each if _width(op) == 1 and prints]
        found.append([_found(known, columns, op, prints) for op, prints in side.each])
    rows = [
        tuple(_row(op, f) for op, f in zip(side.recorded, own, strict=True))
        for side, own in zip(sides, found, strict=True)
    ]
    kind = "rounding" if _agree(_tokens(sides, _shadow, where)) else "value"
    mean = differences_of(_tokens(sides, lambda pair: pair.actual, where)).mean
    return Operations(rows[0], rows[1], _first(sides, found, rows, kind), mean)


def _tokens(sides: Sequence[_Side], of: Callable[[Pair], Any], where: Any) -> Tokens:
    train, infer = (jax.tree.map(of, side.results, is_leaf=lambda x: isinstance(x, Pair)) for side in sides)
    return tokens_of(train, infer, where)


def _side(fn: Callable[..., Any], args: tuple[Any, ...]) -> _Side:
    call = FlatCall(args, {})
    leaves = [leaf for leaf, is_array in zip(jax.tree.leaves(args), call.are_arrays, strict=True) if is_array]
    structures = []

    def arrays(*args: object) -> Any:
        results = jax.tree.map(jnp.asarray, fn(*args))
        structures.append(jax.tree.structure(results))
        return results

    recorded, pairs, origins = record(jax.make_jaxpr(call.of_arrays(arrays))(*leaves), leaves, fingerprint)
    results = jax.tree.unflatten(structures[-1], pairs)
    prints = [[one for run in op.kept for one in run if one is not None] for op in recorded]
    return _Side(recorded, prints, results, frozenset().union(*origins))


def _shadow(pair: Pair) -> Any:
    return pair.actual if pair.shadow is None else pair.shadow


def _found(known: KnownRows, columns: Sequence[np.ndarray], op: Recorded, prints: Sequence[Prints]) -> Found | None:
    """Returns how far an operation's rows are from known ones, in the way in which more of them are known."""
    if not prints:
        return None
    ways = [[one.rows for one in prints], [one.elements for one in prints]]
    if op.equation.primitive.name in _LAYOUTS:
        ways.append([one.columns for one in prints])
    tables = [[table for table in way if table is not None] for way in ways]
    complete = [np.concatenate(way) for way in tables if len(way) == len(prints)]
    found = min(map(known.found, complete), key=lambda found: found.unknown)
    seen = [one.seen for one in prints if one.seen is not None]
    if any(one.has_fill for one in prints) and len(seen) == len(prints):
        unknown = known.found(np.concatenate(seen)).unknown
        only_seen = unknown > 0 and found.unknown == 0
        found = dataclasses.replace(found, unknown=max(found.unknown, unknown), only_seen=only_seen)
    return dataclasses.replace(found, in_column=is_column_of(_numbers(prints), columns)) if _width(op) == 1 else found


def _numbers(prints: Sequence[Prints]) -> np.ndarray:
    """Returns the numbers of an operation whose rows have one each, times a constant."""
    return np.concatenate([one.rows[:, 0] for one in prints])


def _arguments(args: tuple[Any, ...]) -> list[Prints]:
    """Returns the fingerprints of the arguments' rows, which both functions have."""
    leaves = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array | np.ndarray)]
    return [prints for x in leaves if (prints := fingerprint(Pair(x))) is not None]


def _first(
    sides: Sequence[_Side],
    found: Sequence[Sequence[Found | None]],
    rows: Sequence[tuple[OperationParity, ...]],
    kind: Kind,
) -> FirstDifference | None:
    rounding = _rounding(sides)
    limits = [(0.0, 1)] if kind == "value" else [(rounding, 2), (_NOISE, 2), (rounding, 1), (_NOISE, 1)]
    for limit, width in limits:
        numbers = [_first_of(side, own, kind, limit, width) for side, own in zip(sides, found, strict=True)]
        if any(number is not None for number in numbers):
            train, infer = (None if n is None else row[n] for n, row in zip(numbers, rows, strict=True))
            return FirstDifference(kind, train, infer)
    return None


def _first_of(side: _Side, found: Sequence[Found | None], kind: Kind, limit: float, width: int) -> int | None:
    """Returns the number of the first operation that differs, of those between the results and what is the same.

    Of rows of one number each there are many that are alike by chance: they say that all is the same only if one
    operation of the other function has all of them, and are named only if there is nothing else, or if none has.
    """
    reached: set[int] = set()
    waiting = set(side.origins)
    while waiting:
        number = waiting.pop()
        if _differs(found[number], kind, _width(side.recorded[number])):
            reached.add(number)
            waiting |= _to_blame(side, number, found[number]) - reached
    named = (n for n in reached if _width(side.recorded[n]) >= width and _is_other(found[n], kind, limit))
    return min(named, default=None)


def _to_blame(side: _Side, number: int, found: Found | None) -> set[int]:
    """Returns the operations that may make one differ: masks alone where it differs in what is seen alone."""
    reads = side.recorded[number].reads
    masks = {i for i in reads if side.recorded[i].equation.outvars[0].aval.dtype == jnp.bool_}
    return masks if found is not None and found.only_seen and masks else reads


def _width(op: Recorded) -> int:
    """Returns how long the rows of an operation's result are."""
    shape = getattr(op.equation.outvars[0].aval, "shape", ())
    return shape[-1] if shape else 1


def _differs(found: Found | None, kind: Kind, width: int) -> bool:
    """Whether an operation's rows are not those of the other function but for the order of float32 sums."""
    if found is None or (width == 1 and kind == "rounding"):
        return True
    if width == 1:
        return not found.in_column
    return found.unknown > 0 or (found.apart if kind == "value" else found.difference) > _NOISE


def _is_other(found: Found | None, kind: Kind, limit: float) -> bool:
    if found is None:
        return False
    if kind == "value":
        return found.unknown > 0 if found.in_column is None else not found.in_column
    return found.difference > limit


def _rounding(sides: Sequence[_Side]) -> float:
    """Returns the difference from which on it is more than that of few elements, by the lowest dtype."""
    dtypes = {v.aval.dtype for side in sides for op in side.recorded for v in op.equation.outvars if _is_low(v)}
    return max((float(jnp.finfo(dtype).eps) for dtype in dtypes), default=0.0) / _PART_OF_ROUNDING or _NOISE


def _is_low(variable: Any) -> bool:
    return is_low(getattr(variable.aval, "dtype", None))


def _agree(tokens: Tokens) -> bool:
    """Whether log-probabilities are the same but for the rounding of float32, relative where they are above 1."""
    finite = np.isfinite(tokens.train) & np.isfinite(tokens.infer)
    if not np.array_equal(tokens.train[~finite], tokens.infer[~finite], equal_nan=True):
        return False
    first, second = tokens.train[finite], tokens.infer[finite]
    return bool((np.abs(first - second) <= SAME * np.maximum(np.abs(first), 1)).all())


def _row(op: Recorded, found: Found | None) -> OperationParity:
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
