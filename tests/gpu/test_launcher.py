"""The launcher: a process for each of two devices, or for the only one, which train as one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]
PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "process_programs.py"


def test_processes_train_as_one(is_gpu: bool, tmp_path: Path) -> None:
    count = min(2, jax.local_device_count()) if is_gpu else 2
    losses = []
    for processes in (1, count):
        logs = tmp_path / str(processes)
        command = [sys.executable, "-m", "jmp_train", "launch", "-n", str(processes), "--logdir", str(logs), "--"]
        done = subprocess.run(
            [*command, str(PROGRAM), "first_losses", str(logs)],
            env={**os.environ, "JAX_DEFAULT_MATMUL_PRECISION": "float32"},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = [np.load(logs / f"losses_{rank}.npy") for rank in range(processes)]
        for other in found:
            np.testing.assert_array_equal(other, found[0])
        kind = f"{processes} devices in {processes} processes, {jax.devices()[0].device_kind}"
        assert done.stdout.count(kind) == processes, done.stdout
        losses.append(found[0])
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)  # sums in another order
