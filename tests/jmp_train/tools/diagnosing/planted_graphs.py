"""Ten planted faults of graph networks in jraph with linen and haiku, and of this library's own graphs.

The networks follow google-deepmind/jraph (`ogb_examples/train_flax.py`, `_src/models.py`), SchNet's and EGNN's
layers as jraph users write them, and GRAND's diffusion, in small sizes.
"""

from collections.abc import Sequence
from typing import Any

import haiku as hk
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
BF16 = "bfloat16"


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


def owner(graph: Any) -> jax.Array:
    """Returns the graph of each node."""
    total = jax.tree.leaves(graph.nodes)[0].shape[0]
    return jnp.repeat(jnp.arange(len(graph.n_node)), graph.n_node, total_repeat_length=total)


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


def radial(way: Way) -> Case:
    """SchNet's radial basis of long distances."""
    network = mlp(16, 1)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        vectors, target = batch
        distance = jnp.sqrt(jnp.sum(vectors**2, axis=-1))
        centers = jnp.linspace(0, 20, 100).astype(distance.dtype)
        basis = jnp.exp(-10.0 * (distance[:, None] - centers) ** 2)  # fault: radial basis
        return mean_square(network.apply(params, basis) - target)

    params = network.init(jr.key(0), jnp.ones((1, 100)))
    return way.gradients(promoting(loss_fn)), (params, (7 * values(64, 3), values(64, 1, seed=2)))


def total_energy(way: Way) -> Case:
    """Energies of molecules in eV, of references of their atoms and what a network adds to them."""
    network, graph = mlp(16, 1), molecules()
    reference = jnp.array([-13.6, -1029.9, -1485.3, -2042.6])
    species = jr.randint(jr.key(4), (MOLECULES * ATOMS,), 0, 4)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, energies = batch
        atomic = network.apply(params, x)[:, 0]
        atomic = atomic + reference.astype(x.dtype)[species]
        error = jraph.segment_sum(atomic, owner(graph), MOLECULES) - energies  # fault: total energy
        return jnp.mean(jnp.abs(error).astype(jnp.float32))

    energies = jax.ops.segment_sum(reference[species], owner(graph), MOLECULES) + 2 * values(MOLECULES, seed=3)
    return way.gradients(promoting(loss_fn)), (network.init(jr.key(0), graph.nodes), (graph.nodes, energies))


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


def graph_norm(way: Way) -> Case:
    """GraphNorm, whose variance is that of the nodes of a graph, in haiku."""
    graph = molecules()

    def forward(x: jax.Array) -> jax.Array:
        x, index = 3 + 0.2 * hk.Linear(WIDTH)(x), owner(graph)
        mean = jraph.segment_mean(x, index, MOLECULES)
        variance = jraph.segment_mean(x * x, index, MOLECULES) - mean * mean  # fault: variance of a graph
        x = (x - mean[index]) / jnp.sqrt(jnp.maximum(variance, 0)[index] + 1e-3)
        return hk.Linear(1)(jnp.tanh(x))

    net: Any = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, target = batch
        return mean_square(net.apply(params, x) - target)

    batch = graph.nodes, values(MOLECULES * ATOMS, 1, seed=2)
    return way.gradients(promoting(loss_fn)), (net.init(jr.key(0), graph.nodes), batch)


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


def diffused(way: Way) -> Case:
    """GRAND's diffusion of features along edges, in many small steps."""
    network, graph = as_any(nn.Dense(WIDTH)), molecules()
    degree = jraph.segment_sum(jnp.ones(len(graph.senders)), graph.receivers, MOLECULES * ATOMS)[:, None]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, target = batch

        def step(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            mean = jraph.segment_sum(h[graph.senders], graph.receivers, len(h)) / degree.astype(h.dtype)
            return h + 0.005 * (mean - h), None  # fault: diffusion of features

        h, _ = lax.scan(step, network.apply(params, x), None, length=200)
        return mean_square(h - target)

    batch = graph.nodes, values(MOLECULES * ATOMS, WIDTH, seed=2)
    return way.gradients(promoting(loss_fn)), (network.init(jr.key(0), graph.nodes), batch)


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
    Fault("radial basis", "cancellation", "jraph", radial, BF16),
    Fault("total energy", "cancellation", "jraph", total_energy),
    Fault("readout of a large graph", "stagnation", "jraph", readout),
    Fault("variance of a graph", "cancellation", "jraph-haiku", graph_norm, BF16),
    Fault("diffusion of features", "stagnation", "jraph", diffused, BF16, where="scan"),
    Fault("temperatures", "cancellation", "jt.graphs", temperatures),
    Fault("attention of edges", "overflow", "jraph", attention),
    Fault("padding edges", "underflow", "jraph", equivariant, action="epsilon", applied="value"),
    Fault("mask of padding nodes", "invalid mask", "jraph", pooled, action="mask", applied="value"),
)
