"""Models of four libraries run unchanged under autocast and train by every policy; what a step under autocast costs."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import mnist
import numpy as np
import optax
import pytest
from flax import nnx
from promotion import promoting, relaxed

import jmp_train as jt
from jmp_train.app.tasks import digits
from jmp_train.policies.autocasting.transform import autocast
from jmp_train.policies.programs import walk

pytestmark = pytest.mark.quick

HALVES = (jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.full))
RANDOM = np.random.default_rng(0)
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


class Model(NamedTuple):
    """A loss as users write it: `loss(complete(params), *batch)` gives a float and its by-products."""

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    complete: Callable[[Any], Any] = lambda params: params
    closeness: float = 5e-2  # of the gradients

    def under(self, transform: Transform) -> Callable[..., Any]:
        """Returns the transformed loss as a function of the parameters and the batch."""
        loss = transform(promoting(self.loss))
        return lambda params, *batch: loss(self.complete(params), *batch)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


def labels(count: int, classes: int = 10) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32) % classes


def cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()


def applied(model: Any, *batch: Any) -> Model:
    """Returns a model of `init` and `apply` with the cross-entropy of its logits as the loss."""
    params = promoting(model.init)(jax.random.key(0), batch[0])

    def loss(params: Any, x: jax.Array, target: jax.Array) -> Any:
        logits = model.apply(params, x)
        return cross_entropy(logits, target), logits

    return Model(loss, params, batch)


# The models


def linen_cnn() -> Model:
    params, batch_stats = digits.init(jax.random.key(0))

    def loss(params: Any, batch_stats: Any, batch: Any, rng: Any) -> Any:
        loss, (batch_stats, _) = digits.loss_fn(params, batch_stats, batch, rng)
        return loss, batch_stats

    batch = {"image": jnp.abs(normal(16, 8, 8, 1)), "label": labels(16)}
    # Rounding switches relus next to BatchNorm's mean: by hand, bfloat16 is 0.064 away from float32.
    return Model(loss, params, (batch_stats, batch, jax.random.key(1)), closeness=0.1)


class Block(nn.Module):
    """A transformer's block; `dtype` is flax's: what users of flax set by hand."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
        return x + nn.Dense(width, dtype=self.dtype)(y)


class ViT(nn.Module):
    """A small vision transformer."""

    dtype: Any = None
    width: int = 64
    patch: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        patch = (self.patch, self.patch)
        x = nn.Conv(self.width, patch, patch, dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + positions.astype(x.dtype)
        for _ in range(2):
            x = Block(2, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(1)
        return nn.Dense(10, dtype=self.dtype)(x)


def linen_vit() -> Model:
    return applied(ViT(), normal(8, 32, 32, 3), labels(8))


def linen_gru() -> Model:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            outputs: Any = nn.RNN(nn.GRUCell(16))(x)
            return nn.Dense(10)(outputs[:, -1])

    return applied(Net(), normal(8, 6, 5), labels(8))


def equinox_mlp() -> Model:
    net = eqx.nn.MLP(6, 10, 32, 2, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_inexact_array)

    def loss(net: Any, x: jax.Array, target: jax.Array) -> Any:
        logits = jax.vmap(net)(x)
        return cross_entropy(logits, target), logits

    return Model(loss, params, (normal(16, 6), labels(16)), lambda p: eqx.combine(p, static))


def haiku_transformer() -> Model:
    def forward(x: jax.Array) -> jax.Array:
        init = hk.initializers.VarianceScaling(1.0)
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(2, 8, w_init=init, model_size=16)(y, y, y)
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.Linear(16)(jax.nn.gelu(hk.Linear(64)(y)))
        return hk.Linear(10)(x.mean(1))

    return applied(hk.without_apply_rng(hk.transform(forward)), normal(8, 5, 16), labels(8))


def nnx_cnn() -> Model:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.out = nnx.Linear(8, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))

    graph, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def loss(params: Any, stats: Any, x: jax.Array, target: jax.Array) -> Any:
        net = nnx.merge(graph, params, stats, copy=True)
        return cross_entropy(net(x), target), nnx.state(net, nnx.BatchStat)

    return Model(loss, params, (stats, normal(8, 6, 6, 1), labels(8)))


MODELS = (linen_cnn, linen_vit, linen_gru, equinox_mlp, haiku_transformer, nnx_cnn)


# What is asserted


def product_dtypes(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Returns in which dtypes all matrix products and convolutions compute: those of their operands."""
    return [
        "*".join({atom.aval.dtype.name for atom in equation.invars})
        for equation in (place.equation for place in walk(jax.make_jaxpr(fn)(*args)))
        if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]


def distance(tree: Any, expected: Any) -> float:
    """Returns the relative distance in the L2 norm of the whole tree."""
    difference = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b, tree, expected)
    return float(optax.tree.norm(difference) / optax.tree.norm(expected))


@functools.cache
def made(make: Callable[[], Model]) -> tuple[Model, Any]:
    """Returns a model, and its float32 loss and gradient with what else the loss returns."""
    model = make()
    plain = jax.value_and_grad(model.under(lambda loss: loss), has_aux=True)
    return model, jax.jit(plain)(model.params, *model.batch)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
@pytest.mark.parametrize("make", MODELS)
def test_a_model_runs_unchanged(make: Callable[[], Model], half: Any) -> None:
    model, ((expected, expected_rest), expected_grads) = made(make)
    args = (model.params, *model.batch)
    forward = model.under(lambda loss: autocast(loss, half))
    backward = jax.value_and_grad(forward, has_aux=True)

    products = product_dtypes(forward, *args)
    assert set(products) == {half.__name__}
    assert len(products) == len(product_dtypes(model.under(lambda loss: loss), *args))
    assert set(product_dtypes(backward, *args)) == {half.__name__}

    for (loss, rest), grads in ((jax.jit(forward)(*args), expected_grads), jax.jit(backward)(*args)):
        assert loss.dtype == jnp.float32
        tolerance = 5e-3 if half == jnp.float16 else 2e-2
        assert float(loss) == pytest.approx(float(expected), rel=tolerance)
        assert distance(rest, expected_rest) < tolerance
        assert {grad.dtype.name for grad in jax.tree.leaves(grads)} == {"float32"}
        assert distance(grads, expected_grads) < model.closeness


@pytest.mark.newest
@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore::jmp_train.policies.Float32ProductsWarning")  # of products after a norm
@pytest.mark.parametrize("make", [linen_cnn, equinox_mlp, haiku_transformer, nnx_cnn])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "norms in float32"])
def test_it_trains(make: Callable[[], Model], policy: str) -> None:
    model = make()
    paths = {} if make is equinox_mlp else {"(?i)norm": "float32"}  # it has no norm
    by_path = jt.policy_by_path(paths, default="mixed_float16")
    loss = model.under(lambda loss: loss)
    optimizer = jt.with_loss_scale(relaxed(optax.adam(0.03)), jt.torch_loss_scale(2.0**8))
    chosen = by_path if policy == "norms in float32" else policy
    step = jt.train_step(
        jt.stateless(lambda params, batch: loss(params, *batch), has_aux=True), optimizer, policy=chosen
    )
    state, losses = jt.TrainState.create(model.params, optimizer), []
    run = jax.jit(step, donate_argnums=0)
    for _ in range(30):
        state, metrics = run(state, model.batch)
        assert bool(metrics["grads_finite"])
        losses.append(float(metrics["loss"]))
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    assert losses[-1] < 0.7 * losses[0]


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def mnist_shapes(count: int) -> tuple[Any, ...]:
    params, batch_stats = jax.eval_shape(mnist.init, jax.random.key(0))
    batch = {"image": shaped(count, 28, 28, 1), "label": shaped(count, dtype=jnp.int32)}
    return params, batch_stats, batch, jax.random.key(1)


@pytest.mark.full
@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
def test_the_mnist_network_by_its_shapes(half: Any) -> None:
    args = mnist_shapes(4)
    gradient = jax.value_and_grad(autocast(promoting(mnist.loss_fn), half), has_aux=True)
    (loss, (batch_stats, metrics)), grads = jax.eval_shape(gradient, *args)
    floats = jax.tree.leaves((loss, batch_stats, metrics, grads))
    assert {x.dtype.name for x in floats} == {"float32"}
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, args[0])
    assert set(product_dtypes(gradient, *args)) == {half.__name__}


# Cost


def vit_loss(model: ViT) -> Callable[..., jax.Array]:
    def loss(params: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, x)
        assert isinstance(logits, jax.Array)
        return cross_entropy(logits.astype(jnp.float32), target)

    return promoting(loss)


def instructions(loss: Callable[..., jax.Array], *args: Any) -> tuple[int, int]:
    """Returns the instructions of a compiled training step, and those that convert dtypes."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    text = jax.jit(step).lower(*args).compile().as_text()
    assert text is not None
    return len(re.findall(r"^\s+(?:ROOT )?%?\S+ = ", text, re.MULTILINE)), text.count(" convert(")


@pytest.mark.full
@pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["f16", "bf16"])
def test_a_step_has_as_few_instructions_as_one_cast_by_hand(half: Any) -> None:
    x = shaped(8, 32, 32, 3)
    params = jax.eval_shape(promoting(ViT().init), jax.random.key(0), x)["params"]
    args = (params, x, shaped(8, dtype=jnp.int32))
    ours = instructions(autocast(vit_loss(ViT()), half), *args)
    by_hand = instructions(vit_loss(ViT(half)), *args)
    assert ours[0] <= 1.05 * by_hand[0]
    assert ours[1] <= 1.05 * by_hand[1]


def residual_bytes(loss: Callable[..., Any], params: Any, *args: Any) -> int:
    """Returns how much a loss keeps for its gradient."""

    def pullback(params: Any, *args: Any) -> Any:
        return jax.vjp(lambda params: loss(params, *args), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pullback, params, *args))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.full
def test_the_mnist_network_keeps_half_as_much_for_its_gradient() -> None:
    def loss(*args: Any) -> jax.Array:
        return promoting(mnist.loss_fn)(*args)[0]

    args = mnist_shapes(256)
    assert residual_bytes(autocast(loss), *args) <= 0.6 * residual_bytes(loss, *args)
