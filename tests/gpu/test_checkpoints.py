"""A state goes from the device to the disk, to a CPU and back, and no bit is another one.

Capsules on an accelerator: a skip comes out again bit by bit, under a transfer guard, too.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.gpu


def make_state() -> jt.TrainState:
    """Returns a state of all dtypes that training has, with what a careless copy would change."""
    random = np.random.default_rng(0)
    params = {
        "float32": jnp.asarray([0.0, -0.0, 1e-40, 3.4e38], jnp.float32),
        "float16": jnp.asarray(random.normal(size=(5, 3)), jnp.float16),
        "bfloat16": jnp.asarray(random.normal(size=(7,)), jnp.bfloat16),
    }
    optimizer = jt.with_loss_scale(relaxed(optax.adam(1e-3)), jt.torch_loss_scale())
    return jt.TrainState.create(params, optimizer, model_state={"count": jnp.int32(3)}, rng=jax.random.key(7))


def placed(state: Any, device: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, device), state)


def test_there_and_back(tmp_path: Path, cpu: Any) -> None:
    here = jax.devices()[0]
    state = placed(make_state(), here)
    with jt.CheckpointStore(tmp_path / "a") as store:
        store.save(1, state)
        _, on_cpu = store.restore(placed(state, cpu))
    assert all(x.devices() == {cpu} for x in jax.tree.leaves(on_cpu))
    assert_bitwise_equal(on_cpu, state)
    with jt.CheckpointStore(tmp_path / "b") as store:
        store.save(2, on_cpu)
        step, back = store.restore(state)
    assert step == 2
    assert all(x.devices() == {here} for x in jax.tree.leaves(back))
    assert_bitwise_equal(back, state)


def test_weights_as_safetensors(tmp_path: Path) -> None:
    params = make_state().params
    jt.save_weights(tmp_path / "model.safetensors", params)
    assert_bitwise_equal(jt.load_weights(tmp_path / "model.safetensors", params), params)


def test_training_goes_on_where_it_was(tmp_path: Path) -> None:
    """After a restore the next step is that of the state that was saved: same program, same inputs, one device."""
    optimizer = jt.with_loss_scale(relaxed(optax.adam(1e-2)), jt.torch_loss_scale())

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.mean((batch @ params["w"]).astype(jnp.float32) ** 2)

    step = jax.jit(jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_float16"))
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    state, _ = step(jt.TrainState.create({"w": jnp.ones((8, 4))}, optimizer), batch)
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, state)
        _, restored = store.restore(state)
    assert_bitwise_equal(step(restored, batch), step(state, batch))


def test_a_skip_is_replayed_under_a_transfer_guard(tmp_path: Path) -> None:
    def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return (jax.nn.relu(x @ params["in"]) @ params["out"]).astype(jnp.float32).mean()

    optimizer = jt.with_loss_scale(relaxed(optax.adam(1e-3)), jt.torch_loss_scale(256.0))
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_float16")
    random = np.random.default_rng(0)
    params = {"in": random.normal(0, 0.1, (64, 128)), "out": random.normal(0, 0.1, (128, 1))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state = jt.TrainState.create(params, optimizer, rng=jax.random.key(0))
    batches = [jnp.asarray(random.normal(0, 1, (32, 64)), jnp.float32) for _ in range(6)]
    batches[4] = batches[4].at[3].set(jnp.inf)
    run = jax.jit(step)
    with jt.SkipRecorder(tmp_path, wait=True) as recorder, jax.transfer_guard("disallow"):
        watched, after = recorder.watch(run), []
        for batch in batches:
            state, metrics = watched(state, batch)
            after.append((state, metrics))
    path = tmp_path / "step_00000004.capsule"
    assert recorder.last_capsule() == path
    before, batch = jt.load_capsule(path, after[4][0])
    assert_bitwise_equal(batch, batches[4])
    assert_bitwise_equal(run(before, batch), after[4])
    with pytest.raises(ValueError, match=r"is of step 4 .* the given state is of step 6"):
        jt.load_capsule(path, after[5][0])
