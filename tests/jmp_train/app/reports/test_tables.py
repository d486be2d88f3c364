"""The tables and charts of a comparison: curves, bars and legends."""

import dataclasses
import itertools
import json
import math
import resource
from pathlib import Path

import pytest
from made_runs import COSTS, make_run

from jmp_train.app.reports import explanations, print_tables, report, write_report
from jmp_train.app.reports.display import epoch_line
from jmp_train.app.reports.page import page as report_page
from jmp_train.app.reports.tables import loss_scales, losses, panels, watch_table
from jmp_train.app.runs.events import Epoch, Phase
from jmp_train.tools.documents import Box, Chart, Dot, Label, Polyline, svg

pytestmark = pytest.mark.quick

EPOCH = Epoch(1, loss=0.5, learning_rate=1e-3, seconds=2.0, memory_mb=300.0, loss_scale=65536.0, skipped_steps=3)


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns what was printed, without the spaces between columns."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.strip().splitlines()]


def test_numbers_that_are_not_finite_become_null() -> None:
    run = dataclasses.replace(make_run(), epochs=(EPOCH, dataclasses.replace(EPOCH, loss=math.nan)))
    content = report("digits", [run])
    assert [epoch["loss"] for epoch in content["runs"][0]["epochs"]] == [0.5, None]
    assert content["runs"][0]["iterations_per_second"] == 25
    assert content["runs"][0]["samples_per_second"] == 64 * 25
    json.dumps(content, allow_nan=False)


def test_what_was_watched_has_a_table_and_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"lost_updates": {"Conv_0": 0.25, "<b>": 0.5}}
    runs = [make_run("float32"), dataclasses.replace(make_run("float16"), watch=shares)]
    print_tables(runs)
    assert "50.0% (<b>)" in capsys.readouterr().out
    first, second = report("digits", runs)["runs"]
    assert "watch" not in first
    assert second["watch"] == shares
    page = report_page("digits", runs)
    assert page.count('<table id="watches">') == 1
    assert "50.0% (&lt;b&gt;)" in page
    assert "watches" not in report_page("digits", runs[:1])


def test_the_phases_of_a_schedule_have_a_key_a_sentence_and_a_line_in_the_plot() -> None:
    phases = (Phase("c=f16", 0, 90, dataclasses.replace(COSTS, half_flops_share=0.5)), Phase("float32", 90, 100, COSTS))
    runs = [make_run(), dataclasses.replace(make_run("c=f16,0.9:float32"), phases=phases)]
    first, second = report("digits", runs)["runs"]
    assert "phases" not in first
    assert [(phase["policy"], phase["start"], phase["stop"]) for phase in second["phases"]] == [
        ("c=f16", 0, 90),
        ("float32", 90, 100),
    ]
    assert second["phases"][0]["costs"]["half_flops_share"] == 0.5
    note = (
        "c=f16,0.9:float32: c=f16 in steps 1 to 90 (50.0% of the flops in half precision), float32 in steps 91 to 100 "
        "(0.0% of the flops in half precision)"
    )
    assert explanations(runs) == [note]
    assert f"<p>{note}</p>" in report_page("digits", runs)
    with_line, without = (svg(losses([run])).count("<path") for run in (runs[1], runs[0]))
    assert with_line > without


def test_bits_per_byte_have_a_column_and_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        dataclasses.replace(make_run(name), metrics={"test_accuracy": 0.9, "bits_per_byte": 2.5 + i})
        for i, name in enumerate(("float32", "float16"))
    ]
    print_tables([make_run()])
    assert "bits" not in capsys.readouterr().out
    print_tables(runs)
    out = capsys.readouterr().out
    assert all(text in out for text in ("bits/byte", "2.5000", "3.5000"))
    assert [entry["metrics"]["bits_per_byte"] for entry in report("lm", runs)["runs"]] == [2.5, 3.5]
    assert "<td>2.5000" in report_page("lm", runs)
    assert "bits" not in report_page("digits", [make_run()])


def test_a_metric_called_loss_is_told_from_that_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables([dataclasses.replace(make_run(), metrics={"loss": 0.25})])
    titles = capsys.readouterr().out.splitlines()[1].split()
    assert titles == ["policy", "s/epoch", "compile", "loss", "train", "loss", "scale", "skipped"]


def test_the_line_of_an_epoch() -> None:
    line = "float16         epoch  1/10  loss 0.5000  learning rate 1.00e-03  2.00 s  "
    rest = "loss scale 65536  skipped steps 3"
    assert epoch_line("float16", EPOCH, 10, "process") == line + rest
    assert epoch_line("float16", EPOCH, 0, "process") == line.replace(" 1/10", "1") + rest
    assert epoch_line("float16", EPOCH, 10, "device") == f"{line}peak memory 300 MB  {rest}"


def test_the_table_holds_the_runs_side_by_side_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = dataclasses.replace(EPOCH, seconds=1234.56, memory_mb=12345.0)
    print_tables(
        [
            dataclasses.replace(make_run("mixed_bfloat16"), epochs=(EPOCH, long)),
            dataclasses.replace(make_run("b", scale=64.0, skips=(1, 2)), memory_of="device"),
            dataclasses.replace(
                make_run("apex-O2-bfloat16", scale=2.0**32, skips=(1,)),
                costs=dataclasses.replace(COSTS, half_flops_share=0.987, residual_bytes=1_620_000_000),
            ),
        ]
    )
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "mixed_bfloat16 618.28 7.5 s 98.70% 0.5000 65536 3" in rows
    assert "b 3.00 7.5 s 98.70% 0.0100 16 2" in rows
    assert "apex-O2-bfloat16 3.00 7.5 s 98.70% 0.0100 2^31 1" in rows
    assert "mixed_bfloat16 0.0% 3 MB 1.00x 200 kB 601 kB 1.00x" in rows
    assert "apex-O2-bfloat16 98.7% 1.62 GB 540.00x 200 kB 601 kB 1.00x" in rows
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(rows)
    assert "1.00x: mixed_bfloat16; saved: what the forward pass of a step leaves" in text
    assert text.endswith(
        "peak memory of the process, with libraries, compiler and data: mixed_bfloat16 12345 MB, "
        "apex-O2-bfloat16 300 MB"
    )


def test_where_devices_report_memory_the_table_has_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_tables([dataclasses.replace(make_run("apex-O2-bfloat16"), memory_of="device")])
    rows = rows_of(capsys)
    assert "apex-O2-bfloat16 3.00 7.5 s 98.70% 0.0100 1 0 300 MB" in rows
    assert not any("process" in row for row in rows)


def test_a_step_without_a_backward_pass_has_saved_none(capsys: pytest.CaptureFixture[str]) -> None:
    none = dataclasses.replace(COSTS, residual_bytes=None)
    print_tables([make_run("a"), dataclasses.replace(make_run("b"), costs=none)])
    rows = rows_of(capsys)
    assert "b 0.0% none 200 kB 601 kB 1.00x" in rows


@pytest.mark.parametrize("memory_of", ["device", "process"])
def test_speed_and_the_memory_of_devices_are_beside_the_first_runs(
    memory_of: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    slow = dataclasses.replace(EPOCH, seconds=20.0, memory_mb=450.0)
    runs = [
        dataclasses.replace(make_run("float32"), epochs=(EPOCH, EPOCH)),
        dataclasses.replace(make_run("apex-O3-bfloat16"), epochs=(slow, slow)),
    ]
    print_tables([dataclasses.replace(run, memory_of=memory_of) for run in runs], has_speeds=True)
    rows = list(itertools.dropwhile(lambda row: not row.startswith("run "), rows_of(capsys)))
    memory = memory_of == "device"
    spread = "" if memory else " s/epoch"  # of a CPU
    assert rows[0] == f"run iterations/s samples/s{spread} speed-up" + " memory memory ratio" * memory
    seconds = ["" if memory else f" {text}" for text in ("2.00 (2.00 to 2.00)", "20.00 (20.00 to 20.00)")]
    assert rows[2] == f"float32 25.0 1600.0{seconds[0]} 1.00x" + " 300 MB 1.00x" * memory
    assert rows[3] == f"apex-O3-bfloat16 2.5 160.0{seconds[1]} 0.10x" + " 450 MB 1.50x" * memory
    assert rows[-1] == "1.00x: float32"


def test_a_report_is_three_files(tmp_path: Path) -> None:
    paths, problems = write_report(tmp_path, "digits", [make_run("a"), make_run("b")])
    assert problems == []
    assert [path.name for path in paths] == ["report.json", "report.svg", "report.html"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert json.loads(paths[0].read_text())["runs"][1]["policy"] == "b"


def test_what_fits_is_written_and_the_earlier_rest_is_kept(tmp_path: Path) -> None:
    paths, _ = write_report(tmp_path, "digits", [make_run()])
    fits, *earlier = [path.read_bytes() for path in paths]
    assert all(len(content) > 2 * len(fits) for content in earlier)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(fits) + 64, before[1]))
    try:
        written, problems = write_report(tmp_path, "mnist", [make_run()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert written == paths[:1]
    assert problems == [f"{path}: File too large" for path in paths[1:]]
    assert json.loads(paths[0].read_text())["task"] == "mnist"
    assert [path.read_bytes() for path in paths[1:]] == earlier
    assert sorted(tmp_path.iterdir()) == sorted(paths)


RUNS = [make_run("float32"), make_run("mixed_float16", scale=8.0, skips=(3, 60))]
HALF = dataclasses.replace(
    make_run("half"), costs=dataclasses.replace(COSTS, half_flops_share=0.5, residual_bytes=None)
)


def paths(chart: Chart) -> list[Polyline]:
    return [mark for mark in chart.marks if isinstance(mark, Polyline)]


def legends(chart: Chart) -> list[str]:
    return [style.legend for style in chart.legend]


def bars(chart: Chart) -> list[tuple[float, str]]:
    """Returns the lengths of a chart's bars, and the texts next to them."""
    lengths = [mark.right - mark.left for mark in chart.marks if isinstance(mark, Box)]
    texts = [mark.text for mark in chart.marks if isinstance(mark, Label) and mark.anchor == "start"]
    return list(zip(lengths, texts, strict=True))


def test_a_run_has_its_color_in_all_panels_and_a_legend_once() -> None:
    charts = panels([*RUNS, HALF])
    assert len({chart.title for chart in charts}) == 6
    one, other, *rest = [
        mark.style.color for chart in charts for mark in chart.marks[:1] if not isinstance(mark, Label)
    ]
    assert one != other  # only the second run has a loss scale
    assert rest == [one] * 4
    assert [len(legends(chart)) for chart in charts] == [3, 1, 0, 0, 0, 0]
    assert "light-dark(#4477aa" not in svg(charts[0])  # the runs' colors are seen on white and on black


def test_losses_are_averaged_and_skipped_steps_left_out() -> None:
    chart = losses(RUNS)
    full, half = paths(chart)
    assert legends(chart) == ["float32", "mixed_float16"]
    (points,) = full.runs
    assert len(points) == 50
    assert points[0] == (1.5, pytest.approx((1 + 1 / 2) / 2))
    (points,) = half.runs
    assert len(points) == 49
    assert points[1][1] == pytest.approx((1 / 4 + 1 / 5) / 2)  # step 3 was skipped
    assert full.style.dash != half.style.dash


def test_the_scale_has_its_history_and_its_skips() -> None:
    chart = loss_scales(RUNS)
    (history,) = paths(chart)
    assert legends(chart) == ["mixed_float16"]
    assert list(history.runs[0]) == [(1, 8), (3, 8), (3, 4), (60, 4), (60, 2), (100, 2)]
    crosses = [mark for mark in chart.marks if isinstance(mark, Dot)]
    assert [(cross.x, cross.y, cross.is_cross) for cross in crosses] == [(3, 4, True), (60, 2, True)]


def test_runs_without_a_scale_are_said_to_have_none() -> None:
    assert "no run has a loss scale" in svg(loss_scales(RUNS[:1]))
    assert "no run has a loss scale" not in svg(loss_scales(RUNS))


def test_costs_are_the_lengths_of_bars() -> None:
    assert bars(panels([RUNS[0], HALF])[3]) == [(0.0, "0.0%"), (0.5, "50.0%")]
    assert bars(panels([RUNS[0], HALF])[4]) == [(3_000_000, "3 MB"), (0, "none")]
    assert bars(panels(RUNS[:1])[5]) == [(200_000, "200 kB"), (601_000, "601 kB in all")]


def test_the_peak_of_a_device_is_a_bar_and_that_of_a_process_a_footnote() -> None:
    device = dataclasses.replace(HALF, memory_of="device")
    assert bars(panels([device])[5])[-1] == (300e6, "300 MB peak")
    assert len(bars(panels([device])[5])) == len(bars(panels([HALF])[5])) + 1


def test_a_run_whose_losses_are_all_lost_can_be_drawn() -> None:
    run = make_run(skips=tuple(range(1, 101)))
    assert all(math.isnan(step.loss) for step in run.steps)
    charts = panels([dataclasses.replace(run, memory_of="device")])
    assert all("NaN" not in svg(chart) and "nan" not in svg(chart) for chart in charts)


def test_the_worst_group_of_what_was_watched_is_named() -> None:
    shares = {"lost_updates": {"Conv_0": 0.25, "Dense_0": 0.5}, "underflow": {"Conv_0": 0.0, "Dense_0": 0.0}}
    runs = [make_run("float32"), dataclasses.replace(make_run("float16"), watch=shares)]
    assert watch_table(runs).plain_rows == [["float16", "50.0% (Dense_0)", "0"]]


def test_outputs_that_are_not_finite_are_noted() -> None:
    bad = dataclasses.replace(make_run("naive"), metrics={"test_accuracy": 0.5, "nonfinite_outputs": 3})
    text = "naive: for 3 of the test data the model's output is not finite, which counts as wrong"
    assert explanations([make_run(), bad]) == [text]


def test_a_file_of_rules_is_noted() -> None:
    ruled = dataclasses.replace(make_run("torch"), rules="folder/rules.toml")
    assert explanations([make_run(), ruled]) == ["torch: autocast by the rules of folder/rules.toml"]
