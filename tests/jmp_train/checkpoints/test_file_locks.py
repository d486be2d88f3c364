"""File locks: one holder, named, and none after its death, however it dies."""

import errno
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jmp_train.checkpoints import file_locks
from jmp_train.checkpoints.file_locks import LockHeldError, LockUnsupportedError, read_holder, take_lock

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]


@contextmanager
def child(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs a script that has `take_lock` and `path`, without the rest of the library, which is slow to import."""
    start = f"""\
        import importlib.util, os, subprocess, sys, time
        from pathlib import Path
        spec = importlib.util.spec_from_file_location("file_locks", {file_locks.__file__!r})
        file_locks = sys.modules["file_locks"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(file_locks)
        take_lock, path = file_locks.take_lock, Path(sys.argv[1])
    """
    command = [sys.executable, "-c", textwrap.dedent(start) + textwrap.dedent(code)]
    with subprocess.Popen(
        [*command, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_holder_at_a_time_in_one_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with take_lock(path) as lock:
        with pytest.raises(LockHeldError, match=rf"process {os.getpid()} on ") as error:
            take_lock(path)
        assert error.value.holder == read_holder(path)
        assert json.loads(path.read_text())["host"] == socket.gethostname()
    assert not path.exists()
    lock.release()  # again: nothing
    take_lock(path).release()


HOLD = "lock = take_lock(path); print('taken', flush=True); time.sleep(60)"


def test_the_lock_of_another_process_is_held_until_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with child(HOLD, path, "a\nb") as holder:
        assert line_of(holder) == "taken"
        with pytest.raises(LockHeldError) as error:
            take_lock(path)
        found = error.value.holder
        assert found is not None
        assert (found.host, found.process) == (socket.gethostname(), holder.pid)
        assert str(error.value).startswith(f"{path} is held by process {holder.pid} on ")
        assert "\n" not in str(error.value)
        assert len(found.command) <= 200
        holder.kill()
        holder.wait()
    assert path.exists()
    with take_lock(path) as lock:
        assert read_holder(lock.path) == lock_of_this_process(lock.path)


def lock_of_this_process(path: Path) -> file_locks.Holder:
    found = json.loads(path.read_text())
    assert found["process"] == os.getpid()
    return file_locks.Holder(**found)


@pytest.mark.parametrize(
    "start",
    [
        "if os.fork(): time.sleep(60)  # the child says that it is there",
        "subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL)",
        "subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, close_fds=False)",
    ],
)
def test_children_do_not_keep_the_lock(start: str, tmp_path: Path) -> None:
    """A child that lives on, forked or started, is not the holder."""
    path = tmp_path / "lock"
    code = "lock = take_lock(path)\nos.setpgid(0, 0)\n" + start
    code += "\nprint('taken', flush=True)\ntime.sleep(60)"
    with child(code, path) as holder:
        try:
            assert line_of(holder) == "taken"
            with pytest.raises(LockHeldError):
                take_lock(path)
            holder.kill()
            holder.wait()
            os.killpg(holder.pid, 0)  # the child is there
            take_lock(path).release()
        finally:
            os.killpg(holder.pid, 9)


def test_a_forked_child_that_ends_leaves_its_parent_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = """
        lock = take_lock(path)
        if os.fork() == 0:
            lock.release()
            sys.exit()
        os.wait()
        print("taken", flush=True)
        time.sleep(60)
    """
    with child(code, path) as holder:
        assert line_of(holder) == "taken"
        assert path.exists()
        with pytest.raises(LockHeldError, match=f"process {holder.pid} on"):
            take_lock(path)


def test_many_that_take_and_release_never_hold_it_together(tmp_path: Path) -> None:
    """Each deletes the file as it releases: nobody may hold a deleted one."""
    code = """
        taken = 0
        while taken < 300:
            try:
                lock = take_lock(path)
            except file_locks.LockHeldError:
                continue
            inside = os.open(path.with_name("inside"), os.O_CREAT | os.O_EXCL)  # fails if it is there
            os.close(inside)
            path.with_name("inside").unlink()
            lock.release()
            taken += 1
        print(taken)
    """
    path = tmp_path / "lock"
    with child(code, path) as one, child(code, path) as two, child(code, path) as three:
        assert [line_of(process) for process in (one, two, three)] == ["300"] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "a"}', '{"process": "x"}', "\x00\xff"])
def test_a_holder_that_cannot_be_read_is_another_process(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with take_lock(path):
        path.write_text(text)
        with pytest.raises(LockHeldError, match=r"lock is held by another process$") as error:
            take_lock(path)
        assert error.value.holder is None


def test_where_there_are_no_locks_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems, of which none is here: what flock says there."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(LockUnsupportedError, match="no locks: No locks available"):
        take_lock(tmp_path / "lock")
    assert list(tmp_path.iterdir()) == []
