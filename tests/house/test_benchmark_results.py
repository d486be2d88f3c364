"""The tables of `benchmarks/README.md` say what the files in `benchmarks/results` have, and no script is left out."""

import json
import math
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


def row(name: str) -> list[str]:
    """Returns the cells of the row that begins with a name."""
    (line,) = re.findall(rf"^\| {name} \| (.*) \|$", TEXT, re.MULTILINE)
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


def test_gpt2_small_stores_neither_all_scores_nor_all_logits() -> None:
    steps = [step for step in results("amp_memory")["steps"] if step["task"] == "gpt2-small"]
    assert [step["mode"] for step in steps] == ["float32", *MODES]
    for step in steps:
        _, *shape = step["largest_array"]
        assert math.prod(shape) < 8 * 12 * 1024 * 1024 / 2


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


def test_plans_from_one_chip_to_a_pod() -> None:
    """The table; and weak scaling: chips compute the same, and a ring sends 2 (n - 1) / n of the gradients."""
    scaling = results("plan_pods")["scaling"]
    times = ("products_seconds", "compute_seconds", "link_seconds", "between_hosts_seconds")
    for name, entry in scaling.items():
        cells = [
            *map(gigabytes, (entry["peak_bytes"], entry["usable_bytes"])),
            *(f"{1e3 * entry[x]:.2f}" for x in times),
        ]
        assert row(name) == [*cells, f"{entry['plan_cpu_seconds']:.0f} s"]
    for entry in scaling.values():
        one = next(x for x in scaling.values() if x["device"][:3] == entry["device"][:3] and x["devices"] == 1)
        assert entry["products_seconds"] == pytest.approx(one["products_seconds"], rel=1e-3)
        if "fsdp" not in entry["placement"]:
            n, hosts = entry["devices"] // entry["hosts"], entry["hosts"]
            gradients = one["parameter_bytes"]  # float32
            assert entry["sent_bytes"] == pytest.approx(2 * (n - 1) / n * gradients, rel=0.01)
            between = 2 * (hosts - 1) / hosts * gradients / n
            assert entry["sent_between_hosts"] == pytest.approx(between, rel=0.01)


def test_searches_for_a_placement() -> None:
    for name, entry in results("plan_pods").get("search", {}).items():
        counts = [str(entry[key]) for key in ("compiled", "cut")]
        assert row(f"search, {name}") == [entry["fastest"], *counts, f"{entry['plan_cpu_seconds']:.0f} s"]
        assert entry["compiled"] == len(entry["rows"]) <= 40
        fitting = [x for x in entry["rows"] if x["fits"]]
        fastest = min(fitting, key=lambda x: x["step_seconds_bound"])
        assert entry["fastest"] == f"{fastest['device']}, {fastest['placement']}"


def test_published_fits_are_planned_as_reported() -> None:
    published = results("plan_pods")["published"]
    assert {entry["fits"] for entry in published.values()} == {True, False}
    for name, entry in published.items():
        answers = ["fits" if entry[key] else "does not fit" for key in ("reported_fits", "fits")]
        sizes = [gigabytes(entry[key]) for key in ("needed_bytes", "usable_bytes")]
        assert row(name) == [*sizes, *answers, f"[report]({entry['source']})"]
        assert entry["fits"] == entry["reported_fits"]


def test_plans_have_the_memory_that_libtpu_reports() -> None:
    for name, entry in results("plan_pods")["tasks"].items():
        parts, own = entry["peak_bytes"] - entry["constant_bytes"], entry["libtpu_bytes"]
        sizes = (entry[key] for key in ("peak_bytes", "constant_bytes", "libtpu_bytes"))
        assert row(name) == [*(f"{size / 1e6:,.3f}" for size in sizes), f"{parts / own - 1:+.2%}"]
        assert parts == pytest.approx(own, rel=0.01)


def test_bytes_of_an_optimizers_state() -> None:
    for entry in results("optimizer_state")["bytes"]:
        for choice, found in entry["choices"].items():
            bytes_each = [f"{found[key]:.2f}" for key in ("bytes_a_parameter", "with_gradients")]
            peak = "" if found["peak_bytes"] is None else gigabytes(found["peak_bytes"])
            assert [cell.strip() for cell in row(f"{entry['model']}: {choice}")] == [*bytes_each, peak]
        least, most = (entry["choices"][name] for name in ("Kahan in int8, both int8", "master weights"))
        assert least["with_gradients"] <= most["with_gradients"] / 2


def test_small_state_compiles_in_less_than_twice_the_time() -> None:
    compiled = results("optimizer_state")["compile"]["optimizers"]
    seconds = {name: found["trace_s"] + found["compile_s"] for name, found in compiled.items()}
    for name, found in compiled.items():
        ratio = seconds[name] / seconds["Adam"]
        size = f"{found['donated_bytes'] / 1e6:.1f} MB"
        cells = [f"{found['compiled_lines']:,}", f"{seconds[name]:.1f} s", f"{ratio:.2f}", size]
        assert row(f"compiled, {name}") == cells and ratio < 2


def test_what_is_learned_with_small_state_is_within_the_noise_of_seeds() -> None:
    training = results("optimizer_state")["training"]
    for choice in training[0]["choices"]:
        found = [entry["choices"].get(choice, {}).get("losses") for entry in training]
        cells = ["" if x is None else f"{statistics.mean(x):.4f} ± {statistics.stdev(x):.4f}" for x in found]
        assert [cell.strip() for cell in row(f"trained, {choice}")] == cells
    for entry in training:
        losses = {choice: found["losses"] for choice, found in entry["choices"].items()}
        for choice in ("nu bfloat16", "both int8", "Kahan", "Kahan, both int8"):
            if choice in losses:
                more = statistics.mean(losses[choice]) - statistics.mean(losses["float32"])
                assert more < statistics.stdev(losses["float32"])


def test_rules_found_by_trials() -> None:
    for name, found in results("tune")["cases"].items():
        seconds = [f"{found['compile_seconds']:.1f} s", f"{found['seconds']:.2f} s"]
        rates = [f"{found['trials_a_second']:.1f}", f"{found['peer_trials_a_second']:.2f}", str(found["entries"])]
        shares = [" to ".join(f"{x:.1%}" for x in found[key]) for key in ("half_flops", "half_elements")]
        assert row(f"{name}, tuned") == [*seconds, *rates, *shares]


def test_models_that_half_precision_breaks_and_tuned_rules_mend() -> None:
    def off(error: float | None) -> str:
        return "inf" if error is None else f"{error:.1e}"

    breaking = results("tune")["breaking"]
    assert len(breaking) == 8
    for name, found in breaking.items():
        half, tuned = found["all half"], found["tuned"]
        errors = [f"{off(half[key])} to {off(tuned[key])}" for key in ("loss_error", "gradient_error")]
        fractions = [f"{half[key]:.1%} to {tuned[key]:.1%}" for key in ("half_flops", "half_elements")]
        kept = ", ".join(found["entries"]) or "nothing"
        assert row(f"{name}, mended") == [*errors, *fractions, str(found["trials"]), kept]
        assert found["holds"]
        assert half["gradient_error"] is None or half["gradient_error"] > 3 * tuned["gradient_error"]


def test_what_a_diagnosis_costs() -> None:
    report = results("diagnose")
    reports = report.pop("growth")["megabytes"]
    assert reports[-1] - reports[0] < 200
    assert f"{reports[0]:.0f} to {reports[-1]:.0f} MB" in TEXT
    for name, found in report.items():
        step, diagnosis = found["step"], found["diagnosis"]
        compiled = step["compile_cpu_seconds"]
        times = (diagnosis["compile_cpu_seconds"] / compiled, found["first_report_cpu_seconds"] / compiled)
        clock, memory = f"{found['first_report_seconds']:.0f} s", f"{diagnosis['megabytes'] / step['megabytes']:.1f}"
        cells = [f"{found['operations']:,}", f"{compiled:.1f} s", *(f"{x:.1f}" for x in times), clock, memory]
        assert row(f"{name}, diagnosed") == cells and times[0] < 3


def test_training_beside_cached_inference() -> None:
    report = results("parity")
    assert report["device"] == "cpu"
    for name, seeds in report["seeds"].items():
        means = {key: sum(seed[key] for seed in seeds) / len(seeds) for key in seeds[0]}
        each = ", ".join(f"{seed['mean']:.1e}" for seed in seeds)
        shares = [f"{means[key]:.1%}" for key in ("0.1%", "1%")]
        numbers = [f"{means[key]:.1e}" for key in ("KL (k3)", "op by op")]
        assert row(f"parity, {name}") == [each, f"{means['99%']:.1e}", *shares, *numbers]
    half, brain = ([seed["mean"] for seed in report["seeds"][name]] for name in ("float16", "bfloat16"))
    assert all(x <= y / 4 for x, y in zip(half, brain, strict=True))
    assert len(half) == 3


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


def test_gaps_with_and_without_a_float32_end() -> None:
    for task, found in results("precision_schedule").items():
        for policy, result in found["policies"].items():
            cells = [f"{mean:+.2f} ± {error:.2f} %" for mean, error in result["percent"].values()]
            assert row(f"{task}, {policy}") == cells


def test_layers_in_8_bits() -> None:
    report = results("fp8")
    mean = {way: sum(runs) / len(runs) for way, runs in report["bits_per_byte"].items()}
    for way, bits in mean.items():
        difference = bits - mean["bfloat16"]
        assert row(f"{way} layers") == [f"{bits:.4f}", f"{difference:+.4f}", gigabytes(report["peak_bytes"][way])]
        assert difference < 0.03


def test_every_script_and_every_result_is_named() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert scripts == set(re.findall(r"^\| `(\w+\.py)` \|", TEXT, re.MULTILINE))
    for path in (BENCHMARKS / "results").iterdir():
        script = "gpu" if path.stem.startswith("gpu_") else path.stem  # one file for each kind of device
        assert f"`{script}.py`" in TEXT
