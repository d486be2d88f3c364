"""The parser of command lines, and readers of the values of options."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import optax

from jmp_train.app.cli.results import EXIT_CODES, WrongCall
from jmp_train.app.runs import PhasePrecision, check_float64, is_schedule, phase_precisions, schedule_name
from jmp_train.policies import with_state_dtypes

if TYPE_CHECKING:
    from jmp_train.tools.planning import Machine

T = TypeVar("T")

_LARGEST = 2**31 - 1
_MOST_PROCESSES = 1024  # also of devices, which have their own threads


class Parser(argparse.ArgumentParser):
    """A parser that raises `WrongCall`, and whose help ends with exit codes.

    Options have their whole names, because an abbreviation could be the name of a task's option. Those that are not
    given are not in the result.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            **{"epilog": EXIT_CODES, "allow_abbrev": False, "argument_default": argparse.SUPPRESS, **options}
        )

    def error(self, message: str) -> NoReturn:
        """Raises a `WrongCall`."""
        raise WrongCall(message)


def schedule_of_precisions(text: str) -> str:
    """Returns the name of a policy or AMP mode, or of a schedule of them."""
    if not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} has control characters")
    try:
        name = schedule_name(re.sub(" *([,=:]|^|$) *", r"\1", text))
        for phase in precisions_without_device(name):
            check_float64(phase.precision, phase.name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def precision_name(text: str) -> str:
    """Returns the name of a policy or AMP mode."""
    name = schedule_of_precisions(text)
    if is_schedule(name):
        parts = " ".join(phase.name for phase in precisions_without_device(name))
        raise argparse.ArgumentTypeError(f"{name!r} is a schedule; name its policies one by one: {parts}")
    return name


def precisions_without_device(name: str) -> tuple[PhasePrecision, ...]:
    """Returns the result of `phase_precisions`, without asking for the device, which the training process needs.

    Args:
      name: a policy, an AMP mode, or a schedule of them; "half" counts as float16.
    """
    return phase_precisions(re.sub(r"\bhalf\b", "float16", name))


def path(text: str) -> Path:
    """Returns a path; refuses an empty one, which would be the current folder."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return Path(text)


def _whole_number(least: int, most: int, wanted: str) -> Callable[[str], int]:
    """Returns a reader of integers in a range; `wanted` describes the range for error messages."""

    def read(text: str) -> int:
        # Plain digits only: int() would also accept "1_000" and digits of other scripts.
        if not (text.isascii() and text.isdecimal()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        digits = text.lstrip("0") or "0"
        if len(digits) > len(str(most)) or int(digits) > most:  # int() refuses thousands of digits
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        if int(digits) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return int(digits)

    return read


seed = _whole_number(0, 2**32 - 1, f"from 0 to {2**32 - 1}")
positive = _whole_number(1, _LARGEST, "of at least 1")
count = _whole_number(0, _LARGEST, "of at least 0")
few = _whole_number(1, _MOST_PROCESSES, "of at least 1")  # processes or devices


def number(text: str) -> float:
    """Returns a number in plain digits."""
    if not re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)


def _number_above_zero(most: float, wanted: str) -> Callable[[str], float]:
    """Returns a reader of numbers above 0; `wanted` describes the range for error messages."""

    def read(text: str) -> float:
        with contextlib.suppress(argparse.ArgumentTypeError):
            if 0 < number(text) <= most:
                return number(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")

    return read


fraction = _number_above_zero(1, "above 0 and up to 1")
above_zero = _number_above_zero(sys.float_info.max, "above 0")


def pair_of(reader: Callable[[str], T], form: str) -> Callable[[str], tuple[str, T]]:
    """Returns a reader of a name and a value.

    Args:
      reader: reads the value.
      form: the form of the text, for error messages.
    """

    def read(text: str) -> tuple[str, T]:
        name, _, value = text.rpartition("=")
        if not name:
            raise argparse.ArgumentTypeError(f"{text!r} is not {form}")
        return name, reader(value)

    return read


def state_dtype(text: str) -> str:
    """Returns a text FIELD=DTYPE, which sets the dtype of arrays of an optimizer's state."""
    try:
        with_state_dtypes(optax.identity(), dict([pair_of(str, "FIELD=DTYPE, such as nu=bfloat16")(text)]))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def machine_named(option: str, name: str) -> "Machine":
    """Returns a machine with a GPU or a slice of TPUs of a name; raises `WrongCall` that names the option."""
    from jmp_train.tools.planning import Machine

    try:
        return Machine(name)
    except ValueError as error:
        raise WrongCall(f"{option} {str(error).removeprefix('device=')}") from None
