"""Real processes whose output goes wrong; scripts load the one file, which needs neither jax nor jmp_train."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_helpers import shell

from jmp_train.app.launch import output
from jmp_train.app.launch.output import Output

SCRIPT = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("output", {output.__file__!r})
output = importlib.util.module_from_spec(spec)
spec.loader.exec_module(output)

@output.lasting_output()
def main(way):
    if way == "own":
        with output.own_output() as own:
            os.write(1, b"from C\\n")
            print("from a library")
            for number in range(3000):
                print('{{"line": %d}}' % number, file=own, flush=True)
        done = 1 if own.lost else 0
    else:
        for number in range(3000):
            print("line ━━━", number, sys.stdout.isatty())
        print("an error ━━━", file=sys.stderr)
        done = 0
    open("done", "w").write(way)  # where descriptors are closed, this would get one of theirs
    return done

sys.exit(main(sys.argv[1]))
"""
NO_SPACE = "jmp-train: warning: standard output: No space left on device; the rest is not printed\n"
CLOSED = "jmp-train: warning: standard output: it is closed; the rest is not printed\n"


def run(command: str, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """Returns code, standard output and error of a shell's command, in which $RUN is the script."""
    (cwd / "script.py").write_text(SCRIPT)
    return shell(command, cwd, RUN=f"{sys.executable} script.py", **environment)


pytestmark = [
    pytest.mark.quick,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's"),
]


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        ("$RUN text >/dev/full", 0, NO_SPACE + "an error ━━━\n"),
        ("$RUN own >/dev/full", 1, "from C\nfrom a library\n" + NO_SPACE),
        ("$RUN text | head -1 >/dev/null", 0, "an error ━━━\n"),
        ("$RUN own | head -1 >/dev/null", 0, "from C\nfrom a library\n"),
        ("$RUN text >&-", 0, CLOSED + "an error ━━━\n"),
        ("$RUN own >&-", 1, "from a library\n" + CLOSED),
        ("$RUN text >/dev/null 2>/dev/full", 0, ""),
        ("$RUN text >&- 2>&- <&-", 0, ""),
        ("$RUN text >/dev/full 2>&1", 0, ""),
        ("$RUN own >/dev/full 2>&-", 1, ""),
    ],
)
def test_a_program_ends_as_it_should_whatever_becomes_of_its_output(
    tmp_path: Path, command: str, code: int, error: str
) -> None:
    assert run(command, tmp_path) == (code, "", error)
    assert (tmp_path / "done").read_text() in command


def test_only_its_own_lines_are_on_an_own_output(tmp_path: Path) -> None:
    code, out, error = run("$RUN own", tmp_path)
    assert (code, error) == (0, "from C\nfrom a library\n")
    assert out == "".join(f'{{"line": {number}}}\n' for number in range(3000))
    assert run("$RUN own 2>&-", tmp_path) == (0, out, "")


def test_a_pipe_that_does_not_block_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with subprocess.Popen([sys.executable, "script.py", "text"], cwd=tmp_path, stdout=theirs) as run:
        os.close(theirs)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for its reader
            run.wait(0.5)
        with open(ours, encoding="utf-8") as lines:
            assert [line.split()[2] for line in lines] == [str(number) for number in range(3000)]
        assert run.wait(60) == 0


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_what_cannot_be_encoded_is_replaced(tmp_path: Path, environment: dict[str, str]) -> None:
    code, out, error = run("$RUN text", tmp_path, **environment)
    assert code == 0
    assert out.splitlines() == [f"line ??? {number} False" for number in range(3000)]
    assert error.startswith("an error ")


def test_a_closed_file_is_a_lost_output() -> None:
    file = io.StringIO()
    errors: list[Exception] = []
    stream = Output(file, errors.append)
    file.close()
    for _ in range(2):
        print("x", file=stream, flush=True)
    assert errors == [stream.lost]
    assert "closed file" in str(stream.lost)
    assert not stream.isatty()
