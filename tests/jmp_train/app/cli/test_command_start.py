"""Ctrl-C before the command line's own code runs, and after it has."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

# Interrupts the process when it imports a module, or ends.
INTERRUPT = """
import atexit, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
WHEN = os.environ.get("INTERRUPT_AT")

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    @staticmethod
    def find_spec(name, *args):
        if name == WHEN:
            interrupt()

if WHEN == "exit":
    atexit.register(interrupt)
sys.meta_path.insert(0, Finder)
"""
COMMANDS = {
    "script": (str(Path(sys.executable).with_name("jmp-train")),),
    "module": (sys.executable, "-m", "jmp_train"),
    "attached": (sys.executable, "-P", "-mjmp_train"),
}


def run(command: tuple[str, ...], when: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[4])])
    environment = {**os.environ, "PYTHONPATH": path, "INTERRUPT_AT": when}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=folder, env=environment, check=False
    )


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("script", "jax"),
        ("module", "jax"),
        ("attached", "jax"),
        ("module", "jmp_train.app.cli.entry"),
        ("script", "jmp_train.app.cli.train"),
    ],
)
def test_an_interrupt_while_modules_are_imported_is_quiet(name: str, when: str, tmp_path: Path) -> None:
    result = run((*COMMANDS[name], "train", "karate:task"), when, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.full
@pytest.mark.timeout(200)
def test_an_interrupt_of_the_command_or_at_the_end_is_quiet(tmp_path: Path) -> None:
    for when in ("sklearn", "exit"):
        arguments = ("train", "--epochs", "1") if when == "sklearn" else ("launch",)
        result = run((*COMMANDS["module"], *arguments), when, tmp_path)
        assert result.returncode == 130
        assert "Traceback" not in result.stderr


@pytest.mark.timeout(200)
def test_other_programs_keep_their_interrupts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import jmp_train")
    for command in ((sys.executable, "-m", "mine", "-m", "jmp_train"), (sys.executable, "mine.py")):
        result = run(command, "jax", tmp_path)
        assert result.returncode == -signal.SIGINT
        assert result.stderr.endswith("\nKeyboardInterrupt\n")
