"""The processes of `jmp-train launch`: their output, on standard output and in logs, and their endings.

Their output is read to its end, even if it cannot be written, because a process whose output is not read stops.

Some of the lines with which processes end show the cause; others follow from it.
When a process fails, the others lose their connection to it. jax then aborts them, in up to 25 lines each, or raises an
error in their next reduction. And an error that all have alike, such as that of a wrong option, is printed by all.
"""

import codecs
import locale
import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from jmp_train.app.launch.child_processes import ChildProcess
from jmp_train.app.launch.output import Output, warn_of_loss
from jmp_train.policies.files import escaped

LONGEST_LINE = 65536  # characters; longer lines are printed in pieces

_LINE_END = re.compile(r"\r\n|\n|\r(?!\Z)")  # a \r at the end may be half of a \r\n
_CHUNK = 65536
_HOLD_SECONDS = 2.0  # for lines with which a process may end
_MOST_HELD = 1000  # lines
_CALL_IS_WRONG = 2  # exit code of `jmp-train`, see jmp_train.app.cli.results


class RankOutput:
    """Prints the lines of several processes, each with the number of its process in front.

    Lines with which a process may end are held back until it has ended, or has gone on for a while.

    Args:
      logs: a file per process, to which its output is appended byte by byte; None for no logs.
    """

    def __init__(self, logs: Sequence[Path] | None) -> None:
        self._logs = {} if logs is None else dict(enumerate(logs))
        self._lock = threading.Lock()  # keeps lines apart
        self._last_words: dict[int, list[str]] = {}  # held back
        self._screen = Output(sys.stdout, lambda why: warn_of_loss(Output(sys.stderr), why))

    def copy(self, pipe: IO[bytes], rank: int) -> None:
        """Copies the output of a process until its end.

        Args:
          pipe: the process's output.
          rank: its number.
        """
        held = self._last_words[rank] = []
        since = 0.0
        with pipe:
            for lines in self._lines(pipe, rank):
                if held and (time.monotonic() - since > _HOLD_SECONDS or len(held) > _MOST_HELD):
                    self._print(rank, held)
                    held.clear()
                if not held:
                    since = time.monotonic()
                    first = next((i for i, line in enumerate(lines) if may_be_last(line)), len(lines))
                    self._print(rank, lines[:first])
                    lines = lines[first:]
                held += lines

    def conclude(self, failed: Mapping[int, int]) -> str | None:
        """Prints the last lines of the processes that show why they ended.

        Args:
          failed: the exit codes of failed processes, in the order of failure.

        Returns:
          The error that made the call wrong, which is not printed; None if there is none.
        """
        told = telling(self._last_words, list(failed))
        wrong = refusal(told) if next(iter(failed.values()), 0) == _CALL_IS_WRONG else None
        for rank, lines in ({} if wrong else told).items():
            self._print(rank, lines)
        return wrong

    def _lines(self, pipe: IO[bytes], rank: int) -> Iterator[list[str]]:
        """Yields the lines of a process, as many at a time as have arrived, and logs their bytes.

        While lines are held back, it also yields when none arrive for a while.
        """
        # The encoding of the processes.
        named, _, _ = os.environ.get("PYTHONIOENCODING", "").partition(":")
        decoder = codecs.getincrementaldecoder(named or locale.getpreferredencoding(False))("replace")
        rest, data = "", b" "
        while data:
            if self._last_words[rank] and not select.select([pipe], [], [], _HOLD_SECONDS)[0]:
                yield []
                continue
            data = os.read(pipe.fileno(), _CHUNK)
            self._log(data, rank)
            *lines, rest = _LINE_END.split(rest + decoder.decode(data, final=not data))
            if rest and (len(rest) >= LONGEST_LINE or not data):
                lines, rest = [*lines, rest], ""
            if lines:
                yield lines

    def _log(self, data: bytes, rank: int) -> None:
        """Appends to a process's log, up to the first error, which is a warning."""
        try:
            while data and rank in self._logs:
                with self._logs[rank].open("ab", buffering=0) as file:
                    data = data[file.write(data) or 0 :]
        except OSError as error:
            say(f"warning: {self._logs.pop(rank)}: {error.strerror}; the rest of its output is missing there")

    def _print(self, rank: int, lines: Sequence[str]) -> None:
        text = "".join(f"[{rank}] {line.rstrip()}\n" for line in lines)
        with self._lock:
            self._screen.write(text)
            self._screen.flush()


def say(text: str) -> None:
    """Prints a line of the launcher's own on standard error, in one piece: processes have a thread each."""
    line, error = escaped(text, "\n"), Output(sys.stderr)
    error.write(f"jmp-train: {line}\n")
    error.flush()


STOPPED = {129, 130, 143}  # exit codes after SIGHUP, SIGINT and SIGTERM of a run that saved

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


def wait_for(children: Sequence[ChildProcess], messages: int, exit_timeout: float | None, grace: float) -> Endings:
    """Waits until all have ended, some have failed, or some still run too long after the first has ended.

    Args:
      children: the processes, by their number.
      messages: a non-blocking pipe with a line per process whose script has ended.
      exit_timeout: seconds that the others may run on after the first has ended well; None for no limit.
      grace: seconds that the others may run on after the first has stopped at a signal.
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
            settle = max(grace, _SETTLE_SECONDS) if {*endings.failed.values()} <= STOPPED else _SETTLE_SECONDS
            if now >= endings.first_failure + settle:
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
        f"{_processes(_at_work(endings))}; operations of all processes cannot continue"
    )
    if exit_timeout is None:
        return text
    return f"{text}; to be stopped " + ("now" if endings.late else f"in {exit_timeout - waited:.3g} s")


def _processes(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in sorted(ranks)]
    return f"process{'' if len(numbers) == 1 else 'es'} {', '.join(numbers)}"


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
