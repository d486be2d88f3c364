"""The page of benchmark results has every file; one without date, device or command is refused."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from result_files import this_command, write_results

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
RUN = {
    "date": "2026-11-23",
    "device": "CPU, 2 cores",
    "command": "python benchmarks/fast.py --rounds 3",
    "jax": "0.10.2",
}


@pytest.fixture(name="extension", scope="module")
def fixture_extension() -> ModuleType:
    return importlib.import_module("benchmark_results")  # and with it sphinx


def file_of(folder: Path, content: Any) -> Path:
    """Writes a file of results of a script `fast.py`."""
    (folder / "results").mkdir()
    (folder / "fast.py").write_text('"""How fast | slow it is."""\n')
    file = folder / "results" / "fast.json"
    file.write_text(json.dumps(content))
    return file


def test_every_file_of_the_repository_has_a_section_with_its_command(extension: ModuleType) -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    page = extension.page_of([extension.read_results(file) for file in files])
    for file in files:
        assert f"\n## {file.stem}\n" in page
        for run in json.loads(file.read_text())["runs"]:
            assert f"\n  {run['command']}\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| copy+sum, 64 features | ")]
    assert rows[0].split(" | ")[1] == "0.01454"


def test_a_section_has_summary_runs_and_tables(extension: ModuleType, tmp_path: Path) -> None:
    figures = {
        "jax": "0.10.2",
        "size": 20_000,
        "seconds": {"jmp_train": [0.5, 0.25, 0.125, 3, 4, 5, 6], "peer|s": [1.5]},
        "steps": [{"mode": "torch", "peak_bytes": 775_532_287, "fits": True}, {"mode": "naive", "tutorial": None}],
        "verdicts": ["met: " + "long " * 20, "missed"],
    }
    page = extension.page_of([extension.read_results(file_of(tmp_path, {"runs": [RUN], **figures}))])
    assert "How fast | slow it is. [fast.py](../../benchmarks/fast.py) wrote" in page
    assert "- 2026-11-23, CPU, 2 cores, jax 0.10.2:\n  ```sh\n  python benchmarks/fast.py --rounds 3\n  ```" in page
    assert "| size | 20,000 |\n| seconds, jmp\\_train | 3 (0.125 to 6) |\n| seconds, peer\\|s | 1.5 |" in page
    assert "| mode | peak\\_bytes | fits | tutorial |\n| --- | --- | --- | --- |\n" in page
    assert "| torch | 775.5 MB | yes |  |\n| naive |  |  |  |" in page
    assert "verdicts:\n\n- met: long" in page


def test_rows_are_deep_only_where_all_is_shown(extension: ModuleType) -> None:
    seeds = {policy: [{"accuracy": x} for x in (80.5, 81.25)] for policy in ("float32", "float16")}
    (table,) = extension.tables({"gcn": {"seeds": seeds}})
    assert table.title == "gcn, seeds"
    assert table.rows == (("float32", "80.5"), ("float32", "81.25"), ("float16", "80.5"), ("float16", "81.25"))
    cases = {name: {"steps": 3, "choices": {f"{name} {i}": {"loss": i / 8} for i in range(3)}} for name in ("a", "b")}
    found = list(extension.tables({"training": cases}))
    assert [table.title for table in found] == [
        "training, a", "training, a, choices", "training, b", "training, b, choices"
    ]  # fmt: skip
    assert found[3].rows == (("b 0", "0"), ("b 1", "0.125"), ("b 2", "0.25"))
    wide = [{f"x{i}": i * j for i in range(9)} | {"by_kind": {f"kind {j}": {"bytes": 1}}} for j in (1, 2)]
    (table,) = extension.tables({"largest": wide})
    assert (table.header[-1], table.rows[1][-2:]) == ("x8", ("14", "16"))
    assert table.shared == {"x0": "0", "by_kind": "1 entries"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"steps": [1]}, r'fast\.json lacks "runs"'),
        ([1, 2], r'fast\.json lacks "runs"'),
        ({"runs": [RUN, {**RUN, "date": ""}]}, r"fast\.json lacks date in runs\[1\]"),
        ({"runs": [{"date": "2026-11-23"}]}, r"fast\.json lacks device, command in runs\[0\], which has \['date'\]"),
        ({"runs": [{**RUN, "date": "yesterday"}]}, r"fast\.json: date of runs\[0\] is 'yesterday'"),
    ],
)
def test_a_file_that_does_not_say_of_what_it_is_is_refused(
    extension: ModuleType, tmp_path: Path, content: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        extension.read_results(file_of(tmp_path, content))


def test_a_file_without_a_script_is_refused(extension: ModuleType, tmp_path: Path) -> None:
    file = file_of(tmp_path, {"runs": [RUN]})
    (tmp_path / "fast.py").rename(tmp_path / "faster.py")
    with pytest.raises(ValueError, match=r"fast\.json has no script fast\.py in "):
        extension.read_results(file)


def test_what_is_written_is_what_the_page_needs(
    extension: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path, {"runs": [RUN], "steps": 1})
    for rounds, device in ((2, None), (2, None), (4, "A100-40GB, compiled for, not run")):
        monkeypatch.setattr(
            sys, "argv", ["/somewhere/benchmarks/fast.py", "--rounds", str(rounds), "--json", str(file)]
        )
        write_results(file, {**json.loads(file.read_text()), "steps": rounds}, device)
    first, second, third = extension.read_results(file).runs
    assert first == RUN
    assert second["command"] == "python benchmarks/fast.py --rounds 2"
    assert second["device"].startswith("CPU, ")
    assert second["jax"] == jax.__version__
    assert third["device"] == "A100-40GB, compiled for, not run"
    assert json.loads(file.read_text())["steps"] == 4


def test_a_command_is_without_the_file_that_it_writes() -> None:
    arguments = ["benchmarks/graphs.py", "--json=x.json", "--rows", "GAT step", "--json", "y.json", "--seconds", "1"]
    assert this_command(arguments) == "python benchmarks/graphs.py --rows 'GAT step' --seconds 1"


def test_every_script_that_writes_results_writes_its_run_along() -> None:
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if 'add_argument("--json"' in path.read_text()]
    assert len(scripts) > 15
    assert not [path.name for path in scripts if "from result_files import " not in path.read_text()]
