"""A step on all devices that there are, be it one, beside the step on one: data parallelism and FSDP."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from promotion import relaxed

import jmp_train as jt

pytestmark = pytest.mark.gpu
ROWS, WIDTH, STEPS, OVERFLOW = 16, 64, 4, 1  # rows of each device; the step whose gradient overflows on the last one
# Gradients are means over devices in place of rows. In float32 the order of the sums is another one; in float16 each
# device's gradient is rounded before they are added up.
TOLERANCES = {"float32": 1e-5, "mixed_float16": 2e-3}


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("data",))


def make(policy: str) -> tuple[jt.steps.TrainStep, jt.TrainState]:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["hidden"])
        return jnp.mean((hidden @ params["out"]).astype(jnp.float32) ** 2)

    optimizer = jt.with_loss_scale(relaxed(optax.sgd(0.1, momentum=0.9)), jt.torch_loss_scale(2.0**8))
    random = np.random.default_rng(0)
    params = {
        "hidden": jnp.asarray(random.normal(size=(WIDTH, 8 * WIDTH)) / 8, jnp.float32),
        "out": jnp.asarray(random.normal(size=(8 * WIDTH, WIDTH)) / 16, jnp.float32),
    }
    return jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy), jt.TrainState.create(params, optimizer)


def batches() -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    count = ROWS * jax.device_count()
    drawn = [{"x": random.normal(size=(count, WIDTH)).astype(np.float32)} for _ in range(STEPS)]
    drawn[OVERFLOW]["x"][-1, 0] = np.inf
    return drawn


def train(step: Any, state: jt.TrainState, where: Any = None) -> tuple[jt.TrainState, list[Any]]:
    run, found = jax.jit(step), []
    for batch in batches():
        with jax.default_matmul_precision("float32"):  # of which TF32, a GPU's default, has 10 bits
            state, metrics = run(state, jax.device_put(batch, where))
        found.append(jax.tree.map(float, {name: metrics[name] for name in ("loss", "grads_finite", "loss_scale")}))
    return state, found


@pytest.mark.parametrize("policy", TOLERANCES)
@pytest.mark.parametrize("route", ["data_parallel", "fsdp"])
def test_steps_equal_those_of_one_device(route: str, policy: str) -> None:
    step, state = make(policy)
    alone, wanted = train(step, state)
    data = NamedSharding(mesh(), PartitionSpec("data"))
    if route == "data_parallel":
        together, found = train(jt.data_parallel(step, mesh()), jt.distributed.broadcast_state(state, mesh()), data)
    else:
        shardings = jt.fsdp_shardings(state, mesh(), min_size=0)
        placed = jax.tree.map(jax.device_put, state, shardings)
        together, found = train(jt.sharded_step(step, mesh(), shardings=shardings), placed, data)
        for x in jax.tree.leaves(together.params):
            assert x.addressable_data(0).size * jax.device_count() == x.size
    assert [x["grads_finite"] for x in found] == [number != OVERFLOW for number in range(STEPS)]
    assert [x["loss_scale"] for x in found] == [x["loss_scale"] for x in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCES[policy], nan_ok=True)
    for name, exact in alone.params.items():
        exact, moved = np.asarray(exact), np.asarray(state.params[name])
        error = np.abs(np.asarray(together.params[name]) - exact).max()
        assert np.abs(exact - moved).max() > 0
        assert error <= TOLERANCES[policy] * np.abs(exact).max(), name
