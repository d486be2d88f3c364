"""`python -m jmp_train` is `jmp-train`."""

import contextlib
import os
import sys


def _leave_the_current_folder() -> None:
    """Takes the current folder, which `-m` puts first, off the path: what is imported later is not from there."""
    with contextlib.suppress(OSError):  # it is removed
        if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
            del sys.path[0]


if __name__ == "__main__":
    _leave_the_current_folder()

    from jmp_train.cli import main

    sys.exit(main())
