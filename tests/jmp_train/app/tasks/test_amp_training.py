"""AMP modes in real training loops: accuracy, and master weights on every route."""

import dataclasses
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_tasks import load_task
from jax.sharding import Mesh
from promotion import promoting, relaxed

import jmp_train as jt
from jmp_train.app.runs.task_batches import train_batches
from jmp_train.app.tasks import digits

pytestmark = pytest.mark.full

MODES = {
    "torch": jt.amp_mode("torch"),
    "O0": jt.amp_mode("apex", opt_level="O0"),
    "O1": jt.amp_mode("apex"),
    "O2": jt.amp_mode("apex", opt_level="O2"),
    "O3": jt.amp_mode("apex", opt_level="O3"),
    "naive": jt.amp_mode("naive"),
}


def digits_accuracy(amp: jt.policies.Amp, steps: int) -> tuple[float, int]:
    """Returns the test accuracy of the digits task after some steps, and how many were skipped."""
    task = load_task("digits")
    amp, _ = amp.for_model(digits.DigitsCNN(), jnp.ones((1, 8, 8, 1)), train=False)
    init_key, step_key = jax.random.split(jax.random.key(0))
    params, stats = task.init(init_key)
    loss_fn, tx = amp.transform(task.loss_fn, task.optimizer_for(steps))
    # It runs for so long that good machine code is worth its time.
    options = {"xla_backend_optimization_level": 1}
    step = jax.jit(jt.train_step(loss_fn, tx), donate_argnums=0, compiler_options=options)
    state = jt.TrainState.create(
        params, tx, model_state=amp.cast_model_state(stats), rng=step_key, cast_params=amp.cast_params
    )
    skipped = 0
    for batch in itertools.islice(train_batches(task, 64, 0, 100, None, 0), steps):
        state, metrics = step(state, batch)
        skipped = metrics["skipped_steps"]
    test = {name: jnp.asarray(array) for name, array in task.test.items()}
    logits = jax.jit(amp.forward(digits.predict))(state.params, state.model_state, test)
    assert logits.dtype == jnp.float32 or amp.precision.autocast_rules
    return float((logits.argmax(-1) == test["label"]).mean(dtype=jnp.float32)), int(skipped)


@pytest.fixture(scope="module")
def float32_accuracy() -> float:
    return promoting(digits_accuracy)(jt.amp_mode("torch", enabled=False), 300)[0]


@pytest.mark.parametrize("name", ["torch", "O1", "O2", "O3", "naive"])
def test_three_hundred_steps_of_digits_end_where_float32_ends(name: str, float32_accuracy: float) -> None:
    accuracy, skipped = promoting(digits_accuracy)(MODES[name], 300)
    assert float32_accuracy > 0.98
    assert accuracy >= float32_accuracy - 0.01
    # From 2**32 the naive scale finds its level, each overflow after the first halving it.
    assert skipped < 18 if name == "naive" else skipped == 0


SMALL_SCALES = {"torch": {"init_scale": 2.0**8}, "apex": {"max_loss_scale": 2.0**8}, "naive": {"initial_scale": 2.0**8}}


def with_small_scale(amp: jt.policies.Amp) -> jt.policies.Amp:
    """Returns a mode whose first step does not overflow, for a model without BatchNorms."""
    options = amp.options
    if amp.loss_scale != jt.StaticLossScale(1.0):
        options = dataclasses.replace(options, **SMALL_SCALES[amp.mode])
    return dataclasses.replace(amp, options=options, batch_norms=())


@pytest.mark.parametrize("name", ["O2", "naive"])
def test_master_weights_round_to_the_parameters_on_every_route(name: str) -> None:
    amp = with_small_scale(MODES[name])
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return (promoting(model.apply)(params, batch).astype(jnp.float32) ** 2).mean()

    fn, tx = amp.transform(jt.stateless(loss_fn), relaxed(optax.adam(1e-2)))
    step = jt.train_step(fn, tx)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)
    ends = {}
    for route, run in {
        "jit": jax.jit(step),
        "shard_map": jax.jit(jt.data_parallel(step, mesh)),
        "pmap": jt.pmap_step(step),
        "sharded": jax.jit(jt.sharded_step(step, mesh)),
    }.items():
        state = jt.TrainState.create(params, tx, cast_params=amp.cast_params)
        for _ in range(5):
            state, metrics = run(state, batch)
            assert bool(metrics["grads_finite"])
        master_weights = jt.get_master_weights(state.opt_state)
        for half, master_weight in zip(jax.tree.leaves(state.params), jax.tree.leaves(master_weights), strict=True):
            np.testing.assert_array_equal(half, np.asarray(master_weight).astype(np.float16))
        ends[route] = jax.device_get(master_weights)
    for route in ("shard_map", "pmap", "sharded"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-3), ends[route], ends["jit"])
