"""Planted faults of sums that stand still, and of differences and logarithms that lose all digits."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import jraph
import optax
from flax import linen as nn
from flax import nnx
from jax import lax
from planting import Case, Fault, Way, mean_square, values

WIDTH, LENGTH = 8, 8
BF16 = "bfloat16"


def star(edges: int) -> Any:
    """Returns a graph of two nodes, of which all edges but a few go to the first."""
    receivers = jnp.zeros(edges, jnp.int32).at[-10:].set(1)
    nodes = jnp.stack([jnp.ones(WIDTH), 2 * jnp.ones(WIDTH)])
    return jraph.GraphsTuple(
        nodes, None, receivers, jnp.zeros(edges, jnp.int32), None, jnp.array([2]), jnp.array([edges])
    )


class GraphConvolution(nn.Module):
    """Kipf and Welling's layer, as it is written by hand."""

    @nn.compact
    def __call__(self, x: jax.Array, receivers: jax.Array, senders: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(x)
        ones = jnp.ones(receivers.shape, x.dtype)
        degrees = jnp.zeros(len(x), x.dtype).at[receivers].add(ones)  # fault: degrees of nodes
        total = jnp.zeros(x.shape, jnp.float32).at[receivers].add(x[senders].astype(jnp.float32))
        return total / degrees[:, None].astype(jnp.float32)


def degrees(way: Way, where: str = "plain") -> Case:
    graph, model = star(5000), GraphConvolution()
    params = model.init(jr.key(0), graph.nodes, graph.receivers, graph.senders)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return mean_square(model.apply(params, x, graph.receivers, graph.senders))

    run = jax.checkpoint(loss_fn) if where == "remat" else loss_fn
    return way.run(run), (params, graph.nodes)


def messages(way: Way) -> Case:
    """A graph network of jraph."""
    graph = star(5000)

    def update(params: Any, graph: Any) -> Any:
        total = jraph.segment_sum(graph.nodes[graph.senders] * 0.01, graph.receivers, 2)  # fault: sums of messages
        return graph._replace(nodes=total @ params["w"])

    return way.run(lambda params, x: update(params, graph._replace(nodes=x)).nodes), (
        {"w": values(WIDTH, WIDTH)},
        graph.nodes,
    )


def mean_messages(way: Way) -> Case:
    graph = star(5000)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        sent = (x @ params["w"])[graph.senders]
        return mean_square(jraph.segment_mean(sent, graph.receivers, 2))  # fault: means of messages

    return way.run(loss_fn), ({"w": values(WIDTH, WIDTH)}, graph.nodes)


def edge_probabilities(way: Way) -> Case:
    graph = star(4000)

    def attention(params: Any, x: jax.Array) -> jax.Array:
        logits = (x @ params["w"])[graph.senders, 0]
        weights: Any = jraph.segment_softmax(logits, graph.receivers, 2)  # fault: softmax over edges
        return weights.astype(jnp.float32).sum()

    return way.run(attention), ({"w": values(WIDTH, 1)}, graph.nodes)


def embedding_gradient(way: Way) -> Case:
    """The gradient of an embedding, one of whose tokens is in most places; taken inside, of parameters in half."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        embedded = params["embedding"][tokens]  # fault: gradient of an embedding
        return jnp.mean(embedded.astype(jnp.float32) * params["head"].astype(jnp.float32))

    params = {"embedding": values(4, WIDTH), "head": jnp.linspace(1.0, 2.0, WIDTH)}
    tokens = jnp.zeros(5000, jnp.int32).at[:10].set(1)
    return way.run(jax.value_and_grad(loss_fn)), (params, tokens)


def expert_positions(way: Way) -> Case:
    """Which place each token has in its expert's buffer, as switch transformers count it."""

    def route(params: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(gates.argmax(-1), 2, dtype=x.dtype)

        def count(filled: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            filled = filled + row  # fault: one-hot sums
            return filled, filled

        counts = lax.scan(count, jnp.zeros(2, x.dtype), chosen)[1]
        return jnp.where(counts <= 1000, gates, 0).astype(jnp.float32).sum() + counts[-1].astype(jnp.float32).sum()

    return way.run(route), ({"router": values(WIDTH, 2)}, values(3000, WIDTH))


def accumulated_loss(way: Way) -> Case:
    """A loss of a long sequence, added up in a loop."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, y = batch

        def step(total: jax.Array, row: Any) -> tuple[jax.Array, None]:
            error = jnp.abs(row[0] @ params["w"] - row[1])
            total = total + error  # fault: sum of thousands of terms
            return total, None

        return lax.scan(step, jnp.zeros((), x.dtype), (x, y))[0].astype(jnp.float32) / len(x)

    batch = values(3000, WIDTH), values(3000, seed=1)
    return way.run(loss_fn), ({"w": values(WIDTH)}, batch)


def integrated(way: Way) -> Case:
    """A neural differential equation in equinox, of many small steps in a while loop."""
    field = eqx.nn.MLP(2, 2, 8, 1, key=jr.key(0))

    def solve(field: eqx.nn.MLP, start: jax.Array) -> jax.Array:
        def euler(i: jax.Array, y: jax.Array) -> jax.Array:
            return y + 2.0**-12 * field(y)  # fault: small steps of a solver

        return lax.fori_loop(0, 2000, euler, start)

    return way.run(solve), (field, jnp.array([1.0, 2.0]))


def running_mean(way: Way) -> Case:
    """Welford's mean, whose count stands still."""

    def mean(x: jax.Array) -> jax.Array:
        def step(carry: Any, row: jax.Array) -> tuple[Any, None]:
            mean, count = carry
            count = count + 1  # fault: count beyond 2048
            return (mean + (row - mean) / count, count), None

        (mean, count), _ = lax.scan(step, (jnp.zeros((), jnp.float32), jnp.zeros((), x.dtype)), x.astype(jnp.float32))
        return jnp.stack([mean, count.astype(jnp.float32)])

    return way.run(mean), (1 + values(6000, scale=0.1),)


class InstanceNorm(nn.Module):
    """Variance by E[x^2] - E[x]^2."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (3, 3), padding="VALID")(x)
        mean, squares = x.mean((1, 2), keepdims=True), (x * x).mean((1, 2), keepdims=True)
        variance = squares - mean * mean  # fault: variance by squares
        return (x - mean) * lax.rsqrt(jnp.maximum(variance, 0) + 0.01)


def fast_variance(way: Way, where: str = "plain") -> Case:
    model: Any = nn.remat(InstanceNorm)() if where == "remat" else InstanceNorm()
    x = 30 + values(2, LENGTH, LENGTH, 1)
    params = InstanceNorm().init(jr.key(1), x)
    return way.gradients(lambda p, x: mean_square(model.apply(p, x) - 1)), (params, x)


def distances(way: Way) -> Case:
    """A contrastive loss with squared distances by products."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        z = 30 + x @ params["w"]
        square = jnp.sum(z * z, -1)
        apart = square[:, None] + square - 2 * z @ z.T  # fault: distances by products
        return jnp.mean(jnp.exp(-jnp.maximum(apart, 0).astype(jnp.float32)))

    return way.run(loss_fn), ({"w": values(WIDTH, WIDTH, scale=0.1)}, values(LENGTH, WIDTH))


def complement(way: Way) -> Case:
    """log(1 - p) of a focal loss, where p is nearly 1."""

    def forward(x: jax.Array) -> jax.Array:
        p = jax.nn.sigmoid(hk.Linear(1)(x) + 9)
        return -jnp.log(1 - p)  # fault: logarithm of a complement

    net = hk.without_apply_rng(hk.transform(forward))
    x = values(LENGTH, WIDTH)
    return way.run(net.apply), (net.init(jr.key(0), x), x)


def small_logarithm(way: Way) -> Case:
    """Returns of an asset, log(1 + r)."""

    def growth(params: Any, x: jax.Array) -> jax.Array:
        rates = 1e-4 * jnp.tanh(x @ params["w"])
        return 1000 * jnp.log(1 + rates)  # fault: logarithm near 1

    return way.run(growth), ({"w": values(WIDTH, 1)}, values(LENGTH, WIDTH))


def offset_logits(way: Way) -> Case:
    """A softmax by hand, of logits with a large common offset."""

    def attend(model: eqx.nn.Linear, x: jax.Array) -> jax.Array:
        logits = jax.vmap(model)(x) + 1000
        weights = jnp.exp(logits - logits.max(-1, keepdims=True))  # fault: softmax of an offset
        return weights / weights.sum(-1, keepdims=True)

    return way.run(attend), (eqx.nn.Linear(WIDTH, WIDTH, key=jr.key(0)), values(LENGTH, WIDTH))


def advantages(way: Way) -> Case:
    """Advantages of a policy gradient, of returns that are large and alike."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        observations, rewards = batch
        returns = 500 + jnp.cumsum(rewards)
        baseline = 500 + (observations @ params["w"])[:, 0]
        advantage = returns - baseline  # fault: advantages
        return jnp.mean(advantage.astype(jnp.float32) ** 2)

    batch = values(LENGTH, WIDTH), values(LENGTH, scale=0.1)
    return way.run(loss_fn), ({"w": values(WIDTH, 1, scale=0.1)}, batch)


class StateSpace(nnx.Module):
    """Decays between positions, as differences of a cumulative sum."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rates = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        total = jnp.cumsum(nnx.softplus(self.rates(x))[:, 0])
        past = jnp.tril(jnp.ones((len(x), len(x)), bool))
        decay = jnp.exp(jnp.where(past, total - total[:, None], -jnp.inf))  # fault: differences of a cumulative sum
        return decay @ x


def cumulative(way: Way) -> Case:
    graph, params = nnx.split(StateSpace(nnx.Rngs(0)))
    return way.run(lambda params, x: nnx.merge(graph, params)(x)), (params, values(256, WIDTH))


def gradient_of_root(way: Way) -> Case:
    """Distances to a center, of which one is small: the gradient of a root near 0."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        apart = x - params["center"]
        squared = (apart * apart).sum(-1)  # fault: root near 0
        return jnp.sqrt(squared).astype(jnp.float32).mean()

    x = values(LENGTH, 3, scale=1e-4)
    return way.gradients(loss_fn), ({"center": jnp.zeros(3)}, x)


def averaged_weights(way: Way) -> Case:
    """A target network that follows another one, over the steps of a loop."""

    def follow(online: Any, target: Any) -> Any:
        def step(target: Any, _: Any) -> tuple[Any, None]:
            return optax.incremental_update(online, target, 0.001), None  # fault: target network

        return lax.scan(step, target, None, length=2000)[0]

    return way.run(follow), ({"w": 2 + values(WIDTH, scale=0.1)}, {"w": jnp.ones(WIDTH)})


def in_remat(build: Any) -> Any:
    return lambda way: build(way, "remat")


SUMS = (
    Fault("degrees of nodes", "stagnation", "linen", degrees),
    Fault("degrees of nodes", "stagnation", "linen", in_remat(degrees), where="remat"),
    Fault("sums of messages", "stagnation", "jraph", messages, BF16),
    Fault("means of messages", "stagnation", "jraph", mean_messages),
    Fault("softmax over edges", "stagnation", "jraph", edge_probabilities),
    Fault("gradient of an embedding", "stagnation", "jax", embedding_gradient, BF16, direction="backward"),
    Fault("one-hot sums", "stagnation", "jax", expert_positions, BF16, where="scan"),
    Fault("sum of thousands of terms", "stagnation", "jax", accumulated_loss, where="scan"),
    Fault("small steps of a solver", "stagnation", "equinox", integrated, BF16, where="while"),
    Fault("count beyond 2048", "stagnation", "jax", running_mean, where="scan"),
    Fault("variance by squares", "cancellation", "linen", fast_variance, BF16),
    Fault("variance by squares", "cancellation", "linen", in_remat(fast_variance), BF16, where="remat"),
    Fault("distances by products", "cancellation", "jax", distances),
    Fault("logarithm of a complement", "cancellation", "haiku", complement),
    Fault("logarithm near 1", "cancellation", "jax", small_logarithm),
    Fault("softmax of an offset", "cancellation", "equinox", offset_logits),
    Fault("advantages", "cancellation", "jax", advantages, BF16),
    Fault("differences of a cumulative sum", "cancellation", "nnx", cumulative, BF16),
    Fault("root near 0", "underflow", "jax", gradient_of_root),
    Fault("target network", "stagnation", "optax", averaged_weights, BF16, where="scan"),
)
