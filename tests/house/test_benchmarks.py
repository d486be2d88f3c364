"""The benchmarks run, and what they print that is no time holds."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> str:
    command = (sys.executable, str(BENCHMARKS / name), *arguments)
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_has_no_more_instructions_than_one_by_hand_with_jmp(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    output = run("step_overhead.py", "--rounds", "1", "--steps", "1", "--json", str(file))
    assert all(name in output for name in ("jmp by hand", "flax DynamicScale", "no scaling"))
    instructions = json.loads(file.read_text())["instructions"]
    assert 0 < instructions["jmp_train"] <= instructions["jmp by hand"]


@pytest.mark.timeout(300)
def test_import_time_prints_both_and_their_ratio() -> None:
    output = run("import_time.py", "--runs", "1")
    assert re.search(r"import jax, flax, optax, jraph +\d\.\d+ s", output)
    assert re.search(r"import jmp_train +\d\.\d+ s", output)
    assert re.search(r"ratio \d\.\d+", output)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rows", "dtypes", "verdicts"),
    [
        (("copy+sum", "weighted sum, gradient", "edge softmax", "dot"), ("float32", "float16"), 2),
        pytest.param(("GAT step",), ("float32",), 2, marks=pytest.mark.slow),
    ],
)
def test_the_graph_benchmark_checks_what_it_times(
    tmp_path: Path, rows: tuple[str, ...], dtypes: tuple[str, ...], verdicts: int
) -> None:
    file = tmp_path / "graphs.json"
    options = ("--sizes", "200x3000", "--seconds", "0", "--libraries", "jmp_train", "jraph")
    output = run("graphs.py", *options, "--rows", *rows, "--dtypes", *dtypes, "--json", str(file))
    report = json.loads(file.read_text())
    results = report["seconds"]["200x3000"]
    assert tuple(results) == rows
    for title, forms in results.items():
        assert f"\n{title} " in output
        assert {"jmp_train", "jraph"} <= set(forms)
        assert all(len(forms["jmp_train"][dtype]) == 1 for dtype in dtypes)  # a reason is longer
        assert len(forms["jraph"]["float32"]) == 1
        assert report["summaries"]["200x3000"][title]["best_peer"][0].startswith("jraph")
    assert len(report["verdicts"]) == verdicts
    assert all(verdict in output for verdict in report["verdicts"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    output = run("gpu.py", "--tiny", "--rounds", "1", "--json", str(file))
    report = json.loads(file.read_text())["workloads"]["mnist"]
    assert report["batch"] == 8
    ours = {name: x for name, x in report["variants"].items() if name.startswith("jmp_train")}
    assert list(ours) == [f"jmp_train {p}" for p in ("float32", "tf32", "float16", "bfloat16")]
    first = ours["jmp_train float32"]
    for name, result in ours.items():
        assert name in output
        assert len(result["step_ms"]) == 1
        assert result["step_ms"][0] == result["median_ms"] > 0
        assert (result["device"], result["memory_of"]) == ("cpu", "process")
        assert result["memory_mb"] > result["program_mb"] > 100
        assert result["of_the_memory"] == result["memory_mb"] / first["memory_mb"]
        assert result["loss"] == pytest.approx(first["loss"], rel=0.05)
    assert "2.3 times as fast, 0.63 of the memory" in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_gpu_benchmark_makes_gat_steps_on_a_graph_made_once(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    options = ("--workloads", "gat", "--precisions", "float32", "--rounds", "1")
    output = run("gpu.py", "--tiny", *options, "--json", str(file))
    assert output.count("gat: made its data in") == 1
    report = json.loads(file.read_text())["workloads"]["gat"]
    assert report["scale"] == 0.0005
    ours = report["variants"]["jmp_train float32"]
    assert (ours["nodes"], ours["edges"], ours["part"]) == (116, 1784, 1)  # loops included
    assert ours["step_ms"] == [ours["median_ms"]]
    assert ours["memory_mb"] > ours["program_mb"] > 0
    assert 0.5 < ours["loss"] < 3
    assert "jmp_train float32  " in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gpu_benchmark_times_each_graph_operation(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    output = run(
        "gpu.py", "--tiny", "--workloads", "graph-ops", "--rounds", "1", "--json", str(file)
    )
    report = json.loads(file.read_text())["workloads"]["graph-ops"]
    assert report["edges"] == 4000
    for way in ("jmp_train streaming", "jmp_train xla", "jraph"):
        for precision in ("float32", "float16", "bfloat16"):
            rows = report["variants"][f"{way} {precision}"]["rows"]
            assert len(rows) == 5
            for title, row in rows.items():
                assert f"\n{title} " in output
                assert row["ms"] > 0
                assert row["extra_mb"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_autocast_benchmark_stays_within_its_bounds(tmp_path: Path) -> None:
    file = tmp_path / "autocast.json"
    output = run("autocast.py", "--tiny", "--rounds", "1", "--json", str(file))
    report = json.loads(file.read_text())
    assert report["rounds"] == 1
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
    assert all(f"\n{i}. " in output for i in (1, 2, 3, 4))
