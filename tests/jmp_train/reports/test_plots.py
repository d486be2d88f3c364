import dataclasses
import re
import struct
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers import make_run
from matplotlib.figure import Figure

from jmp_train.pictures import PANELS, draw_loss_scales, draw_losses, png, svg

RUNS = [make_run("float32"), make_run("mixed_float16", scale=8.0, skips=(3, 60))]


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_is_well_formed_and_in_the_colour_of_the_page(name: str) -> None:
    text = svg(name, RUNS)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert root.get("aria-label")
    assert "currentColor" in text
    assert "<style" not in text.replace('<style type="text/css">*{stroke-linejoin', "")
    assert text == svg(name, RUNS)


def test_panels_share_no_id() -> None:
    ids = [i for name in PANELS for i in re.findall(r'\bid="([^"]+)"', svg(name, RUNS))]
    assert len(ids) == len(set(ids)) > 0
    for name in PANELS:
        text = svg(name, RUNS)
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
        assert {a or b for a, b in used} <= set(re.findall(r'\bid="([^"]+)"', text))


def test_losses_are_averaged_and_skipped_steps_left_out() -> None:
    axes = Figure().subplots()
    draw_losses(axes, RUNS)
    full, half = axes.lines
    steps, losses = map(np.asarray, full.get_data())
    assert len(steps) == 50
    assert steps[0] == 1.5
    assert losses[0] == pytest.approx((1 + 1 / 2) / 2)
    steps, losses = map(np.asarray, half.get_data())
    assert len(steps) == 49
    assert losses[1] == pytest.approx((1 / 4 + 1 / 5) / 2)  # step 3 was skipped
    assert full.get_linestyle() != half.get_linestyle()


def test_the_scale_has_its_history_and_its_skips() -> None:
    axes = Figure().subplots()
    draw_loss_scales(axes, RUNS)
    history, crosses = axes.lines
    assert history.get_label() == "mixed_float16"
    assert np.asarray(history.get_ydata())[[0, 1, 2, 58, 59]].tolist() == [8, 8, 4, 4, 2]
    assert np.column_stack([np.asarray(axis) for axis in crosses.get_data()]).tolist() == [
        [3, 4],
        [60, 2],
    ]
    assert crosses.get_marker() == "x"


def test_runs_without_a_scale_are_said_to_have_none() -> None:
    axes = Figure().subplots()
    draw_loss_scales(axes, RUNS[:1])
    assert [text.get_text() for text in axes.texts] == ["no run has a loss scale"]
    assert "no run has a loss scale" in svg("loss_scales", RUNS[:1])


def test_png_has_all_four_panels_at_a_readable_size() -> None:
    content = png("digits", RUNS)
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1320, 900)


def test_a_run_whose_losses_are_all_lost_can_be_drawn() -> None:
    run = make_run(skips=tuple(range(1, 101)))
    assert svg("losses", [run])
    assert png("digits", [dataclasses.replace(run, memory_of="device")])
