"""AMP modes in real training loops: accuracy, the scalers' golden traces, and one decision over a mesh."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_tasks import load_task
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import promoting, relaxed
from pytrees import poison_gradient

import jmp_train as jt
from jmp_train.app.runs.task_batches import train_batches
from jmp_train.app.tasks import digits

pytestmark = pytest.mark.quick

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


@pytest.mark.full
@pytest.mark.parametrize("name", ["torch", "O1", "O2", "O3", "naive"])
def test_three_hundred_steps_of_digits_end_where_float32_ends(name: str, float32_accuracy: float) -> None:
    accuracy, skipped = promoting(digits_accuracy)(MODES[name], 300)
    assert float32_accuracy > 0.98
    assert accuracy >= float32_accuracy - 0.01
    # From 2**32 the naive scale finds its level, each overflow after the first halving it.
    assert skipped < 18 if name == "naive" else skipped == 0


# Bad steps and the scale after each, of `reference implementations` run by hand (init 256, interval 3).
BAD = [1, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
TORCH = [128, 128, 64, 64, 32, 16, 16, 16, 32, 32, 16, 8, 8, 8, 16, 16, 16]
MEGATRON = [256, 256, 128, 128, 64, 32, 32, 32, 64, 64, 64, 32, 32, 32, 64, 64, 64]


def scales_of(amp: jt.policies.Amp, bad: Sequence[int]) -> tuple[list[float], list[bool]]:
    """Returns the loss scale after each step of a training loop, and whether the step was taken."""

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del rng
        w = poison_gradient(params["w"], batch["poison"].astype(params["w"].dtype))
        loss = (jnp.tanh(batch["x"] @ w).astype(jnp.float32) ** 2).mean()
        return loss, (model_state, None)

    fn, tx = amp.transform(loss_fn, relaxed(optax.adam(1e-2)))
    state = jt.TrainState.create({"w": jnp.full((4, 2), 0.1)}, tx, cast_params=amp.cast_params)
    poison = np.where(np.asarray(bad, bool), np.float32(np.inf), np.float32(1))
    batches = {"x": jnp.ones((len(bad), 8, 4)), "poison": jnp.asarray(poison)}
    _, metrics = jax.lax.scan(jt.train_step(fn, tx), state, batches)
    return metrics["loss_scale"].tolist(), metrics["grads_finite"].tolist()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("amp", "wanted"),
    [
        (jt.amp_mode("torch", init_scale=256.0, growth_interval=3), TORCH),
        (jt.amp_mode("naive", initial_scale=256.0, growth_interval=3), MEGATRON),
        (jt.amp_mode("naive", initial_scale=256.0, growth_interval=3, hysteresis=1), TORCH),
        (jt.amp_mode("apex", opt_level="O3", loss_scale=128.0), [128] * len(BAD)),
    ],
)
def test_scalers_follow_their_golden_traces(amp: jt.policies.Amp, wanted: list[float]) -> None:
    scales, taken = scales_of(amp, BAD)
    assert scales == wanted
    assert taken == [not bad for bad in BAD]


SMALL_SCALES = {"torch": {"init_scale": 2.0**8}, "apex": {"max_loss_scale": 2.0**8}, "naive": {"initial_scale": 2.0**8}}


def with_small_scale(amp: jt.policies.Amp) -> jt.policies.Amp:
    """Returns a mode whose first step does not overflow, for a model without BatchNorms."""
    options = amp.options
    if amp.loss_scale != jt.StaticLossScale(1.0):
        options = dataclasses.replace(options, **SMALL_SCALES[amp.mode])
    return dataclasses.replace(amp, options=options, batch_norms=())


MESH = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "model", "pipe"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODES)
def test_all_axes_of_a_mesh_decide_as_one(name: str) -> None:
    """Columns of a matrix on the axis `model`, a matrix of its own on each device of `pipe`."""
    amp = with_small_scale(MODES[name])

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del rng
        w = poison_gradient(params["w"], batch["poison"].reshape(()))
        loss = (jnp.tanh(batch["x"] @ w).astype(jnp.float32) ** 2).mean()
        return loss, (model_state, None)

    fn, tx = amp.transform(loss_fn, relaxed(optax.adam(1e-2)))
    step = jt.train_step(fn, tx).with_axes("data", model=("model", "pipe"))
    params = {"w": jnp.linspace(-0.1, 0.1, 32).reshape(4, 8)}
    split = P(None, ("pipe", "model"))
    state = jt.TrainState.create(params, tx, cast_params=amp.cast_params)
    specs = jax.tree.map(lambda x: split if x.shape == (4, 8) else P(), state)
    run = jax.jit(
        jax.shard_map(
            step,
            mesh=MESH,
            in_specs=(specs, {"x": P("data"), "poison": P("data", "model", "pipe")}),
            out_specs=(specs, P()),
            check_vma=False,
        )
    )
    x = jnp.ones((8, 4))
    for device in [None, (0, 0, 0), (1, 0, 1), None, (0, 1, 1)]:
        poison = np.ones((2, 2, 2), np.float32)
        if device is not None:
            poison[device] = np.inf
        before = jax.device_get(state)
        state, metrics = run(state, {"x": x, "poison": jnp.asarray(poison)})
        replicas = [np.asarray(s.data) for s in metrics["grads_finite"].addressable_shards]
        assert replicas == [device is None] * 8
        scales = {float(s.data) for s in metrics["loss_scale"].addressable_shards}
        assert len(scales) == 1
        after = jax.device_get(state)
        moved = (after.params["w"] != before.params["w"]).any()
        assert moved == (device is None)
        if device is not None:
            jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    assert int(metrics["skipped_steps"]) == 3


@pytest.mark.full
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
