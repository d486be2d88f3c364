"""Writers of checkpoints that are stopped and killed, others beside them, and what all of them leave behind."""

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
from jmp_train.checkpoints import arrays as checkpoint_arrays
from jmp_train.checkpoints import reading as checkpoint_reading
from jmp_train.checkpoints import store as checkpoint
from jmp_train.checkpoints.manifest import read_manifest

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


def folders(directory: Path) -> set[str]:
    """Returns the folders alone: a lock's file that is not locked yet may go, and is made again."""
    return {path.name for path in directory.iterdir() if path.is_dir()}


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
        of_the_living = folders(directory)
        if number <= 2:  # it has not yet locked the folder
            save_beside(directory)
            of_the_living.add("step_00000001")
        else:
            with pytest.raises(OSError, match=f"is in use: process {writer} on"):
                save_beside(directory)
        assert folders(directory) == of_the_living
        if number % 2 == 0:
            os.kill(writer, signal.SIGCONT)
            assert writers.line() == "ended 0"
            assert read(directory) == (6, 3.0)
            assert set(names(directory)) - {"step_00000001"} == {"step_00000006"}
            continue
        os.kill(writer, signal.SIGKILL)
        assert writers.line() == "ended -9"
        assert read(directory)[1] in (noted(log), noted(log) + 1)
        with jt.CheckpointStore(directory) as store:
            store.save(2, numbered(9.0))
            assert value_of(store.restore(numbered(0.0))[1]) in (noted(log), noted(log) + 1)
        steps = {f"step_0000000{step}" for step in (1, 2, 5, 6)}
        assert set(names(directory)) <= steps
    assert number > 20
    assert found == {(5, 1.0), (5, 2.0), (6, 3.0)}


@pytest.mark.full
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
        reading = readers.submit(look)
        for step in range(1, 25):
            with jt.CheckpointStore(tmp_path):
                store.save(step - step % 3, numbered(float(step)))  # some of them again
        store.wait()
        stop.set()
        seen = reading.result()
        assert read(tmp_path) == (24, 24.0)
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


def removing(at: Path, once: Callable[[], object]) -> Callable[..., list[np.ndarray]]:
    """Returns `read_arrays` that is too late the first time."""
    load, calls = checkpoint_reading.read_arrays, []

    def load_late(*arguments: Any) -> list[np.ndarray]:
        calls.append(arguments)
        if len(calls) == 1:
            once()
            shutil.rmtree(at)
        return load(*arguments)

    return load_late


def test_a_step_that_is_removed_while_it_is_read_is_not_damaged(
    one_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a writer on another machine, where the mark of a reader is not seen."""
    directory = tmp_path / "copy"
    shutil.copytree(one_step, directory)
    with jt.CheckpointStore(directory) as writer:
        late = removing(directory / "step_00000005", lambda: (writer.save(6, numbered(2.0)), writer.wait()))
        monkeypatch.setattr(checkpoint_reading, "read_arrays", late)
        assert read_value(directory) == 2.0

    def replace() -> None:
        shutil.copytree(directory / "step_00000006", directory / "new")
        (directory / "step_00000006").rename(directory / "old")
        (directory / "new").rename(directory / "step_00000006")

    late = removing(directory / "old", replace)
    monkeypatch.setattr(checkpoint_reading, "read_arrays", late)
    assert read_value(directory) == 2.0


def read_value(directory: Path) -> float:
    with jt.CheckpointStore(directory, read_only=True) as store:
        return value_of(store.restore(numbered(0.0))[1])


def test_a_step_that_is_being_read_is_removed_at_the_next_save(
    one_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(one_step, directory)
    load = checkpoint_reading.read_arrays
    with jt.CheckpointStore(directory, max_to_keep=1) as writer:

        def load_slowly(*arguments: Any) -> list[np.ndarray]:
            writer.save(6, numbered(2.0))
            writer.wait()
            return load(*arguments)

        monkeypatch.setattr(checkpoint_reading, "read_arrays", load_slowly)
        assert read_value(directory) == 1.0
        assert writer.steps() == [5, 6]
        writer.save(7, numbered(3.0))
        writer.wait()
        assert writer.steps() == [7]


def saving_badly(victim: Path, damage: Callable[[Path], object]) -> Callable[..., None]:
    """Returns `write_arrays` of which another process damages a file or folder at once."""

    def save_badly(folder: Path, leaves: dict[str, np.ndarray]) -> None:
        checkpoint_arrays.write_arrays(folder, leaves)
        damage(folder / victim)

    return save_badly


def test_a_checkpoint_that_is_not_complete_is_not_committed(
    one_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file or folder of the arrays is gone, or empty, when all are written."""
    arrays = one_step / "step_00000005" / "arrays"
    paths = [path.relative_to(arrays) for path in sorted(arrays.rglob("*"))]
    paths = [path for path in paths if not path.name.startswith("_")]  # which orbax alone reads
    assert len(paths) == 9  # three leaves of two files
    directory = tmp_path / "copy"
    shutil.copytree(one_step, directory)
    damages = (Path.unlink, lambda path: os.truncate(path, 0))
    with jt.CheckpointStore(directory, max_to_keep=1) as store:
        for victim in paths:
            for damage in damages if (arrays / victim).is_file() else (shutil.rmtree,):
                monkeypatch.setattr(checkpoint, "write_arrays", saving_badly(victim, damage))
                store.save(6, numbered(2.0))
                with pytest.raises(OSError, match=f"step 6 could not be written .*{victim.name}"):
                    store.wait()
                assert names(directory) == ["lock", "step_00000005"]
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


def test_what_earlier_versions_left_is_recovered_or_cleared(one_step: Path, tmp_path: Path) -> None:
    """They were killed as they replaced step 5, saved step 6, and deleted step 4."""
    directory = tmp_path / "copy"
    shutil.copytree(one_step, directory)
    (directory / "step_00000005").rename(directory / "step_00000005.tmp")
    shutil.copytree(one_step / "step_00000005", directory / "step_00000005.deleted")
    shutil.copytree(one_step / "step_00000005", directory / "step_00000004.deleted")
    (directory / "step_00000006.tmp" / "arrays").mkdir(parents=True)
    assert read(directory) == (5, 1.0)
    with jt.CheckpointStore(directory) as store:
        store.save(1, numbered(0.0))
    assert names(directory) == ["step_00000001", "step_00000005"]
    assert read(directory) == (5, 1.0)


@pytest.mark.full
def test_an_intact_leftover_replaces_a_damaged_step(one_step: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(one_step, directory)
    shutil.copytree(one_step / "step_00000005", directory / "step_00000005.a-1-b.whole")
    (directory / "step_00000005" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step 5 is damaged: .*manifest.json"):
        assert read(directory) == (5, 1.0)
    with jt.CheckpointStore(directory) as store:
        store.save(1, numbered(0.0))
    assert names(directory) == ["step_00000001", "step_00000005"]
    read_manifest(directory / "step_00000005")


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
    assert all(name.startswith("step_") and "." not in name for name in names(directory))
    print(f"reads: {counts}; the last of the values that were saved: {value}")
    assert min(counts) > 200
    assert value > 50  # a save for each kill, however busy the machine is
