"""Planted faults of the backward pass and of the update: loss scales, moments, averages and parameters in half."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from planting import SCALE, STATE, Case, Fault, Way, mean_square, values
from promotion import promoting

import jmp_train as jt

WIDTH, LENGTH = 8, 8
BF16 = "bfloat16"


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.tanh(nn.Dense(WIDTH)(x))
        return nn.Dense(WIDTH)(x)


def vanishing(way: Way) -> Case:
    """A loss of small weight, without a loss scale."""
    model, x = MLP(), values(LENGTH, WIDTH)
    scale = None if way.value is None or way.exact else jt.StaticLossScale(way.value)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        outputs: Any = model.apply(params, x)
        return 1e-7 * mean_square(outputs.astype(jnp.float32))  # fault: gradients that vanish

    return way.training(loss_fn, model.init(jr.key(0), x), x, scale)


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return nnx.tanh(self.inner(h) + row).astype(h.dtype), None

        h = lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x)[0]
        return h.astype(jnp.float32)  # fault: loss scale of a recurrent net


def large_scale(way: Way) -> Case:
    graph, params = nnx.split(Recurrent(nnx.Rngs(0)))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return 100 * mean_square(nnx.merge(graph, params)(x))

    scale = None if way.exact else jt.StaticLossScale(way.number(2.0**18))
    return way.training(loss_fn, params, values(6, LENGTH, WIDTH), scale)


def large_scale_on_devices(way: Way) -> Case:
    """A static scale on eight devices, whose gradients are summed in half."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return mean_square(jnp.tanh(x @ params["w"]).astype(jnp.float32))  # fault: loss scale on devices

    scale = None if way.exact else jt.StaticLossScale(way.number(2.0**24))
    step, args = way.training(loss_fn, {"w": values(WIDTH, WIDTH)}, values(16, WIDTH), scale)
    return jt.data_parallel(step, mesh), args


def summed_on_devices(way: Way) -> Case:
    """The sum of a loss over devices, in half."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def total(params: Any, x: jax.Array) -> jax.Array:
            h = jnp.abs(x @ params["w"])
            return lax.psum(h, "data")  # fault: sum over devices

        h = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(params, x)
        return mean_square(h.astype(jnp.float32) / 10000)

    return way.gradients(loss_fn), ({"w": jnp.ones((WIDTH, WIDTH))}, jnp.full((LENGTH, WIDTH), 2000.0))


def adam(way: Way) -> Case:
    """Adam on parameters and gradients in float16: squares of gradients and its epsilon are 0."""
    optimizer = optax.adam(1e-2)
    params = way.state(eqx.nn.Linear(WIDTH, WIDTH, key=jr.key(0)))
    x = values(LENGTH, WIDTH).astype(way.state_dtype)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        grads = jax.grad(lambda model, x: 1e-4 * mean_square(jax.vmap(model)(x)))(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)  # fault: Adam in half
        return (optax.apply_updates(params, updates), opt_state), None

    return step, ((params, optimizer.init(params)), x)


def hand_adam(way: Way) -> Case:
    """Adam as it is written by hand; the moments decay, the epsilon is 0."""

    def step(state: Any, x: jax.Array) -> Any:
        w, m, v = state
        g = jax.grad(lambda w: mean_square(x @ w))(w)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w - 0.01 * m / (jnp.sqrt(v) + 1e-8)  # fault: epsilon of Adam
        return (w, m, v), None

    w = way.state(values(WIDTH, WIDTH).at[0].set(0))
    x = values(LENGTH, WIDTH).at[:, 0].set(0).astype(way.state_dtype)
    return step, ((w, jnp.zeros_like(w), jnp.zeros_like(w)), x)


def second_moments(way: Way) -> Case:
    """Moments in bfloat16 that should fall, late in training."""

    def step(state: Any, x: jax.Array) -> Any:
        w, nu = state
        g = jax.grad(lambda w: mean_square(x @ w))(w)
        nu = nu + (1 - 0.999) * (g.astype(nu.dtype) ** 2 - nu)  # fault: second moments
        return (w - 1e-3 * g / jnp.sqrt(nu.astype(jnp.float32) + 1e-8), nu), None

    nu = jnp.full((WIDTH, WIDTH), 0.25, way.state_dtype)
    return step, ((values(WIDTH, WIDTH, scale=0.1), nu), values(LENGTH, WIDTH))


def stuck_moments(way: Way) -> Case:
    """optax's Adam on float32 gradients, with its second moments in bfloat16."""
    optimizer: Any = optax.scale_by_adam(b2=0.999)

    def step(state: Any, x: jax.Array) -> Any:
        w, opt_state = state
        g = jax.grad(lambda w: mean_square(x @ w))(w)
        updates, new = optimizer.update(g, opt_state)  # fault: moments that are stored in half
        return (w - 1e-3 * updates, new), None

    w = values(WIDTH, WIDTH, scale=0.1)
    opt_state: Any = optimizer.init(w)
    opt_state = opt_state._replace(nu=jnp.full((WIDTH, WIDTH), 0.25, way.state_dtype), count=jnp.int32(5000))
    return promoting(step), ((w, opt_state), values(LENGTH, WIDTH))


def small_updates(way: Way) -> Case:
    """Updates of 2^-13 of parameters near 1, in nnx."""
    graph, params = nnx.split(nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)))
    optimizer: Any = optax.sgd(2.0**-11)
    if way.full_state or way.exact:
        optimizer = jt.with_master_weights(optimizer)
    params = jax.tree.map(lambda x: x.astype("float32" if way.exact else way.dtype), params)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.sum(jnp.sin(nnx.merge(graph, p)(x).astype(jnp.float32))) / 8)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)  # fault: small updates
        return (params, opt_state), None

    return promoting(step), ((params, optimizer.init(params)), values(LENGTH, WIDTH))


def moving_average(way: Way) -> Case:
    """An average of the weights with decay 0.9999, for evaluation."""

    def step(state: Any, x: jax.Array) -> Any:
        w, ema = state
        w = w - 0.01 * jax.grad(lambda w: mean_square(x @ w - 1))(w)
        ema = 0.9999 * ema + (1 - 0.9999) * w.astype(ema.dtype)  # fault: decay of the weights' average
        return (w, ema), None

    w = values(WIDTH, WIDTH)
    return step, ((w, (w + 1).astype(way.state_dtype)), values(LENGTH, WIDTH))


def moving_average_of_tree(way: Way) -> Case:
    """The same by a decay that is an array, so that it is in no line."""

    def step(state: Any, batch: Any) -> Any:
        w, ema = state
        x, decay = batch
        w = w - 0.01 * jax.grad(lambda w: mean_square(x @ w - 1))(w)
        ema = (decay * ema.astype(jnp.float32) + (1 - decay) * w).astype(ema.dtype)  # fault: average in half
        return (w, ema), None

    w = values(WIDTH, WIDTH)
    return step, ((w, (w + 1).astype(way.state_dtype)), (values(LENGTH, WIDTH), jnp.float32(0.9999)))


def batch_statistics(way: Way) -> Case:
    """BatchNorm's running mean, kept in bfloat16."""
    model, x = nn.BatchNorm(use_running_average=False, momentum=0.999), 1 + values(64, WIDTH, scale=0.1)
    variables = model.init(jr.key(0), x)

    def step(stats: Any, x: jax.Array) -> Any:
        _, updated = model.apply({"params": variables["params"], "batch_stats": stats}, x, mutable=["batch_stats"])
        new: Any = updated["batch_stats"]
        stats = jax.tree.map(lambda x, old: x.astype(old.dtype), new, stats)  # fault: running statistics
        return stats, None

    stats = {"mean": jnp.full(WIDTH, 0.8), "var": jnp.full(WIDTH, 0.1)}
    return promoting(step), (way.state(stats), x)


def counter(way: Way) -> Case:
    """A count of examples in float16."""

    def step(state: Any, x: jax.Array) -> Any:
        w, seen = state
        w = w - 0.1 * jax.grad(lambda w: mean_square(x @ w))(w)
        seen = seen + 1  # fault: counter
        return (w, seen), None

    return step, ((values(WIDTH, WIDTH), jnp.full((), 2048, way.state_dtype)), values(LENGTH, WIDTH))


def gan_penalty(way: Way) -> Case:
    """The gradient penalty of a GAN: the norm of a gradient, within the loss."""

    def critic(x: jax.Array) -> jax.Array:
        return 3000 * hk.Linear(1)(jnp.tanh(hk.Linear(WIDTH)(x)))[0]

    net = hk.without_apply_rng(hk.transform(critic))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        gradients = jax.vmap(jax.grad(lambda x: net.apply(params, x)))(x)
        norms = jnp.sqrt((gradients**2).sum(-1) + 1e-3)  # fault: gradient penalty
        return ((norms.astype(jnp.float32) / 300 - 1) ** 2).mean()

    x = values(LENGTH, WIDTH)
    return way.gradients(loss_fn), (net.init(jr.key(1), x[0]), x)


def tiny_embedding_gradients(way: Way) -> Case:
    """A language model whose loss is a mean over very many tokens."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        h = params["embedding"][tokens]
        logits = (h @ params["head"]).astype(jnp.float32)  # fault: gradients of a mean
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return losses.sum() / 2.0**26

    scale = None if way.value is None or way.exact else jt.StaticLossScale(way.value)
    params = {"embedding": values(WIDTH, WIDTH), "head": values(WIDTH, WIDTH, seed=1)}
    return way.training(loss_fn, params, jnp.arange(LENGTH), scale)


UPDATES = (
    Fault("gradients that vanish", "underflow", "linen", vanishing, where="train_step", **SCALE),
    Fault("gradients of a mean", "underflow", "jax", tiny_embedding_gradients, where="train_step", **SCALE),
    Fault("loss scale of a recurrent net", "overflow", "nnx", large_scale, where="scan", **SCALE),
    Fault("loss scale on devices", "overflow", "jax", large_scale_on_devices, where="shard_map", **SCALE),
    Fault("sum over devices", "overflow", "jax", summed_on_devices, where="shard_map"),
    Fault("gradient penalty", "overflow", "haiku", gan_penalty),
    Fault("Adam in half", "underflow", "equinox", adam, **STATE),
    Fault("epsilon of Adam", "underflow", "jax", hand_adam, **STATE | {"action": "epsilon"}),
    Fault("second moments", "stagnation", "jax", second_moments, BF16, **STATE),
    Fault("moments that are stored in half", "stagnation", "optax", stuck_moments, BF16, **STATE),
    Fault("small updates", "stagnation", "nnx", small_updates, BF16, quick=True, **STATE),
    Fault("decay of the weights' average", "stagnation", "jax", moving_average, BF16, **STATE),
    Fault("average in half", "stagnation", "jax", moving_average_of_tree, BF16, **STATE),
    Fault("running statistics", "stagnation", "linen", batch_statistics, BF16, **STATE | {"direction": "forward"}),
    Fault("counter", "stagnation", "jax", counter, **STATE),
)
