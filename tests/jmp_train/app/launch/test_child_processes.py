"""Processes that must not outlive their parent, with parents that are really killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_helpers import STUBBORN, lives, noted, survivors

from jmp_train.app.launch import child_processes
from jmp_train.app.launch.child_processes import ChildProcess, end

pytestmark = [pytest.mark.quick, pytest.mark.timeout(60)]

# Parents that do without the package's other imports, which take seconds.
LOAD = """
import importlib.util, os, subprocess, sys, time
spec = importlib.util.spec_from_file_location("child_processes", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
PARENT = (
    LOAD
    + """
with module.signals_as_exceptions():
    with module.ChildProcess(sys.argv[3:], grace=float(sys.argv[2])) as child:
        print("started", flush=True)
        child.wait()
        print("ended", flush=True)
        time.sleep(100)
"""
)


def start_parent(pids: Path, *arguments: str, grace: float = 0.3) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, str(child_processes.__file__), str(grace)]
    command += [sys.executable, "-c", STUBBORN, str(pids), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGHUP", "SIGUSR1", "SIGTERM", "SIGINT", "SIGQUIT", "SIGSEGV"])
def test_nothing_outlives_a_parent_that_is_ended(name: str, pids: Path) -> None:
    number = getattr(signal, name)
    with start_parent(pids) as parent:
        started = noted(pids)
        parent.send_signal(number)
        text, _ = parent.communicate(timeout=20)
        orderly = name in ("SIGHUP", "SIGTERM", "SIGQUIT")
        assert parent.returncode == (128 + number if orderly else -number), text
        seconds = 0.0 if orderly or name == "SIGINT" else 10.0  # after an orderly end all is over
        assert survivors(started, seconds) == []


def test_nothing_of_a_dead_process_outlives_a_parent_that_is_killed(pids: Path) -> None:
    with start_parent(pids, "3") as parent:
        started = noted(pids)
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        assert parent.stdout.readline() == "ended\n"
        assert survivors({"leader": started["leader"]}, 5) == []
        parent.kill()
        assert survivors(started, 10) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once(number: signal.Signals, pids: Path) -> None:
    with start_parent(pids, grace=50.0) as parent:
        started = noted(pids)
        parent.send_signal(number)
        # The leader, which obeys, has gone, so the grace time of the others runs.
        assert survivors({"leader": started["leader"]}, 10) == []
        assert lives(started["subprocess"])
        parent.send_signal(number)
        start = time.monotonic()
        parent.communicate(timeout=20)
        assert time.monotonic() - start < 5
        assert survivors(started, 0) == []


def test_an_ignored_hangup_stays_ignored(pids: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        parent = start_parent(pids)
    finally:
        signal.signal(signal.SIGHUP, previous)
    with parent:
        started = noted(pids)
        parent.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert parent.poll() is None
        assert set(survivors(started, 0)) == set(started)
        parent.kill()
        assert survivors(started, 10) == []


def test_a_command_whose_supervisor_is_killed_ends_too(pids: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells a process that its parent has died")
    with ChildProcess([sys.executable, "-c", STUBBORN, str(pids)]) as child:
        started = noted(pids)
        os.kill(child._process.pid, signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
        assert survivors({"leader": started["leader"]}, 10) == []


def test_a_supervisor_ends_by_no_signal_that_is_meant_for_a_whole_job(pids: Path) -> None:
    with ChildProcess([sys.executable, "-c", STUBBORN, str(pids)], grace=0.2) as child:
        started = noted(pids)
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
            os.kill(child._process.pid, getattr(signal, name))
        assert child.wait(0.5) is None
        assert set(survivors(started, 0)) == set(started)
    assert survivors(started, 0) == []


def test_exit_codes_and_output_are_the_command_s() -> None:
    script = "import os, sys; print('out'); sys.stdout.flush(); {}"
    cases = {
        "pass": 0,
        "sys.exit(3)": 3,
        "os.kill(os.getpid(), 9)": -9,
        "os.kill(os.getpid(), 15)": -15,
        "os.abort()": -6,
        "os.kill(0, 9)": -9,  # its whole group, of which the supervisor is not a member
    }
    for end_of_script, code in cases.items():
        command = [sys.executable, "-I", "-S", "-c", script.format(end_of_script)]
        with ChildProcess(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.read() == b"out\n"
            assert child.wait(20) == code, end_of_script
        assert child.poll() == code
    with ChildProcess(["/nowhere/at/all"], stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        assert child.stderr.read() == b"/nowhere/at/all: No such file or directory\n"
        assert child.wait() == 127


def test_a_command_gets_default_signals_and_no_files_of_its_supervisor() -> None:
    script = (
        "import os, signal\n"
        "print(sorted(map(int, os.listdir('/dev/fd')))[:3], len(os.listdir('/dev/fd')))\n"
        "print(os.getpid() == os.getpgrp() == os.getsid(0))\n"
    )
    with ChildProcess([sys.executable, "-I", "-S", "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        lines = child.stdout.read().decode().splitlines()
    assert lines == ["[0, 1, 2] 4", "True"]  # the fourth is what lists them
    with ChildProcess(["sh", "-c", "yes | head -n 1; kill -PIPE $$"], stdout=subprocess.PIPE) as child:
        assert child.wait(20) == -signal.SIGPIPE


def test_many_open_files_do_no_harm() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with ChildProcess([sys.executable, "-c", "print(7)"], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.read() == b"7\n"
            assert child.wait(20) == 0
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_several_are_ended_together(pids: Path) -> None:
    children = []
    for number in range(3):
        command = [sys.executable, "-c", STUBBORN, str(pids)]
        environment = {**os.environ, "JAX_PROCESS_ID": str(number)}
        children.append(ChildProcess(command, environment=environment, grace=0.5))
    started = noted(pids, 9)
    start = time.monotonic()
    end(children)
    assert time.monotonic() - start < 3
    assert [child.poll() for child in children] == [-signal.SIGTERM] * 3
    assert survivors(started, 0) == []
