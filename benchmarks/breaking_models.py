"""Eight losses after public code that half precision breaks, so that `tune.py` has something to search for.

Each is written anew in plain JAX, at the sizes of a CPU, with its source in the docstring. What breaks it is what its
field is known for: large logits, distances as differences of squares, narrow bins, derivatives of fast waves, narrow
Gaussians, values far from 1.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from tune_models import EXAMPLES, Case

Params = dict[str, Any]


def _weights(key: jax.Array, *sizes: int) -> list[jax.Array]:
    keys = jr.split(key, len(sizes) - 1)
    return [jr.normal(k, pair) / pair[0] ** 0.5 for k, pair in zip(keys, itertools.pairwise(sizes), strict=True)]


def _network(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights[:-1]:
        x = jnp.tanh(x @ weight)
    return x @ weights[-1]


def _case(loss_fn: Callable[[Any, Any], jax.Array], params: Params, batch: Callable[[jax.Array], Any]) -> Case:
    return Case(loss_fn, [(params, batch(key)) for key in jr.split(jr.key(1), EXAMPLES)])


def large_logits(tiny: bool) -> Case:
    """Attention without a scale, whose logits are in the hundreds.

    After `google-research/t5x`, `t5x/examples/t5/layers.py`, whose `float32_logits` is there for this.
    """
    width, tokens = 16, 12 if tiny else 48

    def loss_fn(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, target = batch
        query, key, value = jnp.split(x @ params["qkv"], 3, -1)
        attended = jax.nn.softmax(query @ key.swapaxes(-1, -2)) @ value
        return jnp.mean((attended @ params["out"] - target) ** 2)

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = jr.split(key)
        return 3 * jr.normal(one, (4, tokens, width)), jr.normal(other, (4, tokens, width))

    first, second = jr.split(jr.key(0))
    return _case(
        loss_fn, {"qkv": 2.5 * _weights(first, width, 3 * width)[0], "out": _weights(second, width, width)[0]}, batch
    )


def point_clouds(tiny: bool) -> Case:
    """Entropic transport between near clouds far from the origin: costs are differences of large squares.

    After `ott-jax/ott`, `src/ott/geometry/costs.py` (`SqEuclidean`: norms less twice the product), in the log domain.
    """
    points = 12 if tiny else 48

    def loss_fn(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = batch[0] + _network(params["shift"], batch[0] - 40), batch[1]
        cost = jnp.sum(x * x, -1)[:, None] + jnp.sum(y * y, -1) - 2 * x @ y.T
        rows, columns = jnp.zeros(points), jnp.zeros(points)
        for _ in range(5):
            rows = -jax.nn.logsumexp((columns - cost) / 0.5, axis=1) * 0.5
            columns = -jax.nn.logsumexp((rows[:, None] - cost) / 0.5, axis=0) * 0.5
        return jnp.mean(rows) + jnp.mean(columns)

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = jr.split(key)
        return 40 + jr.normal(one, (points, 3)), 40 + jr.normal(other, (points, 3))

    return _case(loss_fn, {"shift": [0.1 * w for w in _weights(jr.key(0), 3, 32, 3)]}, batch)


def codebook(tiny: bool) -> Case:
    """Soft k-means on learned codes that are near each other, as those of a vector quantizer become.

    After `google-deepmind/dm-haiku`, `haiku/_src/nets/vqvae.py` (`VectorQuantizer`: the same difference of squares).
    """
    width, codes = (8, 8) if tiny else (32, 32)

    def loss_fn(params: Params, x: jax.Array) -> jax.Array:
        z = _network(params["encoder"], x) + 4
        book = params["codes"]
        distances = jnp.sum(z * z, -1, keepdims=True) - 2 * z @ book.T + jnp.sum(book * book, -1)
        chosen = jax.nn.softmax(-4 * distances) @ book
        return jnp.mean((_network(params["decoder"], chosen - 4) - x) ** 2) + jnp.mean((z - chosen) ** 2)

    one, other, third = jr.split(jr.key(0), 3)
    params = {
        "encoder": [0.5 * w for w in _weights(one, 16, 32, width)],
        "decoder": _weights(other, width, 32, 16),
        "codes": 4 + 0.3 * jr.normal(third, (codes, width)),
    }
    return _case(loss_fn, params, lambda key: jr.normal(key, (32, 16)))


def coupling_flow(tiny: bool) -> Case:
    """Affine coupling layers on data in their own units, which scales stretch beyond float16's range.

    After `google-deepmind/distrax`, `examples/flow.py` and `distrax/_src/bijectors/masked_coupling.py`.
    """
    width, layers = 4, 2 if tiny else 4

    def loss_fn(params: Params, x: jax.Array) -> jax.Array:
        log_scales = 0.0
        for weights in params["layers"]:
            kept, moved = jnp.split(x, 2, -1)
            shift, log_scale = jnp.split(3 * _network(weights, kept / 500), 2, -1)
            x = jnp.concatenate([moved * jnp.exp(log_scale) + shift, kept], -1)
            log_scales = log_scales + log_scale.sum(-1)
        return jnp.mean(0.5 * jnp.sum(x * x, -1) - log_scales)

    params = {"layers": [_weights(key, width // 2, 32, width) for key in jr.split(jr.key(0), layers)]}
    return _case(loss_fn, params, lambda key: 600 * jr.normal(key, (32, width)))


def spline_flow(tiny: bool) -> Case:
    """A rational-quadratic spline with narrow bins, whose widths are differences of knots far from zero.

    After `google-deepmind/distrax`, `distrax/_src/bijectors/rational_quadratic_spline.py`.
    """
    bins, width = (16, 2) if tiny else (64, 4)

    def spline(x: jax.Array, parameters: jax.Array) -> tuple[jax.Array, jax.Array]:
        widths, heights, slopes = jnp.split(parameters, (bins, 2 * bins))
        knots, values = (
            jnp.concatenate([jnp.full(1, -8.0), -8 + 16 * jnp.cumsum(jax.nn.softmax(y))]) for y in (widths, heights)
        )
        slopes = jax.nn.softplus(slopes) + 1e-4
        place = jnp.clip(jnp.sum(x[:, None] >= knots[1:-1], -1), 0, bins - 1)
        left, bottom = knots[place], values[place]
        wide, high = knots[place + 1] - left, values[place + 1] - bottom
        steep, first, last = high / wide, slopes[place], slopes[place + 1]
        z = jnp.clip((x - left) / wide, 0, 1)
        inner = z * (1 - z)
        below = steep + (last + first - 2 * steep) * inner
        derivative = steep**2 * (last * z**2 + 2 * steep * inner + first * (1 - z) ** 2) / below**2
        return bottom + high * (steep * z**2 + first * inner) / below, jnp.log(derivative)

    def loss_fn(params: Params, x: jax.Array) -> jax.Array:
        y, logs = jax.vmap(spline, (1, 0))(x @ params["mix"], params["splines"])
        return jnp.mean(0.5 * y**2 - logs)

    one, other = jr.split(jr.key(0))
    params = {"mix": _weights(one, width, width)[0], "splines": jr.normal(other, (width, 3 * bins + 1))}
    return _case(loss_fn, params, lambda key: 3 * jr.normal(key, (64, width)))


def burgers(tiny: bool) -> Case:
    """The residual of Burgers' equation for a network of fast waves: second derivatives in the thousands cancel.

    After `maziarraissi/PINNs`, `appendix/continuous_time_inference (Burgers)/Burgers.py`, with sines as features.
    """
    width, points = (16, 16) if tiny else (64, 128)
    viscosity = 0.01 / jnp.pi

    def loss_fn(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        def wave(t: jax.Array, x: jax.Array) -> jax.Array:
            features = jnp.sin(params["frequencies"] @ jnp.stack([t, x]))
            return _network(params["layers"], features)[0]

        def residual(t: jax.Array, x: jax.Array) -> jax.Array:
            u, by_x = wave(t, x), jax.grad(wave, 1)
            return jax.grad(wave)(t, x) + u * by_x(t, x) - viscosity * jax.grad(by_x, 1)(t, x)

        t, x = batch
        start = jax.vmap(wave)(jnp.zeros_like(t), x) + jnp.sin(jnp.pi * x)
        return jnp.mean(jax.vmap(residual)(t, x) ** 2) + jnp.mean(start**2)

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = jr.split(key)
        return jr.uniform(one, (points,)), jr.uniform(other, (points,), minval=-1, maxval=1)

    one, other = jr.split(jr.key(0))
    params = {"frequencies": 250 * jr.normal(one, (width, 2)), "layers": _weights(other, width, width, 1)}
    return _case(loss_fn, params, batch)


def mixture_density(tiny: bool) -> Case:
    """A mixture of narrow Gaussians of pen positions: distances by deviations, squared, are beyond float16's range.

    After `magenta/magenta`, `magenta/models/sketch_rnn/model.py` (`tf_2d_normal`).
    """
    components, width = (4, 16) if tiny else (20, 64)

    def loss_fn(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = batch
        weight, center, log_width = jnp.split(_network(params["layers"], x), 3, -1)
        distance = (y - center) / jnp.exp(log_width - 5)
        logs = jax.nn.log_softmax(weight) - 0.5 * distance**2 - (log_width - 5)
        return -jnp.mean(jax.nn.logsumexp(logs, axis=-1))

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = jr.split(key)
        x = jr.normal(one, (32, 8))
        return x, jnp.sin(x[:, :1]) + 0.1 * jr.normal(other, (32, 1))

    return _case(loss_fn, {"layers": _weights(jr.key(0), 8, width, 3 * components)}, batch)


def critic(tiny: bool) -> Case:
    """A critic of returns that are not normalized: values are beyond float16's range.

    After `vwxyzjn/cleanrl`, `cleanrl/ddpg_continuous_action_jax.py` (`mse_loss` of `qf_next_target`).
    """
    width = 16 if tiny else 128

    def loss_fn(params: Params, batch: tuple[jax.Array, ...]) -> jax.Array:
        seen, after, reward = batch
        value, target = (4e4 * _network(params["critic"], x)[:, 0] for x in (seen, after))
        return jnp.mean((value - (reward + 0.99 * jax.lax.stop_gradient(target))) ** 2)

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        one, other, third = jr.split(key, 3)
        seen = jr.normal(one, (64, 8))
        return seen, seen + 0.05 * jr.normal(other, seen.shape), 2e3 * jr.normal(third, (64,))

    return _case(loss_fn, {"critic": _weights(jr.key(0), 8, width, width, 1)}, batch)


MODELS = (large_logits, point_clouds, codebook, coupling_flow, spline_flow, burgers, mixture_density, critic)
BREAKING = {make.__name__: make for make in MODELS}
