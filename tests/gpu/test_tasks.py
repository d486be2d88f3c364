"""The first steps of the tasks on this device, beside those in float32 on a CPU.

The launcher: a process for each of two devices, or for the only one, which train as one.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from example_tasks import load_task

from jmp_train.app.runs import setup_of
from jmp_train.task import Task

pytestmark = pytest.mark.gpu

STEPS = 3
TASKS: dict[str, dict[str, Any]] = {
    "digits": {},
    "karate gat": {"model": "gat"},
    "cora gcn": {"synthetic": True, "model": "gcn"},
    "lm": {},
}
# Losses are means of float32 numbers, which rounded logits and parameters move by some eps of the dtype; gradients,
# which have gone back through all layers, by more of them.
TOLERANCES = {"float32": (1e-4, 1e-3), "mixed_float16": (2e-3, 1e-2), "autocast_bfloat16": (1e-2, 5e-2)}


@functools.cache
def task_of(name: str) -> Task:
    return load_task(name.split()[0], **TASKS[name])


def first_steps(name: str, policy: str, device: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the losses of the first steps, all on one batch, and the norms of their gradients."""
    task = task_of(name)
    with jax.default_device(device), jax.default_matmul_precision("float32"), jax.numpy_dtype_promotion("standard"):
        setup = setup_of(task, policy)
        examples = {key: rows[: task.batch_size] for key, rows in task.train.items()}
        batch: Any = task.prepare(examples) | setup.cast_shared(task.shared())
        state = setup.create_state(*task.init(jax.random.key(0)), jax.random.key(1))
        step, found = jax.jit(setup.step), []
        for _ in range(STEPS):
            state, metrics = step(state, batch)
            assert metrics["grads_finite"]
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses, norms = np.transpose(found)
    return losses, norms


@functools.cache
def on_cpu(name: str) -> tuple[np.ndarray, np.ndarray]:
    return first_steps(name, "float32", jax.devices("cpu")[0])


@pytest.mark.parametrize("policy", TOLERANCES)
@pytest.mark.parametrize("name", TASKS)
def test_first_steps_are_the_cpus(name: str, policy: str) -> None:
    losses, norms = first_steps(name, policy, jax.devices()[0])
    wanted_losses, wanted_norms = on_cpu(name)
    of_losses, of_norms = TOLERANCES[policy]
    assert wanted_losses[-1] < wanted_losses[0]
    np.testing.assert_allclose(losses, wanted_losses, rtol=of_losses)
    np.testing.assert_allclose(norms, wanted_norms, rtol=of_norms)


PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "process_programs.py"


@pytest.mark.timeout(200)
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
