"""Calls of the command line that cannot be run: exit code 2, one line, and nothing is trained or written."""

import contextlib
import io
from pathlib import Path

import pytest

from jmp_train.app.cli.entry import main

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("files")]

LONG = 5000 * "x"
DIGITS = 5000 * "1"  # more than Python's int() takes
CONTROL = "no\n\x1b[31mwhere\u202e"
KARATE = ("train", "karate:task", "--epochs", "1")
COMPARE = ("compare", "karate:task", "--epochs", "1", "--policies", "float32")
MNIST = ("train", "mnist:task", "--data-dir", "mnist", "--batch-size", "16")
FOLDERS = ("", "file", "file/x", "nul\0byte", LONG)
NUMBERS = ("", "0", "-0", "-1", "+1", " 1", "1\n", "1.0", "1e3", "1_000", "\u0663", "\uff11", "nan", DIGITS, LONG)

NO_COMMAND = [(), ("--nosuch",), ("nosuch",), (LONG,), (CONTROL,)]
ARGUMENTS = [
    ("train", LONG),
    ("train", CONTROL),
    ("train", "karate:task", "cora"),
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
    ("train", "--batch-size", "0"),
    *[("train", "--seed", text) for text in ("-1", DIGITS, "\u0663")],
    *[("train", "--batch-size", text) for text in (9 * "9", 99 * "9")],
    ("train", "--train-size", 99 * "9"),
    *[("train", "--devices", text) for text in ("3", "1025", DIGITS)],
    *[
        ("train", "reddit:task", "--synthetic", "--scale", text)
        for text in ("nan", "inf", "0", "2", "1e-400", "1e-9", "0.0_1", "\u0660.\u0665", "..", "", LONG)
    ],
    (*KARATE, "--heads", "1", "1"),
    (*KARATE, "--image-size", "-16"),
]
REPEATED = [
    ("compare", "karate:task", "--policies", "float32", " float32 "),
    ("compare", "karate:task", "--policies", "c=f16,o=f32", "c=f16 , o= f32"),
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
    (*KARATE, "--synthetic"),
    (*KARATE, "--remat"),
    (*KARATE, "--text-file", "file"),
    (*KARATE, "--data-dir", "mnist"),
    *[(*KARATE, "--model", name) for name in ("", "GCN", "sage", CONTROL, LONG)],
    ("train", "--model", "gcn"),
    ("train", "reddit:task", "--scale", "0.1"),
    ("train", "vit:task", "--synthetic", "--image-size", "33"),
    (*MNIST, "--synthetic"),
    (*MNIST, "--devices", "3"),
    ("train", "--accumulate-steps", "3"),
    ("train", "--accumulate-steps", "64", "--devices", "2"),
    (*MNIST, "--train-size", "8"),
    ("compare", "karate:task", "--policies", "float32", "float64"),
]
PATHS = [
    *[("train", f"{task}:task") for task in ("mnist", "cora", "reddit", "proteins", "cifar10", "vit")],
    *[
        ("train", f"{task}:task", "--data-dir", folder)
        for task in ("mnist", "cora", "reddit", "proteins", "cifar10", "vit")
        for folder in ("nowhere", "empty", CONTROL, *FOLDERS)
    ],
    *[("train", "lm:task", "--text-file", file) for file in ("nowhere", "empty", CONTROL, *FOLDERS)],
    *[
        (*call, option, folder)
        for call, option in (
            (KARATE, "--checkpoint-dir"), (KARATE, "--capsules"), (KARATE, "--logdir"), (COMPARE, "--out"),
            (COMPARE, "--logdir"), ((*KARATE, "--mode", "torch"), "--rules"), (("compare", "karate:task"), "--rules"),
        )
        for folder in FOLDERS
    ],
]  # fmt: skip
DIAGNOSE = ("diagnose", "karate:task", "--epochs", "3")
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
TUNE = ("tune", "karate:task", "--epochs", "3")
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


WRONG = {
    "command": NO_COMMAND, "arguments": ARGUMENTS, "values": VALUES, "repeated": REPEATED, "names": NAMES,
    "combinations": COMBINATIONS, "paths": PATHS, "diagnoses": DIAGNOSES, "tunes": TUNES, "launches": LAUNCHES,
}  # fmt: skip


@pytest.mark.parametrize("theme", WRONG)
def test_a_wrong_call_is_exit_code_2_and_one_line(theme: str, folder: Path) -> None:
    before = sorted(path.name for path in folder.rglob("*"))
    for call in WRONG[theme]:
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
