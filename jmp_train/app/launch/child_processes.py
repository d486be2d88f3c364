"""Child processes that never outlive this one.

Each command runs below a supervisor, a small process. It ends the command and everything that the command started
when it is asked to, or when this process has ended in any way, even by SIGKILL or out of memory. Processes get SIGTERM
and, after a grace time, SIGKILL. On Linux that also reaches processes that have left the command's session; on macOS,
those in the command's process group. Descriptors 0 to 2 must be open, see `lasting_output`.
"""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

_SUPERVISOR = Path(__file__).with_name("child_supervisor.py")
_KILL_SECONDS = 30.0  # for processes that SIGKILL does not end at once because they wait for a disk


class ChildProcess:
    """A command that runs in its own session; as a context manager, it is ended on leaving.

    Args:
      command: the program and its arguments.
      environment: its environment variables; None for those of this process.
      stdout: destination of its standard output, as for `subprocess.Popen`.
      stderr: destination of its standard error, as for `subprocess.Popen`.
      stderr: its standard error, as bytes, if `stderr` was `subprocess.PIPE`.

    Example:
      >>> import subprocess, sys
      >>> from jmp_train.app.launch.child_processes import ChildProcess
      >>> with ChildProcess([sys.executable, "-c", "print(7)"], stdout=subprocess.PIPE) as child:
      ...     text = child.stdout.read()
      ...     child.wait()
      0
      >>> int(text)
      7
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        grace: float = 5.0,
        pass_files: Sequence[int] = (),
    ) -> None:
        self.grace = grace
        self._code: int | None = None
        self._channel, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                # Isolated (-I) from the current folder and the environment, without site (-S), so that it starts fast.
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(other.fileno()), str(grace), *command],
                pass_fds=[other.fileno(), *pass_files],
                start_new_session=True,  # so that only this process gets the terminal's Ctrl-C
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        self.stdout: IO[bytes] | None = self._process.stdout
        self.stderr: IO[bytes] | None = self._process.stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end([self])
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()

    def poll(self) -> int | None:
        """Returns the command's exit code, negative for the signal that ended it; None while it runs."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns the exit code once the command has ended, or None after that many seconds."""
        if self._code is None:
            self._channel.settimeout(timeout)
            try:
                text = self._channel.recv(64)
            except (BlockingIOError, TimeoutError):
                return None
            except OSError:
                text = b""
            # SIGKILL if the supervisor itself was killed, which ends the command.
            self._code = int(text) if text else -signal.SIGKILL
        return self._code


def end(children: Sequence[ChildProcess]) -> None:
    """Ends the processes and everything that they started, and returns when none of it is left.

    They get SIGTERM, and after their grace time SIGKILL. An exception meanwhile, such as that of a second Ctrl-C,
    kills all processes at once and propagates.

    Args:
      children: the processes to end. It also ends the children of processes that have ended.
    """
    try:
        _order(children, b"e", max((child.grace for child in children), default=0.0) + _KILL_SECONDS)
    except BaseException:
        _order(children, b"k", _KILL_SECONDS)
        raise
    finally:
        for child in children:
            if child.poll() is None:
                child._code = -signal.SIGKILL
            child._channel.close()


def _order(children: Sequence[ChildProcess], letter: bytes, seconds: float) -> None:
    """Sends an order to the supervisors, and waits for their ends."""
    for child in children:
        with suppress(OSError):  # everything has ended
            child._channel.send(letter)
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child._process.wait(seconds)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turns SIGTERM, SIGHUP and SIGQUIT into SystemExit, as Python turns SIGINT into KeyboardInterrupt.

    So children are ended before this process ends. An ignored signal (`nohup`) stays ignored, and outside the main
    thread nothing changes, because signals cannot be handled there.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if signal.getsignal(number) == signal.SIG_DFL:
                previous[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
