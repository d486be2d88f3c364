"""Runs of the benchmarks' scripts."""

import json
from pathlib import Path
from typing import Any

from process_helpers import run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measured(folder: Path, script: str, *options: str, timeout: float = 280, **environment: Any) -> tuple[str, Any]:
    """Returns what a benchmark prints, and its results, which it adds to those that are in the folder."""
    file = folder / "results.json"
    output = run_python(BENCHMARKS / script, *options, "--json", file, timeout=timeout, **environment)
    return output, json.loads(file.read_text())
