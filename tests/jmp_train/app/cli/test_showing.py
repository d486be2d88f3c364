"""A run that ended well exits with 0, and its files are written, whatever happens when its results are shown."""

import json
import sys
from pathlib import Path

import pytest
from process_helpers import shell

from jmp_train.app.cli.entry import main
from jmp_train.app.cli.results import Failure, show
from jmp_train.app.reports.display import _warn_once

pytestmark = [pytest.mark.quick, pytest.mark.timeout(300)]

# A job whose metrics have names like markup. If asked, it hides a part of rich, which tables need after the run.
JOB = r"""
import os, sys
import jax.numpy as jnp, numpy as np, optax
import jmp_train as jt

if "HIDDEN" in os.environ:
    sys.modules[os.environ["HIDDEN"]] = None
x = np.linspace(-1, 1, 512, dtype=np.float32).reshape(64, 8)

def loss_fn(params, batch):
    return jnp.square(batch["x"] @ params["w[/x]"] - batch["y"]).mean()

def make():
    return jt.Task(
        init=lambda key: ({"w[/x]": jnp.zeros((8, 4))}, None),
        loss_fn=jt.stateless(loss_fn),
        optimizer=optax.sgd(0.1),
        train={"x": x, "y": 3 * x[:, :4]},
        batch_size=16,
        evaluate=lambda params, model_state: {"f1[micro]": 0.25, "ap[/50]": 0.5, "\x1b[31m:smile:\n日本": 0.75},
    )
"""
FILE = "job [b] :smile:.py"
WARNING = "jmp-train: warning: not all is shown: ModuleNotFoundError: this needs the package rich"


@pytest.fixture(name="job")
def fixture_job(tmp_path: Path) -> str:
    (tmp_path / FILE).write_text(JOB)
    return f"{tmp_path / FILE}:make"


def test_names_are_shown_as_they_are(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a table wraps where times are long
    assert main(["train", job]) == 0
    output = capsys.readouterr()
    heads = r"f1[micro] ap[/50] \x1b[31m:smile:\n日本"
    assert heads in " ".join(output.out.split())
    assert output.err == ""


def test_a_missing_package_after_a_run_is_a_warning(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _warn_once.cache_clear()
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert main(["train", job]) == 0
    output = capsys.readouterr()
    assert "epoch 1/1" in output.out
    assert output.err.startswith(WARNING)
    assert output.err.count("\n") == 1


def test_findings_are_written_before_they_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a\x1b[31m"

    def text() -> str:
        assert file.exists()
        raise RuntimeError("it cannot be shown")

    show(None, text, {}, {}, {file: lambda: "findings"})
    output = capsys.readouterr()
    assert output.out == f"wrote {tmp_path}/a\\x1b[31m\n"
    assert output.err == "jmp-train: warning: not all is shown: RuntimeError: it cannot be shown\n"
    with pytest.raises(Failure, match=r"b: (File exists|Not a directory)$"):
        show(None, lambda: "a\x1bb", {}, {}, {file / "b": lambda: "findings"})
    assert capsys.readouterr().out == "a\\x1bb\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("train JOB --logdir out", ["autocast_float16/metrics.jsonl"]),
        ("compare JOB --policies float32 autocast_float16 --out out", ["report.json", "report.html", "report.svg"]),
        ("diagnose JOB --out out", ["diagnosis.json", "diagnosis.html"]),
        ("tune JOB --out out/rules.toml --page out/tuned.html", ["rules.toml", "tuned.html"]),
        ("launch -n 2 --logdir out -- script.py", ["rank_0.log", "rank_1.log"]),
    ],
)
@pytest.mark.parametrize(
    ("environment", "reader"),
    [
        ({"COLUMNS": "1", "LINES": "²", "PYTHONIOENCODING": "ascii", "HIDDEN": "rich.table"}, "cat"),
        ({"COLUMNS": "-5", "PYTHONIOENCODING": "latin-1"}, "true"),
    ],
)
def test_no_way_to_show_results_changes_the_exit_code(
    command: str, files: list[str], environment: dict[str, str], reader: str, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text(JOB)
    (tmp_path / "script.py").write_text(r"print('f1[micro] \x1b[31m 日本', ascii('日本'))")
    line = command.replace("JOB", f"'{FILE}:make'")
    code, _, error = shell(f"$PYTHON -m jmp_train {line} | {reader}", tmp_path, **environment)
    assert code == 0, error
    assert "Traceback" not in error
    assert all((tmp_path / "out" / name).stat().st_size for name in files)
    if command.startswith("compare"):
        runs = json.loads((tmp_path / "out/report.json").read_text())["runs"]
        assert [*runs[0]["metrics"]] == ["f1[micro]", "ap[/50]", "\x1b[31m:smile:\n日本"]
        assert (WARNING in error) == ("HIDDEN" in environment)
