"""Calls of the command line that cannot be run: exit code 2, one line, and nothing is trained or written."""

import contextlib
import io
from pathlib import Path

import pytest
from image_files import write_mnist

from jmp_train.cli import compare as compare_command
from jmp_train.cli import entry as cli
from jmp_train.cli.entry import main
from jmp_train.cli.errors import Failure, one_line

pytestmark = pytest.mark.quick

LONG = 5000 * "x"
DIGITS = 5000 * "1"  # more than Python's int() takes
CONTROL = "no\n\x1b[31mwhere\u202e"
KARATE = ("train", "karate", "--epochs", "1")
COMPARE = ("compare", "karate", "--epochs", "1", "--policies", "float32")
MNIST = ("train", "mnist", "--data-dir", "mnist", "--batch-size", "16")
FOLDERS = ("", "file", "file/x", "nul\0byte", LONG)
NUMBERS = ("", "0", "-0", "-1", "+1", " 1", "1\n", "1.0", "1e3", "1_000", "\u0663", "\uff11", "nan", DIGITS, LONG)

NO_COMMAND = [(), ("--nosuch",), ("nosuch",), (LONG,), (CONTROL,)]
ARGUMENTS = [
    ("train", LONG),
    ("train", CONTROL),
    ("train", "karate", "cora"),
    (*KARATE, "--out", "x"),
    (*KARATE, "--policies", "float32"),
    (*KARATE, "--nosuch", LONG),
    (*KARATE, f"--nosuch{CONTROL}"),
    (*KARATE, "--checkpoint-dir"),
    (*COMPARE, "--checkpoint-dir", "x"),
    (*COMPARE, "--resume"),
    (*COMPARE, "--policy", "float32"),
    ("compare", "--policies"),
]
VALUES = [
    *[("train", "--epochs", text) for text in NUMBERS],
    *[("train", option, "0") for option in ("--batch-size", "--train-size", "--devices")],
    *[("train", "--seed", text) for text in ("-1", str(2**32), DIGITS, "\u0663")],
    *[("train", "--batch-size", text) for text in (9 * "9", 99 * "9", "1438")],
    *[("train", "--train-size", text) for text in (99 * "9", "1438")],
    *[("train", "--devices", text) for text in ("3", "1025", DIGITS)],
    *[
        ("train", "reddit", "--synthetic", "--scale", text)
        for text in (
            "nan",
            "inf",
            "0",
            "2",
            "1e-400",
            "1e-9",
            "0.0_1",
            "\u0660.\u0665",
            "..",
            "",
            LONG,
        )
    ],
    (*KARATE, "--heads", "1", "1"),
    (*KARATE, "--image-size", "-16"),
]
REPEATED = [
    (*KARATE, "--epochs", "1"),
    (*KARATE, "--policy", "float32", "--policy", "float32"),
    (*KARATE, "--mode", "torch", "--mode", "naive"),
    (*KARATE, "--policy", "float32", "--mode", "torch"),
    (*KARATE, "--json", "--json"),
    (*KARATE, "--model", "gcn", "--model=gat"),
    (*KARATE, "--checkpoint-dir", "a", "--checkpoint-dir", "b"),
    (*COMPARE, "--policies", "bfloat16"),
    (*COMPARE, "--out", "a", "--out", "b"),
    ("compare", "karate", "--policies", "float32", " float32 "),
    ("compare", "karate", "--policies", "c=f16,o=f32", "c=f16 , o= f32"),
    ("launch", "-n", "1", "--processes", "2", "script.py"),
]
NAMES = [
    (*KARATE, "--policy", name)
    for name in (
        "", " ", LONG, f"p={LONG}", "params=" + 1000 * "float32,", "params=float32,params=float16",
        "p=f32,params=f32", "p=f32,", "p=", "=", ",", "p=f32=f16", "float32\n", "float32\x1f", "float32\0",
        "\x1b[31m", "half,half", "int32", "float64", "r=f64,p=f64", "apex-O4", "torch-bfloat16-bfloat16",
    )
]  # fmt: skip
COMBINATIONS = [
    (*KARATE, "--resume"),
    (*KARATE, "--checkpoint-every", "1"),
    (*KARATE, "--heads", "1", "1", "1"),
    (*KARATE, "--image-size", "32"),
    (*KARATE, "--scale", "0.1"),
    (*KARATE, "--devices", "2"),
    (*KARATE, "--accumulate-steps", "2"),
    (*KARATE, "--synthetic"),
    (*KARATE, "--remat"),
    (*KARATE, "--text-file", "file"),
    (*KARATE, "--data-dir", "mnist"),
    *[(*KARATE, "--model", name) for name in ("", "GCN", "sage", CONTROL, LONG)],
    ("train", "--model", "gcn"),
    ("train", "reddit", "--scale", "0.1"),
    ("train", "vit-b16", "--synthetic", "--image-size", "33"),
    (*MNIST, "--synthetic"),
    (*MNIST, "--devices", "3"),
    ("train", "--accumulate-steps", "3"),
    ("train", "--accumulate-steps", "64", "--devices", "2"),
    (*MNIST, "--train-size", "8"),
    ("compare", "--batch-size", "1438"),
    ("compare", "karate", "--policies", "float32", "float64"),
]
PATHS = [
    *[("train", task) for task in ("mnist", "cora", "reddit", "proteins", "cifar10", "vit-b16")],
    *[
        ("train", task, "--data-dir", folder)
        for task in ("mnist", "cora", "reddit", "proteins", "cifar10", "vit-b16")
        for folder in ("nowhere", "empty", CONTROL, *FOLDERS)
    ],
    *[("train", "lm", "--text-file", file) for file in ("nowhere", "empty", CONTROL, *FOLDERS)],
    *[
        (*call, option, folder)
        for call, option in (
            (KARATE, "--checkpoint-dir"), (KARATE, "--capsules"), (KARATE, "--logdir"), (COMPARE, "--out"),
            (COMPARE, "--logdir"), ((*KARATE, "--mode", "torch"), "--rules"), (("compare", "karate"), "--rules"),
        )
        for folder in FOLDERS
    ],
]  # fmt: skip
DIAGNOSE = ("diagnose", "karate", "--epochs", "3")
DIAGNOSES = [
    ("diagnose", "nosuch"),
    (*DIAGNOSE, "--steps", "0"),
    (*DIAGNOSE, "--after", "-1"),
    (*DIAGNOSE, "--after", "4", "--out", "made/out"),
    (*DIAGNOSE, "--watch"),
    (*DIAGNOSE, "--logdir", "x"),
    *[(*DIAGNOSE, "--policy", name) for name in ("float31", "", CONTROL)],
    *[
        (*DIAGNOSE, option, folder)
        for option in ("--capsule", "--checkpoint-dir", "--out", "--rules")
        for folder in ("file/x", "nul\0byte", LONG)
    ],
    *[(*DIAGNOSE, "--checkpoint-dir", folder, "--out", "made") for folder in ("file", "empty", "nowhere", CONTROL)],
    *[(*DIAGNOSE, "--rules", file, "--out", "made") for file in ("file", "empty", "nowhere", CONTROL)],
    *[(*DIAGNOSE, "--capsule", file, "--out", "made") for file in ("file", "empty", "nowhere", CONTROL)],
]
TUNE = ("tune", "karate", "--epochs", "3")
TUNES = [
    ("tune", "nosuch"),
    *[
        (*TUNE, option, text)
        for option in ("--examples", "--budget", "--tolerance")
        for text in ("0", "-1", "", DIGITS, LONG)
    ],
    (*TUNE, "--after", "4", "--out", "made/rules.toml"),
    (*TUNE, "--policy", "float32"),
    (*TUNE, "--rules", "file"),
    *[(*TUNE, option, file) for option in ("--out", "--page") for file in ("file/x", "empty", "nul\0byte", LONG, "")],
    *[(*TUNE, "--checkpoint-dir", folder, "--out", "made/x") for folder in ("file", "empty", "nowhere", CONTROL)],
]
LAUNCHES = [
    ("launch",),
    ("launch", "script.py"),
    ("launch", "-n", "2"),
    ("launch", "-n", "2", "--"),
    *[("launch", "-n", text, "script.py") for text in ("0", "1025", "\u0663", DIGITS)],
    *[("launch", "-n", "2", script) for script in ("", "empty", "nul\0", LONG, CONTROL)],
    *[("launch", "-n", "1", "--logdir", folder, "script.py") for folder in FOLDERS],
    ("launch", "-n", "1", "--restarts", "-1", "script.py"),
    ("launch", "-n", "1", "--restarts", DIGITS, "script.py"),
    ("launch", "-n", "1", "--devices-per-process", "0", "script.py"),
]


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "mnist").mkdir()
    write_mnist(tmp_path / "mnist", train=32, test=16)
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize(
    "calls",
    [NO_COMMAND, ARGUMENTS, VALUES, REPEATED, NAMES, COMBINATIONS, PATHS, DIAGNOSES, TUNES, LAUNCHES],
    ids=(
        "command",
        "arguments",
        "values",
        "repeated",
        "names",
        "combinations",
        "paths",
        "diagnoses",
        "tunes",
        "launches",
    ),
)
def test_a_wrong_call_is_exit_code_2_and_one_line(calls: list[tuple[str, ...]], folder: Path) -> None:
    before = sorted(path.name for path in folder.rglob("*"))
    for call in calls:
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main(call)
        shown = [text[:40] for text in call]
        assert (code, out.getvalue()) == (2, ""), shown
        first, *below = error.getvalue().splitlines()
        assert first.startswith("jmp-train: error: "), shown
        assert all(line.startswith("  ") for line in below), shown  # missing files
        assert all(character.isprintable() for line in (first, *below) for character in line), shown
        assert len(first) < 700, shown
    assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((), "a command is needed: train, compare, diagnose, tune, plan or launch; see --help"),
        ((*KARATE, "--epochs", "2"), "argument --epochs: given more than once"),
        ((*KARATE, "--policy", "c=f16,c=f16"), "'c=f16,c=f16' gives compute_dtype more than once"),
        ((*KARATE, "--policy", "float64"), "policy 'float64' has float64, which needs JAX_ENABLE_X64=1"),
        ((*KARATE, "--checkpoint-dir", ""), "argument --checkpoint-dir: '' is not a path"),
        ((*KARATE, "--checkpoint-dir", "file/x"), "--checkpoint-dir file/x: Not a directory"),
        ((*KARATE, "--logdir", "file"), "--logdir file: File exists"),
        (("train", "--devices", "1025"), "'1025' is not a whole number from 1 to 1024"),
        (("train", "mnist", "--data-dir", CONTROL), r"no\n\x1b[31mwhere\u202e is not a folder"),
        (("train", LONG), f"{'x' * 30}…"),
    ],
)  # fmt: skip
def test_what_the_line_says(
    call: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(call) == 2
    assert message in capsys.readouterr().err


@pytest.mark.timeout(200)
def test_what_only_a_run_of_compare_finds_wrong_is_a_wrong_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = folder / "-log" / "float32" / "metrics.jsonl"
    log.parent.mkdir(parents=True)
    log.touch()  # as another process may, after compare has looked
    monkeypatch.setattr(compare_command, "_check_outputs", lambda args, names: None)
    names = ("float32", "bfloat16")
    call = ("compare", "karate", "--epochs", "1", "--logdir=-log", "--policies", *names)
    assert main(call) == 2
    assert capsys.readouterr() == (
        "",
        "jmp-train: error: --logdir: -log/float32 holds the log of another run\n",
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Failure("torch: no output is finite"), "torch: no output is finite"),
        (ValueError("a\nb"), r"a\nb"),
        (FloatingPointError("not finite"), "not finite"),
        (OSError(28, "No space left on device", "log/x"), "log/x: No space left on device"),
        (ChildProcessError("process 1 ended with exit code 3"), "process 1 ended with exit code 3"),
        (MemoryError(), "out of memory (JMP_TRAIN_TRACEBACK=1 shows where)"),
        (
            RecursionError("too deep"),
            "RecursionError: too deep (JMP_TRAIN_TRACEBACK=1 shows where)",
        ),
        (KeyError("label"), "KeyError: 'label' (JMP_TRAIN_TRACEBACK=1 shows where)"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: out of memory\n 1. buffer\n 2. buffer"),
            "RuntimeError: RESOURCE_EXHAUSTED: out of memory (JMP_TRAIN_TRACEBACK=1 shows where)",
        ),
    ],
)
def test_an_error_of_a_run_is_exit_code_1_and_one_line(
    error: Exception,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
@pytest.mark.parametrize("command", [(), ("train",), ("compare",), ("diagnose",), ("tune",), ("launch",)])
def test_help_fits_and_says_what_exit_codes_mean(
    columns: str,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    usage, _, text = capsys.readouterr().out.partition("\n\n")  # argparse indents usage by its first words
    assert usage.startswith("usage: jmp-train")
    lines = text.splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert "Exit codes: 0 all is well; 1 a run failed; 2 the call is wrong" in " ".join(line.strip() for line in lines)
