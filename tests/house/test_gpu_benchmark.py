"""`benchmarks/gpu.py`: its parts, its file of results, its goals, and runs on a CPU."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_runs import BENCHMARKS, measured

pytestmark = pytest.mark.quick
MACHINE = {"device": "NVIDIA H100 80GB HBM3", "devices": 1, "driver": "580.1", "versions": {"jax": "0.11.2"}}


@pytest.fixture(name="gpu", scope="module")
def fixture_gpu() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", BENCHMARKS / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(way: str, precision: str, ms: float, **more: Any) -> dict[str, dict[str, Any]]:
    """Returns a variant's results by its label."""
    about = {"way": way, "precision": precision, "part": 1.0, "step_ms": [ms, 9.0, ms], "median_ms": ms}
    return {f"{way} {precision}": about | more}


def test_each_variant_is_in_a_part_and_each_part_is_short(gpu: Any) -> None:
    left = {name: {x.label for x in workload.variants} for name, workload in gpu.WORKLOADS.items()}
    for part in gpu.PARTS.values():
        assert part.minutes < 9
        found = [x for x in gpu.WORKLOADS[part.workload].variants if x.way.startswith(part.ways)]
        found = [x.label for x in found if x.precision in part.precisions]
        assert found
        left[part.workload] -= set(found)
    assert not any(left.values()), left


def test_a_part_is_run_once_for_a_machine(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_part(name: str, *_: Any) -> dict[str, Any]:
        ran.append(name)
        if len(ran) == 2:
            raise KeyboardInterrupt  # what has ended is in the file by then
        return {"variants": result("jmp_train", "float32", 2.0)}

    monkeypatch.setattr(gpu, "run_part", run_part)
    file = tmp_path / "deep" / "gpu.json"
    args = argparse.Namespace(again=False, tiny=True, precisions=("float32",), rounds=1, minutes=60.0)
    names = ["mnist", "gat", "graph-ops"]

    def run(machine: Any = MACHINE, **options: Any) -> list[str]:
        ran.clear()
        ran.extend(["before"] * 2)
        gpu.run_parts(names, argparse.Namespace(**{**vars(args), **options}), machine, file)
        return ran[2:]

    with pytest.raises(KeyboardInterrupt):
        gpu.run_parts(names, args, MACHINE, file)
    assert list(json.loads(file.read_text())["parts"]) == ["mnist"]
    assert run() == ["gat", "graph-ops"]
    assert run() == []
    assert run(again=True) == names
    newer = {**MACHINE, "driver": "590.2"}
    assert run(newer, minutes=5.0) == ["mnist"]  # one at least; of the others none is sure to end in time
    assert run(newer, minutes=8.0) == ["gat", "graph-ops"]
    report = json.loads(file.read_text())
    assert report["driver"] == "590.2"
    assert [part["machine"]["driver"] for part in report["parts"].values()] == ["590.2"] * 3
    assert [path.name for path in file.parent.iterdir()] == ["gpu.json"]


def test_goals_are_computed_from_the_figures(gpu: Any) -> None:
    rows = {"float32": {"dot": {"ms": 3.0}, "sum": {"ms": 1.0}}, "float16": {"dot": {"ms": 2.0}, "sum": {"ms": 2.0}}}
    parts: dict[str, Any] = {
        "mnist": result("jmp_train", "float16", 2.0, times_as_fast=2.4)
        | result("jmp_train", "bfloat16", 2.5, times_as_fast=2.2)
        | result("torch compile", "float16", 3.0)
        | {"torch compile bfloat16": {"failed": "left out for lack of time"}},
        "gat": result("jmp_train", "float32", 8.0, edges=100) | result("jmp_train", "float16", 5.0, edges=100),
        "gat-pyg": result("PyG eager", "float32", 4.0, edges=10),
        "gat-pyg-compile": result("PyG compile", "float32", 1.0, edges=5),
        "graph-ops": result("jmp_train xla", "float32", 4.0, rows=rows["float32"])
        | result("jmp_train xla", "float16", 4.0, rows=rows["float16"]),
    }
    goals = gpu.goals_of({"parts": {name: {"variants": variants} for name, variants in parts.items()}})
    assert [goal.as_json()["is_met"] for goal in goals] == [False, True, False, False]
    assert goals[0].figures == {"float16": 2.4, "bfloat16": 2.2}
    assert goals[1].figures == {"float16": 1.5}
    assert goals[2].figures == {"float32": pytest.approx(0.08 / 0.2)}
    assert goals[3].figures == {
        "mnist jmp_train float16": 2.4,
        "mnist jmp_train bfloat16": 2.2,
        "dot jmp_train xla float16": 1.5,
        "sum jmp_train xla float16": 0.5,
    }
    assert goals[0].line().startswith("MISSED: MNIST's network in half 2.3 times as fast")
    assert goals[0].line().endswith(": bfloat16 2.20")
    assert [goal.as_json()["is_met"] for goal in gpu.goals_of({"parts": {}})] == [None] * 4


def test_results_are_named_by_the_device(gpu: Any) -> None:
    assert gpu.results_file(MACHINE["device"]) == BENCHMARKS / "results" / "gpu_nvidia_h100_80gb_hbm3.json"


def of_jmp_train(report: Any) -> dict[str, Any]:
    """Returns the variants of a part that are ours."""
    return {name: found for name, found in report["variants"].items() if name.startswith("jmp_train")}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    output, report = measured(tmp_path, "gpu.py", "--tiny", "--parts", "mnist", "--rounds", "1")
    report = report["parts"]["mnist"]
    assert report["batch"] == 8
    ours = of_jmp_train(report)
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


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("workload", "batch"), [("resnet34", 4), ("vit-b16", 2)])
def test_the_gpu_benchmark_makes_steps_in_amp_modes(tmp_path: Path, workload: str, batch: int) -> None:
    part = f"{workload}-apex"
    options = ("--parts", part, "--rounds", "1", "--precisions", "float32", "apex-O2")
    output, report = measured(tmp_path, "gpu.py", "--tiny", *options)
    report = report["parts"][part]
    assert report["batch"] == batch
    ours = of_jmp_train(report)
    assert list(ours) == ["jmp_train float32", "jmp_train apex-O2"]
    first = ours["jmp_train float32"]
    for name, result in ours.items():
        assert f"\n{name} " in output
        assert result["step_ms"] == [result["median_ms"]]
        assert result["of_the_memory"] == result["memory_mb"] / first["memory_mb"]
        assert result["loss"] == pytest.approx(first["loss"], rel=0.1)
    assert first["skipped_steps"] == 0
    assert f"\n{report['note']}\n" in output


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_gpu_benchmark_makes_gat_steps_on_a_graph_made_once(tmp_path: Path) -> None:
    options = ("--parts", "gat", "gat-pyg", "--precisions", "float32", "--rounds", "1", "--minutes", "60")
    output, report = measured(tmp_path, "gpu.py", "--tiny", *options)
    assert output.count("gat: made its data in") == 1
    report = report["parts"]["gat"]
    assert report["scale"] == 0.0005
    ours = report["variants"]["jmp_train float32"]
    assert (ours["nodes"], ours["edges"], ours["part"]) == (116, 1784, 1)  # self-loops included
    assert ours["step_ms"] == [ours["median_ms"]]
    assert ours["memory_mb"] > ours["program_mb"] > 0
    assert 0.5 < ours["loss"] < 3
    assert "jmp_train float32  " in output


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_gpu_benchmark_times_each_graph_operation(tmp_path: Path) -> None:
    options = ("--parts", "graph-ops", "graph-ops-peers", "--rounds", "1", "--minutes", "60")
    output, report = measured(tmp_path, "gpu.py", "--tiny", *options)
    parts = report["parts"]
    assert [part["edges"] for part in parts.values()] == [4000, 4000]
    variants = parts["graph-ops"]["variants"] | parts["graph-ops-peers"]["variants"]
    for way in ("jmp_train chunked", "jmp_train xla", "jraph"):
        for precision in ("float32", "float16", "bfloat16"):
            rows = variants[f"{way} {precision}"]["rows"]
            assert len(rows) == 5
            for title, row in rows.items():
                assert f"\n{title} " in output
                assert row["ms"] > 0
                assert row["extra_mb"] > 0


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_part_runs_and_none_twice(gpu: Any, tmp_path: Path) -> None:
    options = ("--tiny", "--rounds", "1", "--precisions", "float32", "--minutes", "60")
    (first, _), (second, report) = (measured(tmp_path, "gpu.py", *options, timeout=1000) for _ in range(2))
    assert list(report["parts"]) == list(gpu.PARTS)
    for name, part in report["parts"].items():
        assert part["variants"] or part["absent"], name
        for label, variant in part["variants"].items():
            assert variant.get("median_ms", 0) > 0, f"{label}: {variant}"
        assert f"{name}: is there already\n" not in first
        assert f"{name}: is there already\n" in second
    assert report["device"] == "cpu"
    assert report["versions"]["jax"]
