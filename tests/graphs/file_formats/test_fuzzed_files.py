"""Mutated files of graphs give right data or an error that names the file, and nothing else happens."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "fuzzed_graph_files.py"


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="what a process takes is read from /proc")
@pytest.mark.parametrize("count", [300, pytest.param(15_000, marks=pytest.mark.full)])
def test_mutated_files(count: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "23", str(count), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100 + count // 4,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(PROGRAM.parents[1] / "helpers")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["wrong"] == []
    assert not figures["hacked"]
    assert figures["megabytes"] < 500
    for counts in figures["outcomes"].values():
        assert counts["refused"] > counts["read"] > 0
    (fault,) = figures["lack of memory"]
    assert re.fullmatch(r"\[Errno 12\] does not fit into memory: 'raw/[a-z-]+\.csv'", fault)
