"""Models in plain JAX with loops: Sinkhorn's iterations, a hidden Markov model, a Gaussian process."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from rescue_models.model import Batch, Model

Layers = list[dict[str, jax.Array]]


def _init_mlp(key: jax.Array, sizes: Sequence[int]) -> Layers:
    keys = jr.split(key, len(sizes) - 1)
    return [
        {"w": jr.normal(key, (size, to)) / size**0.5, "b": jnp.zeros(to)}
        for key, size, to in zip(keys, sizes, sizes[1:], strict=False)
    ]


def _mlp(layers: Layers, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def transport(cost: jax.Array, regularization: float, iterations: int = 20) -> jax.Array:
    """Returns the plan of entropic optimal transport between uniform weights (Cuturi, 2013)."""
    kernel = jnp.exp(-cost / regularization)
    ones = jnp.ones(len(cost)) / len(cost)

    def iterate(scalings: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        with jax.named_scope("scalings"):
            rows = ones / (kernel @ scalings[1])  # guilty: the kernel is below 6e-8, the scalings above 65504
            columns = ones / (kernel.T @ rows)  # guilty
        return (rows, columns), None

    (rows, columns), _ = jax.lax.scan(iterate, (ones, ones), None, length=iterations)
    return rows[:, None] * kernel * columns


def matching(seed: int) -> Model:
    """Points of two clouds matched by optimal transport of learned features: Sinkhorn's scalings leave the range."""
    random = np.random.default_rng(0)
    turn = np.linalg.qr(random.normal(size=(8, 8)))[0]

    def batch() -> Batch:
        points = random.normal(size=(24, 8))
        order = random.permutation(24)
        moved = (points @ turn + random.normal(0, 0.05, points.shape))[order]
        return jnp.asarray(points, jnp.float32), jnp.asarray(moved, jnp.float32), jnp.asarray(np.argsort(order))

    def loss_fn(params: dict[str, Layers], batch: Batch) -> jax.Array:
        points, moved, order = batch
        ours, theirs = _mlp(params["ours"], points), _mlp(params["theirs"], moved)
        cost = ((ours[:, None] - theirs) ** 2).mean(-1)
        plan = transport(cost, 0.05)
        return -jnp.log(24 * plan[jnp.arange(24), order] + 1e-9).mean()

    params = {name: _init_mlp(jr.key(seed + n), (8, 32, 8)) for n, name in ((0, "ours"), (100, "theirs"))}
    batches = tuple(batch() for _ in range(16))
    return Model(loss_fn, params, batches, optax.adam(3e-3), "scalings", 300)


def hidden_markov(seed: int) -> Model:
    """A hidden Markov model by the forward algorithm on probabilities: those of 16 symbols are 0 in float16."""
    random = np.random.default_rng(0)
    states, symbols, length = 6, 24, 16
    moves = random.dirichlet(np.full(states, 0.3), size=states)
    emits = random.dirichlet(np.full(symbols, 0.2), size=states)

    def sequence() -> list[int]:
        state, out = random.integers(states), []
        for _ in range(length):
            state = random.choice(states, p=moves[state])
            out.append(random.choice(symbols, p=emits[state]))
        return out

    def likelihood(params: dict[str, jax.Array], sequence: jax.Array) -> jax.Array:
        move = jax.nn.softmax(params["moves"])
        emit = jax.nn.softmax(jnp.tanh(params["states"]) @ params["symbols"])

        def forward(weights: jax.Array, symbol: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("forward"):
                return (weights @ move) * emit[:, symbol], None  # guilty: a probability of 16 symbols

        weights, _ = jax.lax.scan(forward, jnp.ones(states) / states, sequence)
        return jnp.log(weights.sum())

    def loss_fn(params: dict[str, jax.Array], batch: Batch) -> jax.Array:
        return -jax.vmap(likelihood, (None, 0))(params, batch[0]).mean() / length

    keys = jr.split(jr.key(seed), 3)
    params = {
        "moves": jr.normal(keys[0], (states, states)),
        "states": jr.normal(keys[1], (states, 32)),
        "symbols": jr.normal(keys[2], (32, symbols)) / 32**0.5,
    }
    batches = tuple((jnp.asarray([sequence() for _ in range(16)]),) for _ in range(8))
    return Model(loss_fn, params, batches, optax.adam(3e-2), "forward", 150)


def gaussian_process(seed: int) -> Model:
    """A Gaussian process with a deep kernel (Wilson et al., 2016): the kernel of float16 is not positive definite."""
    random = np.random.default_rng(0)
    points, noise = 64, 1e-3

    def batch() -> Batch:
        x = random.uniform(-2, 2, (points, 2))
        y = np.sin(2 * x[:, 0]) * x[:, 1] + random.normal(0, 0.02, points)
        return jnp.asarray(x, jnp.float32), jnp.asarray(y - y.mean(), jnp.float32)

    def loss_fn(params: Layers, batch: Batch) -> jax.Array:
        x, y = batch
        features = _mlp(params, x)
        squares = jnp.sum(features**2, -1)
        with jax.named_scope("distances"):
            distances = squares[:, None] + squares - 2 * features @ features.T  # guilty: differences cancel
        kernel = jnp.exp(-0.5 * distances) + noise * jnp.eye(points)
        factor = jnp.linalg.cholesky(kernel)
        weights = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return (0.5 * jnp.sum(weights**2) + jnp.log(jnp.diagonal(factor)).sum()) / points

    params = _init_mlp(jr.key(seed), (2, 32, 32, 4))
    return Model(loss_fn, params, tuple(batch() for _ in range(8)), optax.adam(1e-2), "distances", 150)


MODELS = (matching, hidden_markov, gaussian_process)
