"""Names the operations where two functions diverge, by their contributions or by rows that only one has."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jmp_train.policies.comparing.contributions import Contribution, Program, contributions, leading

Numbers = tuple[int | None, int | None]
"""Of an operation of training and one of inference."""


@dataclasses.dataclass(frozen=True)
class Named:
    """The operations where two functions diverge.

    Attributes:
      numbers: the numbers of the operations; None for a function without such an operation.
      contributions: the contributions in training and in inference, by number of the tried operation.
    """

    numbers: Numbers
    contributions: tuple[dict[int, float], dict[int, float]]


def named_of(train: Program, infer: Program, matched: Numbers, apart: Callable[[list[Any], list[Any]], float]) -> Named:
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
    return Named(numbers, (shares[0], shares[1]))


def _numbers(of_train: dict[int, Contribution], of_infer: dict[int, Contribution], matched: Numbers) -> Numbers:
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
