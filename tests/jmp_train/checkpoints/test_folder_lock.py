"""One store saves into a folder at a time; the next one is told which, and a dead one holds nothing."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import pytest

import jmp_train as jt
from jmp_train.checkpoints.folder_lock import lock_folder

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

STATE = {"w": jnp.arange(6.0)}


@contextmanager
def child(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Runs a script that has `lock_folder` and `path`, without jax and the rest of the library, which take seconds."""
    start = f"""\
        import os, subprocess, sys, time, types
        from pathlib import Path
        for name in ("jmp_train", "jmp_train.checkpoints", "jmp_train.policies", "jmp_train.policies.files"):
            package = sys.modules[name] = types.ModuleType(name)
            package.__path__ = [str(Path({str(Path(jt.__file__).parent)!r}, *name.split(".")[1:]))]
        from jmp_train.policies.files import plain_files
        package.printable, package.read_plain = plain_files.printable, plain_files.read_plain
        from jmp_train.checkpoints.folder_lock import lock_folder
        path = Path(sys.argv[1])
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


def test_a_second_store_that_saves_is_told_who_does(tmp_path: Path) -> None:
    text = f"^{tmp_path} is in use: another CheckpointStore of this process saves there; close it first$"
    with jt.CheckpointStore(tmp_path) as store, jt.CheckpointStore(tmp_path) as second:
        store.save(1, STATE)
        for save in (second.lock, lambda: second.save(2, STATE)):
            with pytest.raises(OSError, match=text):
                save()
        store.wait()
        assert second.steps() == [1]
        assert second.restore(STATE)[0] == 1  # readers are never refused
        store.close()
        second.save(2, STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_0000000{n}.safetensors" for n in (1, 2)]


def test_a_store_that_is_forgotten_holds_nothing(tmp_path: Path) -> None:
    """As in a notebook, whose cell is run again."""
    for step in (1, 2):
        store = jt.CheckpointStore(tmp_path)
        store.save(step, STATE)
        store.wait()
        del store
    assert jt.CheckpointStore(tmp_path).steps() == [1, 2]


HOLD = "release = lock_folder(path); print('taken', flush=True); time.sleep(60)"


def assert_in_use(path: Path, holder: str) -> None:
    with pytest.raises(OSError, match=rf"^{path} is in use: {holder}saves there$") as error:
        lock_folder(path)
    assert len(str(error.value)) < 300 + len(str(path))


def test_the_lock_of_another_process_is_held_until_it_is_killed(tmp_path: Path) -> None:
    with child(HOLD, tmp_path, "a\nb", "x" * 1000) as holder:
        assert line_of(holder) == "taken"
        with jt.CheckpointStore(tmp_path) as store:
            text = rf"process {holder.pid} on {socket.gethostname()} since \d{{4}}-.* UTC \(.*\) saves there$"
            with pytest.raises(OSError, match=rf"^{tmp_path} is in use: {text}") as error:
                store.save(1, STATE)
            assert "\n" not in str(error.value)
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            assert (tmp_path / "lock").exists()
            store.save(2, STATE)
            assert f"process {os.getpid()} on " in (tmp_path / "lock").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002.safetensors"]


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
    code = "release = lock_folder(path)\nos.setpgid(0, 0)\n" + start
    code += "\nprint('taken', flush=True)\ntime.sleep(60)"
    with child(code, tmp_path) as holder:
        try:
            assert line_of(holder) == "taken"
            assert_in_use(tmp_path, f"process {holder.pid} on .* ")
            holder.kill()
            holder.wait()
            os.killpg(holder.pid, 0)  # the child is there
            release = lock_folder(tmp_path)
            assert release is not None
            release()
        finally:
            os.killpg(holder.pid, 9)


def test_a_forked_child_that_ends_leaves_its_parent_the_lock(tmp_path: Path) -> None:
    code = """
        release = lock_folder(path)
        if os.fork() == 0:
            release()
            sys.exit()
        os.wait()
        print("taken", flush=True)
        time.sleep(60)
    """
    with child(code, tmp_path) as holder:
        assert line_of(holder) == "taken"
        assert (tmp_path / "lock").exists()
        assert_in_use(tmp_path, f"process {holder.pid} on .* ")


def test_many_that_take_and_release_never_hold_it_together(tmp_path: Path) -> None:
    """Each deletes the file as it releases: nobody may hold a deleted one."""
    code = """
        taken = 0
        while taken < 300:
            try:
                release = lock_folder(path)
            except OSError as error:
                assert "is in use" in str(error), error
                continue
            inside = os.open(path / "inside", os.O_CREAT | os.O_EXCL)  # fails if it is there
            os.close(inside)
            (path / "inside").unlink()
            release()
            taken += 1
        print(taken)
    """
    with child(code, tmp_path) as one, child(code, tmp_path) as two, child(code, tmp_path) as three:
        assert [line_of(process) for process in (one, two, three)] == ["300"] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_cannot_be_read_is_another_process(tmp_path: Path) -> None:
    release = lock_folder(tmp_path)
    assert release is not None
    for content in (b"", b"{", b"\x00\xff", b"\x1b[31mprocess 1 on x"):
        (tmp_path / "lock").write_bytes(content)
        assert_in_use(tmp_path, "another process ")
    (tmp_path / "lock").write_bytes(b"process 1 \x1b on x" + b"y" * 10_000)
    assert_in_use(tmp_path, r"process 1 \\x1b on xy+\.\.\. ")
    release()
    release()  # again: nothing


def test_a_folder_without_locks_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems, of which none is here: what flock says there."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with jt.CheckpointStore(tmp_path) as store:
        text = "cannot be locked, so another run that saves there will not be detected: .* No locks available"
        with pytest.warns(UserWarning, match=text) as caught:
            store.save(1, STATE)
        assert caught[0].filename == __file__
        store.save(2, STATE)
        assert store.restore(STATE)[0] == 2
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}


@pytest.mark.parametrize("gone", ["folder", "file"])
def test_a_holder_whose_file_was_deleted_leaves_its_successor_the_lock(gone: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = lock_folder(folder)
    assert first is not None
    if gone == "folder":
        shutil.rmtree(folder)
    else:
        (folder / "lock").unlink()
    second = lock_folder(folder)
    assert second is not None
    first()
    with pytest.raises(OSError, match="another CheckpointStore of this process saves there"):
        lock_folder(folder)
    second()
    assert list(folder.iterdir()) == []
