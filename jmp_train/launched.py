"""Runs a script for `jmp_train.launcher`, and ends its process at once when the script fails.

Without this, jax would keep a failed process until the others are ready to end, and they wait for it.
It imports nothing but Python's own, so that the script may still choose jax's environment.
"""

import os
import runpy
import sys
import traceback


def _main(command: list[str]) -> None:
    """Runs `script arguments` or `-m module arguments` as Python itself does."""
    module = command[0] == "-m"
    sys.argv = command[1:] if module else command
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.abspath(command[0]))
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            _leave(end)
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, the others must not wait
        traceback.print_exception(error)
        _leave(error)


def _leave(error: BaseException) -> None:
    code = error.code if isinstance(error, SystemExit) else 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    writer = sys.modules.get("jmp_train.checkpoint_writer")
    if writer is not None:  # the script may have a checkpoint on its way
        writer.finish_writes()
        writer.tell_lost_steps()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _main(sys.argv[1:])
