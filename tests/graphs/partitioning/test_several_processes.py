"""One graph cut over two real processes, by `jmp-train launch`: the losses of one process."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import partition_programs
import pytest

pytestmark = pytest.mark.full


@pytest.mark.timeout(200)
@pytest.mark.parametrize("devices", [1, 2])
def test_losses_are_those_of_one_process(devices: int, tmp_path: Path) -> None:
    program = str(Path(partition_programs.__file__))
    command = [sys.executable, "-m", "jmp_train", "launch", "-n", "2", "--devices-per-process", str(devices)]
    done = subprocess.run(
        [*command, "--", program, str(tmp_path)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    graph, features, labels, step, state = partition_programs.problem()
    run, wanted = jax.jit(step), []
    for _ in range(partition_programs.STEPS):
        state, metrics = run(state, {"graph": graph, "features": features, "label": labels})
        wanted.append(float(metrics["loss"]))
    assert wanted[-1] < wanted[0]
    for process in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"losses_{process}.npy"), wanted, rtol=1e-6)
