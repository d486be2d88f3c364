"""Dropout of a model that keeps its own random keys: each device drops others, and the keys of the state agree."""

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

pytestmark = [pytest.mark.quick, pytest.mark.newest]

DEVICES, ROWS, WIDTH = 8, 2, 32
MESH = Mesh(np.array(jax.devices()), ("data",))
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
