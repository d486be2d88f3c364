"""Public examples of training in 8 bits, as their users write them without their library, in our recipes."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import promoting, relaxed

import jmp_train as jt
from jmp_train.policies import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Int8RowwiseScaling

pytestmark = pytest.mark.full


def policy_of(paths: Any, recipe: Any) -> Any:
    rules = jt.TORCH_CUDA.replace(paths=paths)
    return dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=recipe)


def few(policy: Any, loss_fn: Any, *args: Any) -> list[str]:
    """Returns the paths of the products in few bits."""
    operations = jt.explain_policy(loss_fn, policy, *args).operations
    return [row.path for row in operations if row.rule == "fp8"]


def trained(
    loss_fn: Any, optimizer: Any, policy: Any, params: Any, batches: Any, rng: Any = None
) -> tuple[Any, list[float]]:
    """Returns the params after a step on each batch, and the losses."""
    step = jt.train_step(loss_fn, relaxed(optimizer), policy=policy)
    state = jt.TrainState.create(params, step.optimizer, rng=rng)
    if isinstance(getattr(policy, "fp8", None), DelayedScaling):
        state = jt.steps.with_fp8_state(step, state, batches[0])
    run, losses = jax.jit(promoting(step)), []
    for batch in batches:
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    return state.params, losses


class Net(nn.Module):
    """`examples/jax/mnist/test_single_gpu_mnist.py` of Transformer Engine, with flax's layers."""

    @nn.compact
    def __call__(self, x: Any, disable_dropout: bool = False) -> Any:
        x = nn.Conv(features=32, kernel_size=(3, 3), strides=1, dtype=jnp.bfloat16)(x)
        x = nn.relu(x)
        x = nn.Conv(features=64, kernel_size=(3, 3), strides=1, dtype=jnp.bfloat16)(x)
        x = nn.relu(x)
        x = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Dropout(rate=0.25)(x, deterministic=disable_dropout)
        x = x.reshape(x.shape[0], -1)
        assert x.dtype == jnp.bfloat16
        x = nn.Dense(features=128, dtype=jnp.bfloat16)(x)
        x = nn.relu(x)
        x = nn.Dropout(rate=0.5)(x, deterministic=disable_dropout)
        x = nn.Dense(features=32, dtype=jnp.bfloat16)(x)
        x = nn.Dense(features=32, dtype=jnp.bfloat16)(x)
        assert x.dtype == jnp.bfloat16
        return x


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), jt.policies.MXFP8BlockScaling()])
def test_mnist_of_transformer_engine(recipe: Any) -> None:
    cnn: Any = Net()
    images = jax.random.uniform(jax.random.key(0), (32, 12, 12, 1))
    labels = (images[:, :6].mean((1, 2, 3)) > images[:, 6:].mean((1, 2, 3))).astype(jnp.int32)
    params = promoting(cnn.init)({"params": jax.random.key(1), "dropout": jax.random.key(2)}, images)["params"]

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        images, labels = batch
        logits = cnn.apply({"params": params}, images, rngs={"dropout": rng})
        loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 32)).mean()
        return loss, (model_state, None)

    policy = policy_of({"Dense_": "fp8"}, recipe)
    batch = images, labels
    paths = few(policy, promoting(loss_fn), params, None, batch, jax.random.key(3))
    assert [path.rsplit("/")[-1] for path in paths] == ["Dense_0", "Dense_1", "Dense_2"]
    optimizer = optax.sgd(0.02, 0.9)
    _, losses = trained(loss_fn, optimizer, policy, params, [batch] * 12, jax.random.key(4))
    _, plain = trained(loss_fn, optimizer, jt.get_policy("autocast_bfloat16"), params, [batch] * 12, jax.random.key(4))
    assert max(losses[-1], plain[-1]) < 0.5 * losses[0]
    np.testing.assert_allclose(losses[0], plain[0], rtol=0.02)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8RowwiseScaling()])
def test_readme_of_torchao(recipe: Any) -> None:
    """`m = nn.Sequential(nn.Linear(K, N), nn.Linear(N, 128))`, where the filter leaves out the module "1"."""
    m: Any = nn.Sequential([nn.Dense(96, use_bias=False), nn.Dense(128, use_bias=False)])
    x = jax.random.normal(jax.random.key(0), (64, 80))
    params = m.init(jax.random.key(1), x)

    def loss_fn(params: Any, x: Any) -> Any:
        return m.apply(params, x).astype(jnp.float32).sum()

    policy = policy_of({"layers_0": "fp8"}, recipe)
    assert [path.rsplit("/")[-1] for path in few(policy, loss_fn, params, x)] == ["layers_0"]
    after, _ = trained(jt.stateless(loss_fn), optax.sgd(0.1), policy, params, [x])
    plain, _ = trained(jt.stateless(loss_fn), optax.sgd(0.1), jt.get_policy("float32"), params, [x])
    change, wanted = (jax.tree.map(jnp.subtract, tree, params) for tree in (after, plain))
    for got, exact in zip(jax.tree.leaves(change), jax.tree.leaves(wanted), strict=True):
        assert jnp.linalg.norm(got - exact) < 0.1 * jnp.linalg.norm(exact)


def test_fp8_layers_of_flax() -> None:
    """`nn.Dense(..., dot_general_cls=nn.Fp8DotGeneral)` and our delayed scaling learn the same."""
    x = jax.random.normal(jax.random.key(0), (32, 16))

    def model(dot_general: Any) -> Any:
        make = lambda features: nn.Dense(features, dot_general_cls=dot_general, dtype=jnp.bfloat16)
        return nn.Sequential([make(32), nn.relu, make(16)])

    theirs, plain = model(nn.Fp8DotGeneral), model(None)
    variables = promoting(theirs.init)(jax.random.key(1), x)

    def loss_of(model: Any) -> Any:
        return lambda variables, x: ((model.apply(variables, x).astype(jnp.float32) - x[:, ::-1]) ** 2).mean()

    batches = [x * (1 + 0.1 * i) for i in range(6)]
    params = {"params": variables["params"]}
    policy = policy_of({"layers_": "fp8"}, DelayedScaling())
    assert len(few(policy, loss_of(plain), params, x)) == 2
    _, losses = trained(jt.stateless(loss_of(plain)), optax.sgd(0.1), policy, params, batches)
    _, wanted = trained(jt.stateless(loss_of(theirs)), optax.sgd(0.1), jt.get_policy("float32"), variables, batches)
    np.testing.assert_allclose(losses, wanted, rtol=0.01)


class Layer(nn.Module):
    """A layer of a decoder."""

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        query, key, value = (
            nn.DenseGeneral((2, 8), use_bias=False, name=name)(x) for name in ("query", "key", "value")
        )
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", query, key) / 8**0.5)
        x = x + nn.DenseGeneral(16, (-2, -1), name="out")(jnp.einsum("bhts,bshd->bthd", scores, value))
        return x + nn.Dense(16, name="wo")(nn.relu(nn.Dense(32, name="wi")(nn.RMSNorm()(x)))), None


class Decoder(nn.Module):
    """Layers in a loop, each recomputed, and logits, as in MaxText with `scan_layers` and `remat_policy`."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        scan: Any = nn.scan
        loop = scan(nn.remat(Layer), {"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=3)
        return nn.Dense(24, name="logits_dense")(loop(name="layers")(x, None)[0])


class Model(nn.Module):
    """A decoder within a model."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Decoder(name="decoder")(x)


@pytest.mark.parametrize("recipe", [Int8RowwiseScaling(), Float8CurrentScaling(), DelayedScaling()])
def test_quantization_of_maxtext(recipe: Any) -> None:
    """`quantization: "int8"` and `"fp8"`: `QtRule(module_path="decoder/.*layers.*", op_names=("dot_general",))`."""
    model: Any = Model()
    x = jax.random.normal(jax.random.key(0), (4, 8, 16))
    params = model.init(jax.random.key(1), x)

    def loss_fn(params: Any, x: Any) -> Any:
        return (model.apply(params, x).astype(jnp.float32) ** 2).mean()

    policy = policy_of({"decoder/.*layers": "fp8"}, recipe)
    paths = [path.rsplit("/")[-1] for path in few(policy, loss_fn, params, x)]
    assert paths == ["query", "key", "value", "out", "wi", "wo"]  # not the products of attention, not the logits
    _, losses = trained(jt.stateless(loss_fn), optax.adam(1e-2), policy, params, [x] * 6)
    _, plain = trained(jt.stateless(loss_fn), optax.adam(1e-2), jt.get_policy("float32"), params, [x] * 6)
    np.testing.assert_allclose(losses[0], plain[0], rtol=0.08)
    np.testing.assert_allclose(losses, plain, rtol=0.3)
