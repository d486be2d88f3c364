"""Finds the operation of another program that computes the same thing, by the axes of its result and its numbers.

The runs of an operation within loops are stacked along a first axis, so that the scores of a token in generation and
those of all tokens in training have axes of the same sizes, in another order. A cache has more places than tokens.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

EQUAL = 2e-5  # relative: what other orders of float32 sums make of all of a result
FILL = 9e3  # what is beyond stands for "not seen", see `fingerprints`
_FEW, _MANY = 256, 8192  # elements that are compared, first and of the best
_MOST_WAYS = 48  # of putting axes together
_REFINED, _SAME = 10, 3  # counterparts that are looked at closely, and further ones by the same primitive


@dataclasses.dataclass(frozen=True)
class Values:
    """All that an operation computed.

    Attributes:
      array: [runs, ...].
      primitive: the name of the operation's primitive.
      order: where it is in its program, from 0 to 1.
    """

    array: np.ndarray
    primitive: str
    order: float


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """An operation of the other program, and how its values are put in place of one's own.

    Attributes:
      number: of the operation there.
      axes: of each axis of its values the own axis, or None for one of which the first element is taken.
      apart: the relative difference of the two.
      alike: how far they are the same but for a factor, from 0 to 1.
      misfit: the logarithm of how many own elements there are for each of the other.
    """

    number: int
    axes: tuple[int | None, ...]
    apart: float
    alike: float
    misfit: float

    @property
    def is_equal(self) -> bool:
        """Whether the two are the same but for rounding."""
        return self.apart <= EQUAL

    def arranged(self, theirs: np.ndarray, rank: int) -> np.ndarray:
        """Returns the other's values with the own axes, of length 1 where it has none.

        Args:
          theirs: the other's values.
          rank: the number of own axes.
        """
        return _arranged(theirs, self.axes, rank)


def counterparts(own: Values, others: Sequence[Values]) -> list[Counterpart]:
    """Returns the operations that may compute the same, the likeliest first.

    Args:
      own: values of an operation.
      others: those of the other program.
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
    """Returns whether all elements are the same, so that they say nothing about what they are."""
    return array.size == 0 or bool((array == array.flat[0]).all())


def _rank(own: Values, found: Counterpart, other: Values) -> tuple[bool, float, float, float, bool, float]:
    near, by_other = abs(own.order - other.order), own.primitive != other.primitive
    return not found.is_equal, round(1 - found.alike, 2), found.misfit, round(found.apart, 2), by_other, near


def _sort(array: np.ndarray) -> str:
    return "f" if array.dtype.kind not in "biu" else "b" if array.dtype.kind == "b" else "i"


def _places(shape: tuple[int, ...], count: int) -> tuple[np.ndarray, ...]:
    """Returns indices of some elements, of all if these are few."""
    size = int(np.prod(shape))
    flat = np.arange(size) if size <= count else np.random.default_rng(0).integers(0, size, count)
    return np.unravel_index(flat, shape)


def _ways(own: tuple[int, ...], other: tuple[int, ...], *, drops: bool) -> Iterator[tuple[int | None, ...]]:
    """Yields ways in which the axes of another array are some of the own, which may be longer.

    Args:
      own: sizes.
      other: sizes.
      drops: whether the other may have more axes, along which it does not vary.
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


def _arranged(theirs: np.ndarray, axes: tuple[int | None, ...], rank: int) -> np.ndarray:
    kept = theirs[tuple(slice(None) if a is not None else 0 for a in axes)]
    order = [a for a in axes if a is not None]
    kept = kept.transpose(np.argsort(order))
    return kept.reshape([dict(zip(sorted(order), kept.shape, strict=True)).get(a, 1) for a in range(rank)])


def _compared(
    own: Values, other: Values, number: int, axes: tuple[int | None, ...], places: tuple[np.ndarray, ...]
) -> Counterpart:
    theirs = _arranged(other.array, axes, own.array.ndim)
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
    """Returns numbers as float64, with those that stand for "not seen" as a number of moderate size."""
    x, y = first.astype(np.float64), second.astype(np.float64)
    seen = [np.abs(z) < FILL for z in (x, y)]  # not NaN
    most = max(1.0, *(float(np.abs(z[s]).max(initial=0)) for z, s in zip((x, y), seen, strict=True)))
    x, y = (np.where(s, z, -2 * most) for z, s in zip((x, y), seen, strict=True))
    return x, y
