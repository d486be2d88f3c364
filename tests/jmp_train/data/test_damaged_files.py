"""Damaged images and arrays: each gives an array of the right shape, or an error that names the file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parents[2]
SUFFIXES = ("bin", "bmp", "gz", "idx", "jpg", "pgm", "png", "ppm", "tif", "webp")


def read_damaged(folder: Path, seed: int, count: int) -> None:
    """Reads so many damaged files in a process of its own; a hook sees if one of them has something run."""
    program = TESTS / "programs" / "damaged_files.py"
    result = subprocess.run(
        (sys.executable, str(program), str(folder), str(seed), str(count)),
        env={"PYTHONPATH": f"{TESTS.parent}:{TESTS / 'helpers'}", "JAX_PLATFORMS": "cpu", "PATH": "/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, f"{result.stderr[-4000:]}\nat {sorted(folder.iterdir())}"
    report = json.loads(result.stdout)
    print(report)
    assert report["faults"] == []
    assert report["forbidden"] == []
    assert report["megabytes"] < 300
    assert sum(report["outcomes"].values()) == count
    assert {f"{suffix}: error" for suffix in SUFFIXES} <= set(report["outcomes"])
    arrays = sum(n for name, n in report["outcomes"].items() if name.endswith("array"))
    assert 0.1 < arrays / count < 0.6  # or the damage is too much, or too little


def test_damaged_files_give_arrays_or_errors_that_name_them(tmp_path: Path) -> None:
    read_damaged(tmp_path, seed=0, count=200)


@pytest.mark.full
def test_15_000_damaged_files(tmp_path: Path) -> None:
    read_damaged(tmp_path, seed=1, count=15_000)
