"""Exits of the processes of `jmp-train launch`: waits for all, or for the first failure."""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from jmp_train.launch.child_processes import ChildProcess
from jmp_train.launch.rank_output import say

_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 1.0  # after a failure, because others may fail for the same reason
_NOTICE_SECONDS = 10.0  # after the end of the first script, before a message names the others


@dataclass
class Endings:
    """The processes that have ended, with exit codes and times.

    Attributes:
      failed: the exit codes of failed processes, by their number, in the order of failure.
      ended: the times (`time.monotonic`) at which scripts or processes ended well, by number.
      running: the processes that had not ended at the last check.
      late: True if the processes whose scripts had not ended were given up.
      first_failure: time of the first failure (`time.monotonic`); None if there was none.
    """

    failed: dict[int, int] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    late: bool = False
    first_failure: float | None = None


def wait_for(children: Sequence[ChildProcess], messages: int, exit_timeout: float | None) -> Endings:
    """Waits until all have ended, some have failed, or some still run too long after the first has ended.

    Args:
      children: the processes, by their number.
      messages: a non-blocking pipe with a line per process whose script has ended.
      exit_timeout: seconds that the others may run on after the first has ended well; None for no limit.
    """
    endings = Endings()
    noticed = False
    while True:
        now = time.monotonic()
        codes = [child.poll() for child in children]
        well = [rank for rank, code in enumerate(codes) if code == 0]
        for rank in _told(messages) + well:
            endings.ended.setdefault(rank, now)
        for rank, code in enumerate(codes):
            if code:
                endings.failed.setdefault(rank, code)
        endings.running = [rank for rank, code in enumerate(codes) if code is None]
        if endings.failed:
            endings.first_failure = endings.first_failure or now
        if not endings.running:
            return endings
        if endings.first_failure is not None:
            if now >= endings.first_failure + _SETTLE_SECONDS:
                return endings
        elif endings.ended and _at_work(endings):
            waited = now - min(endings.ended.values())
            endings.late = exit_timeout is not None and waited >= exit_timeout
            if (endings.late or waited >= _NOTICE_SECONDS) and not noticed:
                noticed = True
                say(_notice(endings, waited, exit_timeout))
            if endings.late:
                return endings
        time.sleep(_POLL_SECONDS)


def reason(endings: Endings, exit_timeout: float | None) -> str | None:
    """Returns the failed processes, in order, and the ones stopped because of them, as a text; None if all is well.

    Args:
      endings: from `wait_for`.
      exit_timeout: the argument of `wait_for`.
    """
    if endings.late:
        return (
            f"{_processes(endings.ended)} ended well, still running after the exit timeout of {exit_timeout:g} s: "
            f"{_processes(_at_work(endings))}, now stopped; do all take the same number of steps?"
        )
    if not endings.failed:
        return None
    parts = [
        f"process {rank} " + (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")
        for rank, code in endings.failed.items()
    ]
    if endings.running:
        was = "was" if len(endings.running) == 1 else "were"
        parts.append(f"{_processes(endings.running)} still ran and {was} stopped")
    text = ", then ".join(parts)
    before = _ended_before_others(endings)
    return f"{text}; the script of {_processes(before)} had ended well before that" if before else text


def _ended_before_others(endings: Endings) -> list[int]:
    """Returns the processes whose scripts had ended before the first failure, unless all had."""
    failure = endings.first_failure or 0.0
    before = [rank for rank, since in endings.ended.items() if since < failure]
    return before if set(before) < {*endings.failed, *endings.running, *endings.ended} else []


def _told(messages: int) -> list[int]:
    """Returns the processes whose scripts have ended since the last check."""
    with suppress(OSError):  # the pipe is empty
        return [int(line) for line in os.read(messages, 65536).split()]
    return []


def _at_work(endings: Endings) -> list[int]:
    return [rank for rank in endings.running if rank not in endings.ended]


def _notice(endings: Endings, waited: float, exit_timeout: float | None) -> str:
    text = (
        f"{_processes(endings.ended)} ended well, still running after {waited:.3g} s: "
        f"{_processes(_at_work(endings))}; what takes all of them cannot go on"
    )
    if exit_timeout is None:
        return text
    return f"{text}; to be stopped " + ("now" if endings.late else f"in {exit_timeout - waited:.3g} s")


def _processes(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"process{'' if len(numbers) == 1 else 'es'} {', '.join(numbers)}"
