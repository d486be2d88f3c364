"""The last checkpoint of a script: written though nobody waits for it, or missed aloud."""

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from machine_limits import mounted_tmpfs

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest, pytest.mark.timeout(120)]

# Random numbers do not compress: writing them takes longer than what the script does after it.
SAVE = (
    "import os, resource, signal, sys, numpy as np, jmp_train as jt\n"
    "store = jt.CheckpointStore(sys.argv[1])\n"
    "state = {'w': np.random.default_rng(0).integers(0, 2**63, 4_000_000), 'step': 7}\n"
    "def fill_the_disk():\n"
    "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
)
RUNNER = Path(jt.__file__).parent / "app/launch/rank.py"  # as the launcher starts scripts


def run(directory: Path, script: str, *, launched: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a script that has a store and a state, but that does not close the store."""
    file = directory.with_name(f"{directory.name}.py")
    file.write_text(SAVE + script)
    with open(os.devnull, "wb") as launcher:
        runner = [str(RUNNER), str(launcher.fileno()), "0"] if launched else []
        return subprocess.run(
            [sys.executable, *runner, str(file), str(directory)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            pass_fds=[launcher.fileno()],
        )


def saved(directory: Path) -> tuple[int, int]:
    """Returns the newest step and what its state says that it is; nothing else is left there."""
    with jt.CheckpointStore(directory) as store:
        step, state = store.restore({"w": np.zeros(4_000_000, np.int64), "step": 0})
    wanted = np.random.default_rng(0).integers(0, 2**63, 4_000_000)
    np.testing.assert_array_equal(state["w"], wanted)
    return step, state["step"]


@pytest.mark.full
def test_a_script_that_ends_without_close_has_its_last_checkpoint(tmp_path: Path) -> None:
    other = "other = jt.CheckpointStore(sys.argv[1] + '_other'); other.save(7, state); del other\n"
    done = run(tmp_path / "end", f"store.save(7, state)\n{other}")
    assert (done.returncode, done.stderr) == (0, "")
    assert saved(tmp_path / "end") == (7, 7)
    assert saved(tmp_path / "end_other") == (7, 7)


@pytest.mark.full
@pytest.mark.parametrize("launched", [False, True], ids=["python", "launched"])
def test_so_has_a_script_that_ends_by_an_error(tmp_path: Path, launched: bool) -> None:
    done = run(tmp_path / "exit", "store.save(7, state)\nsys.exit(3)\n", launched=launched)
    assert (done.returncode, done.stderr) == (3, "")
    assert saved(tmp_path / "exit") == (7, 7)
    done = run(tmp_path / "error", "store.save(7, state)\nraise ValueError('no more')\n", launched=launched)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: no more"
    assert saved(tmp_path / "error") == (7, 7)


@pytest.mark.full
@pytest.mark.parametrize("launched", [False, True], ids=["python", "launched"])
def test_a_last_checkpoint_that_cannot_be_written_is_told(tmp_path: Path, launched: bool) -> None:
    script = "store.save(6, {'step': 6})\nstore.wait()\nfill_the_disk()\nstore.save(7, state)\nprint('done')\n"
    done = run(tmp_path / "end", script, launched=launched)
    assert done.returncode == 1
    assert done.stdout == "done\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"jmp_train: step 7 could not be written to {tmp_path / 'end'}: ")
    assert "File too large" in line
    assert line.endswith("; the steps before are as they were")
    with jt.CheckpointStore(tmp_path / "end") as store:
        assert store.restore({"step": 0}) == (6, {"step": 6})


@pytest.mark.full
def test_one_of_two_processes_whose_checkpoint_is_lost_ends_when_the_other_does(tmp_path: Path) -> None:
    """Had it left at once, jax would abort the other."""
    script = "jt.distributed.initialize(shutdown_timeout=20)\n" + SAVE
    script += "store.save(6, {'step': 6})\nstore.wait()\nfill_the_disk()\nstore.save(7, state)\n"
    file, directory = tmp_path / "two.py", tmp_path / "two"
    file.write_text(f"import jmp_train as jt\n{script}")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(file), str(directory)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": rank},
        )
        for rank in "01"
    ]
    texts = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 0], texts
    (line,) = texts[0].splitlines()
    assert line.startswith(f"jmp_train: step 7 could not be written to {directory}: ")
    assert texts[1] == ""


@pytest.mark.full
def test_a_failure_that_was_told_is_not_told_again(tmp_path: Path) -> None:
    script = (
        "fill_the_disk()\n"
        "store.save(7, state)\n"
        "try:\n"
        "    store.wait()\n"
        "except OSError as error:\n"
        "    print(error.errno)\n"
    )
    done = run(tmp_path / "told", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{errno.EFBIG}\n"


@pytest.mark.full
def test_it_saves_after_the_end_of_the_main_thread_and_at_the_exit_of_python(tmp_path: Path) -> None:
    script = (
        "import atexit, threading\n"
        "def train():\n"
        "    threading.main_thread().join()\n"
        "    store.save(6, {**state, 'step': 6})\n"
        "threading.Thread(target=train, daemon=False).start()\n"
        "atexit.register(lambda: store.save(7, state) or store.close())\n"
    )
    done = run(tmp_path / "late", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert saved(tmp_path / "late") == (7, 7)
    (tmp_path / "late" / "step_00000007.safetensors").unlink()
    assert saved(tmp_path / "late") == (6, 6)


@pytest.fixture(name="small_disk")
def fixture_small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder on a disk of 4 MB."""
    with mounted_tmpfs(tmp_path / "disk", "size=4m") as directory:
        yield directory


def test_a_full_disk_is_one_line_and_its_space_is_free_again(
    small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    small, large = ({"w": random.normal(size=size)} for size in (100_000, 800_000))
    with jt.CheckpointStore(small_disk) as store:
        store.save(1, small)
        store.wait()
        free = shutil.disk_usage(small_disk).free
        store.save(2, large)
        with pytest.raises(OSError, match=r"step 2 .*No space left on device: '.*; the steps before are") as caught:
            store.wait()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.__cause__ is None
        assert "\n" not in str(caught.value)
        assert shutil.disk_usage(small_disk).free == free
        assert store.restore(small)[0] == 1
        store.save(3, small)
        assert store.restore(small)[0] == 3
    assert capfd.readouterr() == ("", "")
