"""What `benchmarks/gpu.py` does beside measuring: its parts, its file of results, and its goals."""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"device": "NVIDIA H100 80GB HBM3", "devices": 1, "driver": "580.1", "versions": {"jax": "0.11.2"}}


@pytest.fixture(name="gpu", scope="module")
def fixture_gpu() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("gpu_benchmark", BENCHMARKS / "gpu.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
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


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_part_runs_and_none_twice(gpu: Any, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    options = ("--tiny", "--rounds", "1", "--precisions", "float32", "--minutes", "60", "--json", str(file))
    command = (sys.executable, str(BENCHMARKS / "gpu.py"), *options)
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=1000).stdout for _ in range(2)
    )
    report = json.loads(file.read_text())
    assert list(report["parts"]) == list(gpu.PARTS)
    for name, part in report["parts"].items():
        assert part["variants"] or part["absent"], name
        for label, variant in part["variants"].items():
            assert variant.get("median_ms", 0) > 0, f"{label}: {variant}"
        assert f"{name}: is there already\n" not in first
        assert f"{name}: is there already\n" in second
    assert report["device"] == "cpu"
    assert report["versions"]["jax"]
