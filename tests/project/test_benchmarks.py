"""The benchmarks run, and what they print, but for times, holds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from process_helpers import run_python

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# The options by which a script is short, and what it prints.
SHORT = {
    "walks.py": ("--nodes 300 --edges 2000 --walks 200 --length 5 --rounds 1", "plain Python, p=0.5, q=2"),
    "graph_building.py": ("--nodes 50 --edges 1000 --rounds 1", "medians of CPU seconds"),
    "graph_batches.py": ("--graphs 20 --batch-size 4 --batches 3", "milliseconds per batch of 4 graphs"),
    "diagnose.py": ("--tiny --rounds 1", r"(?m)^gat +\d+ "),
    "optimizer_state.py": ("--tiny --seeds 1 --choices float32", r"(?m)^float32 +\d"),
    "tune.py": ("--tiny --rounds 1 --cases terrain critic", r"(?m)^critic +float32 .*\n +all half .* inf .*\n +tuned "),
    "precision_schedule.py": ("--epochs 4 --seeds 1 --policies bfloat16", r"(?m)^bfloat16 +evaluated in half [+-]\d"),
    "checkpoint.py": ("--states 40x1 --rounds 1", "orbax"),
    "minibatch.py": (
        "--size 300x2000 --batch-size 16 --seconds 0 --rounds 1 --models gat --policies mixed_float16",
        "keeps (ahead|BEHIND)",
    ),
    "graphs.py": ("--sizes 200x3000 --seconds 0 --libraries jmp_train jraph --rows dot --dtypes float32", r"\ndot "),
    "plan_pods.py": ("--tiny --parts published", "does not fit"),
}


def measured(folder: Path, script: str, options: str, timeout: float = 280, **environment: Any) -> tuple[str, Any]:
    """Returns what a benchmark prints, and its results."""
    file = folder / "results.json"
    output = run_python(BENCHMARKS / script, *options.split(), "--json", file, timeout=timeout, **environment)
    return output, json.loads(file.read_text())


@pytest.mark.parametrize("script", SHORT)
def test_a_script_prints_what_it_measured(script: str, tmp_path: Path) -> None:
    options, printed = SHORT[script]
    output, report = measured(tmp_path, script, options, timeout=580)
    assert re.search(printed, output), output
    assert report


def test_a_step_has_no_more_instructions_than_one_by_hand_with_jmp(tmp_path: Path) -> None:
    _, report = measured(tmp_path, "step_overhead.py", "--rounds 1 --steps 1")
    instructions = report["instructions"]
    assert 0 < instructions["jmp_train"] <= instructions["jmp by hand"]
    _, report = measured(tmp_path, "step_overhead.py", "--sums --rounds 1")
    assert report["products by hand"]["instructions"] == report["products policy"]["instructions"]


def test_sparse_features_have_the_gradients_of_all_zeros(tmp_path: Path) -> None:
    _, report = measured(tmp_path, "sparse_features.py", "--rounds 1")
    for dtype, bound in (("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)):
        assert report[dtype]["differ"] < bound


def test_shares_of_features_send_less_than_other_programs_and_half_in_half(tmp_path: Path) -> None:
    _, report = measured(tmp_path, "sharded_features.py", "--devices 4 --nodes 4000 --reads 800 --rounds 1")
    full, half = (
        {name: row["sent_mb"] for name, row in report["results"][dtype].items()} for dtype in ("float32", "float16")
    )
    assert report["least_mb"] < full["shard_features"] < 1.4 * report["least_mb"]
    assert 2 * full["shard_features"] < full["reduce-scatter"] < full["array[ids]"]
    assert 0.5 < half["shard_features"] / full["shard_features"] < 0.52  # ids are as long in both


def test_memory_of_messages_is_measured_in_arrays_of_edges_by_features(tmp_path: Path) -> None:
    _, report = measured(tmp_path, "graph_memory.py", "--size 500x20000 --only built_in layers --messages copy_u")
    units = report["CPU, float32"]["units"]
    assert {"copy_u, sum", "u_mul_e, one weight, sum", "GraphConv", "SAGEConv pool"} <= set(units)
    assert all(0 <= found["forward"] <= found["gradient"] for found in units.values())


def test_training_is_compared_with_cached_inference(tmp_path: Path) -> None:
    _, report = measured(tmp_path, "parity.py", "--seeds 1 --steps 2")
    means = {name: seed["mean"] for name, (seed,) in report["seeds"].items()}
    assert means["float32"] < 1e-5
    assert means["float32"] < means["float16"] < means["bfloat16"] / 4


def test_the_language_model_is_trained_in_8_bits(tmp_path: Path) -> None:
    _, report = measured(tmp_path, "fp8.py", "--steps 3 --seeds 1 --parts dense --ways bfloat16 DelayedScaling")
    bfloat16, fp8 = report["models"]["dense"].values()
    assert 5 < bfloat16["bits_per_byte"] < 8  # of 256 bytes, in the beginning
    assert abs(fp8["bits_per_byte"] - bfloat16["bits_per_byte"]) < 0.1
    assert fp8["stored_bytes"] < 0.9 * bfloat16["stored_bytes"]
    assert 0.9 < fp8["flops_in_few_bits"] < 1


def test_a_parallel_step_is_the_one_written_by_hand(tmp_path: Path) -> None:
    # Instructions of programs as users have.
    _, report = measured(tmp_path, "scaling.py", "--devices 1 2 --rounds 1 --steps 1", XLA_FLAGS="")
    for devices, result in report["devices"].items():
        losses = list(result["losses"].values())
        assert losses == pytest.approx([losses[0]] * 5, rel=1e-4)
        counts = result["instructions"]
        # On one device XLA drops the reductions, and copies what was before them into each fusion that is after them.
        assert 0 < counts["data_parallel"] <= (1.5 if devices == "1" else 1.03) * counts["by hand"]


def test_import_time_prints_both_and_their_ratio() -> None:
    output = run_python(BENCHMARKS / "import_time.py", "--runs", "1")
    assert re.search(r"ratio \d\.\d+", output)


def test_the_autocast_benchmark_stays_within_its_bounds(tmp_path: Path) -> None:
    _, report = measured(tmp_path, "autocast.py", "--tiny --rounds 1")
    for half in ("float16", "bfloat16"):
        by_hand, ours = report["hlo"][f"by hand {half}"], report["hlo"][f"autocast {half}"]
        assert 0 < ours["instructions"] <= 1.05 * by_hand["instructions"]
        assert 0 < ours["converts"] <= 1.05 * by_hand["converts"]
    for name in ("ViT-B/16", "mnist"):
        kept = report["residual_bytes"][name]
        assert 0 < kept["autocast"] <= 0.6 * kept["float32"]
    for variants in report["steps"].values():
        losses = [variants[f"jax {way}"]["loss"] for way in ("float32", "by hand", "autocast")]
        assert losses == pytest.approx([losses[0]] * 3, rel=0.02)
