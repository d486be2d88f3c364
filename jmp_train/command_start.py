"""The start of a command, before jax is imported: no modules of the current folder, and exit code 130 for Ctrl-C.

`python -m jmp_train` puts the current folder first on `sys.path`; `jmp-train` does not. So it is removed, and no
`jax.py` there is imported. Ctrl-C while jax is imported, or while Python exits, prints no traceback. The package
imports this module first. In processes of other programs it does nothing.
"""

import os
import sys


def _runs_as_module() -> bool:
    """Returns whether this process is `python -m` jmp_train, and Python has not found it yet."""
    arguments: list[str] = getattr(sys, "argv", None) or [""]
    return arguments[0] == "-m" and sys.orig_argv[-len(arguments)].removeprefix("-m") == "jmp_train"


def _leave_current_folder() -> None:
    try:
        current = os.getcwd()
    except OSError:  # the folder was removed
        return
    if not sys.flags.safe_path and sys.path[:1] == [current]:
        del sys.path[0]


# Only modules that Python itself has loaded already are imported above.
if _runs_as_module():
    _leave_current_folder()

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(130)


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt, as in Python, for a command that must clean up."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


_is_command = _runs_as_module() or os.path.basename((getattr(sys, "argv", None) or [""])[0]) in (
    "jmp-train",
    "jmp-train.exe",
    "jmp-train-script.py",
)
# Not if it is ignored, as for commands in the background.
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
