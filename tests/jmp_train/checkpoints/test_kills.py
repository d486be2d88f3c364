"""Writers of checkpoints that are stopped and killed, others beside them, and what all of them leave behind."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoint_writers
import numpy as np
import pytest
from checkpoint_writers import numbered, value_of
from machine_limits import as_nobody, everybodys_folder

import jmp_train as jt
from jmp_train.checkpoints import restoring
from jmp_train.checkpoints.step_files import open_step
from jmp_train.policies.files import SafetensorsFile

pytestmark = [pytest.mark.quick, pytest.mark.timeout(200)]


class Writers:
    """The server of writers; see there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert self.line() == "ready"

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def start(self, *task: object) -> int:
        """Returns the process id of a new writer."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, task)) + "\n")
        self._process.stdin.flush()
        return int(self.line())


@pytest.fixture(name="writers", scope="module")
def fixture_writers() -> Iterator[Writers]:
    with subprocess.Popen(
        [sys.executable, checkpoint_writers.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        start_new_session=True,
    ) as process:
        try:
            yield Writers(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the writer that is stopped, too


@pytest.fixture(name="one_step", scope="module")
def fixture_one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with step 5, whose value is 1."""
    directory = tmp_path_factory.mktemp("one_step")
    with jt.CheckpointStore(directory) as store:
        store.save(5, numbered(1.0))
    return directory


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def steps(directory: Path) -> set[str]:
    """Returns the names of the steps: a lock's file that is not locked yet may go, and is made again."""
    return {name for name in names(directory) if name.startswith("step_")}


def file_of(step: int) -> str:
    return f"step_{step:08d}.safetensors"


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    """Returns every path below a folder, with what would tell a change."""
    facts = {str(path.relative_to(directory)): path.stat() for path in directory.rglob("*")}
    return {name: (fact.st_ino, fact.st_mtime_ns) for name, fact in facts.items()}


def read(directory: Path) -> tuple[int, float]:
    """Returns the step and the value that a reader finds, which changes nothing."""
    before = contents(directory)
    with jt.CheckpointStore(directory, read_only=True) as store:
        step, state = store.restore(numbered(0.0))
        assert step in store.steps()
    with jt.CheckpointStore(directory) as store:  # nor does one that could write
        assert store.restore(numbered(0.0))[0] == step
    assert contents(directory) == before
    return step, value_of(state)


def save_beside(directory: Path) -> None:
    with jt.CheckpointStore(directory) as store:
        store.save(1, numbered(9.0))


def noted(log: Path) -> float:
    return float(log.read_text()) if log.exists() else 1.0


@pytest.mark.full
def test_a_version_is_intact_wherever_a_writer_stops_or_is_killed(
    writers: Writers, one_step: Path, tmp_path: Path
) -> None:
    """Before each change that it makes in the folder: readers, a second writer, a kill, and the next writer."""
    found, number = set(), 0
    while True:
        number += 1
        directory, log = tmp_path / str(number), tmp_path / f"{number}.log"
        shutil.copytree(one_step, directory)
        writer = writers.start("at", number, directory, log)
        if writers.line() != "stopped":
            break
        found.add(read(directory))
        assert read(directory)[1] in (noted(log), noted(log) + 1)
        of_the_living = steps(directory)
        if number <= 2:  # it has not yet locked the folder
            save_beside(directory)
            of_the_living.add(file_of(1))
        else:
            with pytest.raises(OSError, match=f"is in use: process {writer} on"):
                save_beside(directory)
        assert steps(directory) == of_the_living
        if number % 2 == 0:
            os.kill(writer, signal.SIGCONT)
            assert writers.line() == "ended 0"
            assert read(directory) == (6, 3.0)
            assert set(names(directory)) - {file_of(1)} == {file_of(6)}
            continue
        os.kill(writer, signal.SIGKILL)
        assert writers.line() == "ended -9"
        assert read(directory)[1] in (noted(log), noted(log) + 1)
        with jt.CheckpointStore(directory) as store:
            store.save(2, numbered(9.0))
            assert value_of(store.restore(numbered(0.0))[1]) in (noted(log), noted(log) + 1)
        assert set(names(directory)) <= {file_of(step) for step in (1, 2, 5, 6)}
    assert number > 8
    assert found == {(5, 1.0), (5, 2.0), (6, 3.0)}


def test_readers_beside_a_writer_that_keeps_one_step_always_find_one(tmp_path: Path) -> None:
    stop = threading.Event()

    def look() -> list[float]:
        seen = []
        while not stop.is_set():
            seen.append(read_value(tmp_path))
        return seen

    with jt.CheckpointStore(tmp_path, max_to_keep=1) as store, ThreadPoolExecutor() as readers:
        store.save(0, numbered(0.0))
        store.wait()
        looking = readers.submit(look)
        for step in range(1, 25):
            with jt.CheckpointStore(tmp_path):
                store.save(step - step % 3, numbered(float(step)))  # some of them again
        store.wait()
        stop.set()
        seen = looking.result()
        assert read(tmp_path) == (24, 24.0)
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


def read_value(directory: Path) -> float:
    with jt.CheckpointStore(directory, read_only=True) as store:
        return value_of(store.restore(numbered(0.0))[1])


def test_a_step_that_is_removed_or_replaced_while_it_is_read_is_read_to_its_end(
    one_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, load = shutil.copytree(one_step, tmp_path / "copy"), SafetensorsFile.read
    with jt.CheckpointStore(directory, max_to_keep=1) as writer:
        for step in (5, 6):

            def load_slowly(*arguments: Any, step: int = step) -> np.ndarray:
                writer.save(step, numbered(step - 3.0))
                writer.wait()
                return load(*arguments)

            monkeypatch.setattr(SafetensorsFile, "read", load_slowly)
            assert read_value(directory) == step - 4
            monkeypatch.undo()
            assert read_value(directory) == step - 3
    assert names(directory) == [file_of(6)]


def test_a_step_whose_file_is_gone_is_not_damaged(
    one_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system, where a file that was removed cannot be read on; or before it was opened."""
    directory = shutil.copytree(one_step, tmp_path / "copy")
    with jt.CheckpointStore(directory, max_to_keep=1) as writer:
        writer.save(6, numbered(2.0))
        writer.wait()

        def load_late(*_: object) -> None:
            monkeypatch.undo()
            writer.save(6, numbered(3.0))
            writer.wait()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(SafetensorsFile, "read", load_late)
        assert read_value(directory) == 3.0

        def open_late(path: Path, step: int) -> Any:
            monkeypatch.undo()
            writer.save(7, numbered(4.0))
            writer.wait()
            return open_step(path, step)

        monkeypatch.setattr(restoring, "open_step", open_late)
        assert read_value(directory) == 4.0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_an_error_of_the_process_is_no_damage(
    number: int, one_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older step is not taken for want of memory."""
    directory = shutil.copytree(one_step, tmp_path / "copy")
    with jt.CheckpointStore(directory) as writer:
        writer.save(6, numbered(2.0))

    def load_never(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(SafetensorsFile, "read", load_never)
    with pytest.raises(OSError, match=os.strerror(number)):
        read(directory)
    monkeypatch.undo()
    assert read(directory) == (6, 2.0)


def test_an_outdated_step_that_cannot_be_removed_is_told(one_step: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(one_step, tmp_path / "copy")
    (directory / file_of(5)).unlink()
    (directory / file_of(5)).mkdir()
    text = rf"^step 6 is saved, but {file_of(5)} cannot be removed: "
    with jt.CheckpointStore(directory, max_to_keep=1) as store:
        store.lock()
        (directory / f"{file_of(5)}.{os.getpid()}.deleted").write_text("in the way of its removal")

        def save() -> None:
            store.save(6, numbered(2.0))
            store.wait()

        with pytest.warns(UserWarning, match=text):
            save()
    assert read(directory) == (6, 2.0)


def test_a_checkpoint_that_is_not_complete_is_not_committed(
    one_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the temporary file is gone, or shorter, when all is written."""
    directory = shutil.copytree(one_step, tmp_path / "copy")
    with jt.CheckpointStore(directory, max_to_keep=1) as store:
        for damage, message in ((Path.unlink, "No such file"), (lambda path: os.truncate(path, 9), "has 9 bytes")):

            def damage_and_sync(descriptor: int, damage: Callable[[Path], object] = damage) -> None:
                for path in directory.glob(".step*"):
                    damage(path)

            monkeypatch.setattr("os.fsync", damage_and_sync)
            store.save(6, numbered(2.0))
            with pytest.raises(OSError, match=f"step 6 could not be written .*{message}"):
                store.wait()
            monkeypatch.undo()
            assert names(directory) == ["lock", file_of(5)]
        assert read(directory) == (5, 1.0)


def test_a_folder_that_cannot_be_written_to_can_be_read(tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path / "a", read_only=True) as store:
        assert store.steps() == []
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*/a, which does not exist"):
            store.restore(numbered(0.0))
        with pytest.raises(ValueError, match=r"store of .*/a was opened with read_only=True"):
            store.save(1, numbered(1.0))
    assert names(tmp_path) == []
    with everybodys_folder() as directory:
        with jt.CheckpointStore(directory) as store:
            store.save(5, numbered(1.0))
        os.chmod(directory, 0o555)
        with as_nobody():
            assert read(directory) == (5, 1.0)
            with (
                jt.CheckpointStore(directory) as store,
                pytest.raises(PermissionError, match="no checkpoint can be written: Permission"),
            ):
                store.save(6, numbered(2.0))
        os.chmod(directory, 0o777)
        with as_nobody(), jt.CheckpointStore(directory) as store:
            store.save(6, numbered(2.0))
            assert store.restore(numbered(0.0))[0] == 6


@pytest.mark.full
@pytest.mark.timeout(900)
def test_fifty_kills_with_readers_beside_lose_nothing(writers: Writers, tmp_path: Path) -> None:
    """A training run that is killed at any moment fifty times, and two readers that never fail."""
    directory, log = tmp_path / "run", tmp_path / "log"
    directory.mkdir()
    generator, stop = random.Random(0), threading.Event()
    with jt.CheckpointStore(directory) as store:
        store.save(0, numbered(1.0))

    def look() -> int:
        count, latest = 0, 0.0
        while not stop.is_set():
            certain = noted(log)
            value = read_value(directory)
            assert value >= max(latest, certain)
            count, latest = count + 1, value
        return count

    with ThreadPoolExecutor() as executor:
        readers = [executor.submit(look) for _ in range(2)]
        for kill in range(50):
            writer = writers.start("train", directory, log, kill)
            time.sleep(generator.uniform(0.3, 2))
            os.kill(writer, signal.SIGKILL)
            assert writers.line() == "ended -9"
            assert read(directory)[1] >= noted(log)
        stop.set()
        counts = [reader.result() for reader in readers]
    step, value = read(directory)
    with jt.CheckpointStore(directory) as store:
        store.save(step + 1, numbered(value + 1))
    assert set(names(directory)) == steps(directory)
    print(f"reads: {counts}; the last of the values that were saved: {value}")
    assert min(counts) > 200
    assert value > 50  # a save for each kill, however busy the machine is
