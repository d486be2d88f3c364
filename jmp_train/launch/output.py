"""Standard output and error that do not stop a run: what cannot be written is dropped, with one warning."""

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO


class Output(io.TextIOBase):
    """A text stream on top of another that raises nothing: a run outlives the disk or terminal it prints to.

    Characters that the stream cannot encode become `?`. After the first write that fails all is dropped.

    Args:
      stream: where to write; None, as Python has it for a closed standard stream, for nowhere.
      on_failure: called with the error of the first write that fails; not if the reader has left (`| head`).

    Attributes:
      lost: the error that kept something from being written; None if there was none, or the reader left.

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
        self._lock = threading.RLock()  # a live display writes from a thread of its own
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
        """Writes what is waiting, or drops it."""
        with self._lock:
            if self._stream is None or self._failed:
                return
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._fail(error)

    def close(self) -> None:
        """Does nothing: the stream is its owner's."""

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
    """Sends what a stream still holds nowhere, else Python tries again at its end, and fails for it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Makes standard output and error an `Output` each; the first one's failure is a line on the second.

    As a context, or as a decorator of a command line's `main`.
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
    """Gives a command standard output for itself: what libraries print there goes to standard error meanwhile.

    That holds for what they print from C, too. To be used within `lasting_output`.
    """
    error = sys.stderr
    output = sys.stdout
    assert isinstance(output, Output)
    output.flush()
    try:
        number = output.fileno()
    except (OSError, ValueError):  # no file, as in a notebook, or a closed one
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
    """Says that standard output cannot be written any more.

    Args:
      error: where to say it.
      why: what its `Output` was told.
    """
    reason = why.strerror if isinstance(why, OSError) and why.strerror else why
    text = f"jmp-train: warning: standard output: {reason}; the rest is not printed"
    print(text, file=error, flush=True)


def _prepare_descriptors() -> None:
    """Opens those of 0, 1 and 2 that are closed to nowhere, and has writes wait for a slow reader.

    Else a run's next file would get one of these descriptors, and what a library prints from C would land in a
    checkpoint; and a pipe that some other program has set not to block would look like a full disk.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
            os.set_inheritable(number, True)
    for number in (1, 2):
        # Windows has it for pipes, from Python 3.12.
        with contextlib.suppress(OSError, AttributeError):
            os.set_blocking(number, True)
