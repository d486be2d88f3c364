"""Planted faults of the backward pass and the update in what holds them: remat, cond, scan, devices, a pipeline."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from models import image_classifier
from models.graph_classifiers import node_classifier
from models.graph_models import GCN
from planting import SCALE, STATE, Case, Fault, Way, mean_square, values
from promotion import promoting

import jmp_train as jt
from jmp_train.graphs import fn

WIDTH, LENGTH = 8, 8
BF16 = "bfloat16"


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


def steep_stages(way: Way) -> Case:
    """Stages of a pipeline whose gradients grow."""
    mesh = jax.make_mesh((2, 2), ("data", "pipe"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def block(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        del rng
        return jnp.tanh(30 * x) @ params["w"]  # fault: steep stage

    blocks = jt.pipeline(block, mesh, "pipe", micro_batches=2)
    params = {"w": values(2, WIDTH, WIDTH, scale=0.1)}
    x = values(LENGTH, WIDTH, scale=1e-3)
    return way.training(lambda p, x: jnp.sum(blocks(p, x).astype(jnp.float32)), params, x, static(way, 2.0**15))


def digits(way: Way) -> Case:
    """The task's kind of network, with a static scale that is too large."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(WIDTH, (3, 3))(x)))
            return 3000 * nn.Dense(10)(x.mean((1, 2)))  # fault: loss scale of a classifier

    task = image_classifier(lambda axis: Net(), (1, 4, 4, 1))
    params, model_state = task.init(jr.key(0))
    batch = {"image": values(LENGTH, 4, 4, 1), "label": jnp.arange(LENGTH)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return task.loss_fn(params, model_state, batch, None)[0]

    return way.training(loss_fn, params, batch, static(way, 2.0**12))


def squared_features(way: Way) -> Case:
    """Message passing of features whose norms are taken by hand."""
    graph = jt.graphs.rand_graph(12, 40, seed=0)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        h = x @ params["w"]
        h = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True))  # fault: norms of nodes
        passed = jt.graphs.update_all(graph.with_nodes(h=h), fn.copy_u("h", "m"), fn.mean("m", "x"))
        return mean_square(passed.nodes["x"] - 1)

    return way.gradients(loss_fn), ({"w": values(WIDTH, WIDTH)}, values(12, WIDTH, scale=300.0))


def graph_gradients(way: Way) -> Case:
    """The tasks' GCN, whose gradients vanish."""
    random = np.random.default_rng(0).integers(0, 12, (40, 2))
    graph = jt.graphs.from_edges(random[:, 0], random[:, 1], n_node=12)
    init, predict, _ = node_classifier(lambda key: GCN(WIDTH, WIDTH, 3, rngs=nnx.Rngs(key)))
    params, model_state = init(jr.key(0))
    scale = None if way.value is None or way.exact else jt.StaticLossScale(way.value)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = predict(params, model_state, batch).astype(jnp.float32)  # fault: gradients of a graph network
        return 1e-8 * mean_square(logits)

    batch = {"graph": graph, "features": values(12, WIDTH), "node": jnp.arange(12)}
    return way.training(loss_fn, params, batch, scale)


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


PLACES = (
    Fault("steep branch", "overflow", "jax", steep_branch, where="cond", **SCALE),
    Fault("steep layer", "overflow", "linen", steep_layer, where="remat", **SCALE),
    Fault("steep stage", "overflow", "jax", steep_stages, where="pipeline", **SCALE),
    Fault("loss scale of a classifier", "overflow", "linen", digits, where="train_step", **SCALE),
    Fault("norms of nodes", "overflow", "jt.graphs", squared_features),
    Fault("gradients of a graph network", "underflow", "jt.graphs", graph_gradients, **SCALE),
    Fault("small updates on devices", "stagnation", "jax", updates_on_devices, BF16, where="shard_map", **STATE),
    Fault("inner loop", "stagnation", "haiku", updates_in_scan, BF16, where="scan", **STATE),
    Fault("late average", "stagnation", "equinox", averages_in_cond, BF16, where="cond", **STATE),
)
