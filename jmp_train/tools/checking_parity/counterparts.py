"""Finds the operation of another program that computes the same values, by shape and numbers.

The runs of an operation within loops are stacked along a first axis. The scores of a token in generation and those of
all tokens in training thus have axes of the same sizes, in another order. A cache has more places than tokens.

A fingerprint of an array is a few numbers per row.
A row lies along the last axis. Its fingerprint consists of its products with four fixed random vectors and its norm.
Numbers that stand for "not seen" (infinities, and numbers beyond `FILL`) count as zero, so masking or padding a row at
its end does not change its fingerprint.

Reference: random projections preserve distances (Johnson and Lindenstrauss, 1984).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_train.policies.pytrees import is_key
from jmp_train.tools.diagnosing import Pair

EQUAL = 2e-5  # relative: the difference of a whole result between orders of float32 sums
FILL = 9e3  # larger numbers stand for "not seen": common fills are -1e4, float16's -65504 and 0.7 times that
_FEW, _MANY = 256, 8192  # elements to compare, of all operations and of the best ones
_MOST_WAYS = 48  # of matching axes
_REFINED, _SAME = 10, 3  # counterparts to compare closely, and more with the same primitive


@dataclasses.dataclass(frozen=True)
class Values:
    """All values that an operation computed.

    Attributes:
      array: the values, [runs, ...].
      primitive: the name of the operation's primitive.
      order: the position of the operation in its program, from 0 to 1.
    """

    array: np.ndarray
    primitive: str
    order: float


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """An operation of the other program, and how its values map to one's own.

    Attributes:
      number: the number of the operation there.
      axes: for each axis of its values, the own axis; None if only the first element along it is used.
      apart: the relative difference of the values.
      alike: the similarity of the values up to a factor, from 0 to 1.
      misfit: the logarithm of the ratio of numbers of elements, own to other.
    """

    number: int
    axes: tuple[int | None, ...]
    apart: float
    alike: float
    misfit: float

    @property
    def is_equal(self) -> bool:
        """True if the values differ only by rounding."""
        return self.apart <= EQUAL


def counterparts(own: Values, others: Sequence[Values]) -> list[Counterpart]:
    """Returns the operations that may compute the same values, the most likely first.

    Args:
      own: values of an operation.
      others: values of the operations of the other program.
    """
    found = []
    few, many = (_places(own.array.shape, count) for count in (_FEW, _MANY))
    for number, other in enumerate(others):
        if _sort(own.array) != _sort(other.array):
            continue
        for axes in _ways(own.array.shape, other.array.shape, drops=_sort(own.array) != "f"):
            found.append((_compared(own, other, number, axes, few), other))
    found.sort(key=lambda pair: _rank(own, *pair))
    same = [pair for pair in found[_REFINED:] if pair[1].primitive == own.primitive]
    best = [(_compared(own, other, c.number, c.axes, many), other) for c, other in found[:_REFINED] + same[:_SAME]]
    return [c for c, _ in sorted(best, key=lambda pair: _rank(own, *pair))]


def is_uniform(array: np.ndarray) -> bool:
    """Returns whether all elements are equal, so that they do not identify the operation."""
    return array.size == 0 or bool((array == array.flat[0]).all())


def _rank(own: Values, found: Counterpart, other: Values) -> tuple[bool, float, float, float, bool, float]:
    near, by_other = abs(own.order - other.order), own.primitive != other.primitive
    return not found.is_equal, round(1 - found.alike, 2), found.misfit, round(found.apart, 2), by_other, near


def _sort(array: np.ndarray) -> str:
    return "f" if array.dtype.kind not in "biu" else "b" if array.dtype.kind == "b" else "i"


def _places(shape: tuple[int, ...], count: int) -> tuple[np.ndarray, ...]:
    """Returns indices of a sample of elements, or of all if there are few."""
    size = int(np.prod(shape))
    flat = np.arange(size) if size <= count else np.random.default_rng(0).integers(0, size, count)
    return np.unravel_index(flat, shape)


def _ways(own: tuple[int, ...], other: tuple[int, ...], *, drops: bool) -> Iterator[tuple[int | None, ...]]:
    """Yields ways to match the axes of another array with own axes, which may be longer.

    Args:
      own: the own sizes.
      other: the other array's sizes.
      drops: whether the other may have more axes, along which it is constant.
    """
    long = [axis for axis, size in enumerate(other) if size > 1]
    for left_out in range(min(len(long), 1) + 1 if drops else 1):
        for kept in itertools.combinations(long, len(long) - left_out):
            choices = [[a for a, size in enumerate(own) if size >= other[axis]] for axis in kept]
            for chosen in itertools.islice(itertools.product(*choices), _MOST_WAYS):
                longer = sum(own[a] > other[axis] for axis, a in zip(kept, chosen, strict=True))
                if longer <= 1 and len(set(chosen)) == len(chosen):
                    places = dict(zip(kept, chosen, strict=True))
                    yield tuple(places.get(axis) for axis in range(len(other)))


def arranged(theirs: np.ndarray, axes: tuple[int | None, ...], rank: int) -> np.ndarray:
    """Returns another operation's values with the own axes, which have length 1 if the other lacks them.

    Args:
      theirs: the other's values.
      axes: see `Counterpart`.
      rank: the number of own axes.
    """
    kept = theirs[tuple(slice(None) if a is not None else 0 for a in axes)]
    order = [a for a in axes if a is not None]
    kept = kept.transpose(np.argsort(order))
    return kept.reshape([dict(zip(sorted(order), kept.shape, strict=True)).get(a, 1) for a in range(rank)])


def _compared(
    own: Values, other: Values, number: int, axes: tuple[int | None, ...], places: tuple[np.ndarray, ...]
) -> Counterpart:
    theirs = arranged(other.array, axes, own.array.ndim)
    inside = np.ones(len(places[0]) if places else 1, bool)
    there = []
    for place, size in zip(places, theirs.shape, strict=True):
        inside &= (place < size) | (size == 1)
        there.append(np.minimum(place, size - 1))
    x, y = _comparable(own.array[places], np.where(inside, theirs[tuple(there)], 0))
    squares = float(x @ x), float(y @ y)
    apart = float(np.sqrt(((x - y) ** 2).sum() / max(*squares, 1e-300))) if max(squares) else 0.0
    alike = abs(float(x @ y)) / math.sqrt(squares[0] * squares[1]) if min(squares) else float(max(squares) == 0)
    return Counterpart(number, axes, apart, alike, round(math.log(own.array.size / theirs.size), 3))


def _comparable(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns numbers as float64, with those that stand for "not seen" replaced by a moderate number."""
    x, y = first.astype(np.float64), second.astype(np.float64)
    seen = [np.abs(z) < FILL for z in (x, y)]  # False for NaN
    most = max(1.0, *(float(np.abs(z[s]).max(initial=0)) for z, s in zip((x, y), seen, strict=True)))
    x, y = (np.where(s, z, -2 * most) for z, s in zip((x, y), seen, strict=True))
    return x, y


_COUNT = 4
COLUMNS = 2 * _COUNT + 1
# Relative to a row's norm, the same float32 sums in another order differ by less, and different mathematics by more.
SAME = 1e-4
_MOST_QUERIES = 256  # rows to search for, per operation
_MOST_NEIGHBORS = 1024  # rows of the other program to compare one row with


@dataclasses.dataclass(frozen=True)
class Prints:
    """Fingerprints of the rows of an array, float32 [rows, 9]: per row, those of its shadow and itself, and the norm.

    Attributes:
      rows: the fingerprints of the rows.
      elements: for a vector, the fingerprints of each element as a row, because it may belong to a column; otherwise
        None.
    """

    rows: np.ndarray
    elements: np.ndarray | None

    @property
    def tables(self) -> list[np.ndarray]:
        """All tables in which to search for rows of another function."""
        return [table for table in (self.rows, self.elements) if table is not None]


def fingerprint(pair: Pair) -> Prints | None:
    """Returns the fingerprints of an array's rows; None for arrays that cannot be compared, such as random keys.

    Args:
      pair: an array and its shadow.
    """
    if is_key(pair.actual) or jnp.iscomplexobj(pair.actual) or not np.size(pair.actual):
        return None
    actual = _rows(pair.actual)
    shadow = actual if pair.shadow is None else _rows(pair.shadow)
    is_vector = pair.actual.ndim == 1 and pair.actual.dtype != jnp.bool_  # all elements of booleans are known
    return Prints(
        rows=_table(shadow, actual),
        elements=_table(shadow.reshape(-1, 1), actual.reshape(-1, 1)) if is_vector else None,
    )


def _table(shadow: np.ndarray, actual: np.ndarray) -> np.ndarray:
    weights, norm = _weights(actual.shape[1]), np.linalg.norm(shadow, axis=1, keepdims=True)
    return np.concatenate([shadow @ weights, actual @ weights, norm], axis=1)


def _rows(x: Any) -> np.ndarray:
    """Returns the rows of an array with zeros for numbers that are not seen."""
    rows = np.asarray(x).astype(np.float32).reshape(-1, x.shape[-1] if x.ndim else 1)
    return np.where(np.abs(rows) < FILL, rows, np.float32(0)) if jnp.issubdtype(x.dtype, jnp.floating) else rows


@functools.lru_cache
def _weights(length: int) -> np.ndarray:
    """Returns four random vectors, [length, 4]; shorter ones are the beginnings of longer ones."""
    return np.random.default_rng(0).normal(size=(length, _COUNT)).astype(np.float32)


class Rows:
    """Fingerprints of rows.

    Args:
      table: [rows, 9], from `fingerprint`, of one or more arrays.

    Attributes:
      shadow: the fingerprints of the shadows, [rows, 4].
      actual: the fingerprints of the rows themselves, [rows, 4].
      norm: the norms of the shadows, [rows].
    """

    def __init__(self, table: np.ndarray) -> None:
        self.shadow, self.actual, self.norm = table[:, :_COUNT], table[:, _COUNT:-1], table[:, -1]


@dataclasses.dataclass(frozen=True)
class MatchedRows:
    """The differences of an operation's rows from those of another program.

    Attributes:
      unknown: the fraction of rows whose shadow the other program does not have.
      apart: the mean difference of the shadows from those of the same rows in the other program, relative to the norm.
      difference: the mean difference from the same row of the other program, likewise; NaN if no row is known.
      error: the mean difference from the own shadow, likewise.
    """

    unknown: float
    apart: float
    difference: float
    error: float


class KnownRows:
    """The rows of all operations of a program.

    Args:
      tables: the fingerprints of the operations, from `fingerprint`.
    """

    def __init__(self, tables: Sequence[np.ndarray]) -> None:
        together = np.unique(np.concatenate([np.zeros((0, COLUMNS), np.float32), *tables]), axis=0)
        self._rows = Rows(together[np.argsort(together[:, 0], kind="stable")])

    def found(self, table: np.ndarray) -> MatchedRows:
        """Returns the differences between rows of the other program and these.

        Args:
          table: fingerprints, from `fingerprint`; more than 256 rows are sampled.
        """
        rows = Rows(table[:: -(-len(table) // _MOST_QUERIES)])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            apart, difference = self._differences(rows)
            known = np.isfinite(difference)
            error = _distance(rows.shadow, rows.actual) / rows.norm
        error = np.where(rows.norm > 0, error, 0)
        return MatchedRows(
            unknown=float(1 - known.mean()),
            apart=float(apart[known].mean()) if known.any() else 0.0,
            difference=float(difference[known].mean()) if known.any() else float("nan"),
            error=float(error.mean()),
        )

    def _differences(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Returns, per row, the differences of its shadow and itself from the nearest row with the same shadow.

        The differences are infinite if there is no such row. A row of zeros carries no information and counts as known.
        """
        reach = SAME * rows.norm
        keys = self._rows.shadow[:, 0]
        first = np.searchsorted(keys, rows.shadow[:, 0] - reach)
        last = np.minimum(np.searchsorted(keys, rows.shadow[:, 0] + reach, side="right"), first + _MOST_NEIGHBORS)
        apart, difference = (np.where(rows.norm > 0, np.inf, 0.0) for _ in range(2))
        active = np.flatnonzero((first < last) & (rows.norm > 0))
        while active.size:
            near, norm = first[active], rows.norm[active]
            shadows = _distance(self._rows.shadow[near], rows.shadow[active]) / norm
            own = _distance(self._rows.actual[near], rows.actual[active]) / norm
            apart[active] = np.minimum(apart[active], np.where(shadows <= SAME, shadows, np.inf))
            difference[active] = np.minimum(difference[active], np.where(shadows <= SAME, own, np.inf))
            first[active] += 1
            active = active[(first[active] < last[active]) & (difference[active] + apart[active] > 0)]
        return apart, difference


def _distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the root mean square of each row's differences, which approximates the norm of the difference."""
    return np.sqrt(np.square(first.astype(np.float64) - second).mean(axis=1))
