"""The launcher, with scripts that do without jax."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jmp_train.launcher import launch


@pytest.fixture(name="script")
def fixture_script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def gone(pid: int) -> bool:
    """Returns whether a process has ended within five seconds."""
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_each_process_knows_its_place(
    script: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAX_NUM_CPU_DEVICES")
    script.write_text(
        "import os, sys\n"
        f"print(*(os.environ[name] for name in {names}), sys.argv[1:], __name__)\n"
        "print(os.environ['JAX_COORDINATOR_ADDRESS'], file=sys.stderr)\n"
    )
    launch([str(script), "--rate", "1"], 3, devices_per_process=2, logdir=tmp_path / "logs")
    lines = capfd.readouterr().out.splitlines()
    arguments = "['--rate', '1'] __main__"
    for rank, devices in enumerate(("0,1", "2,3", "4,5")):
        wanted = f"3 {rank} {devices} 2 {arguments}"
        assert f"[{rank}] {wanted}" in lines
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert wanted in log
        assert len(log) == 2
    assert len({line[4:] for line in lines if "127.0.0.1:" in line}) == 1


def test_a_failure_stops_all_and_what_they_started(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_text(
        "import os, signal, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "if os.environ['JAX_PROCESS_ID'] == '1':\n"
        "    while not Path('ready').exists(): time.sleep(0.05)\n"
        "    sys.exit('no more')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "Path('pids').write_text(f'{os.getpid()} {child.pid}')\n"
        "Path('ready').touch()\n"
        "time.sleep(100)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChildProcessError) as error:
        launch([str(script)], 2, logdir=tmp_path, grace=0.5)
    assert str(error.value).startswith(
        "process 1 ended with exit code 1, then process 0 still ran and was stopped (see "
    )
    assert (tmp_path / "rank_1.log").read_text() == "no more\n"
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_all_are_started_anew_after_a_failure(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "tries = pathlib.Path(sys.argv[1]) / os.environ['JAX_PROCESS_ID']\n"
        "tries.mkdir(exist_ok=True)\n"
        "number = len(list(tries.iterdir()))\n"
        "(tries / str(number)).touch()\n"
        "print('try', number, os.environ['JAX_COORDINATOR_ADDRESS'])\n"
        "if number < 2 and os.environ['JAX_PROCESS_ID'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command, logdir = [str(script), str(tmp_path)], tmp_path / "logs"
    launch(command, 2, restarts=3, logdir=logdir)
    output = capfd.readouterr()
    said = "jmp-train: process 1 was killed by signal 9 (see "
    assert [line[: len(said)] for line in output.err.splitlines()] == [said] * 2
    assert "; starting all anew, 2 of 3 times" in output.err
    assert [line[:5] for line in (logdir / "rank_1.log").read_text().splitlines()] == [
        "try 0",
        "try 1",
        "try 2",
    ]
    for rank in (0, 1):
        shutil.rmtree(tmp_path / str(rank))
    with pytest.raises(ChildProcessError, match="process 1 was killed by signal 9"):
        launch(command, 2, restarts=1)


@pytest.mark.timeout(60)
def test_a_launcher_that_is_ended_ends_its_processes(script: Path, tmp_path: Path) -> None:
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)\n")
    command = [sys.executable, "-m", "jmp_train", "launch", "-n", "2", "--", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as launcher:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=20) == 128 + signal.SIGTERM
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("command", "count", "devices", "message"),
    [
        ([], 1, 1, r"launch needs a script: jmp-train launch -n 2 -- script\.py"),
        (["nowhere.py"], 1, 1, r"launch needs a Python script, 'nowhere\.py' is no file"),
        (["-m", "json"], 0, 1, "count=0 must be at least 1"),
        (["-m", "json"], 1, 0, "devices_per_process=0 must be at least 1"),
    ],
)
def test_wrong_calls_are_refused(
    command: list[str], count: int, devices: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(command, count, devices_per_process=devices)
