import dataclasses
import json
import math
import resource
from pathlib import Path

import pytest
from helpers import make_run

from jmp_train import html_report
from jmp_train.records import Epoch
from jmp_train.report import epoch_line, print_speed_table, print_table, report, write_report

EPOCH = Epoch(
    epoch=1, loss=0.5, learning_rate=1e-3, seconds=2.0, memory_mb=300.0, loss_scale=65536.0,
    skipped_steps=3,
)  # fmt: skip


def test_numbers_that_are_not_finite_become_null() -> None:
    run = dataclasses.replace(make_run(), epochs=(EPOCH, dataclasses.replace(EPOCH, loss=math.nan)))
    content = report("digits", [run])
    assert [epoch["loss"] for epoch in content["runs"][0]["epochs"]] == [0.5, None]
    assert content["runs"][0]["iterations_per_second"] == 25
    assert content["runs"][0]["samples_per_second"] == 64 * 25
    json.dumps(content, allow_nan=False)


def test_the_line_of_an_epoch() -> None:
    assert epoch_line("float16", EPOCH, 10) == (
        "float16         epoch  1/10  loss 0.5000  learning rate 1.00e-03  2.00 s  "
        "peak memory 300 MB  loss scale 65536  skipped steps 3"
    )


def test_the_table_holds_the_runs_side_by_side_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = dataclasses.replace(EPOCH, seconds=1234.56, memory_mb=12345.0)
    print_table(
        [
            dataclasses.replace(make_run("mixed_bfloat16"), epochs=(EPOCH, long)),
            dataclasses.replace(make_run("b", scale=64.0, skips=(1, 2)), memory_of="device"),
            make_run("apex-O2-bfloat16", scale=2.0**32, skips=(1,)),
        ]
    )
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert [
        "mixed_bfloat16",
        "618.28",
        "7.5",
        "s",
        "12345",
        "MB",
        "98.70%",
        "0.5000",
        "65536",
        "3",
    ] in rows
    assert ["b", "3.00", "7.5", "s", "300", "MB", "98.70%", "0.0100", "16", "2"] in rows
    name = "apex-O2-bfloat16"
    assert [name, "3.00", "7.5", "s", "300", "MB", "98.70%", "0.0100", "2^31", "1"] in rows
    assert "memory: peak of the process or device" in out


def test_speed_and_memory_are_beside_the_first_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    slow = dataclasses.replace(EPOCH, seconds=20.0, memory_mb=450.0)
    print_speed_table(
        [
            dataclasses.replace(make_run("float32"), epochs=(EPOCH, EPOCH)),
            dataclasses.replace(make_run("apex-O3-bfloat16"), epochs=(slow, slow)),
        ]
    )
    titles, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert titles.split() == [
        "run", "memory", "iterations/s", "samples/s", "speed-up", "memory", "ratio",
    ]  # fmt: skip
    assert rows[0].split() == ["float32", "300", "MB", "25.0", "1600.0", "1.00x", "1.00x"]
    assert rows[1].split() == ["apex-O3-bfloat16", "450", "MB", "2.5", "160.0", "0.10x", "1.50x"]
    assert rows[-1].strip() == "1.00x: float32"


def test_a_report_is_three_files(tmp_path: Path) -> None:
    paths, problems = write_report(tmp_path, "digits", [make_run("a"), make_run("b")])
    assert problems == []
    assert [path.name for path in paths] == ["report.json", "report.png", "report.html"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert json.loads(paths[0].read_text())["runs"][1]["policy"] == "b"


def test_what_fits_is_written_and_the_earlier_rest_is_kept(tmp_path: Path) -> None:
    paths, _ = write_report(tmp_path, "digits", [make_run()])
    _, *earlier = [path.read_bytes() for path in paths]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        written, problems = write_report(tmp_path, "mnist", [make_run()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert written == paths[:1]
    assert problems == [f"{path}: File too large" for path in paths[1:]]
    assert json.loads(paths[0].read_text())["task"] == "mnist"
    assert [path.read_bytes() for path in paths[1:]] == earlier
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_the_sentences_compare_with_the_first_run() -> None:
    half = dataclasses.replace(make_run("half", scale=8.0, skips=(7,)), test_accuracy=0.98)
    epochs = tuple(
        dataclasses.replace(epoch, seconds=epoch.seconds / 2, memory_mb=150.0)
        for epoch in half.epochs
    )
    assert html_report.sentences([make_run("full"), dataclasses.replace(half, epochs=epochs)]) == [
        "full: 98.70% of the test data right, 3 s an epoch, 300 MB.",
        (
            "half: 98.00% right (-0.70 points), 2.00 times as fast as full, "
            "with 0.50 of its memory; 1 of 100 steps skipped."
        ),
    ]
