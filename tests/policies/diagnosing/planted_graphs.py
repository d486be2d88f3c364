"""Planted faults of graph networks in jraph with linen, and of this library's own graphs.

The networks follow google-deepmind/jraph (`ogb_examples/train_flax.py`, `_src/models.py`), SchNet's and EGNN's
layers as jraph users write them, in small sizes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jraph
import numpy as np
from flax import linen as nn
from flax.linen.initializers import constant
from jax import lax
from planting import Case, Fault, Way, mean_square, values
from promotion import promoting

import jmp_train as jt
from jmp_train.graphs import fn

WIDTH, ATOMS, MOLECULES = 8, 9, 4


def molecules(nodes: Any = None, padding: int = 0) -> Any:
    """Returns small graphs, each of a ring with chords; with padding nodes and edges as another graph."""
    ring = np.arange(ATOMS)
    senders = np.concatenate([(ring + k) % ATOMS for k in (1, 2, 4)])
    shift = np.repeat(np.arange(MOLECULES) * ATOMS, len(senders))
    nodes = values(MOLECULES * ATOMS, WIDTH) if nodes is None else nodes
    graph = jraph.GraphsTuple(
        nodes=nodes,
        edges=values(len(shift), WIDTH, seed=5),
        receivers=jnp.asarray(np.tile(np.tile(ring, 3), MOLECULES) + shift),
        senders=jnp.asarray(np.tile(senders, MOLECULES) + shift),
        globals=None,
        n_node=jnp.full(MOLECULES, ATOMS),
        n_edge=jnp.full(MOLECULES, len(senders)),
    )
    if not padding:
        return graph
    return jraph.pad_with_graphs(graph, MOLECULES * ATOMS + padding, len(shift) + padding, MOLECULES + 1)


class MLP(nn.Module):
    features: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.features[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.features[-1])(x)


def as_any(x: Any) -> Any:
    """Returns it, of any type."""
    return x


def mlp(*features: int) -> Any:
    return MLP(features)


def expanded(distance: jax.Array) -> jax.Array:
    """Returns SchNet's basis of distances."""
    centers = jnp.linspace(0, 10, 50).astype(distance.dtype)
    return jnp.exp(-10.0 * (distance[:, None] - centers) ** 2)


def bonds(way: Way) -> Case:
    """Bonds of atoms that are anywhere in a large box."""
    network, graph = mlp(16, 1), molecules()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        positions, target = batch
        vectors = positions[graph.senders] - positions[graph.receivers]  # fault: bond vectors
        distance = jnp.sqrt(jnp.sum(vectors**2, axis=-1))
        energy = network.apply(params, expanded(distance))
        return mean_square(energy - target)

    positions = 60 + 1.5 * values(MOLECULES * ATOMS, 3)
    params = network.init(jr.key(0), jnp.ones((1, 50)))
    return way.gradients(promoting(loss_fn)), (params, (positions, values(len(graph.senders), 1, seed=2)))


class GraphNetwork(nn.Module):
    """The network of jraph's example for molecules, in which all nodes of a graph are added up."""

    @nn.compact
    def __call__(self, graph: Any) -> jraph.GraphsTuple:
        graph = graph._replace(globals=jnp.zeros([graph.n_node.shape[0], 1], graph.nodes.dtype))
        update: Any = jraph.concatenated_args(lambda x: nn.relu(mlp(WIDTH, WIDTH)(x)))
        same: Any = jraph.concatenated_args(lambda x: x)
        net = jraph.GraphNetwork(update, update, same)
        return net(graph)  # fault: readout of a large graph


def readout(way: Way) -> Case:
    """Jraph's graph network on a mesh of thousands of nodes."""
    nodes, network = 6000, as_any(GraphNetwork())
    ring: Any = jnp.arange(nodes)
    shape = jraph.GraphsTuple(None, None, ring, (ring + 1) % nodes, None, jnp.array([nodes]), jnp.array([nodes]))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, edges = batch
        out = network.apply(params, shape._replace(nodes=x, edges=edges))
        return mean_square(out.globals.astype(jnp.float32) / nodes)

    x, edges = values(nodes, 4), values(nodes, 4, seed=1)
    params = network.init(jr.key(0), shape._replace(nodes=x, edges=edges))
    return way.gradients(promoting(loss_fn)), (params, (x, edges))


def attention(way: Way) -> Case:
    """Attention over edges whose exponentials are summed as they are."""
    network, graph = as_any(nn.Dense(1, bias_init=constant(9.0))), molecules()

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        pairs = jnp.concatenate([x[graph.senders], x[graph.receivers]], axis=-1)
        weights = jnp.exp(network.apply(params, pairs))  # fault: attention of edges
        total = jraph.segment_sum(weights, graph.receivers, len(x))
        out = jraph.segment_sum(weights * x[graph.senders], graph.receivers, len(x)) / total
        return mean_square(out)

    params = network.init(jr.key(0), jnp.ones((1, 2 * WIDTH)))
    return way.gradients(promoting(loss_fn)), (params, graph.nodes)


def equivariant(way: Way) -> Case:
    """EGNN's update of coordinates, in a graph that jraph has padded: padding edges join a node with itself."""
    network, graph = mlp(16, 1), molecules(3 * values(MOLECULES * ATOMS, 3), padding=8)
    senders, receivers, padding = graph.senders, graph.receivers, as_any(jraph.get_node_padding_mask(graph))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, target = batch
        difference = x[senders] - x[receivers]
        squared = jnp.sum(difference**2, axis=-1, keepdims=True)
        unit = difference / (lax.stop_gradient(jnp.sqrt(squared)) + way.number(1e-8))  # fault: padding edges
        message = unit * network.apply(params, squared)
        moved = x + jraph.segment_sum(message, receivers, len(x))
        return mean_square((moved - target) * padding.astype(x.dtype)[:, None])

    params = network.init(jr.key(0), jnp.ones((1, 1)))
    return way.gradients(promoting(loss_fn)), (params, (graph.nodes, values(len(graph.nodes), 3, seed=2)))


def pooled(way: Way) -> Case:
    """Attention over the nodes of a padded graph."""
    network, graph = mlp(WIDTH, 1), molecules(padding=8)
    padding = as_any(jraph.get_node_padding_mask(graph))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        logits = network.apply(params, x)[:, 0]
        logits = logits + (1 - padding.astype(x.dtype)) * way.number(-1e9)  # fault: mask of padding nodes
        return mean_square(jax.nn.softmax(logits) @ x)

    return way.gradients(promoting(loss_fn)), (network.init(jr.key(0), graph.nodes), graph.nodes)


def temperatures(way: Way) -> Case:
    """Heat between cells of a weather model, from differences of temperatures in kelvin, with this library's graphs."""
    network, graph = mlp(16, 1), jt.graphs.rand_graph(40, 160, seed=0)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        temperature, target = batch
        cells = graph.with_nodes(t=temperature)
        flux = jt.graphs.update_all(cells, fn.u_sub_v("t", "t", "m"), fn.sum("m", "flux"))  # fault: temperatures
        return mean_square(network.apply(params, flux.nodes["flux"]) - target)

    params = network.init(jr.key(0), jnp.ones((1, 1)))
    batch = 288 + 0.3 * values(40, 1), values(40, 1, seed=2)
    return way.gradients(promoting(loss_fn)), (params, batch)


GRAPHS = (
    Fault("bond vectors", "cancellation", "jraph", bonds),
    Fault("readout of a large graph", "stagnation", "jraph", readout),
    Fault("temperatures", "cancellation", "jt.graphs", temperatures),
    Fault("attention of edges", "overflow", "jraph", attention),
    Fault("padding edges", "underflow", "jraph", equivariant, action="epsilon", applied="value"),
    Fault("mask of padding nodes", "invalid mask", "jraph", pooled, action="mask", applied="value"),
)
