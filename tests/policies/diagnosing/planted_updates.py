"""Planted faults of the backward pass and the update: loss scales, moments, averages, and what holds them."""

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
from planting import BF16, SCALE, STATE, Case, Fault, Way, mean_square, values
from promotion import promoting

import jmp_train as jt

WIDTH, LENGTH = 8, 8


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


def static(way: Way, planted: float) -> jt.LossScale | None:
    return None if way.exact else jt.StaticLossScale(way.number(planted))


def steep_branch(way: Way) -> Case:
    """A steep function in a branch, whose gradient overflows."""

    def steep(x: jax.Array) -> jax.Array:
        return jnp.tanh(1000 * x)  # fault: steep branch

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, is_steep = batch
        h = x @ params["w"]
        return jnp.sum(lax.cond(is_steep, steep, jnp.tanh, h).astype(jnp.float32))

    batch = values(LENGTH, WIDTH, scale=1e-4), jnp.array(True)
    return way.training(loss_fn, {"w": values(WIDTH, WIDTH)}, batch, static(way, 2.0**10))


class Steep(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.tanh(nn.Dense(WIDTH)(x) * 1000)  # fault: steep layer


def steep_layer(way: Way) -> Case:
    model: Any = nn.remat(Steep)()
    x = values(LENGTH, WIDTH, scale=1e-4)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply(params, x).astype(jnp.float32))

    return way.training(loss_fn, Steep().init(jr.key(0), x), x, static(way, 2.0**10))


def updates_on_devices(way: Way) -> Case:
    """Parameters in bfloat16 on eight devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def update(scale: jax.Array, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda scale: jnp.sum(jnp.sin(scale.astype(jnp.float32) * x)) / len(x))(scale)
        return scale - 2.0**-12 * lax.pmean(gradient, "data")  # fault: small updates on devices

    def step(scale: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        mapped = jax.shard_map(update, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        return mapped(scale, x), None

    return step, (jnp.ones(WIDTH, way.state_dtype), values(16, WIDTH))


def updates_in_scan(way: Way) -> Case:
    """An inner loop of many small steps, on parameters in bfloat16, in haiku."""
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(WIDTH, w_init=jnp.ones)(x)))

    def adapt(params: Any, x: jax.Array) -> tuple[Any, None]:
        def step(params: Any, _: Any) -> tuple[Any, None]:
            grads = jax.grad(lambda p: mean_square(net.apply(p, x) - 4))(params)
            return jax.tree.map(lambda p, g: p - 2.0**-12 * g, params, grads), None  # fault: inner loop

        return lax.scan(step, params, None, length=200)[0], None

    x = 1 + values(LENGTH, WIDTH, scale=0.1)
    return promoting(adapt), (way.state(net.init(jr.key(0), x)), x.astype(way.state_dtype))


def averages_in_cond(way: Way) -> Case:
    """An average of the weights in equinox that is updated from some step on."""
    model = eqx.nn.Linear(WIDTH, WIDTH, key=jr.key(0))

    def step(state: Any, batch: Any) -> Any:
        model, average = state
        x, is_late, rate = batch
        grads = jax.grad(lambda m: mean_square(jax.vmap(m)(x) - 1))(model)
        model = jax.tree.map(lambda p, g: p - 0.01 * g, model, grads)

        def follow(average: Any) -> Any:
            nearer = jax.tree.map(lambda a, p: (rate * (p - a)).astype(a.dtype), average, model)
            return jax.tree.map(jnp.add, average, nearer)  # fault: late average

        return (model, lax.cond(is_late, follow, lambda a: a, average)), None

    average = way.state(jax.tree.map(lambda p: p + 1, eqx.filter(model, eqx.is_array)))
    return promoting(step), ((model, average), (values(LENGTH, WIDTH), jnp.array(True), jnp.float32(1e-4)))


UPDATES = (
    Fault("gradients that vanish", "underflow", "linen", vanishing, where="train_step", **SCALE),
    Fault("loss scale of a recurrent net", "overflow", "nnx", large_scale, where="scan", quick=True, **SCALE),
    Fault("loss scale on devices", "overflow", "jax", large_scale_on_devices, where="shard_map", **SCALE),
    Fault("Adam in half", "underflow", "equinox", adam, **STATE),
    Fault("epsilon of Adam", "underflow", "jax", hand_adam, direction="update", action="epsilon", applied="state"),
    Fault("moments that are stored in half", "stagnation", "optax", stuck_moments, BF16, **STATE),
    Fault("small updates", "stagnation", "nnx", small_updates, BF16, quick=True, **STATE),
    Fault("decay of the weights' average", "stagnation", "jax", moving_average, BF16, **STATE),
    Fault("average in half", "stagnation", "jax", moving_average_of_tree, BF16, **STATE),
    Fault("running statistics", "stagnation", "linen", batch_statistics, BF16, action="state", applied="state"),
    Fault("steep branch", "overflow", "jax", steep_branch, where="cond", **SCALE),
    Fault("steep layer", "overflow", "linen", steep_layer, where="remat", **SCALE),
    Fault("small updates on devices", "stagnation", "jax", updates_on_devices, BF16, where="shard_map", **STATE),
    Fault("inner loop", "stagnation", "haiku", updates_in_scan, BF16, where="scan", **STATE),
    Fault("late average", "stagnation", "equinox", averages_in_cond, BF16, where="cond", **STATE),
)
