"""flax's fp8 scales and histories are overwritten with their gradients, as flax's own TrainState does."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.linen import fp8_ops
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from promotion import promoting, relaxed
from pytrees import assert_bitwise_equal, assert_close

import jmp_train as jt

pytestmark = pytest.mark.quick

COLLECTION = fp8_ops.OVERWRITE_WITH_GRADIENT
MODEL: Any = nn.Dense(16, dot_general_cls=fp8_ops.Fp8DotGeneral, dtype=jnp.float32)
BATCH = jax.random.normal(jax.random.key(0), (16, 16))
VARIABLES: Any = jax.jit(MODEL.init)(jax.random.key(1), BATCH)


def loss_fn(variables: Any, batch: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):  # flax's own promotions
        return (MODEL.apply(variables, batch).astype(jnp.float32) ** 2).mean()


def run(optimizer: Any, variables: Any = VARIABLES, steps: int = 2, **kwargs: Any) -> Any:
    step = jax.jit(promoting(jt.train_step(jt.stateless(loss_fn), optimizer, **kwargs)))
    state, metrics = jt.TrainState.create(variables, optimizer), {}
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return state, metrics


def test_steps_are_those_of_flax() -> None:
    adam = relaxed(optax.adam(1e-2))
    state, metrics = run(adam)
    flax_state = TrainState.create(apply_fn=None, params=VARIABLES, tx=adam)

    @jax.jit
    @promoting
    def flax_step(state: Any) -> Any:
        grads = jax.grad(loss_fn)(state.params, BATCH)
        return state.apply_gradients(grads=grads), optax.tree.norm(grads["params"])

    flax_state, norm = flax_step(flax_step(flax_state)[0])
    assert_close(state.params, flax_state.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert float(jax.tree.leaves(state.params[COLLECTION])[0].max()) > 1  # amax of the batch
    assert len(jax.tree.leaves(state.opt_state)) == 1 + 2 * len(jax.tree.leaves(VARIABLES["params"]))


@pytest.mark.full
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_no_loss_scale_and_no_policy_touches_them(policy: str) -> None:
    plain, _ = run(optax.sgd(0.1), steps=1)
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.StaticLossScale(1024.0))
    state, _ = run(optimizer, steps=1, policy=policy)
    histories = [x.params[COLLECTION]["Fp8DirectDotGeneralOp_0"] for x in (state, plain)]
    for name in ("input_amax_history", "kernel_amax_history", "input_scale", "kernel_scale"):
        rounding = 0 if policy == "float32" else 1e-2
        np.testing.assert_allclose(*(h[name] for h in histories), rtol=rounding)
        assert histories[0][name].dtype == jnp.float32
    # That of the cotangent is the scaled one's: the backward pass quantizes it as it comes.
    scaled, bare = (float(h["output_grad_amax_history"].max()) for h in histories)
    assert scaled == pytest.approx(1024 * bare, rel=1e-2)


@pytest.mark.full
def test_an_overflow_that_reaches_the_scales_alone_is_a_skip_of_everything() -> None:
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            op = fp8_ops.Fp8DirectDotGeneralOp
            return nn.Dense(4, dot_general_cls=op)(nn.relu(nn.Dense(8, dot_general_cls=op)(x)))

    def two_loss(variables: Any, batch: jax.Array) -> Any:
        outputs: Any = Two().apply(variables, batch)
        return (outputs.astype(jnp.float32) ** 2).mean()

    variables: Any = promoting(Two().init)(jax.random.key(1), BATCH)
    bad = BATCH.at[0].set(jnp.inf)
    grads = jax.jit(promoting(jax.grad(two_loss)))(variables, bad)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads["params"]))  # fp8 has no inf
    assert not all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads[COLLECTION]))

    optimizer = jt.with_loss_scale(relaxed(optax.adam(0.1)), jt.torch_loss_scale(4.0))
    before = jt.TrainState.create(variables, optimizer)
    after, metrics = promoting(jt.train_step(jt.stateless(two_loss), optimizer))(before, bad)
    flax_state: Any = jt.FlaxTrainState.create(apply_fn=None, params=variables, tx=optimizer)
    flax_after: Any = flax_state.apply_gradients(grads=grads)
    assert not bool(metrics["grads_finite"])
    pairs: Any = ((after, before), (flax_after, flax_state))
    for state, old in pairs:
        assert_bitwise_equal(state.params, old.params)
        assert_bitwise_equal(state.opt_state.inner_state, old.opt_state.inner_state)
        assert int(state.opt_state.skipped_steps) == 1
        assert float(jt.get_loss_scale(state.opt_state).loss_scale) == 2


@pytest.mark.full
def test_of_micro_batches_and_devices_the_largest_counts() -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.NoOpLossScale())
    whole, _ = run(optimizer, steps=1)
    parts, _ = run(optimizer, steps=1, accumulate_steps=4)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    step = jt.train_step(jt.stateless(loss_fn), optimizer)
    devices, _ = jax.jit(promoting(jt.data_parallel(step, mesh)))(jt.TrainState.create(VARIABLES, optimizer), BATCH)
    for state in (parts, devices):
        for name in ("input_amax_history", "kernel_amax_history", "input_scale"):
            values = [x.params[COLLECTION]["Fp8DirectDotGeneralOp_0"][name] for x in (state, whole)]
            np.testing.assert_allclose(*values, rtol=1e-6)


@pytest.mark.full
def test_the_collection_is_found_in_other_containers() -> None:
    def pair_loss(params: Any, batch: jax.Array) -> jax.Array:
        return loss_fn(params["models"][0], batch) + loss_fn(params["models"][1], batch)

    optimizer = jt.with_master_weights(jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale()))
    params = {"models": (VARIABLES, VARIABLES)}
    state = jt.TrainState.create(params, optimizer)
    state, _ = promoting(jt.train_step(jt.stateless(pair_loss), optimizer))(state, BATCH)
    alone, _ = run(jt.with_master_weights(jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())), steps=1)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)
    for one in state.params["models"]:
        assert_close(one, alone.params, rtol=1e-5, atol=1e-6)
    frozen, _ = run(optimizer, freeze(VARIABLES), steps=1)
    assert jax.tree.structure(frozen.params) == jax.tree.structure(freeze(VARIABLES))


@pytest.mark.parametrize(
    "wrap",
    [
        jt.with_master_weights,
        lambda adam: jt.with_loss_scale(adam, jt.NoOpLossScale()),
        lambda adam: jt.with_state_dtypes(adam, {"nu": "bfloat16"}),
        lambda adam: jt.with_stochastic_rounding(adam, jax.random.key(0)),
        jt.with_kahan,
    ],
)
def test_an_optimizer_that_would_train_them_says_what_to_do(wrap: Any) -> None:
    optimizer = wrap(optax.adam(1e-2))
    with pytest.raises(TypeError, match=f"params '{COLLECTION}/.*amax_history.*jt.train_step or jt.FlaxTrainState"):
        optimizer.init(VARIABLES)
    optimizer.init(jax.tree.map(lambda x: x.astype(jnp.bfloat16), VARIABLES["params"]))


@pytest.mark.full
def test_variables_of_nnx_among_the_parameters_are_refused() -> None:
    model: Any = nnx.bridge.ToNNX(MODEL, rngs=nnx.Rngs(0))
    promoting(model.lazy_init)(BATCH)
    params = nnx.split(model, nnx.Any(nnx.Param, nnx.variable_type_from_name(COLLECTION)), ...)[1]
    with pytest.raises(TypeError, match=r"params 'Fp8D.*/input_amax_history' is in flax's collection .* rule 'fp8'"):
        jt.TrainState.create(params, optax.adam(1e-2))
    jt.TrainState.create(nnx.split(model, nnx.Param, ...)[1], optax.adam(1e-2))
