"""Runs a script as one process of `jmp-train launch`, as Python does except for its exit.

    python rank.py PIPE RANK script arguments
    python rank.py PIPE RANK -m module arguments

When the script fails, its process ends at once. By itself, jax would keep it until the others are ready to end,
while they wait for it. When the script has ended well, RANK is written to the open descriptor PIPE, before jax waits.

This module imports only Python's standard library, so that the script can still choose jax's environment, and nothing
from the script's folder or the current one. The script may find these modules imported.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the folder of this file, which scripts should not see

import atexit
import os
import types
from contextlib import suppress
from importlib.machinery import SourceFileLoader


def _main(pipe: int, rank: str, command: list[str]) -> None:
    os.set_inheritable(pipe, False)
    identity = os.fstat(pipe)
    for stream in (sys.stdout, sys.stderr):
        if stream.errors == "strict":  # characters outside the encoding must not end the run
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    process = os.getpid()
    try:
        _run(command)
    except SystemExit as end:
        if end.code not in (None, 0):
            _leave(end.code)
        _tell_at_exit(process, pipe, identity, rank)
        raise
    except BaseException as error:  # noqa: BLE001 - of any kind, because the others must not wait
        error.__traceback__ = _own_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        _leave(1)
    _tell_at_exit(process, pipe, identity, rank)


def _run(command: list[str]) -> None:
    """Runs `script arguments` or `-m module arguments`, with the `sys.path` that Python would set."""
    if command[0] == "-m":
        import runpy

        sys.argv = command[1:]
        _put_first(os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    script = os.path.abspath(command[0])
    _put_first(os.path.dirname(os.path.realpath(script)))
    loader = SourceFileLoader("__main__", script)
    code = compile(loader.get_data(script), script, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    attributes = {"__file__": script, "__loader__": loader, "__cached__": None}
    main.__dict__.update(attributes, __builtins__=__builtins__)
    sys.modules["__main__"] = main  # until the process ends
    exec(code, main.__dict__)  # noqa: S102 - the script


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:  # set by the user's PYTHONSAFEPATH
        sys.path.insert(0, folder)


def _own_part(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without its first frames, which are those of this file and of runpy."""
    while traceback and traceback.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        traceback = traceback.tb_next
    return traceback


def _tell_at_exit(process: int, pipe: int, identity: os.stat_result, rank: str) -> None:
    """Notifies the launcher when the script and its threads have ended, before jax waits for others."""

    def tell() -> None:
        with suppress(OSError):  # the launcher has ended, or the script has closed all files
            # Checked because the script may have opened another file under this number.
            if os.path.samestat(os.fstat(pipe), identity):
                os.write(pipe, f"{rank}\n".encode())

    if os.getpid() == process:  # not in a fork of the script
        atexit.register(tell)


def _leave(code: object) -> None:
    """Ends the process as `sys.exit(code)` does, but at once."""
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    writer = sys.modules.get("jmp_train.distributed.background")
    if writer is not None:  # the script may be writing a checkpoint
        writer.finish_writes()
        writer.tell_lost_steps()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the script has closed the stream
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
