"""Names the operations that cause a difference, by giving them the values of the other program.

Operations are tried in the order in which they run. Each one gets the values of its counterpart and keeps them, so the
reduction at a later operation is its own part and not that of its operands. Operations that are only written
differently do not reduce the difference.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import source_of
from jmp_train.tools.checking_parity.counterparts import FILL, Counterpart, Values, arranged, counterparts, is_uniform
from jmp_train.tools.checking_parity.rerunning import Rerun, Swap
from jmp_train.tools.diagnosing import Key, Recorded, key_of

_MOST_TRIALS = 48
_MOST_ELEMENTS = 1 << 24  # of the stored values of an operation
_WORSE = 1.02  # times the difference: values that leave more belong to another quantity
_CHANCE = 0.8  # of the difference: values that leave more may belong to another quantity and be nearer by chance
_LEFT = 0.02  # of the difference: the search ends when less is left
_TRIED = 2  # counterparts to try per operation, and one with the same primitive
_SURE = 0.05  # relative difference up to which no other counterpart is tried
_CLOSE = 0.7  # largest misfit of arrays that have only their shape in common
_LEAST = 0.2  # of the difference: operations with a smaller part are not named
_LEADING = 0.5  # of the largest part: the first operation with at least this much is named

MatchedNumbers = tuple[int | None, int | None]
"""Of an operation of training and one of inference."""


@dataclasses.dataclass(frozen=True)
class RecordedProgram:
    """A function that can run again.

    Attributes:
      rerun: the program.
      recorded: its operations.
      values: the values of the operations by number, and of the arguments by negative numbers.
      results: the results of the function.
      origins: the numbers of the operations that computed the results.
      differing: the numbers of those whose rows are not among those of the other program.
    """

    rerun: Rerun
    recorded: Sequence[Recorded]
    values: dict[int, Values]
    results: list[Any]
    origins: frozenset[int]
    differing: frozenset[int]


def program_of(
    rerun: Rerun, recorded: Sequence[Recorded], origins: frozenset[int], differing: frozenset[int]
) -> RecordedProgram:
    """Returns a program with the values of its operations, after running it.

    The arguments are attributes of `RecordedProgram`.
    """
    numbers = {key_of(op.callers, op.equation): number for number, op in enumerate(recorded)}
    kept: dict[int, list[np.ndarray]] = {}

    def note(key: Key, result: Any) -> None:
        number = numbers.get(key)
        if number is None or not _is_plain(result):
            return
        if result.size * max(len(recorded[number].kept), 1) <= _MOST_ELEMENTS:
            kept.setdefault(number, []).append(np.asarray(result))

    results = rerun.results({}, note)
    values = {
        number: Values(np.stack(runs), recorded[number].equation.primitive.name, number / len(recorded))
        for number, runs in kept.items()
    }
    plain = [x for x in rerun.arguments if _is_plain(x) and x.size <= _MOST_ELEMENTS]
    values |= {-1 - i: Values(np.asarray(x)[None], "argument", 0.0) for i, x in enumerate(plain)}
    return RecordedProgram(rerun, recorded, values, results, origins, differing)


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The contribution of an operation to a difference.

    Attributes:
      share: the fraction of the difference that disappears with the values of the counterpart.
      counterpart: the number of the operation in the other program; None if there is none, or if it is an argument.
    """

    share: float
    counterpart: int | None


def contributions(
    own: RecordedProgram, other: RecordedProgram, apart: Callable[[list[Any]], float]
) -> dict[int, Contribution]:
    """Returns the contributions of operations to the difference, by number of the operation.

    Args:
      own: the program with these operations.
      other: the program whose values replace those of `own`.
      apart: returns the difference between results of `own` and the results of the other program.
    """
    before = start = apart(own.results)
    if not start > 0:
        return {}
    found: dict[int, Contribution] = {}
    kept: dict[Key, Swap] = {}
    known = _Counterparts(own, other)
    tried = 0
    for group in _groups(own, known):
        best, swaps, chosen = before * _WORSE, None, dict[int, Counterpart]()
        for choice in known.choices(group):
            trial = kept | dict(_swaps(own, other, choice))
            after, tried = apart(own.rerun.results(trial)), tried + 1
            if after <= best:
                best, swaps, chosen = after, trial, choice
            if best <= _LEFT * start:
                break
        if swaps is not None:
            share = (before - best) / start
            numbers = {n: c.number for n, c in chosen.items() if c.number >= 0}  # without arguments
            found |= {n: Contribution(share, numbers.get(n)) for n in group}
            if not _CHANCE * before < best < before / _WORSE:
                kept, before = swaps, best
        if before <= _LEFT * start or tried >= _MOST_TRIALS:
            break
    return found


def leading(found: dict[int, Contribution]) -> int | None:
    """Returns the number of the first operation with a large part of the difference; None if there is none."""
    most = max((contribution.share for contribution in found.values()), default=0.0)
    least = max(_LEADING * most, _LEAST)
    return min((number for number, contribution in found.items() if contribution.share >= least), default=None)


class _Counterparts:
    """The counterparts of a program's operations, each searched once."""

    def __init__(self, own: RecordedProgram, other: RecordedProgram) -> None:
        self._own, self._numbers = own, list(other.values)
        self._varying = [number for number, values in other.values.items() if not is_uniform(values.array)]
        self._other = other
        self._same_code = _same_code(other.recorded)
        self._found: dict[int, list[Counterpart]] = {}

    def of(self, number: int) -> list[Counterpart]:
        """Returns the counterparts of an operation, the most likely first."""
        if number not in self._found:
            own = self._own.values.get(number)
            uniform = own is not None and is_uniform(own.array)
            numbers = self._varying if uniform else self._numbers
            others = [self._other.values[n] for n in numbers]
            is_start = uniform and not self._own.recorded[number].reads  # the start of a cache or a sum
            found = [] if own is None or is_start else counterparts(own, others)
            found = [c for c in found if c.misfit <= _CLOSE or not uniform]  # only their shapes can be compared
            self._found[number] = [dataclasses.replace(c, number=numbers[c.number]) for c in found]
        return self._found[number]

    def is_equal(self, number: int) -> bool:
        """Returns whether the other program has an operation with the same values."""
        return any(c.is_equal for c in self.of(number)[:1])

    def choices(self, group: Sequence[int]) -> Iterator[dict[int, Counterpart]]:
        """Yields counterparts to try together for operations of the same code, the most likely first.

        If the other program has as many operations of the matching code, they are assigned in order. In deep layers,
        which accumulate the differences of all earlier layers, numbers are too different to match.
        """
        ways: dict[tuple[int, ...], Counterpart] = {}
        for found in self.of(group[0]):
            numbers = self._same_code[found.number] if found.number >= 0 else (found.number,)
            if len(numbers) != len(group):
                numbers = (found.number, *((self.of(number) or [found])[0].number for number in group[1:]))
            ways.setdefault(numbers, found)
        for numbers, found in self._chosen(group[0], list(ways.items())):
            pairs = ((number, self._way(group[0], found, number, n)) for number, n in zip(group, numbers, strict=True))
            yield {number: way for number, way in pairs if way is not None}

    def _way(self, first: int, found: Counterpart, number: int, other: int) -> Counterpart | None:
        """Returns how values map to another operation's: like those of the first one, if the shapes allow it."""
        own, others = self._own.values, self._other.values
        if number not in own or other not in others:
            return None
        shapes = [values.array.shape for values in (own[first], own[number], others[found.number], others[other])]
        if shapes[0] == shapes[1] and shapes[2] == shapes[3]:
            return dataclasses.replace(found, number=other)
        way = next(iter(counterparts(own[number], [others[other]])), None)
        return way and dataclasses.replace(way, number=other)

    def _chosen(self, number: int, ways: list[tuple[Any, Counterpart]]) -> list[tuple[Any, Counterpart]]:
        """Returns the most likely ways, and the best one with the same primitive."""
        if ways and ways[0][1].apart < _SURE:
            return ways[:1]
        name = self._own.recorded[number].equation.primitive.name
        same = [way for way in ways[_TRIED:] if self._other.values[way[1].number].primitive == name]
        return ways[:_TRIED] + same[:1]


def _groups(own: RecordedProgram, known: _Counterparts) -> list[list[int]]:
    """Returns operations that may cause the difference, in the order they run, grouped by code."""
    groups: dict[tuple[str, str], list[int]] = {}
    waiting, reached = set(own.origins), set[int]()
    while waiting:
        number = waiting.pop()
        if number in reached or (number not in own.differing and known.is_equal(number)):
            continue
        reached.add(number)
        op = own.recorded[number]
        waiting |= op.reads
        groups.setdefault(_code_of(op), []).append(number)
    return sorted((sorted(group) for group in groups.values()), key=min)


def _same_code(recorded: Sequence[Recorded]) -> list[tuple[int, ...]]:
    """Returns, for each operation, the numbers of all operations with the same primitive and code."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, op in enumerate(recorded):
        numbers.setdefault(_code_of(op), []).append(number)
    return [tuple(numbers[_code_of(op)]) for op in recorded]


def _code_of(op: Recorded) -> tuple[str, str]:
    return source_of((*op.callers, op.equation)), op.equation.primitive.name


def _swaps(own: RecordedProgram, other: RecordedProgram, choice: dict[int, Counterpart]) -> Iterator[tuple[Key, Swap]]:
    for number, found in choice.items():
        op = own.recorded[number]
        theirs = arranged(other.values[found.number].array, found.axes, own.values[number].array.ndim)
        yield key_of(op.callers, op.equation), _swap(theirs)


def _swap(theirs: np.ndarray) -> Swap:
    """Returns a function that puts in another operation's values, and masks the other places if it masks any."""
    lowest = float(np.nan_to_num(theirs).min()) if theirs.dtype.kind == "f" else 0.0
    fill = lowest if lowest <= -FILL else None

    def put_in(run: int, result: Any) -> Any:
        if theirs.shape[0] != 1 and run >= theirs.shape[0]:
            return result
        value = theirs[run if theirs.shape[0] != 1 else 0]
        region = tuple(slice(None) if size == 1 else slice(size) for size in value.shape)
        result = np.array(result) if fill is None else np.full_like(result, fill)
        result[region] = value.astype(result.dtype)
        return jax.device_put(result)

    return put_in


def _is_plain(x: Any) -> bool:
    return isinstance(x, jnp.ndarray) and x.size > 0 and x.dtype.kind in "fiub"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The operations where two functions diverge.

    Attributes:
      numbers: the numbers of the operations; None for a function without such an operation.
      contributions: the contributions in training and in inference, by number of the tried operation.
    """

    numbers: MatchedNumbers
    contributions: tuple[dict[int, float], dict[int, float]]


def named_of(
    train: RecordedProgram,
    infer: RecordedProgram,
    matched: MatchedNumbers,
    apart: Callable[[list[Any], list[Any]], float],
) -> Divergence:
    """Returns the operations where two functions diverge.

    Args:
      train: the program of training.
      infer: the program of inference.
      matched: the first operations with rows that the other lacks, which are named if no operation contributes.
      apart: returns the difference between results of training and of inference.
    """
    of_infer = contributions(infer, train, lambda results: apart(train.results, results))
    of_train = contributions(train, infer, lambda results: apart(results, infer.results))
    numbers = _numbers(of_train, of_infer, matched)
    shares = [{number: c.share for number, c in found.items()} for found in (of_train, of_infer)]
    first, second = numbers
    if first is not None and second in of_infer and of_infer[second].counterpart == first:
        shares[0][first] = shares[1][second]  # the same trial, seen from the other side
    return Divergence(numbers, (shares[0], shares[1]))


def _numbers(
    of_train: dict[int, Contribution], of_infer: dict[int, Contribution], matched: MatchedNumbers
) -> MatchedNumbers:
    """Returns the first contributing operation of inference, and its counterpart or an earlier one in training.

    If inference leaves an operation out, only training has one.
    """
    train, infer = leading(of_train), leading(of_infer)
    if infer is None:
        return (matched[0] if train is None else train), matched[1]
    counterpart = of_infer[infer].counterpart
    if train is None or (counterpart is not None and counterpart < train):
        train = matched[0] if counterpart is None else counterpart
    return train, infer
