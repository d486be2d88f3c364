"""What commands say of wrong calls, of errors and of Ctrl-C, and their exit codes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from jmp_train.app.cli import compare as compare_command
from jmp_train.app.cli import entry as cli
from jmp_train.app.cli.entry import main
from jmp_train.app.cli.results import Failure, one_line

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("files")]

LONG = 5000 * "x"
CONTROL = "no\n\x1b[31mwhere\u202e"
# What the line says, by the call's words.
SAID = {
    "": "error: a command is needed: train, compare, diagnose, tune, plan or launch; see --help",
    "train nosuch": "'nosuch' is not a task: digits, path/to/file.py, ",
    "train --policy float31": "argument --policy: Unknown dtype 'float31'",
    "compare --policies float32 c=x": "argument --policies: Unknown dtype 'x'",
    "train --policy float16,0.9:float32": (
        "argument --policy: 'float16,0.9:float32': all phases must store parameters in the same dtypes, but "
    ),
    "compare --modes float32 torch,0.9:apex-O1": (
        "all phases must have the same loss scale, but torch and apex-O1 differ"
    ),
    "diagnose --policy a:b": "'a' in 'a:b' is not a fraction of the run; write a schedule as NAME,FRACTION:NAME",
    "train --policy float32,0.9:float31": "argument --policy: Unknown dtype 'float31'",
    "plan --policies mixed_float16,0.9:float32": (
        "argument --policies: 'mixed_float16,0.9:float32' is a schedule; name its policies one by one: "
        "mixed_float16 float32"
    ),
    "train --policy mixed_float16,0.99:float32 --epochs 1": (
        "'mixed_float16,0.99:float32': a run of 22 steps has no step for the phase that starts at 0.99; use more "
    ),
    "train --mode apex-O4": "argument --mode: Unknown dtype 'apex-O4' must be full",
    "compare --modes torch apex-02": (
        "or a policy: mixed_float16, mixed_bfloat16, autocast_float16, autocast_bfloat16, or "
        "'params=...,compute=...'; or an AMP mode: torch, apex-O0, apex-O1, apex-O2, apex-O3, "
        "naive, each also with -bfloat16"
    ),
    "train --policy float32 --mode torch": "argument --mode: not allowed with argument --policy",
    "compare --modes torch --policies float32": "argument --policies: not allowed with argument --modes",
    "train karate:task --policy c=f16,c=f16": "'c=f16,c=f16' gives compute_dtype more than once",
    "train karate:task --policy float64": "policy 'float64' has float64, which needs JAX_ENABLE_X64=1",
    "train --epochs 0": "'0' is not a whole number of at least 1",
    "train --batch-size -3": "argument --batch-size: '-3' is not a whole number",
    "train --batch-size 1438": "error: batch_size=1438 must be between 1 and the 1437 training examples",
    "train --seed x": "'x' is not a whole number from 0 to 4294967295",
    "train --seed 4294967296": "'4294967296' is not a whole number from 0",
    "train --train-size 0": "argument --train-size: '0' is not a whole number of at",
    "train --train-size 1438": "train_size=1438 must be between 1 and the 1437",
    "train mnist:task --data-dir mnist --train-size 33": "train_size=33 must be between 1 and the 32 training",
    "train --devices 0": "argument --devices: '0' is not a whole number of at least",
    "train --devices 1025": "'1025' is not a whole number from 1 to 1024",
    "train --devices 8 --batch-size 100": "devices=8 must divide batch_size",
    "train cora:task --synthetic --sparse --devices 2": "devices=2: all batches share arrays, such as a whole",
    "train --data-dir x": "unrecognized arguments: --data-dir",
    "train mnist:task --data-dir nowhere": "data_dir nowhere is not a folder; MNIST's are public in",
    "train mnist:task --synthetic --data-dir x": "exclude each other",
    "compare --policies float32 float32": "--policies names float32 more than",
    "compare --modes naive naive": "--modes names naive more than",
    "compare --out file/out": "--out file/out: Not a directory",
    "train karate:task --checkpoint-dir file/x": "--checkpoint-dir file/x: Not a directory",
    "train karate:task --checkpoint-dir=": "argument --checkpoint-dir: '' is not a path",
    "train karate:task --logdir file": "--logdir file: Not a directory",
    "train karate:task --model mlp": "argument --model: invalid choice: 'mlp' (choose from",
    "train reddit:task --scale 1.5": "scale=1.5 must be above 0 and up to 1",
    "train reddit:task --scale nan": "argument --scale: 'nan' is not a number",
    "train reddit:task --scale x": "argument --scale: 'x' is not a number",
    "train reddit:task --heads 1 0 1": "heads=(1, 0, 1) must be 3 numbers of at least 1",
    "train reddit:task --heads 1 1": "argument --heads: expected 3 arguments",
    "train proteins:task": "--data-dir is missing: the folder of PROTEINS_A.txt",
}


def error_of(call: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(call) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("jmp-train: error: ")
    return error


@pytest.mark.parametrize("words", SAID)
def test_what_the_line_says(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(words.split(), capsys)
    assert SAID[words] in error
    assert error.count("\n") == 1
    assert not Path("out").exists()


def test_long_texts_are_cut_and_control_characters_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    shown = r"no\n\x1b[31mwhere\u202e is not a folder"
    assert shown in error_of(("train", "mnist:task", "--data-dir", CONTROL), capsys)
    assert f"{'x' * 30}…" in error_of(("train", LONG), capsys)


def test_missing_files_of_mnist_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    first, *lines = error_of(("train", "mnist:task", "--data-dir", "empty"), capsys).splitlines()
    assert "readers/public_images.py:" in first and "data_dir empty lacks files; MNIST's are public" in first
    assert len(lines) == 4
    assert all("https://" in line and "bytes, sha256 " in line for line in lines)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_what_only_a_run_of_compare_finds_wrong_is_a_wrong_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Path("-log/float32/metrics.jsonl")
    log.parent.mkdir(parents=True)
    log.touch()  # as another process may, after compare has looked
    monkeypatch.setattr(compare_command, "check_unused", lambda folder: None)
    call = ("compare", "karate:task", "--epochs", "1", "--logdir=-log", "--policies", "float32", "bfloat16")
    assert error_of(call, capsys) == "jmp-train: error: --logdir: -log/float32 holds the log of another run\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Failure("torch: no output is finite"), "torch: no output is finite"),
        (ValueError("a\nb"), r"a\nb"),
        (FloatingPointError("not finite"), "not finite"),
        (OSError(28, "No space left on device", "log/x"), "log/x: No space left on device"),
        (ChildProcessError("process 1 ended with exit code 3"), "process 1 ended with exit code 3"),
        (MemoryError(), "out of memory (JMP_TRAIN_TRACEBACK=1 shows where)"),
        (RecursionError("too deep"), "RecursionError: too deep (JMP_TRAIN_TRACEBACK=1 shows where)"),
        (KeyError("label"), "KeyError: 'label' (JMP_TRAIN_TRACEBACK=1 shows where)"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: out of memory\n 1. buffer\n 2. buffer"),
            "RuntimeError: RESOURCE_EXHAUSTED: out of memory (JMP_TRAIN_TRACEBACK=1 shows where)",
        ),
    ],
)
def test_an_error_of_a_run_is_exit_code_1_and_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "train_command", fail)
    assert main(["train"]) == 1
    assert capsys.readouterr().err == f"jmp-train: error: {line}\n"
    monkeypatch.setenv("JMP_TRAIN_TRACEBACK", "1")
    assert main(["train"]) == 1
    text = capsys.readouterr().err
    assert "in fail" in text
    assert text.endswith(f"\njmp-train: error: {line}\n")


@pytest.mark.parametrize("cause", [None, ImportError("an extension did not load")])
def test_ctrl_c_is_exit_code_130_whatever_it_becomes(
    cause: Exception | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if cause is None:
                raise
            raise cause from None

    monkeypatch.setattr(cli, "train_command", interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_text_in_one_line() -> None:
    assert one_line("lacks:\n  a\n  b\x07") == "lacks:\n  a\n  b\\x07"
    assert one_line(f"{LONG}/x is not a folder") == f"{300 * 'x'}…{282 * 'x'}/x is not a folder"


@pytest.mark.parametrize("columns", ["80", "40"])
def test_help_fits_and_says_what_exit_codes_mean(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for command in ((), ("train",), ("compare",), ("diagnose",), ("tune",), ("launch",)):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--help"])
        assert caught.value.code == 0
        usage, _, text = capsys.readouterr().out.partition("\n\n")  # argparse indents usage by its first words
        assert usage.startswith("usage: jmp-train")
        assert max(map(len, text.splitlines())) <= int(columns), command
        assert "Exit codes: 0 all is well; 1 a run failed; 2 the call is wrong" in " ".join(text.split()), command
