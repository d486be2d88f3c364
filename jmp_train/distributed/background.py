"""Threads that write checkpoints: the script's exit waits for them, and their failures are reported.

Python joins threads when a script ends, with or without an exception, so the current write is still finished. (It
closes executors before that, which is why orbax could not write any more.) A failure that `wait` has not raised is
reported at the very end, on stderr and by exit code 1.
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax


class _Write(threading.Thread):
    """Writes a step, and keeps the error if it failed."""

    def __init__(self, step: int, directory: Path, write: Callable[[], None]) -> None:
        super().__init__(name=f"checkpoint {step}", daemon=False)
        self._step, self._directory, self._write = step, directory, write
        self.error: BaseException | None = None

    def run(self) -> None:
        """Writes."""
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - it is raised by `wait`
            self.error = error
        finally:
            del self._write  # and the arrays

    def finish(self) -> None:
        """Waits until the step is written."""
        if self.ident is not None:  # the thread was started
            self.join()

    def failure(self) -> str:
        """Returns a description of the failure; an empty string if there was none."""
        if not self.is_alive() and self.error is None:
            return ""
        error = "it was interrupted" if self.is_alive() else self.error
        return (
            f"step {self._step} could not be written to {self._directory}: {error}; the steps before are as they were"
        )


# The last write of each store while its outcome is unreported. It is global, as is the end of the process.
_untold: list[_Write] = []


class BackgroundWriter:
    """Writes one step at a time in a thread.

    Args:
      directory: the destination, for messages.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: _Write | None = None

    def start(self, step: int, write: Callable[[], None]) -> None:
        """Waits for the previous step, then calls `write` in a thread; raises OSError as `wait` does."""
        self.wait()
        self._last = _Write(step, self._directory, write)
        _untold.append(self._last)
        try:
            self._last.start()
        except RuntimeError:  # Python starts no more threads once it calls `atexit`'s functions
            self._last.run()

    def wait(self) -> None:
        """Waits until the last step is written; raises OSError, once, if it could not be."""
        last = self._last
        if last is None:
            return
        last.finish()
        self._last = None
        if last not in _untold:  # reported at the end
            return
        _untold.remove(last)
        if last.error is None:
            return
        failure = OSError(last.failure())
        if not isinstance(last.error, OSError):
            raise failure from last.error
        failure.errno = last.error.errno
        raise failure from None


def finish_writes() -> None:
    """Waits until all writes of this process are finished, for code that ends it by `os._exit`."""
    for write in _untold:
        write.finish()


def tell_lost_steps() -> bool:
    """Prints a line to stderr for each lost step that was not reported yet.

    Returns:
      Whether there is a lost step.
    """
    lines = [line for write in _untold if (line := write.failure())]
    _untold.clear()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or None
        for line in lines:
            print(f"jmp_train: {line}", file=sys.stderr, flush=True)
    return bool(lines)


def _leave_if_steps_are_lost() -> None:
    if not tell_lost_steps():
        return
    # The other processes have ended their work, and wait for this one.
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(1)  # nothing else sets the exit code that late


atexit.register(_leave_if_steps_are_lost)
