"""The jobs of `examples/tasks`, and the one that README.md shows, under `jmp-train train` and `compare`."""

import dataclasses
import doctest
import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from example_tasks import FOLDER, task_module

from jmp_train.app.cli.entry import main

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
JOBS = sorted(file.stem for file in FOLDER.glob("*.py") if "\ndef task(" in file.read_text())
# Options of a run that learns something, and the worst headline metric that it may have.
LEARNS: dict[str, tuple[list[str], float]] = {
    "haiku_digits": ([], 0.95),
    "nanogpt": (["--steps", "60"], 3.7),  # bits per byte; the bytes one by one have 3.9
    "sampled_graph": ([], 0.93),
    "table_mlp": ([], 0.93),
}
NAMES = list(LEARNS)  # the short ones
LARGE = ("cifar10", "mnist", "vit")  # whose own tests have smaller models, or fewer images
# Options with which a run of three steps is fast.
TINY = {
    "cora": "--synthetic --model sage",
    "haiku_digits": "",
    "karate": "--model gat",
    "lm": "--batch-size 2 --train-size 12",
    "nanogpt": "--text-file text.txt",
    "proteins": "--synthetic --batch-size 4 --train-size 12",
    "reddit": "--synthetic --scale 0.001",
    "sampled_graph": "",
    "table_mlp": "",
}
PRECISIONS = ("float32", "mixed_float16", "autocast_bfloat16")
MODELS = [f"models.{name}" for name in ("causal_attention", "gpt", "graph_classifiers", "rounded_once", "token_losses")]


@pytest.fixture(autouse=True)
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs each test in an empty folder, and forgets the modules of the jobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    before = set(sys.modules)
    with jax.numpy_dtype_promotion("standard"):  # other libraries'
        yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent in (FOLDER, tmp_path):
            del sys.modules[name]


def readme_job() -> str:
    found = re.findall(r"```python\n(# my_job.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(found) == 1
    return found[0]


def text_file() -> list[str]:
    """Returns the option of a text that is quickly learned and evaluated."""
    Path("text.txt").write_text((ROOT / "LICENSE").read_text())
    return ["--text-file", "text.txt"]


def compared(job: str, *options: str) -> list[dict[str, Any]]:
    """Returns what `compare --out` reports of each run; each has its page and picture, too."""
    call = ["compare", job, "--policies", "float32", "autocast_float16", "--out", "out", *options]
    assert main(call) == 0
    assert Path("out/report.svg").read_text().count("<svg") == 7
    assert job.rpartition("/")[2] in Path("out/report.html").read_text()
    return json.loads(Path("out/report.json").read_text())["runs"]


def test_a_job_is_short_and_has_its_row_in_the_list() -> None:
    assert sorted([*TINY, *LARGE]) == JOBS
    rows = (ROOT / "examples" / "README.md").read_text()
    for name in JOBS:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < (70 if name in LEARNS else 220)
        assert f"| [tasks/{name}.py](tasks/{name}.py) |" in rows
    assert sum(1 for line in readme_job().splitlines() if line) <= 25


@pytest.mark.full
@pytest.mark.parametrize("name", ["cora", "lm", "proteins", "reddit", "task_options", *MODELS])
def test_the_examples_in_docstrings_are_right(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name", ["digits", *sorted({*TINY, *LARGE} - {*LEARNS})])
def test_each_option_of_a_published_job_is_described(name: str) -> None:
    options = task_module(name).Options
    for field in dataclasses.fields(options):
        assert f" {field.name}: " in "".join(part.__doc__ or "" for part in options.__mro__), field.name


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "precision"),
    # nnx.Embed stays in float32 whatever a policy has cast its weights to, which is warned of.
    [pair for pair in itertools.product(TINY, PRECISIONS) if pair != ("nanogpt", "mixed_float16")],
)
def test_a_published_job_trains_in_each_precision(
    name: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text_file()
    call = ["train", f"{FOLDER}/{name}.py", "--steps", "3", "--json", "--policy", precision, *TINY[name].split()]
    assert main(call) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(step["finite"] for step in run["steps"]) >= 2  # a loss scale may halve once
    assert (run["costs"]["half_flops_share"] > (0.75 if name in LEARNS else 0.5)) == (precision != "float32")
    assert run["metrics"].get("nonfinite_outputs", 0) == 0


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_job_learns_as_well_in_half_precision_as_in_float32(name: str) -> None:
    options, bound = LEARNS[name]
    found = [next(iter(run["metrics"].values())) for run in compared(f"{FOLDER}/{name}.py:task", *options)]
    for value in found:
        assert value < bound if name == "nanogpt" else value > bound
    assert found[1] == pytest.approx(found[0], abs=0.02)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_job_runs_on_two_devices_and_in_parts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = text_file() if name == "nanogpt" else []
    batch = ["--batch-size", "32"] if name != "sampled_graph" else []
    losses = []
    for parts in ([], ["--devices", "2", "--accumulate-steps", "2"]):
        call = ["train", f"{FOLDER}/{name}.py", "--policy", "float32", "--steps", "2", "--json"]
        assert main([*call, *options, *batch, *parts]) == 0
        losses.append([step["loss"] for step in json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]])
    if name in ("nanogpt", "table_mlp"):  # without dropout, batch statistics and mini-batches of each part's own
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_job_of_the_readme_reaches_what_it_prints() -> None:
    Path("my_job.py").write_text(readme_job())
    for run in compared("my_job.py:task"):
        assert run["metrics"]["accuracy"] > 0.93
