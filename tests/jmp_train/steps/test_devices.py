"""`Summed`: counts in the model state are those of the whole batch on any number of devices.

Dropout of a model that keeps its own random keys: each device drops others, and the keys of the state agree.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import jmp_train as jt
from jmp_train.steps import Summed

pytestmark = [pytest.mark.newest, pytest.mark.quick]

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


DEVICES, ROWS, WIDTH = 8, 2, 32
GRAPH, DROPOUT = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


def in_own_shard_map(step: jt.steps.TrainStep) -> Any:
    specs = (PartitionSpec(), PartitionSpec("data"))
    return jax.jit(jax.shard_map(step.with_axes("data"), mesh=MESH, in_specs=specs, out_specs=PartitionSpec()))


ROUTES: dict[str, Callable[[jt.steps.TrainStep], Any]] = {
    "shard_map": lambda step: jt.data_parallel(step, MESH),
    "pmap": jt.pmap_step,
    "jit": lambda step: jt.sharded_step(step, MESH),
    "one's own shard_map": in_own_shard_map,
}


def masked_sum(w: jax.Array, model_state: Any, rows: jax.Array, rng: Any) -> Any:
    """The gradient of row i is the mask that dropout drew for example i."""
    del rng
    dropout = nnx.merge(GRAPH, model_state["dropout"])
    loss = (w[rows] * dropout(jnp.ones((len(rows), WIDTH)))).sum()
    keys = jax.vmap(lambda key: jax.random.split(key)[1])(model_state["keys"])
    set_anew = jax.tree.map(jnp.zeros_like, model_state["set anew"]) | {"key": jax.random.key(2)}
    return loss, ({"dropout": nnx.state(dropout), "keys": keys, "set anew": set_anew}, None)


def new_state(count: int) -> jt.TrainState:
    keys = jax.random.split(jax.random.key(1), 3)
    set_anew = {"mean": jnp.ones(()), "key": jax.random.key(3)}
    model_state = {"dropout": DROPOUT, "keys": keys, "set anew": set_anew}
    return jt.TrainState.create(jnp.zeros((count, WIDTH)), optax.sgd(1.0), model_state=model_state)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("route", ROUTES)
def test_devices_draw_their_own_masks_and_agree_on_the_next_keys(route: str, accumulate_steps: int) -> None:
    count = DEVICES * ROWS * accumulate_steps
    step, state = jt.train_step(masked_sum, optax.sgd(1.0), accumulate_steps=accumulate_steps), new_state(count)
    after, _ = ROUTES[route](step)(state, jnp.arange(count))
    masks = (np.asarray(after.params) != 0).reshape(DEVICES, -1)
    assert len(np.unique(masks, axis=0)) == DEVICES

    rows = jnp.arange(count // DEVICES)
    alone, _ = jax.jit(step)(state, rows)
    np.testing.assert_array_equal(masks[0], (np.asarray(alone.params) != 0)[rows].ravel())
    for x, expected in zip(jax.tree.leaves(after.model_state), jax.tree.leaves(alone.model_state), strict=True):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data, wanted = (jax.random.key_data(y) if is_key else y for y in (x, expected))
        for shard in data.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted)


@pytest.mark.full
def test_keys_add_no_all_reduce_to_a_step() -> None:
    """They are summed with the test for overflow; one of its own would take some microseconds of each step on GPUs."""

    def all_reduces(loss_fn: Any, state: jt.TrainState) -> int:
        step = jax.jit(jt.data_parallel(jt.train_step(loss_fn, optax.sgd(1.0)), MESH))
        program = step.lower(state, jnp.arange(DEVICES)).compile().as_text() or ""
        return program.count(" all-reduce(")

    state = new_state(DEVICES)
    without_keys = jt.stateless(lambda w, rows: w[rows].sum())
    expected = all_reduces(without_keys, dataclasses.replace(state, model_state=None))
    assert all_reduces(masked_sum, state) == expected > 0
