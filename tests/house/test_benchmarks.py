"""The benchmarks run, and what they print, but for times, holds."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planetoid_files import write_planetoid
from promotion import relaxed

import jmp_train as jt
from jmp_train.task import Task
from jmp_train.tasks.models import Accuracy
from jmp_train.tasks.models.convolution import ResNet
from jmp_train.tasks.models.vision_transformer import VisionTransformer

pytestmark = pytest.mark.quick

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(name: str, *arguments: str, timeout: float = 280, **environment: str) -> str:
    command = (sys.executable, str(BENCHMARKS / name), *arguments)
    env = os.environ | environment
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_step_has_no_more_instructions_than_one_by_hand_with_jmp(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    output = run("step_overhead.py", "--rounds", "1", "--steps", "1", "--json", str(file))
    assert all(name in output for name in ("jmp by hand", "flax DynamicScale", "no scaling"))
    instructions = json.loads(file.read_text())["instructions"]
    assert 0 < instructions["jmp_train"] <= instructions["jmp by hand"]


@pytest.mark.full
def test_parameters_and_state_alone_decide_that_a_published_model_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "pods.json"
    output = run("plan_pods.py", "--tiny", "--parts", "published", "--json", str(file))
    (name,) = json.loads(file.read_text())["published"]
    found = json.loads(file.read_text())["published"][name]
    assert name in output
    assert found["needed_bytes"] == pytest.approx(3 * 4 * 1.5576e9, rel=0.005), "of GPT-2 with 1,558 million parameters"
    assert not found["fits"]


@pytest.mark.full
def test_steps_of_walks_are_counted_beside_plain_python(tmp_path: Path) -> None:
    file = tmp_path / "walks.json"
    sizes = ("--nodes", "300", "--edges", "2000", "--walks", "200", "--length", "5", "--rounds", "1")
    output = run("walks.py", *sizes, "--json", str(file))
    assert "plain Python, p=0.5, q=2" in output
    rates = json.loads(file.read_text())["steps_per_second"]
    assert len(rates) == 7
    assert all(value > 0 for each in rates.values() for value in each.values())


@pytest.mark.full
@pytest.mark.timeout(300)
def test_how_long_graphs_take_to_build_is_measured_beside_a_sort(tmp_path: Path) -> None:
    file = tmp_path / "building.json"
    output = run("graph_building.py", "--nodes", "50", "--edges", "1000", "--rounds", "1", "--json", str(file))
    assert "medians of CPU seconds" in output
    assert [len(times) for times in json.loads(file.read_text())["seconds"].values()] == [1] * 5


@pytest.mark.full
@pytest.mark.timeout(300)
def test_batches_of_small_graphs_are_timed_beside_those_of_jraph(tmp_path: Path) -> None:
    file = tmp_path / "batches.json"
    output = run("graph_batches.py", "--graphs", "20", "--batch-size", "4", "--batches", "3", "--json", str(file))
    assert "milliseconds per batch of 4 graphs" in output
    ways = json.loads(file.read_text())["ways"]
    assert len(ways) == 4 and all(way["clock_ms"] > 0 and way["cpu_ms"] > 0 for way in ways.values())


@pytest.mark.full
@pytest.mark.timeout(300)
def test_sparse_features_have_the_gradients_of_all_zeros(tmp_path: Path) -> None:
    file = tmp_path / "sparse.json"
    assert "gradients differ by" in run("sparse_features.py", "--rounds", "1", "--json", str(file))
    report = json.loads(file.read_text())
    for dtype, bound in (("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)):
        assert report[dtype]["differ"] < bound


@pytest.mark.full
@pytest.mark.timeout(300)
def test_shares_of_features_send_less_than_other_programs_and_half_in_half(tmp_path: Path) -> None:
    file = tmp_path / "shares.json"
    options = ("--devices", "4", "--nodes", "4000", "--reads", "800", "--rounds", "1", "--json", str(file))
    assert "float16  shard_features  sends" in run("sharded_features.py", *options)
    report = json.loads(file.read_text())
    full, half = (
        {name: row["sent_mb"] for name, row in report["results"][dtype].items()} for dtype in ("float32", "float16")
    )
    assert report["least_mb"] < full["shard_features"] < 1.4 * report["least_mb"]
    assert 2 * full["shard_features"] < full["reduce-scatter"] < full["array[ids]"]
    assert 0.5 < half["shard_features"] / full["shard_features"] < 0.52  # ids are as long in both


@pytest.mark.full
@pytest.mark.timeout(300)
def test_memory_of_messages_is_measured_in_arrays_of_edges_by_features(tmp_path: Path) -> None:
    file = tmp_path / "graph_memory.json"
    options = ("--size", "500x20000", "--only", "built_in", "layers", "--messages", "copy_u", "--json", str(file))
    output = run("graph_memory.py", *options)
    report = json.loads(file.read_text())["CPU, float32"]
    units = report["units"]
    assert {"copy_u, sum", "u_mul_e, one weight, sum", "GraphConv", "SAGEConv pool"} <= set(units)
    assert all(0 <= found["forward"] <= found["gradient"] for found in units.values())
    assert re.search(rf"^copy_u, sum +{units['copy_u, sum']['forward']:.3f} ", output, re.MULTILINE)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_training_is_compared_with_cached_inference(tmp_path: Path) -> None:
    file = tmp_path / "parity.json"
    run("parity.py", "--seeds", "1", "--steps", "2", "--json", str(file))
    found = json.loads(file.read_text())["seeds"]
    means = {name: seed["mean"] for name, (seed,) in found.items()}
    assert means["float32"] < 1e-5
    assert means["float32"] < means["float16"] < means["bfloat16"] / 4


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_a_diagnosis_costs_is_measured_beside_the_step(tmp_path: Path) -> None:
    file = tmp_path / "diagnose.json"
    output = run("diagnose.py", "--tiny", "--rounds", "1", "--json", str(file), timeout=580)
    report = json.loads(file.read_text())
    for name in ("mnist", "vit-tiny", "gat"):
        assert report[name]["operations"] > 500
        # No times: the most that its arrays took.
        assert report[name]["diagnosis"]["megabytes"] < 5 * report[name]["step"]["megabytes"]
        assert re.search(rf"^{name} +\d+ ", output, re.MULTILINE)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_language_model_is_trained_in_8_bits(tmp_path: Path) -> None:
    file = tmp_path / "fp8.json"
    output = run("fp8.py", "--steps", "3", "--seeds", "1", "--ways", "bfloat16", "DelayedScaling", "--json", str(file))
    report = json.loads(file.read_text())["bits_per_byte"]
    assert list(report) == ["bfloat16", "DelayedScaling"]
    (bfloat16,), (fp8,) = report.values()
    assert 5 < bfloat16 < 8  # of 256 bytes, in the beginning
    assert abs(fp8 - bfloat16) < 0.1
    assert re.search(rf"^DelayedScaling +{fp8:.4f} bits per byte", output, re.MULTILINE)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_an_optimizers_state_in_few_bits_trains_as_in_float32(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    choices = ("float32", "both int8", "Kahan, both int8")
    output = run("optimizer_state.py", "--tiny", "--seeds", "1", "--choices", *choices, "--json", str(file))
    (report,) = json.loads(file.read_text())["training"]
    assert tuple(report["choices"]) == choices
    (float32,), *others = (found["losses"] for found in report["choices"].values())
    assert 1 < float32 < 3  # nats, of ten digits in the beginning
    for choice, (loss,) in zip(choices[1:], others, strict=True):
        assert abs(loss - float32) < 0.05
        assert re.search(rf"^{choice} +{loss:.4f} ", output, re.MULTILINE)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_tuning_costs_is_measured_beside_compiling_each_trial(tmp_path: Path) -> None:
    file = tmp_path / "tune.json"
    cases = ("language_model", "terrain")
    output = run("tune.py", "--tiny", "--rounds", "1", "--cases", *cases, "critic", "--json", str(file))
    report, breaking = (json.loads(file.read_text())[part] for part in ("cases", "breaking"))
    assert (tuple(report), tuple(breaking)) == (cases, ("critic",))
    assert breaking["critic"]["all half"]["gradient_error"] is None  # infinite
    assert breaking["critic"]["tuned"]["gradient_error"] < 0.05
    assert re.search(r"^critic +float32 .*\n +all half .* inf .*\n +tuned .* mul$", output, re.MULTILINE)
    for name, found in report.items():
        assert found["holds"]
        assert 1 <= found["trials"] <= 1000
        assert 0 < found["half_flops"][1] <= 1
        assert re.search(rf"^{name} +{found['choices']} ", output, re.MULTILINE)
    assert report["terrain"]["entries"] > 0  # torch's table does not train it


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_a_float32_end_changes_is_measured_seed_by_seed(tmp_path: Path) -> None:
    file = tmp_path / "precision_schedule.json"
    file.write_text('{"digits": 1}')
    policies = ("autocast_bfloat16", "bfloat16")
    output = run("precision_schedule.py", "--epochs", "4", "--seeds", "2", "--policies", *policies, "--json", str(file))
    report = json.loads(file.read_text())
    assert report["digits"] == 1
    found = report["regression"]
    assert found["steps"] == 64
    for name in policies:
        assert re.search(rf"^{name} +evaluated in half [+-]\d", output, re.MULTILINE)
        for losses, float32 in zip(found["policies"][name]["losses"], found["float32"], strict=True):
            assert losses["half"] == pytest.approx(float32, rel=0.5)
            assert losses["float32_end"] != losses["half"] != losses["in_half"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_what_saving_costs_is_measured_beside_orbax(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.json"
    run("checkpoint.py", "--every", "2", "--batch-size", "4", "--rounds", "1", "--json", str(file))
    report = json.loads(file.read_text())
    assert report["megabytes"] > 100
    for way in ("without", "CheckpointStore", "orbax"):
        assert len(report[way]["rounds"]) == 1


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_parallel_step_is_the_one_written_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    options = ("--devices", "1", "2", "--rounds", "1", "--steps", "1")
    output = run("scaling.py", *options, "--json", str(file), XLA_FLAGS="")  # instructions of programs as users have
    report = json.loads(file.read_text())
    assert report["cores"] >= 1
    assert list(report["devices"]) == ["1", "2"]
    for devices, result in report["devices"].items():
        losses = list(result["losses"].values())
        assert losses == pytest.approx([losses[0]] * 5, rel=1e-4)
        counts = result["instructions"]
        # On one device XLA drops the reductions, and copies what was before them into each fusion that is after them.
        assert 0 < counts["data_parallel"] <= (1.5 if devices == "1" else 1.03) * counts["by hand"]
        for route in ("data_parallel", "sharded_step", "pmap_step"):
            assert re.search(rf"^{devices} +{route} +\d", output, re.MULTILINE)
    assert "target at most 1.03" in output


@pytest.mark.full
@pytest.mark.timeout(300)
def test_import_time_prints_both_and_their_ratio() -> None:
    output = run("import_time.py", "--runs", "1")
    assert re.search(r"import jax, flax, optax, jraph +\d\.\d+ s", output)
    assert re.search(r"import jmp_train +\d\.\d+ s", output)
    assert re.search(r"ratio \d\.\d+", output)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rows", "dtypes", "verdicts"),
    [
        (("copy+sum", "weighted sum, gradient", "edge softmax", "dot"), ("float32", "float16"), 2),
        pytest.param(("GAT step",), ("float32",), 2, marks=pytest.mark.full),
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


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    output = run("gpu.py", "--tiny", "--parts", "mnist", "--rounds", "1", "--json", str(file))
    report = json.loads(file.read_text())["parts"]["mnist"]
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


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workload", "batch"), [("resnet34", 4), ("vit-b16", 2)])
def test_the_gpu_benchmark_makes_steps_in_amp_modes(tmp_path: Path, workload: str, batch: int) -> None:
    file = tmp_path / "gpu.json"
    part = f"{workload}-apex"
    options = ("--parts", part, "--rounds", "1", "--precisions", "float32", "apex-O2")
    output = run("gpu.py", "--tiny", *options, "--json", str(file))
    report = json.loads(file.read_text())["parts"][part]
    assert report["batch"] == batch
    ours = {name: x for name, x in report["variants"].items() if name.startswith("jmp_train")}
    assert list(ours) == ["jmp_train float32", "jmp_train apex-O2"]
    first = ours["jmp_train float32"]
    for name, result in ours.items():
        assert f"\n{name} " in output
        assert result["step_ms"] == [result["median_ms"]]
        assert result["of_the_memory"] == result["memory_mb"] / first["memory_mb"]
        assert result["loss"] == pytest.approx(first["loss"], rel=0.1)
    assert first["skipped_steps"] == 0
    assert f"\n{report['note']}\n" in output


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a file of the benchmarks that torch's processes import, or skips the test."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not there: install it to compare")
    monkeypatch.syspath_prepend(BENCHMARKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def torch_weights(params: Any, batch_stats: Any, kernel_axes: tuple[int, ...]) -> dict[str, Any]:
    """Returns our parameters and statistics by torch's names, in torch's layouts; those of convolutions by axes."""
    ends = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
    weights = {}
    for path, array in jax.tree_util.tree_leaves_with_path((params, batch_stats)):
        *modules, end = (entry.key for entry in path[1:])
        values = np.asarray(array)
        if end == "kernel":
            values = values.transpose(kernel_axes if values.ndim == 4 else (1, 0))
        weights[".".join([*modules, ends.get(end, end)])] = values
    return weights


def random_like(tree: Any, seed: int) -> Any:
    """Returns values near 0.3, of which all matter; also as variances."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (0.3 + 0.1 * random.standard_normal(x.shape)).astype(np.float32), tree)


NETWORKS = {  # ours, torch's with the same sizes, how our convolutions' kernels become torch's
    "ResNet": (
        lambda: ResNet((1, 2), (4, 6)),
        {"stages": (1, 2), "features": (4, 6)},
        (0, 3, 1, 2),
    ),
    "VisionTransformer": (
        lambda: VisionTransformer(5, patch=16, width=12, depth=2, heads=3, mlp=20),
        {"image_size": 32, "classes": 5, "width": 12, "depth": 2, "heads": 3, "mlp": 20},
        (3, 2, 0, 1),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_torch_steps_the_same_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = module("gpu_torch_models", monkeypatch)
    torch = models.torch
    make, sizes, kernel_axes = NETWORKS[name]
    ours, torchs = make(), getattr(models, name)(**sizes).eval()
    images = np.random.default_rng(0).standard_normal((3, 32, 32, 3)).astype(np.float32)
    variables = jax.eval_shape(lambda: ours.init(jax.random.key(0), images, train=False))
    variables = random_like(variables, seed=1)
    weights = torch_weights(variables["params"], variables.get("batch_stats", {}), kernel_axes)
    tensors = {key: torch.from_numpy(np.ascontiguousarray(x)) for key, x in weights.items()}
    loaded = torchs.load_state_dict(tensors, strict=False)
    assert loaded.unexpected_keys == []
    assert all(key.endswith("num_batches_tracked") for key in loaded.missing_keys)
    with torch.no_grad():
        wanted = torchs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    logits = jax.jit(lambda variables, images: ours.apply(variables, images, train=False))
    np.testing.assert_allclose(logits(variables, images), wanted, rtol=1e-4)
    assert np.ptp(wanted, axis=0).min() > 1e-3  # the images differ in all logits


@pytest.mark.parametrize(("name", "count"), [("ResNet", 21_282_122), ("VisionTransformer", 86_567_656)])
def test_torchs_networks_have_as_many_parameters_as_ours(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = module("gpu_torch_models", monkeypatch)
    with models.torch.device("meta"):
        model = getattr(models, name)()
    assert sum(x.numel() for x in model.parameters()) == count


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_gpu_benchmark_makes_gat_steps_on_a_graph_made_once(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    options = ("--parts", "gat", "gat-pyg", "--precisions", "float32", "--rounds", "1", "--minutes", "60")
    output = run("gpu.py", "--tiny", *options, "--json", str(file))
    assert output.count("gat: made its data in") == 1
    report = json.loads(file.read_text())["parts"]["gat"]
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
    file = tmp_path / "gpu.json"
    options = ("--parts", "graph-ops", "graph-ops-peers", "--rounds", "1", "--minutes", "60")
    output = run("gpu.py", "--tiny", *options, "--json", str(file))
    parts = json.loads(file.read_text())["parts"]
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


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_minibatch_benchmark_measures_loading_and_stepping(tmp_path: Path) -> None:
    file = tmp_path / "minibatch.json"
    options = ("--size", "300x2000", "--batch-size", "16", "--seconds", "0", "--rounds", "1")
    some = ("--models", "gat", "--policies", "mixed_float16")
    output = run("minibatch.py", *options, *some, "--json", str(file))
    rates = json.loads(file.read_text())["rates"]
    assert list(rates) == ["gat mixed_float16"]
    ours = rates["gat mixed_float16"]
    assert {"loading", "step", "both"} <= set(ours)
    assert all(rate > 0 for rate in ours.values())
    is_ahead = ours["loading"] > ours["step"]
    assert ("keeps ahead" if is_ahead else "keeps BEHIND") in output
    assert "NeighborLoader" in output or "PyG" in output


@pytest.fixture(name="planetoid", scope="module")
def fixture_planetoid() -> Any:
    spec = importlib.util.spec_from_file_location("planetoid", BENCHMARKS / "planetoid.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "selected", "epochs", "accuracy"),
    [
        ({"epochs": 20, "patience": 2, "by_accuracy": True}, 2, 7, 75),
        ({"epochs": 4, "patience": 2, "by_accuracy": True}, 2, 4, 75),
        ({"epochs": 8, "patience": None, "by_accuracy": True}, 8, 8, 100),
        ({"epochs": 7, "patience": None, "by_accuracy": False}, 4, 7, 75),
        ({"epochs": 8, "patience": None, "by_accuracy": False}, 8, 8, 100),
    ],
)
def test_validation_selects_the_epoch(
    planetoid: Any, options: dict[str, Any], selected: int, epochs: int, accuracy: float
) -> None:
    """The only parameter counts the epochs, and the logits of each are given."""
    margins = [  # of the right class over the other, of four nodes
        [1, 1, -1, -1],
        [1, 1, 1, -1],  # more accurate, and a smaller loss
        [0.1, 0.1, 0.1, 0.1],  # more accurate
        [3, 3, 3, -1],  # a smaller loss
        [0.5, 0.5, 0.5, 0.5],  # as accurate as ever
        [-1, -1, -1, -1],
        [-1, -1, -1, -1],
        [9, 9, 9, 9],  # more of both
    ]
    nodes = np.arange(8)
    tested = np.where(nodes <= nodes[:, None], 1, -1)  # in epoch n, n of 8 test nodes are right

    def batch(margins: Any) -> dict[str, np.ndarray]:
        logits = np.stack([np.float32(margins), np.zeros(np.shape(margins), np.float32)], axis=-1)
        return {"logits": logits, "label": np.zeros(logits.shape[1], np.int32)}

    def predict(count: Any, model_state: Any, batch: Any) -> jax.Array:
        del model_state
        return batch["logits"][count.astype(jnp.int32) - 1]

    task = Task(
        train={"x": nodes},
        test={"x": nodes},
        init=lambda key: (jnp.float32(0), None),
        loss_fn=lambda count, model_state, batch, rng: (-count, (model_state, None)),
        metrics=Accuracy(predict),
        optimizer=relaxed(optax.sgd(optax.constant_schedule(1.0))),
    )
    paper = planetoid.Paper(accuracies={}, **options)
    train = planetoid.make_trainer(task, jt.get_policy("float32"), paper)
    batches = {"train": {}, "validation": batch(margins), "test": batch(tested)}
    result = {name: x.item() for name, x in train(jax.random.key(0), batches).items()}
    assert result == {
        "accuracy": 100 * selected / 8,
        "validation_accuracy": accuracy,
        "epoch": selected,
        "epochs": epochs,
        "skipped_steps": 0,
    }


def test_differences_are_paired_by_the_seed(planetoid: Any) -> None:
    """Student's t of 2 degrees of freedom is 4.302653, by the tables."""
    below, above = planetoid.interval_of_mean([1.0, 2.0, 3.0])
    half = 4.302653 / 3**0.5
    assert (below, above) == pytest.approx((2 - half, 2 + half))
    accuracies = {"float32": (80, 84, 81), "mixed_float16": (81, 86, 84)}
    seeds = {
        policy: [{"accuracy": x, "skipped_steps": 0} for x in of_policy] for policy, of_policy in accuracies.items()
    }
    summary = planetoid.summarize(seeds)
    assert summary["float32"]["mean"] == pytest.approx(245 / 3)
    assert summary["float32"]["deviation"] == pytest.approx((13 / 3) ** 0.5)
    assert summary["mixed_float16"]["difference"] == pytest.approx(2)
    assert summary["mixed_float16"]["interval"] == pytest.approx((below, above))
    assert "difference" not in summary["float32"]


def test_data_sets_without_files_are_left_out_unless_they_are_named(
    planetoid: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_planetoid(tmp_path, np.ones((12, 5)), np.arange(12) % 3, {n: [] for n in range(12)}, 3, (10, 7, 11, 9))
    assert list(planetoid.read_data(tmp_path, None)) == ["cora"]
    assert "lacks ind.pubmed.x" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"lacks ind\.citeseer\.x"):
        planetoid.read_data(tmp_path, ["cora", "citeseer"])


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_planetoid_benchmark_runs(tmp_path: Path) -> None:
    file = tmp_path / "planetoid.json"
    options = ("--synthetic", "--seeds", "2", "--epochs", "2", "--models", "gcn")
    output = run("planetoid.py", *options, "--json", str(file))
    report = json.loads(file.read_text())["cora"]["gcn"]
    assert list(report["summary"]) == ["float32", "mixed_float16", "autocast_float16"]
    for policy, row in report["summary"].items():
        seeds = report["seeds"][policy]
        assert [seed["epochs"] for seed in seeds] == [2, 2]
        assert row["mean"] == pytest.approx(np.mean([seed["accuracy"] for seed in seeds]))
        assert f"\n{policy} " in output
    assert "published 81.5, band 80.8 to 82.2" in output


@pytest.mark.full
def test_the_planetoid_benchmark_says_where_files_are_public() -> None:
    command = (sys.executable, str(BENCHMARKS / "planetoid.py"), "--data-dir", "nowhere")
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 2
    assert "data_dir nowhere is not a folder; Planetoid's files are public in" in result.stderr
