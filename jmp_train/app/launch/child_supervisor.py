"""Runs one command for `jmp_train.app.launch.child_processes`, and ends it with everything that it started.

    python -I -S child_supervisor.py CHANNEL GRACE COMMAND ...

CHANNEL is the descriptor of an open socket to the process that requested the command. The supervisor sends the
command's exit code through it as soon as the command has ended. It receives `e`, to end what still runs, with SIGTERM
and after GRACE seconds with SIGKILL, or `k`, for SIGKILL at once. The end of the channel shows that the other process
has ended, however it died, and means the same as `e`.

The command leads its own session and group. On Linux, the supervisor also becomes the parent of orphans below it
(a subreaper, like an init process), so that it finds daemons that have left the group; elsewhere
such daemons survive. It imports only Python's standard library, and nothing of this package.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

_POLL_MILLISECONDS = 20  # between checks for running processes while all are being ended
_KILL_SECONDS = 30.0  # time for SIGKILL to take effect; processes that still wait for a disk are left
_SEES_CHILDREN = sys.platform == "linux" and os.path.exists("/proc/self/stat")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


def _main(channel: int, grace: float, command: list[str]) -> None:
    os.set_inheritable(channel, False)
    wake = _wake_at_signals()
    leader = _start(command)
    _let_go_of_streams()
    poll = select.poll()
    for file in (channel, wake):
        poll.register(file, select.POLLIN)
    code, deadline, asked = None, None, set[int]()
    while True:
        ready = [file for file, _ in poll.poll(None if deadline is None else _POLL_MILLISECONDS)]
        if wake in ready:
            os.read(wake, 4096)
        if code is None:
            code = _exit_code(leader)
            if code is not None:
                _tell(channel, code)
        if channel in ready:
            order = _order(channel)
            if order in ("", "k"):
                poll.unregister(channel)  # no more orders can come
            now = time.monotonic()
            deadline = now if order == "k" else min(now + grace, deadline or float("inf"))
        running = _reap(leader) or code is None
        if deadline is None:
            continue
        late = time.monotonic() - deadline
        if not running or late > _KILL_SECONDS:
            return
        _signal_all(leader, late >= 0, asked)


def _wake_at_signals() -> int:
    """Returns a pipe that becomes readable after a signal, so that only SIGKILL ends this process."""
    wake, write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Signals to all processes of a job also reach the command and the other process.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # the command inherits ignored signals
            signal.signal(number, lambda *_: None)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda *_: None)
    return wake


def _start(command: list[str]) -> int:
    prctl = _prctl()
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != supervisor:  # it died before the call
                os._exit(1)
        for number in (signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and the command would inherit that
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _prctl() -> Callable[..., int] | None:
    """Returns Linux's prctl; None on other systems."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        return ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None


def _let_go_of_streams() -> None:
    """Closes the standard streams of this process, so that a pipe ends when the command ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)


def _exit_code(leader: int) -> int | None:
    """Returns the command's exit code, negative for a signal, or None while it runs.

    On Linux the command stays a zombie, so that no other process can get its id.
    """
    if not _SEES_CHILDREN:
        pid, status = os.waitpid(leader, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    found = os.waitid(os.P_PID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _tell(channel: int, code: int) -> None:
    with suppress(OSError):  # the other process has ended
        os.write(channel, f"{code}\n".encode())


def _order(channel: int) -> str:
    """Returns the order `e` or `k`, or an empty string if the other process has ended."""
    try:
        data = os.read(channel, 64)
    except OSError:
        return ""
    return "k" if b"k" in data else data[:1].decode()


def _reap(leader: int) -> bool:
    """Reaps ended processes except the leader, and returns whether any other process still runs."""
    if not _SEES_CHILDREN:
        return _group_has_members(leader)
    running = False
    for child in _children():
        if child != leader:
            with suppress(ChildProcessError):
                running |= os.waitpid(child, os.WNOHANG)[0] == 0
    # A process that has just ended may have left children.
    return running or any(child != leader for child in _children())


def _group_has_members(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal_all(leader: int, kill: bool, asked: set[int]) -> None:
    """Kills the group and the orphans, or asks each once to end.

    It signals only children of this process and their group, whose ids cannot belong to other processes.
    Descendants of a child that has left the group become children of this process when that child ends.
    """
    with suppress(ProcessLookupError, PermissionError):
        if kill or leader not in asked:
            os.killpg(leader, signal.SIGKILL if kill else signal.SIGTERM)
            asked.add(leader)  # only now, because it may have been too young to lead a group
    for child in _children():
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child) != leader and (kill or child not in asked):
                asked.add(child)
                os.kill(child, signal.SIGKILL if kill else signal.SIGTERM)


def _children() -> Iterator[int]:
    """Yields the children of this process; none if they cannot be listed."""
    if not _SEES_CHILDREN:
        return
    own = str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if fields[1].decode() == own:
                    yield int(name)


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
