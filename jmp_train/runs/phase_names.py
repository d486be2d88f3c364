"""Names of precisions and schedules: `mixed_float16,0.9:float32` is float32 for the last tenth of the run."""

import itertools
import re
from typing import NamedTuple

from jmp_train.policies.dtype_policies import check_shares, first_steps

SCHEDULE_FORM = "NAME,SHARE:NAME"
_BETWEEN = re.compile(r",(?=[^,:]*:)")  # policies have commas too, but no colons
_SHARE = re.compile(r"(\d+\.?\d*|\.\d+)(e-\d+)?", re.ASCII)


class NamedPhase(NamedTuple):
    """The precision of a part of a run.

    Attributes:
      share: fraction of the run's steps before it begins.
      name: a policy or AMP mode, see `precision_of`.
    """

    share: float
    name: str


def phases_named(name: str) -> tuple[NamedPhase, ...]:
    """Returns the phases of a name; only one if it names a policy or AMP mode.

    Args:
      name: a precision, or several with the fractions of the run at which they begin; the first fraction, 0, may be
        left out.

    Raises:
      ValueError: a fraction is invalid, or the fractions do not increase from 0.

    Example:
      >>> phases_named("params=float32,compute=float16,0.9:float32")
      (NamedPhase(share=0.0, name='params=float32,compute=float16'), NamedPhase(share=0.9, name='float32'))
      >>> phases_named("float32")
      (NamedPhase(share=0.0, name='float32'),)
    """
    phases = []
    for part in _BETWEEN.split(name):
        share, colon, precision = part.rpartition(":")
        if colon and not _SHARE.fullmatch(share):
            raise ValueError(f"{share!r} in {name!r} is not a fraction of the run; write a schedule as {SCHEDULE_FORM}")
        phases.append(NamedPhase(float(share) if colon else 0.0, precision))
    try:
        check_shares([phase.share for phase in phases])
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    return tuple(phases)


def phase_bounds(name: str, total: int) -> tuple[tuple[int, int], ...]:
    """Returns for each phase the number of steps before it and by its end.

    Args:
      name: see `phases_named`.
      total: number of steps of the run.

    Raises:
      ValueError: the run is so short that a phase has no steps.

    Example:
      >>> phase_bounds("mixed_float16,0.9:float32", 330)
      ((0, 297), (297, 330))
    """
    try:
        firsts = first_steps([phase.share for phase in phases_named(name)], total)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    return tuple(itertools.pairwise((*firsts, total)))


def schedule_name(name: str) -> str:
    """Returns a name in the form used by checkpoints and reports, which is unique for each schedule.

    Args:
      name: see `phases_named`.

    Example:
      >>> schedule_name("0:mixed_float16,.90:float32")
      'mixed_float16,0.9:float32'
    """
    first, *others = phases_named(name)
    return ",".join([first.name, *(f"{phase.share}:{phase.name}" for phase in others)])


def is_schedule(name: str) -> bool:
    """Returns whether a name is that of a schedule of several precisions.

    Args:
      name: see `phases_named`.
    """
    return len(phases_named(name)) > 1
