"""`Summed`: counts in the model state are those of the whole batch on any number of devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jmp_train as jt
from jmp_train.steps import Summed

pytestmark = pytest.mark.quick

MESH = Mesh(np.array(jax.devices()), ("data",))


def loss_fn(w: Any, state: Any, batch: Any, rng: Any) -> Any:
    """Counts of three classes: a moving average (as a VQ-VAE's), all so far in integers, and a mean for comparison."""
    del rng
    counts = jax.nn.one_hot(batch, 3).sum(0)
    new = {
        "average": Summed(0.9 * state["average"].value + 0.1 * counts, 0.9),
        "seen": Summed({"classes": state["seen"].value["classes"] + counts.astype(jnp.int32)}),
        "mean": 0.9 * state["mean"] + 0.1 * batch.astype(jnp.float32).mean(),
    }
    return w * 1.0, (new, None)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("route", "parts"), [("data_parallel", 1), ("data_parallel", 2), ("pmap_step", 1), ("sharded_step", 2)]
)
def test_devices_add_what_each_has_added(route: str, parts: int) -> None:
    forms: dict[str, Any] = {
        "data_parallel": lambda step: jt.data_parallel(step, MESH),
        "pmap_step": jt.pmap_step,
        "sharded_step": lambda step: jt.sharded_step(step, MESH),
    }
    step = jt.train_step(loss_fn, optax.sgd(0.0), accumulate_steps=parts)
    seen = Summed({"classes": jnp.zeros(3, jnp.int32)})
    model_state = {"average": Summed(jnp.ones(3), 0.9), "seen": seen, "mean": jnp.float32(0)}
    one = many = jt.TrainState.create(jnp.ones(()), step.optimizer, model_state=model_state)
    batch = jnp.tile(jnp.array([0, 1, 1, 2]), 16)  # all micro-batches count alike
    on_one, on_many = jax.jit(step), forms[route](step)
    for _ in range(3):
        one, many = on_one(one, batch)[0], on_many(many, batch)[0]
    for found, wanted in zip(jax.tree.leaves(many.model_state), jax.tree.leaves(one.model_state), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(many.model_state["seen"].value["classes"], [48, 96, 48])
