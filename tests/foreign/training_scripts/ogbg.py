"""A graph network in jraph and flax linen, as ogbg_molpcba's: padded graphs, targets with NaN for unknown."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from scripts import Script, gradients_of, half_optimizer

TASKS, LATENT = 5, 16


class MLP(nn.Module):
    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for size in self.sizes:
            x = nn.relu(nn.Dense(size)(x))
        return x


class GraphNet(nn.Module):
    steps: int = 2

    @nn.compact
    def __call__(self, graphs: jraph.GraphsTuple) -> jraph.GraphsTuple:
        embed = jraph.GraphMapFeatures(
            embed_node_fn=nn.Dense(LATENT),
            embed_edge_fn=nn.Dense(LATENT),
            embed_global_fn=nn.Dense(LATENT),
        )
        graphs = embed(graphs)
        for _ in range(self.steps):
            sizes = (LATENT, LATENT)
            mlps: list[Any] = [jraph.concatenated_args(MLP(sizes)) for _ in range(3)]
            net = jraph.GraphNetwork(*mlps)
            passed: Any = net(graphs)
            added: Any = jax.tree.map(
                jnp.add,
                (graphs.nodes, graphs.edges, graphs.globals),
                (passed.nodes, passed.edges, passed.globals),
            )
            norm = [nn.LayerNorm()(x) for x in added]
            graphs = graphs._replace(nodes=norm[0], edges=norm[1], globals=norm[2])
        return graphs._replace(globals=nn.Dense(TASKS)(graphs.globals))


def replace_globals(graphs: jraph.GraphsTuple) -> jraph.GraphsTuple:
    return graphs._replace(globals=jnp.ones([graphs.n_node.shape[0], 1]))


def binary_cross_entropy_with_mask(logits: Any, labels: Any, mask: Any) -> jax.Array:
    labels = jnp.where(mask, labels, -1)
    positive = jnp.where(logits >= 0, logits, 0)
    magnitude = jnp.where(logits >= 0, logits, -logits)
    return positive - logits * labels + jnp.log(1 + jnp.exp(-magnitude))


def loss_fn(params: Any, graphs: jraph.GraphsTuple) -> Any:
    labels: Any = graphs.globals
    predicted: Any = GraphNet().apply({"params": params}, replace_globals(graphs))
    graph_mask: Any = jraph.get_graph_padding_mask(graphs)
    mask = ~jnp.isnan(labels) & graph_mask[:, None]
    loss = binary_cross_entropy_with_mask(predicted.globals, labels, mask)
    return jnp.sum(jnp.where(mask, loss, 0)) / jnp.sum(mask), (loss, predicted.globals, mask)


def molecules() -> jraph.GraphsTuple:
    random: Any = np.random.default_rng(0)
    counts: Any = np.array

    def molecule(atoms: int) -> jraph.GraphsTuple:
        labels = random.integers(0, 2, (1, TASKS)).astype(np.float32)
        labels[random.random((1, TASKS)) < 0.4] = np.nan
        return jraph.GraphsTuple(
            nodes=random.normal(size=(atoms, 9)).astype(np.float32),
            edges=random.normal(size=(2 * atoms, 3)).astype(np.float32),
            senders=random.integers(0, atoms, 2 * atoms),
            receivers=random.integers(0, atoms, 2 * atoms),
            n_node=counts([atoms]),
            n_edge=counts([2 * atoms]),
            globals=labels,
        )

    graphs = jraph.batch_np([molecule(atoms) for atoms in (3, 5, 4, 6, 7)])
    padded = jraph.pad_with_graphs(graphs, n_node=32, n_edge=64, n_graph=8)
    return jax.tree.map(jnp.asarray, padded)


@functools.cache
def script(half: bool) -> Script:
    graphs, key = molecules(), jax.random.PRNGKey(0)
    params = jax.jit(GraphNet().init)(key, replace_globals(graphs))["params"]
    tx = half_optimizer(optax.adam(2e-3), half)
    state = train_state.TrainState.create(apply_fn=GraphNet().apply, params=params, tx=tx)

    @jax.jit
    def train_step(state: Any, graphs: jraph.GraphsTuple) -> Any:
        (loss, _), grads = gradients_of(loss_fn, half, has_aux=True)(state.opt_state, state.params, graphs)
        return state.apply_gradients(grads=grads), loss

    return Script(state, train_step, graphs)


def loss_args() -> tuple[Any, ...]:
    return script(True).state.params, molecules()
