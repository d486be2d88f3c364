"""One store saves into a folder at a time; the next one is told which, and a dead one holds nothing."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import jmp_train as jt

pytestmark = pytest.mark.quick

STATE = {"w": jnp.arange(6.0)}


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_a_store_that_is_forgotten_holds_nothing(tmp_path: Path) -> None:
    """As in a notebook, whose cell is run again."""
    for step in (1, 2):
        store = jt.CheckpointStore(tmp_path)
        store.save(step, STATE)
        store.wait()
        del store
    assert jt.CheckpointStore(tmp_path).steps() == [1, 2]


SCRIPT = """
import sys, time
import jax.numpy as jnp
import jmp_train as jt
store = jt.CheckpointStore(sys.argv[1])
store.lock()
store.save(1, {"w": jnp.arange(6.0)}, metadata={"epoch": 3})
store.wait()
print("saved", flush=True)
time.sleep(60)
"""


@pytest.mark.full
@pytest.mark.timeout(60)
def test_another_process_is_named_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "saved\n"
            with jt.CheckpointStore(tmp_path) as store:
                text = rf"^{tmp_path} is in use: process {process.pid} on \S+ since .* saves there$"
                with pytest.raises(OSError, match=text):
                    store.save(1, STATE)
                assert store.restore(STATE)[0] == 1
                assert store.metadata(1) == {"epoch": 3}
                process.send_signal(signal.SIGKILL)
                process.wait()
                store.save(2, STATE)
        finally:
            process.kill()


def test_a_folder_without_locks_is_warned_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems, of which none is here: what flock says there."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with jt.CheckpointStore(tmp_path) as store:
        with pytest.warns(
            UserWarning, match="cannot be locked, so another run that saves there will not be detected"
        ) as caught:
            store.save(1, STATE)
        assert caught[0].filename == __file__
        store.save(2, STATE)
        assert store.restore(STATE)[0] == 2
