"""Threads that write checkpoints: the script's exit waits for them, and their failures are reported.

Python joins threads when a script has ended, by an exception or not, so what is being written then is still finished.
(It closes executors before, which is why orbax could not write any more.) A failure that `wait` has told nobody is
told at the very end, on stderr and by exit code 1.
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
    """Writes a step, and keeps what became of it."""

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
        """Waits for the end."""
        if self.ident is not None:  # it was started
            self.join()

    def failure(self) -> str:
        """Returns what is to be said of it if it has failed, else nothing."""
        if not self.is_alive() and self.error is None:
            return ""
        error = "it was interrupted" if self.is_alive() else self.error
        return (
            f"step {self._step} could not be written to {self._directory}: {error}; the steps before are as they were"
        )


# The last of each store, while nobody was told how it ended. Of the whole process, as its end is.
_untold: list[_Write] = []


class BackgroundWriter:
    """Writes one step at a time in a thread.

    Args:
      directory: where to, for messages.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last: _Write | None = None

    def start(self, step: int, write: Callable[[], None]) -> None:
        """Waits for the step before, and has `write` called by a thread; raises OSError as `wait` does."""
        self.wait()
        self._last = _Write(step, self._directory, write)
        _untold.append(self._last)
        try:
            self._last.start()
        except RuntimeError:  # Python starts none any more when it calls `atexit`'s functions
            self._last.run()

    def wait(self) -> None:
        """Waits until the last step is written; raises OSError, once, if it could not be."""
        last = self._last
        if last is None:
            return
        last.finish()
        self._last = None
        if last not in _untold:  # the end has told it
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
    """Waits until all that this process writes is written; for those who end it by `os._exit`."""
    for write in _untold:
        write.finish()


def tell_lost_steps() -> bool:
    """Prints a line to stderr for each step that could not be written and of which nobody was told.

    Returns:
      Whether there is one.
    """
    lines = [line for write in _untold if (line := write.failure())]
    _untold.clear()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed, or none
        for line in lines:
            print(f"jmp_train: {line}", file=sys.stderr, flush=True)
    return bool(lines)


def _leave_if_steps_are_lost() -> None:
    if not tell_lost_steps():
        return
    # The other processes are at their end, and wait for this one.
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(1)  # nothing else sets the exit code that late


atexit.register(_leave_if_steps_are_lost)
