"""Capsules on an accelerator: a skip comes out again bit by bit, under a transfer guard, too."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.gpu


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
