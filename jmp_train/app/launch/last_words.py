"""The lines with which the processes of a run end: which of them show the cause, and which follow from it.

When a process fails, the others lose their connection to it. jax then aborts them, in up to 25 lines each, or raises an
error in their next reduction. And an error that all have alike, such as that of a wrong option, is printed by all.
"""

import re
from collections.abc import Mapping, Sequence

_ERROR = "jmp-train: error: "

# What jax's coordination service logs when a process is lost, and the stack trace of its abort.
_OF_LOSS = re.compile(
    r"[EFW]\d{4} [\d:.]+ +\d+ (coordination_\w+|client|preemption_sync_manager)\.(cc|h):\d+\] "
    r"|Additional GRPC error information|:[A-Z]+:Error received from peer"
    r"|\*\*\* Check failure stack trace: \*\*\*|    @ +0x"
)
_LAST = re.compile(rf'Traceback \(most recent call last\):|  File ".+", line \d|{_ERROR}|Fatal Python error')
_CONNECTION = re.compile("gloo|nccl|coordination service|distributed service", re.IGNORECASE)


def may_be_last(line: str) -> bool:
    """Returns whether a line looks like the first of those with which a process ends."""
    return bool(_LAST.match(line) or _OF_LOSS.match(line))


def telling(words: Mapping[int, Sequence[str]], failed: Sequence[int]) -> dict[int, list[str]]:
    """Returns the last lines that are worth printing, each text once, by process.

    Lines that report the loss of another process are left out, unless nothing else shows why the processes ended.

    Args:
      words: the last lines of each process.
      failed: the processes that failed, in that order.

    Example:
      >>> lost = "ValueError: Gloo all-reduce failed: Connection closed by peer"
      >>> telling({0: ["Traceback ...", lost], 1: ["Traceback ...", "LookupError: no 7"]}, failed=[0, 1])
      {1: ['Traceback ...', 'LookupError: no 7']}
    """
    own = {rank: _own(words[rank]) for rank in dict.fromkeys([*failed, *sorted(words)])}
    causes = {rank: lines for rank, lines in own.items() if lines and not _CONNECTION.search(_message(lines))}
    if not causes and all(words[rank] for rank in failed):  # none was killed or ended silently
        causes = {rank: list(words[rank]) for rank in failed[:1]}
    first = {tuple(lines): rank for rank, lines in reversed(causes.items())}
    return {rank: lines for rank, lines in causes.items() if first[tuple(lines)] == rank}


def refusal(told: Mapping[int, Sequence[str]]) -> str | None:
    """Returns the only error that was told, if it is one line of `jmp-train`; otherwise None.

    Args:
      told: from `telling`.
    """
    match list(told.values()):
        case [[line]] if line.startswith(_ERROR):
            return line.removeprefix(_ERROR)
    return None


def _own(lines: Sequence[str]) -> list[str]:
    """Returns the lines without those about the loss of other processes."""
    return [line for line in lines if not _OF_LOSS.match(line)]


def _message(lines: Sequence[str]) -> str:
    """Returns the error of a traceback: the last line that is not indented, and those below."""
    start = max((i for i, line in enumerate(lines) if line[:1].strip()), default=0)
    return "\n".join(lines[start:])
