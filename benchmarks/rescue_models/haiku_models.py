"""Models in haiku: means over neighbors in a dense graph, prices in dollars, products of raw features."""

import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from rescue_models.model import Batch, Model


def neighbors(seed: int) -> Model:
    """Ages of users by means over hundreds of neighbors: the sum over them overflows before it is divided."""
    random = np.random.default_rng(0)
    users, groups = 256, 4

    def batch() -> Batch:
        group = random.integers(groups, size=users)
        linked = random.uniform(size=(users, users)) < np.where(group[:, None] == group, 0.9, 0.5)
        features = random.poisson(300 + 100 * group[:, None] * np.array([1, -0.5, 0.3, 0.1]), (users, 4))
        return jnp.asarray(linked, jnp.float32), jnp.asarray(features, jnp.float32), jnp.asarray(group)

    def network(linked: jax.Array, features: jax.Array) -> jax.Array:
        x = features
        for _ in range(2):
            with jax.named_scope("sums"):
                sums = linked @ x  # guilty: 180 neighbors with features of hundreds
            means = sums / linked.sum(-1, keepdims=True)
            x = jax.nn.relu(hk.Linear(32)(jnp.concatenate([x, means], -1)))
        return hk.Linear(groups)(hk.LayerNorm(-1, True, True)(x))

    net = hk.without_apply_rng(hk.transform(network))

    def loss_fn(params: hk.Params, batch: Batch) -> jax.Array:
        *graph, group = batch
        return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, *graph), group).mean()

    batches = tuple(batch() for _ in range(4))
    params = net.init(jr.key(seed), *batches[0][:2])
    return Model(loss_fn, params, batches, optax.adam(1e-2), "sums", 200)


def prices(seed: int) -> Model:
    """Prices of houses in dollars, which float16 cannot hold."""
    random = np.random.default_rng(0)

    def batch() -> Batch:
        area, rooms, age = random.uniform(400, 4000, 64), random.integers(1, 9, 64), random.integers(0, 120, 64)
        price = 20_000 + 110 * area + 6_000 * rooms - 500 * age + 15 * area * (age < 20)
        return (
            jnp.asarray(np.stack([area, rooms, age], -1), jnp.float32),
            jnp.asarray(price * random.lognormal(0, 0.02, 64), jnp.float32),
        )

    def network(x: jax.Array) -> jax.Array:
        x = jax.nn.relu(hk.Linear(64)(x))
        x = jax.nn.relu(hk.Linear(32)(x))
        return hk.Linear(1, name="price")(x)[..., 0]  # guilty: prices above 65504

    net = hk.without_apply_rng(hk.transform(network))

    def loss_fn(params: hk.Params, batch: Batch) -> jax.Array:
        x, price = batch
        return jnp.mean(((net.apply(params, x) - price) / 100_000) ** 2)

    batches = tuple(batch() for _ in range(16))
    params = net.init(jr.key(seed), batches[0][0])
    return Model(loss_fn, params, batches, optax.adam(1e-2), "price", 300)


def crosses(seed: int) -> Model:
    """A deep and cross network (Wang et al., 2021) on counts, whose products of features overflow."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(8, 8))

    def batch() -> Batch:
        counts = random.poisson(40, (64, 8)) * random.integers(1, 5, (64, 8))
        scores = np.einsum("bi,ij,bj->b", counts, weights, counts) / 1e4
        return jnp.asarray(counts, jnp.float32), jnp.asarray(scores > np.median(scores), jnp.float32)

    def network(counts: jax.Array) -> jax.Array:
        x = counts
        for _ in range(2):
            with jax.named_scope("cross"):
                x = counts * hk.Linear(8)(x) + x  # guilty: polynomials of counts
        norm = hk.LayerNorm(-1, True, True)
        deep = jax.nn.relu(hk.Linear(32)(norm(counts)))
        return hk.Linear(1)(jnp.concatenate([norm(x), deep], -1))[..., 0]

    net = hk.without_apply_rng(hk.transform(network))

    def loss_fn(params: hk.Params, batch: Batch) -> jax.Array:
        counts, clicked = batch
        return optax.sigmoid_binary_cross_entropy(net.apply(params, counts), clicked).mean()

    batches = tuple(batch() for _ in range(16))
    params = net.init(jr.key(seed), batches[0][0])
    return Model(loss_fn, params, batches, optax.adam(1e-2), "cross", 300)


MODELS = (neighbors, prices, crosses)
