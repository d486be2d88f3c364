"""Output of the processes of `jmp-train launch`: on standard output and in their logs.

Each is read to its end, even if it cannot be written, because a process whose output is not read stops.
"""

import codecs
import io
import locale
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from jmp_train.launch.output import Output, warn_of_loss

LONGEST_LINE = 65536  # characters; longer lines are printed in pieces

_LINE_END = re.compile(r"\r\n|\n|\r(?!\Z)")  # a \r at the end may be half of a \r\n
_CHUNK = 65536


class RankOutput:
    """Prints the lines of several processes, each with the number of its process in front.

    Args:
      logdir: an existing folder for logs, where process 0 is written to `rank_0.log`, byte by byte, and so on; None
        for no logs.
    """

    def __init__(self, logdir: Path | None) -> None:
        self._logdir = logdir
        self._lock = threading.Lock()  # keeps lines apart
        own = isinstance(sys.stdout, Output)  # which reports its own failures
        self._screen = sys.stdout if own else Output(sys.stdout, _warn_of_loss)

    def copy(self, pipe: IO[bytes], rank: int) -> None:
        """Copies the output of a process until its end.

        Args:
          pipe: the process's output.
          rank: its number.
        """
        with pipe, _Log(self._logdir, rank) as log:
            for text in _decoded(pipe, log):
                lines = "".join(f"[{rank}] {line.rstrip()}\n" for line in text)
                with self._lock:
                    self._screen.write(lines)
                    self._screen.flush()


class _Log:
    """A file to append to; the first failed write causes a warning."""

    def __init__(self, logdir: Path | None, rank: int) -> None:
        self._path = None if logdir is None else log_path(logdir, rank)
        self._file: io.FileIO | None = None
        self._warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, data: bytes) -> None:
        """Writes the bytes, or as many as fit."""
        if self._path is None:
            return
        try:
            self._file = self._file or self._path.open("ab", buffering=0)
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            if not self._warned:
                self._warned = True
                say(f"warning: {self._path}: {error.strerror}; what does not fit is missing there")


def log_path(logdir: Path, rank: int) -> Path:
    """Returns the path of a process's log."""
    return logdir / f"rank_{rank}.log"


def say(text: str) -> None:
    """Prints a line of the launcher's own on standard error."""
    print(f"jmp-train: {text}", file=Output(sys.stderr), flush=True)


def _warn_of_loss(why: Exception) -> None:
    warn_of_loss(Output(sys.stderr), why)


def _decoded(pipe: IO[bytes], log: _Log) -> Iterator[list[str]]:
    """Yields the lines from a pipe, as many at a time as have arrived; the log gets the bytes."""
    # The encoding of the processes.
    named, _, _ = os.environ.get("PYTHONIOENCODING", "").partition(":")
    encoding = named or locale.getpreferredencoding(False)
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    rest = ""
    while data := os.read(pipe.fileno(), _CHUNK):
        log.write(data)
        *lines, rest = _LINE_END.split(rest + decoder.decode(data))
        if len(rest) >= LONGEST_LINE:
            lines, rest = [*lines, rest], ""
        if lines:
            yield lines
    rest += decoder.decode(b"", final=True)
    if rest:
        yield [rest]
