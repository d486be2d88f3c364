"""Ctrl-C while `jmp-train` imports jax, or while Python exits: exit code 130, no traceback.

The package imports this before jax. In processes of other programs it does nothing.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from jmp_train.current_folder import runs_as_module


def _is_command() -> bool:
    """Returns whether this process is `jmp-train` or `python -m jmp_train`."""
    arguments: list[str] = getattr(sys, "argv", None) or [""]
    name = os.path.basename(arguments[0])
    return runs_as_module() or name in ("jmp-train", "jmp-train.exe", "jmp-train-script.py")


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


# Not if it is ignored, as for commands in the background.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
