"""The tables of `benchmarks/README.md` say what the files in `benchmarks/results` have, and no script is left out."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.quick

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TEXT = (BENCHMARKS / "README.md").read_text()
MODES = ("torch", "apex-O1", "apex-O2", "apex-O3", "naive")
POLICIES = ("float32", "mixed_float16", "autocast_float16")


def results(name: str) -> Any:
    report = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    assert report.pop("runs")
    return report


def row(name: str, text: str = TEXT) -> list[str]:
    """Returns the cells of the first row that begins with a name."""
    line, *others = re.findall(rf"^\| {name} \| (.*) \|$", text, re.MULTILINE)
    assert text is not TEXT or not others
    return line.split(" | ")


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def test_memory_in_the_amp_modes() -> None:
    steps = results("amp_memory")["steps"]
    assert {step["gpu"] for step in steps} == {"A100-40GB"}
    for task in {step["task"] for step in steps}:
        of = {step["mode"]: step for step in steps if step["task"] == task}
        shares = [f"{of[mode]['ratio']:.3f}" for mode in MODES]
        assert row(task)[1:] == [gigabytes(of["float32"]["peak_bytes"]), *shares]


def test_memory_of_the_gat() -> None:
    steps = results("gat_memory")["steps"]
    assert {step["gpu"] for step in steps} == {"V100-16GB"}
    for heads in {step["heads"] for step in steps}:
        of = {step["policy"]: step for step in steps if step["heads"] == heads}
        assert row(heads)[:3] == [gigabytes(of[policy]["peak_bytes"]) for policy in POLICIES]


def test_temporary_memory_of_message_passing() -> None:
    before, after = (results("graph_memory")[when] for when in ("before", "after"))
    for name in (
        "u_sub_v, sum",
        "u_sub_v, softmax",
        "batch, GATConv",
        "block, SAGEConv",
        "edge_conv, softmax",
        "gine, max",
    ):
        cells = [found[name][which] for found in (before, after) for which in ("forward", "gradient")]
        assert row(name) == [f"{x:.2f}" for x in cells]
    for name, cells in results("graph_memory")["denser"]["units"].items():
        rounds = ", 2 rounds" if name == "GatedGraphConv" else ""
        assert row(name + rounds)[2:] == [f"{cells[which]:.2f}" for which in ("forward", "gradient")]


def test_temporary_memory_on_a_gpu() -> None:
    for name, cells in results("graph_memory")["V100-16GB, float32"]["units"].items():
        assert row(f"V100: {name}") == [f"{cells[which]:.2f}" for which in ("forward", "gradient")]


def test_the_largest_batches() -> None:
    found = results("plan")["largest"]
    for case in {entry["case"] for entry in found}:
        of = {entry["gpu"]: entry for entry in found if entry["case"] == case}
        cells = row(f"{case}, {'nodes' if case == 'gat' else 'images'}")
        assert cells == [f"{of[gpu]['largest_batch']:,}" for gpu in ("V100-16GB", "A100-40GB", "H100-80GB")]
        for entry in of.values():
            assert entry["tried_batches"][str(entry["largest_batch"])] <= entry["usable_bytes"] < entry["next_bytes"]


def test_published_fits_are_planned_as_reported() -> None:
    published = results("plan_pods")["published"]
    assert {entry["fits"] for entry in published.values()} == {True, False}
    for name, entry in published.items():
        answers = ["fits" if entry[key] else "does not fit" for key in ("reported_fits", "fits")]
        sizes = [gigabytes(entry[key]) for key in ("needed_bytes", "usable_bytes")]
        assert row(name) == [*sizes, *answers, f"[report]({entry['source']})"]
        assert entry["fits"] == entry["reported_fits"]


def test_bytes_of_an_optimizers_state() -> None:
    for entry in results("optimizer_state")["bytes"]:
        for choice, found in entry["choices"].items():
            bytes_each = [f"{found[key]:.2f}" for key in ("bytes_a_parameter", "with_gradients")]
            peak = "" if found["peak_bytes"] is None else gigabytes(found["peak_bytes"])
            assert [cell.strip() for cell in row(f"{entry['model']}: {choice}")] == [*bytes_each, peak]
        least, most = (entry["choices"][name] for name in ("Kahan in int8, both int8", "master weights"))
        assert least["with_gradients"] <= most["with_gradients"] / 2


def test_accuracies_on_cora() -> None:
    report = results("planetoid")
    assert report["device"] == "cpu"
    for model, found in report["cora"].items():
        summary = found["summary"]
        assert row(model) == [
            str(found["published"]),
            *(f"{summary[p]['mean']:.1f} ± {summary[p]['deviation']:.1f}" for p in POLICIES),
        ]
        assert not any(any(summary[p]["skipped_steps"]) for p in POLICIES)


def test_rates_of_mini_batches() -> None:
    for name, rates in results("minibatch")["rates"].items():
        columns = ("loading", "step", "both", "PyG", "PyG, 1 worker")
        assert row(name) == [f"{rates[column]:.1f}" for column in columns]


def test_graph_operations_on_a_cpu() -> None:
    for name, forms in results("graphs")["seconds"]["20000x520000"].items():
        medians = [
            " / ".join(f"{1e3 * statistics.median(times):.1f}" for times in forms[form].values())
            for form in ("jmp_train", "jmp_train, native", "DGL")
        ]
        assert row(re.escape(name)) == medians


def test_products_in_8_and_4_bits() -> None:
    report = results("fp8")
    for way, peak in report["peak_bytes"].items():
        assert row(f"{way} layers") == [gigabytes(peak)]
    guide = (BENCHMARKS.parent / "docs" / "fp8.md").read_text()
    dense, experts = (report["models"][part] for part in ("dense", "mixtral"))
    plain = dense["bfloat16"]
    for way, found in dense.items():
        bits = [f"{x['bits_per_byte']:.3f} ± {x['deviation']:.3f}" if x else "-" for x in (found, experts.get(way))]
        ratios = [f"{found['stored_bytes'] / plain['stored_bytes']:.2f}"]
        ratios.append(f"{found['compile_cpu_seconds'] / plain['compile_cpu_seconds']:.1f}")
        errors = [] if way == "bfloat16" else found.get("loss_error", [])
        error = f"{statistics.mean(errors):.2%}" if errors else "-"
        assert row(way, guide) == [bits[0], error, *ratios, bits[1]]
    for way in ("Float8CurrentScaling", "Float8RowwiseScaling", "Int8RowwiseScaling", "NVFP4BlockScaling"):
        decibels = [f"{abs(rows[way]['product']):.1f}" for rows in report["signal_to_noise"].values()]
        assert f"| {way} | {' | '.join(decibels)} |" in guide


def test_every_script_and_every_result_is_named() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert scripts == set(re.findall(r"^\| `(\w+\.py)` \|", TEXT, re.MULTILINE))
    for path in (BENCHMARKS / "results").iterdir():
        script = "gpu" if path.stem.startswith("gpu_") else path.stem  # one file for each kind of device
        assert f"`{script}.py`" in TEXT
