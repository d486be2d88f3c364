"""Mutated files of graphs give right data or an error that names the file, and nothing else happens."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzed_graph_files import is_whole, kinds

pytestmark = pytest.mark.quick

PROGRAM = Path(__file__).resolve().parents[2] / "programs" / "fuzzed_graph_files.py"


@pytest.mark.parametrize("name", ["planetoid", "ogb", "ogb-zipped", "links", "reddit", "reddit-zipped"])
def test_changed_files_are_refused_by_name_or_give_data_that_fit(name: str, tmp_path: Path) -> None:
    formats = {kind: (read, files, mutations) for kind, read, _, files, mutations in kinds(tmp_path)}
    read, files, mutations = formats[name]
    draw, folder = random.Random(0), tmp_path / name
    for number in range(60):
        file = draw.choice(list(files))
        (folder / file).write_bytes(draw.choice(mutations)(draw, files[file]))
        try:
            assert is_whole(read(folder)), (number, file)
        except (ValueError, OSError) as error:
            assert f"{folder}/" in str(error) and "\n" not in str(error), (number, file)
        (folder / file).write_bytes(files[file])


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="what a process takes is read from /proc")
def test_mutated_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "23", "15000", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=4_000,
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
