"""Removes the current folder from `sys.path` under `python -m jmp_train`, so that no `jax.py` there is imported.

It also does so under `python -m jmp_train.diagnose`. `-m` puts the folder first; `jmp-train` does not. The package
imports this before all else, and this imports only modules that Python itself has loaded by then. In processes of
other programs it does nothing.
"""

import os
import sys

_COMMANDS = ("jmp_train", "jmp_train.diagnose")


def runs_as_module() -> bool:
    """Returns whether this process is `python -m` with one of the commands, and Python has not found it yet."""
    arguments: list[str] = getattr(sys, "argv", None) or [""]
    return arguments[0] == "-m" and sys.orig_argv[-len(arguments)].removeprefix("-m") in _COMMANDS


def _leave() -> None:
    try:
        current = os.getcwd()
    except OSError:  # the folder was removed
        return
    if not sys.flags.safe_path and sys.path[:1] == [current]:
        del sys.path[0]


if runs_as_module():
    _leave()
