"""The jobs of `examples/tasks`, and the one that README.md shows, under `jmp-train train` and `compare`."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jmp_train.cli.entry import main

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "tasks"
NAMES = sorted(file.stem for file in FOLDER.glob("*.py"))
# Options of a run that learns something, and the worst headline metric that it may have.
LEARNS: dict[str, tuple[list[str], float]] = {
    "haiku_digits": ([], 0.95),
    "nanogpt": (["--steps", "60"], 3.7),  # bits per byte; the bytes one by one have 3.9
    "sampled_graph": ([], 0.93),
    "table_mlp": ([], 0.93),
}
QUICK = "table_mlp"


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
    assert sorted(LEARNS) == NAMES
    rows = (ROOT / "examples" / "README.md").read_text()
    for name in NAMES:
        assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 70
        assert f"| [tasks/{name}.py](tasks/{name}.py) |" in rows
    assert sum(1 for line in readme_job().splitlines() if line) <= 25


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in NAMES]
)
def test_a_job_trains_in_half_precision(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = text_file() if name == "nanogpt" else []
    assert main(["train", f"{FOLDER}/{name}.py:task", "--steps", "3", "--json", *options]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [step["finite"] for step in run["steps"]] == [True] * 3
    assert run["costs"]["half_flops_share"] > 0.75
    assert next(iter(run["metrics"])) == ("bits_per_byte" if name == "nanogpt" else "accuracy")


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
        call = ["train", f"{FOLDER}/{name}.py:task", "--policy", "float32", "--steps", "2", "--json"]
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
