"""Models of every neural network library that we promise train through the same step."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from promotion import relaxed

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest]

Made = tuple[Any, Any, Callable[..., Any]]  # params, model_state, loss_fn
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
BATCH = {"x": jnp.asarray(X), "y": jnp.asarray(np.sign(X[:, :1]))}


def squared(y: jax.Array, batch: Any) -> jax.Array:
    return ((y.astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2).mean()


def linen() -> Made:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Dense(8)(x)
            x = nn.BatchNorm(use_running_average=False, name="norm")(x)
            return nn.Dense(1)(nn.relu(x))

    net = Net()
    variables = net.init(jax.random.key(0), BATCH["x"])

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        variables = {"params": params, "batch_stats": stats}
        y, updated = net.apply(variables, batch["x"], mutable=["batch_stats"])
        return squared(y, batch), (updated["batch_stats"], None)

    return variables["params"], variables["batch_stats"], loss_fn


def flax_nnx() -> Made:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.out = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.dense(x)
            return self.out(nnx.relu(self.norm(x).astype(x.dtype)))  # nnx's norm returns float32

    graph, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        net = nnx.merge(graph, params, stats)
        y = net(batch["x"])
        return squared(y, batch), (nnx.state(net, nnx.BatchStat), None)

    return params, stats, loss_fn


def equinox() -> Made:
    class Net(eqx.Module):
        dense: eqx.nn.Linear
        norm: eqx.nn.LayerNorm
        out: eqx.nn.Linear

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(jax.nn.relu(self.norm(self.dense(x))))

    keys = jax.random.split(jax.random.key(0))
    net = Net(eqx.nn.Linear(4, 8, key=keys[0]), eqx.nn.LayerNorm(8),
              eqx.nn.Linear(8, 1, key=keys[1]))  # fmt: skip
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return squared(jax.vmap(eqx.combine(params, static))(batch["x"]), batch)

    return params, None, jt.stateless(loss_fn)


def haiku() -> Made:
    def forward(x: jax.Array) -> jax.Array:
        x = hk.Linear(8)(x)
        x = hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training=True)
        return hk.Linear(1)(jax.nn.relu(x))

    net = hk.transform_with_state(forward)
    params, stats = net.init(jax.random.key(0), BATCH["x"])

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        y, stats = net.apply(params, stats, None, batch["x"])
        return squared(y, batch), (stats, None)

    return params, stats, loss_fn


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [linen, flax_nnx, equinox, haiku])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "by path"])
def test_it_trains(make: Callable[[], Made], policy: str) -> None:
    with jax.numpy_dtype_promotion("standard"):  # the libraries promote by themselves
        params, model_state, loss_fn = make()
        by_path = jt.policy_by_path({"norm": "float32"}, default="mixed_float16")
        chosen = by_path if policy == "by path" else jt.get_policy(policy)
        optimizer = jt.with_loss_scale(relaxed(optax.adam(0.03)), jt.torch_loss_scale(2.0**8))
        step = jax.jit(jt.train_step(loss_fn, optimizer, policy=chosen), donate_argnums=0)
        state = jt.TrainState.create(params, optimizer, model_state=model_state)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", jt.policies.Float32ProductsWarning)
            state, first = step(state, BATCH)
        hands_on_float32 = policy == "by path" and make in (linen, haiku)
        assert len(warned) == hands_on_float32  # the product after the norm
        for _ in range(30):
            state, metrics = step(state, BATCH)
            assert bool(metrics["grads_finite"])
        last = step(jax.tree.map(jnp.copy, state), BATCH)[1]
    floats = jax.tree.leaves((state.params, state.model_state))
    assert {x.dtype.name for x in floats if jnp.issubdtype(x.dtype, jnp.floating)} == {"float32"}
    assert float(last["loss"]) < 0.7 * float(first["loss"])
