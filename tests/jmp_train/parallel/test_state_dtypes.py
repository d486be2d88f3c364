"""Optimizer state in few bits on eight devices: sharded as the parameters, and the bits of one device."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt

pytestmark = pytest.mark.quick

MESH = Mesh(np.array(jax.devices()), ("data",))
PARAMS = {
    "up": jax.random.normal(jax.random.key(0), (64, 256)) / 8,
    "down": jax.random.normal(jax.random.key(1), (256, 3, 64)) / 16,
    "bias": jnp.zeros(64),
}


def optimizer() -> Any:
    quantized = jt.with_state_dtypes(relaxed(optax.adam(1e-2)), {"mu": "int8", "nu": "bfloat16"}, block_size=64)
    return jt.with_loss_scale(quantized, jt.torch_loss_scale(2.0**8))


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return ((jnp.einsum("bi,ijk->bk", jnp.tanh(x @ params["up"]), params["down"]) + params["bias"] - 1) ** 2).mean()


def make() -> tuple[Any, Any]:
    tx = optimizer()
    return jt.train_step(jt.stateless(loss_fn), tx), jt.TrainState.create(PARAMS, tx)


def test_codes_and_scales_lie_where_the_parameter_does() -> None:
    _, state = make()
    where = jt.zero1_shardings(state, MESH).opt_state.inner_state.inner_state[0]
    for name, codes, scales in (("up", (None, "data"), (None, "data")), ("down", ("data",), ("data", None, None))):
        assert tuple(where.mu[name].codes.spec) == codes
        assert tuple(where.mu[name].scales.spec) == scales
        assert tuple(where.nu[name].spec) == codes
    assert tuple(where.mu["bias"].spec) == ()
    split = jt.parallel.state_shardings(state, MESH, params={**jax.tree.map(lambda x: P(), PARAMS), "up": P("data")})
    assert tuple(split.opt_state.inner_state.inner_state[0].mu["up"].scales.spec) == ("data", None)


def test_scales_are_whole_where_a_device_would_have_a_part_of_a_block() -> None:
    tx = jt.with_state_dtypes(optax.adam(1e-2), {"mu": "int8"}, min_size=1, block_size=200)
    state = jt.TrainState.create({"w": jnp.ones((3, 1000))}, tx)
    mesh = Mesh(np.array(jax.devices()[:5]), ("data",))
    where = jt.zero1_shardings(state, mesh, min_size=1).opt_state.inner_state[0].mu["w"]
    assert (tuple(where.codes.spec), tuple(where.scales.spec)) == ((None, "data"), (None, None))


@pytest.mark.full
@pytest.mark.parametrize("form", ["replicated", "zero1", "fsdp", "pmap"])
def test_eight_devices_step_as_one(form: str) -> None:
    """The same gradients up to the order of sums; with the same gradients the same bits, as the next test has it."""
    step, state = make()
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(16, 64)), jnp.float32)
    alone = jax.jit(step)
    if form == "pmap":
        run: Any = jt.pmap_step(step)
    elif form == "replicated":
        run = jt.data_parallel(step, MESH)
    else:
        shard = {"zero1": jt.zero1_shardings, "fsdp": jt.fsdp_shardings}[form]
        run = jt.sharded_step(step, MESH, shardings=shard(state, MESH, min_size=1024))
    one = several = state
    metrics = metrics_of_several = {}
    for _ in range(3):
        one, metrics = alone(one, batch)
        several, metrics_of_several = run(several, batch)
    np.testing.assert_allclose(metrics_of_several["loss"], metrics["loss"], rtol=1e-2)
    codes = [x.opt_state.inner_state.inner_state[0].mu["up"].codes for x in (one, several)]
    assert (np.asarray(codes[0]) != np.asarray(codes[1])).mean() < 0.1
    kept = several.opt_state.inner_state.inner_state[0]
    assert kept.mu["up"].codes.dtype == jnp.int8
    if form in ("zero1", "fsdp"):
        assert kept.mu["up"].codes.addressable_shards[0].data.shape == (64, 32)
        assert kept.mu["up"].scales.addressable_shards[0].data.shape == (64, 1)
    skipped, metrics = run(several, batch.at[3, 0].set(jnp.nan))
    assert not bool(metrics["grads_finite"])
    assert_bitwise_equal(skipped.opt_state.inner_state, several.opt_state.inner_state)
    assert_bitwise_equal(skipped.params, several.params)


@pytest.mark.full
def test_the_same_gradients_make_the_same_bits_however_the_state_is_sharded() -> None:
    step, state = make()
    tx = step.optimizer
    grads = jax.tree.map(lambda x: 100 * jnp.cos(37 * x), PARAMS)
    update = jax.jit(tx.update)
    alone = update(grads, state.opt_state, state.params)
    for shard in (jt.zero1_shardings, jt.fsdp_shardings):
        apart = jax.device_put(state, shard(state, MESH, min_size=1024))
        assert_bitwise_equal(update(grads, apart.opt_state, apart.params), alone)


@pytest.mark.full
def test_orbax_brings_back_every_bit(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    step, state = make()
    state, _ = jax.jit(step)(state, jnp.ones((16, 64)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", make()[1])
    assert_bitwise_equal(restored, state)
