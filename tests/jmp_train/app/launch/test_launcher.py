"""The launcher, with scripts that do without jax."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from process_helpers import STUBBORN, noted, survivors

from jmp_train.app.cli.entry import main
from jmp_train.app.launch import launcher
from jmp_train.app.launch.launcher import launch

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]


@pytest.fixture(name="script")
def fixture_script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


# `jmp-train launch` without the package's other imports, which take seconds.
LAUNCHER = """
import pathlib, sys, types
for name in ("jmp_train", "jmp_train.policies", "jmp_train.policies.files"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [str(pathlib.Path(sys.argv[1], *name.split(".")[1:]))]
from jmp_train.policies.files import plain_files
package.escaped = plain_files.escaped
from jmp_train.app.launch.launcher import launch
from jmp_train.app.launch.output import lasting_output
with lasting_output():
    try:
        launch(sys.argv[3:], 2, **eval(sys.argv[2], {"Path": pathlib.Path}))
    except ChildProcessError as error:
        print("jmp-train: error:", error, file=sys.stderr)
        sys.exit(1)
"""


def launcher_command(script: Path, *arguments: object, **options: Any) -> list[str]:
    """Returns the command of a launcher of two processes, with `launch`'s options."""
    folder = Path(launcher.__file__).parents[2]
    shown = "{" + ", ".join(f"{name!r}: {value!r}" for name, value in options.items()) + "}"
    shown = shown.replace("PosixPath", "Path")
    return [sys.executable, "-c", LAUNCHER, str(folder), shown, str(script), *map(str, arguments)]


def ran(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=50, check=False, **options)


def test_each_process_knows_its_place(script: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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


def test_a_failure_stops_all_and_what_they_started(script: Path, pids: Path) -> None:
    script.write_text(
        "import os, pathlib, sys, time\n"
        "if os.environ['JAX_PROCESS_ID'] == '1':\n"
        "    while not pathlib.Path(sys.argv[1], '0leader').exists(): time.sleep(0.05)\n"
        f"    sys.exit('no more')\n{STUBBORN}"
    )
    with pytest.raises(ChildProcessError) as error:
        launch([str(script), str(pids)], 2, logdir=script.parent, grace=0.5)
    assert str(error.value).startswith(
        "process 1 ended with exit code 1, then process 0 still ran and was stopped (see "
    )
    assert (script.parent / "rank_1.log").read_text() == "no more\n"
    assert survivors(noted(pids), 0) == []


def test_a_process_that_has_died_leaves_nothing(script: Path, pids: Path) -> None:
    script.write_text(STUBBORN)
    with pytest.raises(ChildProcessError, match=r"process \d ended with exit code 3"):
        launch([str(script), str(pids), "3"], 2, grace=0.3)
    assert survivors(noted(pids, 6), 0) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("signals", "code"),
    [
        (["SIGHUP"], 128 + 1),
        (["SIGINT"], -2),
        (["SIGKILL"], -9),
        (["SIGTERM", "SIGTERM"], 128 + 15),
        (["SIGUSR1"], -10),
    ],
)
def test_a_launcher_that_is_ended_leaves_nothing(signals: list[str], code: int, script: Path, pids: Path) -> None:
    script.write_text(STUBBORN)
    command = launcher_command(script, pids, grace=0.3 if len(signals) == 1 else 50.0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        started = noted(pids, 6)
        process.send_signal(getattr(signal, signals[0]))
        for name in signals[1:]:  # within the grace time
            leaders = {name: pid for name, pid in started.items() if "leader" in name}
            assert survivors(leaders, 10) == []
            process.send_signal(getattr(signal, name))
        process.communicate(timeout=20)
        assert process.returncode == code
        assert survivors(started, 10) == []


def test_all_are_restarted_after_a_failure(script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
    said = "jmp-train: process 1 was killed by signal 9"
    assert [line[: len(said)] for line in output.err.splitlines()] == [said] * 2
    assert f" (see {logdir}/rank_*.log); restarting all, 2 of 3 times\n" in output.err
    assert [line[:5] for line in (logdir / "rank_1.log").read_text().splitlines()] == ["try 0", "try 1", "try 2"]
    for rank in (0, 1):
        shutil.rmtree(tmp_path / str(rank))
    with pytest.raises(ChildProcessError, match="process 1 was killed by signal 9"):
        launch(command, 2, restarts=1)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "how",
    ["pass", "sys.exit()", "exit(0)", "os._exit(0)",
     "import atexit; atexit.register(time.sleep, 60)"],  # as jax does, which waits for the others
)  # fmt: skip
def test_processes_that_wait_for_one_that_has_ended_are_stopped(
    how: str, script: Path, pids: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(
        "import os, pathlib, sys, time\n"
        "rank = os.environ['JAX_PROCESS_ID']\n"
        "pathlib.Path(sys.argv[1], rank).write_text(str(os.getpid()))\n"
        f"if rank == '1':\n    {how}\nelse:\n    time.sleep(60)\n"
    )
    begin = time.monotonic()
    with pytest.raises(ChildProcessError) as error:
        launch([str(script), str(pids)], 3, exit_timeout=0.5, grace=0.5)
    assert time.monotonic() - begin < 20
    assert str(error.value) == (
        "process 1 ended well, still running after the exit timeout of 0.5 s: processes 0, 2, now stopped; "
        "do all take the same number of steps?"
    )
    assert re.fullmatch(
        r"jmp-train: process 1 ended well, still running after 0\.\d+ s: processes 0, 2; operations of all "
        r"processes cannot continue; to be stopped now\n",
        capfd.readouterr().err,
    )
    assert survivors(noted(pids), 0) == []


def test_a_process_may_end_after_the_others(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Nor is the end of a forked copy, or of the main thread alone, the end of a script.
    script.write_text(
        "import os, sys, threading, time\n"
        "if os.environ['JAX_PROCESS_ID'] == '0':\n"
        "    time.sleep(1.2)\n"
        "    print('report')\n"
        "elif not os.fork():\n"
        "    sys.exit()\n"
        "else:\n"
        "    threading.Thread(target=time.sleep, args=(0.9,)).start()\n"
    )
    launch([str(script)], 2, exit_timeout=0.6)
    assert capfd.readouterr() == ("[0] report\n", "")


def test_the_command_line_takes_an_exit_timeout(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script.write_text("import os, time\ntime.sleep(60 * int(os.environ['JAX_PROCESS_ID']))\n")
    assert main(["launch", "-n", "2", "--exit-timeout", "1", "--", str(script)]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "jmp-train: error: process 0 ended well, still running after the exit timeout of 1 s: process 1, "
    )


def test_an_early_end_counts_for_restarts_and_is_named_with_a_failure_that_follows(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(
        "import os, pathlib, sys, time\n"
        "mark = pathlib.Path(sys.argv[1], os.environ['JAX_PROCESS_ID'])\n"
        "times = len(mark.read_text()) if mark.exists() else 0\n"
        "mark.write_text('x' * (times + 1))\n"
        "if times < 2 and os.environ['JAX_PROCESS_ID'] == '0':\n"
        "    time.sleep(0.6 if times else 60)\n"
        "    sys.exit(times)\n"
    )
    launch([str(script), str(tmp_path)], 2, exit_timeout=1.5, restarts=2, grace=0.5)
    assert capfd.readouterr().err.splitlines()[1:] == [
        (
            "jmp-train: process 1 ended well, still running after the exit timeout of 1.5 s: process 0, now stopped; "
            "do all take the same number of steps?; restarting all, 1 of 2 times"
        ),
        (
            "jmp-train: process 0 ended with exit code 1; the script of process 1 had ended well before that; "
            "restarting all, 2 of 2 times"
        ),
    ]


TALK = """
import os, pathlib, sys
for step in range(1000):
    print(f"step {step} — größer", "x" * 100)
pathlib.Path(sys.argv[1], os.environ["JAX_PROCESS_ID"]).write_text(str(step))
"""
LOST = "jmp-train: warning: standard output: {}; the rest is not printed\n"


def check_trained(folder: Path) -> None:
    assert [(folder / rank).read_text() for rank in "01"] == ["999", "999"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ('exec "$@" >/dev/full', LOST.format("No space left on device")),
        ('exec "$@" >&-', LOST.format("it is closed")),
        ('"$@" | head -n 1', ""),
        ('exec "$@" >/dev/full 2>/dev/full', ""),
        ('exec "$@" >&- 2>&-', ""),
    ],
)
def test_output_that_goes_nowhere_does_not_stop_training(shell: str, said: str, script: Path, tmp_path: Path) -> None:
    script.write_text(TALK)
    done = ran(["bash", "-c", f"set -o pipefail; {shell}", "bash", *launcher_command(script, tmp_path)])
    assert (done.returncode, done.stderr.decode()) == (0, said)
    check_trained(tmp_path)


def test_a_log_that_cannot_be_opened_does_not_stop_training(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(
        "import os, shutil, sys\n"
        "if not os.path.exists(sys.argv[1]):\n"
        "    print('x' * 1_000_000)\n"
        "    sys.exit()\n"
        "shutil.rmtree(sys.argv[1])\n"
        "sys.exit(1)\n"
    )
    launch([str(script), str(tmp_path / "logs")], 1, logdir=tmp_path / "logs", restarts=1)
    assert capfd.readouterr().err.splitlines()[1:] == [
        f"jmp-train: warning: {tmp_path / 'logs/rank_0.log'}: {os.strerror(2)}; the rest of its output is missing there"
    ]


def test_a_full_log_does_not_stop_training(script: Path, tmp_path: Path) -> None:
    script.write_text(TALK)
    limited = ["bash", "-c", 'ulimit -f 64; exec "$@"', "bash"]  # 64 KiB a file
    done = ran(limited + launcher_command(script, tmp_path, logdir=tmp_path))
    assert done.returncode == 0
    assert sorted(done.stderr.decode().splitlines()) == [
        f"jmp-train: warning: {tmp_path}/rank_{rank}.log: File too large; the rest of its output is missing there"
        for rank in (0, 1)
    ]
    assert len(done.stdout.splitlines()) == 2000
    assert (tmp_path / "rank_0.log").stat().st_size == 64 * 1024
    check_trained(tmp_path)


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({"PYTHONIOENCODING": "ascii"}, [b"step 999 \\u2014 gr\\xf6\\xdfer x", b"] Ma??\n"]),
        ({"LC_ALL": "C"}, ["step 999 — größer x".encode(), "] Maß\n".encode()]),
    ],
)
def test_what_an_encoding_lacks_is_replaced(
    variables: dict[str, str], shown: list[bytes], script: Path, tmp_path: Path
) -> None:
    script.write_text(TALK + "os.write(1, 'Maß\\n'.encode())\n")
    done = ran(launcher_command(script, tmp_path), env={**os.environ, **variables})
    assert (done.returncode, done.stderr) == (0, b"")
    assert [done.stdout.count(text) for text in shown] == [2, 2]
    check_trained(tmp_path)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_line_without_an_end_takes_no_memory(script: Path, tmp_path: Path) -> None:
    script.write_text(
        "import os, pathlib, sys\n"
        "if os.environ['JAX_PROCESS_ID'] == '0':\n"
        "    for _ in range(1024): os.write(1, 'ß'.encode() * 2 ** 15)\n"
        "    print('\\rone\\rtwo\\r\\nthree', end='', flush=True)\n"
        "    supervisor = pathlib.Path(f'/proc/{os.getppid()}/status').read_text()\n"
        "    launcher = supervisor.partition('PPid:')[2].split()[0]\n"
        "    memory = pathlib.Path(f'/proc/{launcher}/status').read_text()\n"
        "    pathlib.Path(sys.argv[1]).write_text(memory.partition('VmHWM:')[2].split()[0])\n"
    )
    done = ran(launcher_command(script, tmp_path / "memory", logdir=tmp_path))
    assert done.returncode == 0
    lines = done.stdout.decode().splitlines()
    assert lines[-3:] == ["[0] one", "[0] two", "[0] three"]
    assert sum(line.count("ß") for line in lines) == 2**25
    assert max(map(len, lines)) < 2**17 + 10
    assert int((tmp_path / "memory").read_text()) < 40 * 1024  # KiB, of 64 MiB that are printed
    assert (tmp_path / "rank_0.log").stat().st_size == 2**26 + len("\rone\rtwo\r\nthree")


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ValueError, match=r"launch needs a script: jmp-train launch -n 2 -- script\.py"):
        launch([], 1)
    with pytest.raises(ValueError, match=r"launch needs a Python script, but 'nowhere\.py' is not a file"):
        launch(["nowhere.py"], 1)


REFUSED = "jmp-train: error: 'nosuch' is not a task"


@pytest.mark.parametrize(
    ("ending", "code", "out", "error"),
    [
        # All refuse alike: one line, and their exit code.
        (f"print({REFUSED!r}, file=sys.stderr)\nsys.exit(2)", 2, [], REFUSED),
        # All raise the same error: its traceback comes once.
        ("raise LookupError('no 7')", 1, ["LookupError: no 7"], "process {} ended with exit code 1, then "),
        ("sys.exit(7)", 7, [], "process {} ended with exit code 7, then process "),
        ("os.kill(os.getpid(), 6)", 128 + 6, [], "process {} was killed by signal 6, then process "),
    ],
)
def test_an_error_is_told_once_and_gives_the_exit_code(
    ending: str, code: int, out: list[str], error: str, script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(f"import os, sys\n{ending}\n")
    assert main(["launch", "-n", "2", "--", str(script)]) == code
    told = capfd.readouterr()
    assert [line[4:] for line in told.out.splitlines() if line[4:].startswith("LookupError")] == out
    assert len(told.err.splitlines()) == 1
    assert any(error.format(rank) in told.err for rank in "01")


def test_an_error_that_a_process_survives_is_printed_while_it_runs(script: Path, tmp_path: Path) -> None:
    # The second line is printed when the first has been, so the first cannot wait for the end.
    script.write_text(
        "import pathlib, sys, time, traceback\n"
        "try:\n    raise LookupError('no 7')\nexcept LookupError:\n    traceback.print_exc()\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n    time.sleep(0.05)\n"
        "print('goes on')\n"
    )
    command = launcher_command(script, tmp_path / "seen")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line[4:])
            if lines.count("LookupError: no 7\n") == 2:
                (tmp_path / "seen").touch()
    assert process.returncode == 0
    assert lines.count("goes on\n") == 2


@pytest.mark.parametrize("code", [129, 130, 143])
def test_processes_that_have_stopped_at_a_signal_are_not_restarted(
    code: int, script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script.write_text(f"print('starts', flush=True)\nraise SystemExit({code})\n")
    with pytest.raises(SystemExit) as left:
        launch([str(script)], 2, restarts=3)
    assert left.value.code == code
    told = capfd.readouterr()
    assert told.out.count("starts") == 2
    assert told.err == ""


def test_a_process_that_stops_later_than_the_others_has_its_grace(
    script: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    last_report = "if os.environ['JAX_PROCESS_ID'] == '0': time.sleep(1); print('reported', flush=True)"
    script.write_text(f"import os, time\n{last_report}\nraise SystemExit(143)\n")
    with pytest.raises(SystemExit) as left:
        launch([str(script)], 2, restarts=1, grace=40)
    assert left.value.code == 143
    told = capfd.readouterr()
    assert told.out == "[0] reported\n"
    assert told.err == ""


@pytest.mark.parametrize("command", ["compare", "diagnose", "tune", "plan"])
def test_commands_of_one_process_are_refused_by_several(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    assert main([command, "digits"]) == 2
    assert capsys.readouterr().err == (
        f"jmp-train: error: {command} runs in one process; of the commands, only train runs in several\n"
    )
