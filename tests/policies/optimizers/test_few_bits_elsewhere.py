"""Optimizer state in few bits in other programs' hands: an `nnx.Optimizer`, orbax checkpoints, safetensors files."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from promotion import promoting, relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies.quantizing import BlockQuantized, dequantize

pytestmark = pytest.mark.full

BOTH = {"mu": "int8", "nu": "uint8"}
X = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)


def small(rounding: str = "nearest") -> Any:
    """Adam whose moments are in 8 bits, those of small arrays too."""
    return jt.with_state_dtypes(relaxed(optax.adam(1e-2)), BOTH, rounding=rounding, min_size=1)


def loss_of(kernel: jax.Array) -> jax.Array:
    return ((jnp.asarray(X) @ kernel.astype(jnp.float32)) ** 2).mean()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_an_nnx_optimizer_steps_as_optax_does(rounding: str) -> None:
    optimizer = jt.with_loss_scale(small(rounding), jt.torch_loss_scale(8.0))
    model = nnx.Linear(64, 32, use_bias=False, rngs=nnx.Rngs(0))
    params = jnp.copy(model.kernel[...])
    opt_state = optimizer.init({"kernel": params})
    wrapped = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(model: nnx.Linear, wrapped: nnx.Optimizer) -> None:
        scale = jt.get_loss_scale(wrapped)
        grads = nnx.grad(lambda model: scale.scale(loss_of(model.kernel[...])))(model)
        promoting(wrapped.update)(model, grads)

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        grads = jax.grad(lambda x: jt.get_loss_scale(opt_state).scale(loss_of(x)))(params)
        updates, opt_state = promoting(optimizer.update)({"kernel": grads}, opt_state, {"kernel": params})
        stepped: Any = optax.apply_updates({"kernel": params}, updates)
        return stepped["kernel"], opt_state

    for _ in range(5):
        nnx_step(model, wrapped)
        params, opt_state = step(params, opt_state)
    np.testing.assert_allclose(model.kernel[...], params, rtol=1e-5, atol=1e-6)
    moments: Any = wrapped.opt_state.inner_state.inner_state[0]
    kept = moments.mu["kernel"].get_value()  # a mapping of what were its fields, as nnx has it
    assert (kept["codes"].dtype, kept["codes"].shape) == (jnp.int8, (64, 32))
    decoded = [optax.tree.get(jt.policies.decode_opt_state(state), "nu") for state in (wrapped.opt_state, opt_state)]
    (mine,), (other,) = (jax.tree.leaves(tree) for tree in decoded)
    np.testing.assert_allclose(mine, other, rtol=0.05, atol=1e-9)


def test_an_orbax_checkpoint_of_plain_adam_goes_on_in_8_bits(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    adam: Any = relaxed(optax.adam(1e-2))
    params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(64, 32)), jnp.float32)}
    grads = jax.grad(lambda params: loss_of(params["w"]))(params)
    _, plain = adam.update(grads, adam.init(params), params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", plain)
        checkpointer.wait_until_finished()
        read = checkpointer.restore(tmp_path / "state")  # without a target: nested dicts and lists
    optimizer = jt.with_kahan(jt.with_loss_scale(small(), jt.NoOpLossScale()), compensation_dtype="int8")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    adopted: Any = jt.adopt_opt_state(optimizer.init(half), read)
    moments = adopted.inner_state.inner_state.inner_state[0]
    assert int(moments.count) == 1
    for name, bound in (("mu", 0.02), ("nu", 0.01)):
        kept, exact = getattr(moments, name)["w"], getattr(plain[0], name)["w"]
        assert isinstance(kept, BlockQuantized)
        largest = float(jnp.abs(exact).max())
        np.testing.assert_allclose(dequantize(kept), exact, atol=bound * largest)
    # The next step is the plain optimizer's but for what 8 bits lose of the moments.
    updates, _ = adam.update(grads, plain, params)
    new, state = optimizer.update(grads, adopted, half, return_params=True)
    taken = jt.policies.compensated_params(new, state)["w"] - half["w"].astype(jnp.float32)
    large = np.abs(np.asarray(grads["w"])) > 0.1 * np.abs(np.asarray(grads["w"])).max()
    np.testing.assert_allclose(np.asarray(taken)[large], np.asarray(updates["w"])[large], rtol=0.1, atol=1e-4)


def test_compensated_parameters_are_other_programs_weights(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    optimizer = jt.with_kahan(jt.with_loss_scale(small(), jt.NoOpLossScale()), compensation_dtype="int8")
    params = {"w": jnp.ones((64, 32), jnp.bfloat16)}
    step = jt.train_step(jt.stateless(lambda params, batch: loss_of(params["w"])), optimizer)
    state = jt.TrainState.create(params, optimizer)
    for _ in range(3):
        state, _ = jax.jit(step)(state, jnp.zeros(1))
    weights = jt.policies.compensated_params(state.params, state.opt_state)
    jt.checkpoints.save_weights(tmp_path / "model.safetensors", weights)
    found = load_file(tmp_path / "model.safetensors")["w"]
    assert found.dtype == np.float32
    assert_bitwise_equal(found, weights["w"])
    assert (found != np.asarray(state.params["w"]).astype(np.float32)).any()
    again = jt.checkpoints.load_weights(tmp_path / "model.safetensors", params)
    assert_bitwise_equal(again["w"], weights["w"].astype(jnp.bfloat16))
