"""Names of precisions, and of schedules: `mixed_float16,0.9:float32` is float32 from 0.9 of the run on."""

import itertools
import re
from typing import NamedTuple

from jmp_train.policies.dtype_policies import check_shares, first_steps

SCHEDULE_FORM = "NAME,SHARE:NAME"
_BETWEEN = re.compile(r",(?=[^,:]*:)")  # policies have commas, too, but no colons
_SHARE = re.compile(r"(\d+\.?\d*|\.\d+)(e-\d+)?", re.ASCII)


class NamedPhase(NamedTuple):
    """The precision of a part of a run.

    Attributes:
      share: of the run's steps that is done when it begins.
      name: of a policy or AMP mode, see `precision_of`.
    """

    share: float
    name: str


def phases_named(name: str) -> tuple[NamedPhase, ...]:
    """Returns the phases that a name stands for: one, if it is that of a policy or AMP mode.

    Args:
      name: of a precision, or several with the shares of the run from which on they hold; the first share, 0, may be
        left out.

    Raises:
      ValueError: a share is none, or they do not rise from 0.

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
            raise ValueError(f"{share!r} in {name!r} is not a share of the run; a schedule is {SCHEDULE_FORM}")
        phases.append(NamedPhase(float(share) if colon else 0.0, precision))
    try:
        check_shares([phase.share for phase in phases])
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    return tuple(phases)


def phase_bounds(name: str, total: int) -> tuple[tuple[int, int], ...]:
    """Returns of each phase how many steps are done before its first and after its last one.

    Args:
      name: see `phases_named`.
      total: how many steps the run has.

    Raises:
      ValueError: a phase has no step in so short a run.

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
    """Returns a name as checkpoints and reports have it: each schedule has one.

    Args:
      name: see `phases_named`.

    Example:
      >>> schedule_name("0:mixed_float16,.90:float32")
      'mixed_float16,0.9:float32'
    """
    first, *others = phases_named(name)
    return ",".join([first.name, *(f"{phase.share}:{phase.name}" for phase in others)])


def is_schedule(name: str) -> bool:
    """Returns whether a name is that of several precisions, one after another.

    Args:
      name: see `phases_named`.
    """
    return len(phases_named(name)) > 1
