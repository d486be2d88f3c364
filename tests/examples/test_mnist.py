import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_tasks import load_task
from made_runs import first_examples
from mnist import BLOCKS
from promotion import promoting_task

from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.loop import train
from jmp_train.task import Task

pytestmark = pytest.mark.full


@pytest.fixture(name="synthetic", scope="module")
def fixture_synthetic() -> Task:
    task = first_examples(load_task("mnist", synthetic=True), 96)
    return dataclasses.replace(promoting_task(task), test={name: array[:40] for name, array in task.test.items()})


def test_the_network_is_pytorchs(synthetic: Task) -> None:
    params, batch_stats = jax.eval_shape(synthetic.init, jax.random.key(0))
    # weights and biases of each block, and BatchNorm's two; of the dense layers 1024-1000-1000-10
    blocks = sum(i * o * k * k + o + 2 * o for i, o, k, _, _ in BLOCKS)
    dense = 1024 * 1000 + 1000 + 1000 * 1000 + 1000 + 1000 * 10 + 10
    assert sum(x.size for x in jax.tree.leaves(params)) == blocks + dense == 14_740_522
    assert sum(x.size for x in jax.tree.leaves(batch_stats)) == 2 * sum(o for _, o, *_ in BLOCKS)
    assert {x.dtype for x in jax.tree.leaves((params, batch_stats))} == {jnp.dtype("float32")}


def test_half_precision_starts_as_float32_does(synthetic: Task) -> None:
    losses = {
        name: [step.loss for step in train(synthetic, name, RunSettings(epochs=1, batch_size=16)).steps]
        for name in ("float32", "mixed_float16", "mixed_bfloat16", "autocast_float16")
    }
    assert losses["float32"][-1] < losses["float32"][0]
    np.testing.assert_allclose(losses["mixed_float16"], losses["float32"], rtol=0.005)
    np.testing.assert_allclose(losses["autocast_float16"], losses["float32"], rtol=0.005)
    np.testing.assert_allclose(losses["mixed_bfloat16"], losses["float32"], rtol=0.02)
