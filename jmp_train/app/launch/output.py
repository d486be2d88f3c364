"""Standard output and error that do not stop a run: output that cannot be written is dropped, with one warning."""

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO


class Output(io.TextIOBase):
    """A text stream on top of another that raises no errors, so that a run outlives the disk or terminal it prints to.

    Characters that the stream cannot encode become `?`. After the first failed write, all output is dropped.

    Args:
      stream: the stream to write to; None, Python's value for a closed standard stream, drops everything.
      on_failure: called with the error of the first failed write, unless the reader has left (`| head`).

    Attributes:
      lost: the error of the first failed write; None if there was none, or the reader left.

    Example:
      >>> file = io.BytesIO()
      >>> text = io.TextIOWrapper(file, encoding="ascii")
      >>> print("━━ 1", file=Output(text), flush=True)
      >>> file.getvalue().decode().strip()
      '?? 1'
    """

    def __init__(self, stream: IO[str] | None, on_failure: Callable[[Exception], None] = lambda error: None) -> None:
        self._stream = stream
        self._on_failure = on_failure
        self._failed = False
        self._lock = threading.RLock()  # a live display writes from its own thread
        self.lost: Exception | None = None

    def write(self, text: str, /) -> int:
        """Writes a text, or drops it."""
        with self._lock:
            if self._stream is None:
                self._fail(OSError("it is closed"))
            elif not self._failed:
                try:
                    self._write(self._stream, text)
                except (OSError, ValueError) as error:  # ValueError: a closed file
                    self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Writes buffered text, or drops it."""
        with self._lock:
            if self._stream is None or self._failed:
                return
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._fail(error)

    def close(self) -> None:
        """Does nothing, because the stream belongs to its owner."""

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False

    def writable(self) -> bool:
        """Returns True."""
        return True

    def fileno(self) -> int:
        """Returns the stream's descriptor; raises OSError if it has none."""
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def _write(self, stream: IO[str], text: str) -> None:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode(self.encoding, "replace").decode(self.encoding))

    def _fail(self, error: Exception) -> None:
        if self._failed:
            return
        self._failed = True
        _drop_what_waits(self)
        if not isinstance(error, BrokenPipeError):
            self.lost = error
            self._on_failure(error)


def _drop_what_waits(stream: Output) -> None:
    """Sends buffered text to nowhere; otherwise Python tries to write it again at exit, and fails."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Replaces standard output and error by `Output`s; a failure of the first is reported on the second.

    Use it as a context, or as a decorator of a command line's `main`.
    """
    _prepare_descriptors()
    error = Output(sys.stderr)
    output = Output(sys.stdout, lambda why: warn_of_loss(error, why))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            yield
        finally:
            output.flush()
            error.flush()


@contextlib.contextmanager
def own_output() -> Iterator[Output]:
    """Reserves standard output for a command: libraries that print there write to standard error meanwhile.

    This includes output from C. Use it within `lasting_output`.
    """
    error = sys.stderr
    output = sys.stdout
    assert isinstance(output, Output)
    output.flush()
    try:
        number = output.fileno()
    except (OSError, ValueError):  # not a file, as in a notebook, or closed
        with contextlib.redirect_stdout(error):
            yield output
        output.flush()
        return
    with open(os.dup(number), "w", encoding="utf-8") as file:
        os.dup2(2, number)
        own = Output(file, lambda why: warn_of_loss(error, why))
        try:
            with contextlib.redirect_stdout(error):
                yield own
        finally:
            own.flush()
            os.dup2(file.fileno(), number)


def warn_of_loss(error: IO[str] | Output, why: Exception) -> None:
    """Reports that standard output can no longer be written.

    Args:
      error: the stream for the report.
      why: the error of the failed write.
    """
    reason = why.strerror if isinstance(why, OSError) and why.strerror else why
    error.write(f"jmp-train: warning: standard output: {reason}; the rest is not printed\n")  # in one piece
    error.flush()


def _prepare_descriptors() -> None:
    """Opens closed descriptors among 0, 1 and 2 to nowhere, and makes writes wait for a slow reader.

    Otherwise the next file of a run would get one of these descriptors, and output of a library from C would land in a
    checkpoint. A pipe that another program has set to non-blocking would look like a full disk.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
    for number in (1, 2):
        # Windows supports it for pipes from Python 3.12.
        with contextlib.suppress(OSError, AttributeError):
            os.set_blocking(number, True)
