"""The examples run as their users run them: what they print, in float16 as in float32."""

import dataclasses
import re
from pathlib import Path

import pytest
from image_files import write_cifar, write_image_folder, write_mnist
from process_helpers import launched, run_python

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
ACCURACY = r"test accuracy ([\d.]+)%"


def run_example(cwd: Path, name: str, *options: str, launch: bool = False, timeout: float = 280) -> str:
    """Returns what an example prints, by one process or by two that `jmp-train launch` starts."""
    launcher = ("-m", "jmp_train", "launch", "-n", "2", "--") if launch else ()
    return run_python(*launcher, EXAMPLES / name, *options, cwd=cwd, timeout=timeout)


def numbers(pattern: str, output: str) -> list[float]:
    """Returns what the only group of a pattern has matched."""
    return [float(found) for found in re.findall(pattern, output, re.MULTILINE)]


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a graph example prints with `--use-fp16` and with `--no-use-fp16`.

    Attributes:
      score: a regular expression for the end of the last line, whose groups are scores.
      least: the first score is above this.
      apart: the scores of the two runs differ by at most this.
      losses: how many lines there are, each with a loss; None if they are not looked at.
      fall: the last loss is below this part of the first one.
      traces: the line before the last one, if it says how many traces there were.
    """

    score: str
    least: float
    apart: float
    losses: int | None = None
    fall: float = 1
    traces: str | None = None


LEARNED = {
    "gin_proteins.py --count 600 --epochs 6": Learned(ACCURACY, 80, 9, losses=6, traces="2 traces for 2 sizes"),
    "appnp_cora.py --epochs 20": Learned(ACCURACY, 85, 3, losses=5, traces="1 trace"),
    # Of 80 clouds or 64 networks, 12 or 6 may be others.
    "edgeconv_shapes.py --count 320 --epochs 8": Learned(ACCURACY, 45, 15, losses=8, traces="1 trace"),
    "pna_networks.py --count 320 --epochs 8": Learned(ACCURACY, 75, 10, losses=8, traces="1 trace"),
    "rgcn_entities.py": Learned(ACCURACY, 80, 2, losses=4, traces="1 trace"),
    "sage_minibatch.py --scale 0.005 --epochs 4": Learned(ACCURACY, 90, 10, losses=4, fall=0.5),
    "edge_classification.py --epochs 4": Learned(r"^accuracy ([\d.]+)  traces 1", 0.85, 0.02),
    "link_prediction.py --epochs 8": Learned(r"^AUC ([\d.]+)  MRR ([\d.]+)", 0.9, 0.02),
    "node2vec.py --epochs 40": Learned(r"probe ([\d.]+)%", 85, 5),
    "node2vec.py --graph cora --epochs 12": Learned(r"probe ([\d.]+)%", 60, 3),
    "saint_reddit.py --synthetic --scale 0.005 --epochs 2": Learned(ACCURACY, 90, 3),
    "gps_skip_links.py": Learned(ACCURACY, 95, 3),
    "tgn_stream.py --events 100000": Learned(r"AUC ([\d.]+)", 0.75, 0.03),
}


@pytest.mark.parametrize("command", LEARNED)
def test_a_graph_example_learns_in_float16_as_in_float32(command: str, tmp_path: Path) -> None:
    expected, scores = LEARNED[command], []
    for flag in ("--use-fp16", "--no-use-fp16"):
        *lines, last = run_example(tmp_path, *command.split(), flag).splitlines()
        score = re.search(f"{expected.score}$", last)
        assert score is not None, last
        scores.append([float(each) for each in score.groups()])
        if expected.traces is not None:
            assert lines.pop() == expected.traces
        if expected.losses is not None:
            losses = numbers(r"^(?:epoch \d+  )?loss ([\d.]+)(?:  [\d.]+ s)?$", "\n".join(lines))
            assert len(losses) == len(lines) == expected.losses
            assert losses[-1] < expected.fall * losses[0]
    assert min(first for first, *_ in scores) > expected.least
    assert scores[0] == pytest.approx(scores[1], abs=expected.apart)


def test_the_reddit_example_learns_in_float16_as_in_float32(tmp_path: Path) -> None:
    losses = []
    for flag in ("--use-fp16", "--no-use-fp16"):
        *lines, last = run_example(tmp_path, "gat_reddit.py", flag, "--scale", "0.001", "--epochs", "20").splitlines()
        row = r"^epoch (\d+)  loss ([\d.]+|nan)  loss scale (\d+)  [\d.]+ s$"
        epochs, found, scales = zip(*re.findall(row, "\n".join(lines), re.MULTILINE), strict=True)
        assert list(map(int, epochs)) == list(range(1, len(lines) + 1)) == list(range(1, 21))
        losses.append(list(map(float, found)))
        assert (int(scales[-1]) > 1) == (flag == "--use-fp16")
        (accuracy,) = numbers(f"^{ACCURACY}$", last)
        assert accuracy > 60  # chance level: 25
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.01)
    assert max(run[-1] for run in losses) < 0.5 * losses[1][0]


def test_memory_of_a_temporal_graph_network_beats_none(tmp_path: Path) -> None:
    with_memory, without = (
        float(run_example(tmp_path, "tgn_stream.py", flag, "--events", "100000").split()[-1])
        for flag in ("--memory", "--no-memory")
    )
    assert with_memory > without + 0.15


def test_the_message_passing_example_agrees_with_itself_and_the_hub_is_right(tmp_path: Path) -> None:
    example = str(EXAMPLES / "message_passing.py")
    code = f"import runpy, warnings\nwarnings.simplefilter('error')\nrunpy.run_path({example!r}, run_name='__main__')"
    *lines, hub = run_python("-c", code, cwd=tmp_path).splitlines()
    assert hub == "hub 13160, by jax.ops.segment_sum 2048"
    row = r"^(\w+) +\((.*)\) float16, float16  largest ([\d.]+), difference ([\d.]+)$"
    found = re.findall(row, "\n".join(lines), re.MULTILINE)
    assert len(found) == len(lines)
    assert [each[:2] for each in found] == [("x", "30, 16"), ("hx", "100, 1"), ("gradient", "100, 1")]
    for *_, largest, difference in found:
        assert float(largest) > 1
        assert float(difference) < 2e-3 * float(largest)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("digits.py", "autocast_float16"),
        *(("amp_modes.py", mode) for mode in ("torch", "apex-O2", "apex-O3", "config.toml")),
    ],
)
def test_the_digits_examples_reach_their_accuracy(name: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[fp16]\nmode = "naive"\ninitial_scale = 65536.0\n')
    (accuracy,) = numbers(ACCURACY, run_example(tmp_path, name, option))
    assert accuracy > 97


def test_the_precision_schedule_that_is_stopped_in_both_phases_ends_with_the_same_bits(tmp_path: Path) -> None:
    example = "precision_schedule.py"
    whole = run_example(tmp_path, example, "whole").splitlines()[-1]
    for stop, compiled in (("130", 1), ("370", 2)):  # the switch is after step 360
        output = run_example(tmp_path, example, "parts", stop)
        assert output.count("compiling") == compiled
        assert output.splitlines()[-1].startswith(f"step {stop}  loss ")
    assert run_example(tmp_path, example, "parts").splitlines()[-1] == whole
    (accuracy,) = numbers(rf"^{ACCURACY}  parameters \w{{16}}$", whole)
    assert accuracy > 95


def test_the_nan_hunt_finds_the_line_and_its_rule_mends_it(tmp_path: Path) -> None:
    output = run_example(tmp_path, "nan_hunt.py")
    before, after = numbers(r"^loss ([\d.]+),", output)
    assert before > 3.4
    assert after < 0.1
    code = (EXAMPLES / "nan_hunt.py").read_text().splitlines()
    line = next(i for i, text in enumerate(code, 1) if "jnp.mean(x * x" in text)
    assert re.search(rf"^problem: overflow, forward pass,\s+.*nan_hunt.py:{line}\b", output, re.MULTILINE)
    assert max(map(len, output.splitlines())) <= 100


def test_the_reward_rises_in_float16_whose_mismatch_is_at_most_a_quarter_of_bfloat16s(tmp_path: Path) -> None:
    options = ("--dtypes", "bfloat16", "float16", "--steps", "70")
    output = run_example(tmp_path, "grpo_float16.py", *options, timeout=500)
    row = r"^(b?float16) +([\d.]+) to ([\d.]+) +([\d.e-]+) +([\d.]+)%"
    rows = {name: list(map(float, row)) for name, *row in re.findall(row, output, re.MULTILINE)}
    first, last, mismatch, within = rows["float16"]
    assert last > first + 0.08
    assert mismatch <= rows["bfloat16"][2] / 4
    assert within > rows["bfloat16"][3]


@pytest.mark.parametrize(
    ("command", "epochs"),
    [
        ("basic.py", 10),
        ("pmap_mnist.py --train-size 2048", 2),
        ("model_parallel.py", 10),
        ("model_parallel.py tensor", 10),
        ("sharded.py zero1 naive", 10),
        ("sharded.py fsdp torch", 10),
        ("pipeline.py", 10),
    ],
)
def test_a_data_parallel_example_loses_the_same_on_eight_devices_and_in_two_processes(
    command: str, epochs: int, tmp_path: Path
) -> None:
    name, *options = command.split()
    alone, launched = (
        numbers(r"epoch \d+  loss ([\d.]+)", run_example(tmp_path, f"data_parallel/{name}", *options, launch=launch))
        for launch in (False, True)
    )
    assert len(alone) == len(launched) == epochs  # by process 0 alone
    assert alone[-1] < 0.7 * alone[0]
    assert launched == pytest.approx(alone, rel=0.05, abs=2e-3)


def test_the_skewed_example_waits_or_gives_up(tmp_path: Path) -> None:
    command = ("data_parallel/skewed.py", "--delay", "20")
    output = run_example(tmp_path, *command, launch=True)
    assert numbers(r"process 0 waited ([\d.]+) s", output)[0] > 19
    code, text = launched(EXAMPLES / command[0], *command[1:], "--timeout", "5")
    assert code == 1
    assert "Timed out waiting 5000ms" in text
    assert "jmp-train: error: process 0 ended with exit code 1, then process 1 " in text


def test_the_mnist_example_is_float32s_but_for_three_lines(tmp_path: Path) -> None:
    half = (EXAMPLES / "mnist_amp.py").read_text()
    full, replaced = re.subn(r"# float32: (.*)\n.*# AMP$", r"\1", half, flags=re.MULTILINE)
    full, removed = re.subn(r"^.*# AMP; float32 does without\n", "", full, flags=re.MULTILINE)
    assert (replaced, removed, half.count("# AMP")) == (2, 1, 3)
    assert not re.search("float16|half|loss_scale", full.partition('"""\n\nimport')[2])
    write_mnist(tmp_path, train=520, test=50)
    losses = []
    for name, code in (("half.py", half), ("full.py", full)):
        (tmp_path / name).write_text(code)
        output = run_python(name, tmp_path, "1", cwd=tmp_path, PYTHONPATH=f"{EXAMPLES.parent}:{EXAMPLES}")
        losses += numbers(r"\Aepoch 1  loss ([\d.]+)  test accuracy [\d.]+%\n\Z", output)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert 0 < losses[1] < 2.6


def test_the_resnet_example_trains_in_a_mode_and_by_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[fp16]\nmode = "naive"\ninitial_scale = 1024.0\n')
    write_cifar(tmp_path, examples=8)
    sizes = ("--data-dir", ".", "--epochs", "1", "--batch-size", "8", "--train-size", "16")
    losses = []
    for precision, scale in ((("--mode", "float32"), 1), (("--config", "config.toml"), 1024)):
        output = run_example(tmp_path, "resnet34_cifar10.py", *sizes, *precision)
        row = rf"\Aepoch 1  loss ([\d.]+)  loss scale {scale}  skipped 0  [\d.]+ s  test accuracy [\d.]+%\n\Z"
        losses += numbers(row, output)
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["float32", "apex-O2"])
def test_the_vit_example_trains_on_a_folder(mode: str, tmp_path: Path) -> None:
    write_image_folder(tmp_path, train=16, val=4)
    options = ("--data-dir", ".", "--image-size", "16", "--batch-size", "8", "--epochs", "6")
    output = run_example(tmp_path, "vit_imagenet.py", *options, "--mode", mode, timeout=850)
    losses = numbers(r"epoch \d  loss ([\d.]+)  loss scale", output)
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0] < 0.5
    assert numbers(ACCURACY, output) == [100]
