"""Checks of arguments: numbers and ids of nodes and edges, words, and arrays that must be known."""

import operator
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.policies.pytrees import check_choice, has_tracers

Word = TypeVar("Word", bound=str)

LARGEST_COUNT = 2**31 - 1  # ids, degrees and places are int32 on the device


def as_count(name: str, count: SupportsIndex, most: int = LARGEST_COUNT, *, least: int = 0) -> int:
    """Returns a number of nodes or edges as an int.

    Args:
      name: the argument's name, for the message.
      count: an integer from `least` to `most`.
      most: the largest valid number.
      least: the smallest valid number.

    Raises:
      TypeError: the number is not an integer; a bool is not one.
      ValueError: the number is less than `least`, or more than `most`.

    Example:
      >>> as_count("n_node", 2**31)
      Traceback (most recent call last):
      ValueError: n_node=2147483648 must be at most 2147483647
    """
    try:
        number = operator.index(count)
    except TypeError:
        raise TypeError(f"{name}={reprlib.repr(count)} must be an integer") from None
    if isinstance(count, bool | np.bool_):
        raise TypeError(f"{name}={count} must be an integer")
    if number < least:
        raise ValueError(f"{name}={_shown(number)} must be at least {least}")
    if number > most:
        raise ValueError(f"{name}={_shown(number)} must be at most {most}")
    return number


def check_int32(what: str, count: int, noun: str = "") -> None:
    """Raises ValueError if int32 cannot number this many nodes, edges or places.

    Args:
      what: text of the message before the number.
      count: the number.
      noun: text after the number.

    Example:
      >>> check_int32("senders has", 2**31, "edges")
      Traceback (most recent call last):
      ValueError: senders has 2147483648 edges, more than int32's largest number, 2147483647
    """
    if count > LARGEST_COUNT:
        number = f"{count} {noun}".rstrip()
        raise ValueError(f"{what} {number}, more than int32's largest number, {LARGEST_COUNT}")


def as_counts(name: str, counts: ArrayLike) -> np.ndarray:
    """Returns numbers of nodes or edges of the graphs of a batch, int64 [graphs].

    Args:
      name: the argument's name, for the message.
      counts: integers [graphs] from 0 to `LARGEST_COUNT`; the sum may be larger.

    Raises:
      TypeError: they are not integers.
      ValueError: they have several axes, or one is negative or too large; the message names it.
    """
    array = _integers(name, counts, reprlib.repr)
    wrong = (array < 0) | (array > LARGEST_COUNT)
    if wrong.any():
        place = int(wrong.argmax())
        as_count(f"{name}[{place}]", array[place])
    return array.astype(np.int64)


def check_known(name: str, argument: object, hint: str) -> None:
    """Raises TypeError, with a hint, if an argument has arrays that are traced by jit."""
    if has_tracers(argument):
        raise TypeError(f"{name} is traced: {hint}")


def known_ids(name: str, ids: Ids, count: int, kind: str = "nodes", *, least: int = 0) -> np.ndarray:
    """Returns ids as an array of integers, int [ids].

    Args:
      name: the argument's name, for messages.
      ids: integers from `least` to `count - 1`.
      count: the number of nodes or edges.
      kind: "node" or "edge", for messages.
      least: the smallest valid id; -1 if that stands for none.

    Raises:
      TypeError: they are traced, or not integers.
      ValueError: they have several axes, or one is out of range; the message names it.

    Example:
      >>> known_ids("seeds", [0, 3], 3)
      Traceback (most recent call last):
      ValueError: seeds[1] = 3 is out of range for 3 nodes
    """
    check_known(name, ids, "pass ids that are known, outside of jit")
    array = _integers(name, ids, lambda values: np.asarray(values).dtype)
    wrong = (array < least) | (array >= count)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(f"{name}[{place}] = {array[place]} is out of range for {count} {kind}")
    return array


def _integers(name: str, values: Any, shown: Callable[[Any], object]) -> np.ndarray:
    """Returns integers [values]; `shown` describes other values in the message."""
    array = np.asarray(values)
    array = array if array.size else array.astype(np.int32)  # an empty list is float64
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers, got {shown(values)}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    return array


def checked_word(name: str, word: str, words: Iterable[Word]) -> Word:
    """Returns an argument that is one of some words; raises ValueError if it is another."""
    known = list(words)
    check_choice(name, word, known)
    return next(each for each in known if each == word)


def _shown(number: int) -> str:
    """Returns the number as text, or its length if it has too many digits for Python to print."""
    return str(number) if abs(number) < 10**30 else f"<integer of {number.bit_length()} bits>"
