"""Eight losses after public code that half precision breaks, so that `tune.py` has something to search for.

Each is rewritten in plain JAX, at sizes for a CPU. Its docstring names the repository and the file that it follows,
and what it leaves out or exaggerates. Each breaks by a known problem of its field: large logits, distances as
differences of squares, narrow bins, derivatives of fast waves, narrow Gaussians, values far from 1.
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
    for number, weight in enumerate(weights[:-1]):
        with jax.named_scope(f"linear_{number}"):  # as a library's modules have
            x = jnp.tanh(x @ weight)
    return x @ weights[-1]


def _case(loss_fn: Callable[[Any, Any], jax.Array], params: Params, batch: Callable[[jax.Array], Any]) -> Case:
    return Case(loss_fn, [(params, batch(key)) for key in jr.split(jr.key(1), EXAMPLES)])


def large_logits(tiny: bool) -> Case:
    """Attention whose keys have biases in the hundreds, which move all logits of a query alike.

    After `huggingface/transformers`, `src/transformers/models/qwen2/modeling_qwen2.py` (`Qwen2Attention`: biases of
    queries and keys; `eager_attention_forward`), without rotary embeddings and masks. What float16 does to it is in
    pull request 33317 there.
    """
    heads, width, tokens = (2, 8, 12) if tiny else (4, 16, 48)

    def loss_fn(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, target = batch
        query, key, value = (
            (x @ weight + bias).reshape(*x.shape[:-1], heads, -1) for weight, bias in params["projections"]
        )
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) * width**-0.5
        attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), value)
        return jnp.mean((attended.reshape(x.shape) @ params["out"] - target) ** 2)

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = jr.split(key)
        return jr.normal(one, (4, tokens, heads * width)), jr.normal(other, (4, tokens, heads * width))

    sizes = heads * width, heads * width
    keys = jr.split(jr.key(0), 4)
    biases = (4 * jr.normal(keys[3], sizes[:1]), 400 * jr.normal(keys[2], sizes[:1]), jnp.zeros(sizes[0]))
    projections = [(_weights(key, *sizes)[0], bias) for key, bias in zip(keys[:3], biases, strict=True)]
    return _case(loss_fn, {"projections": projections, "out": _weights(keys[3], *sizes)[0]}, batch)


def point_clouds(tiny: bool) -> Case:
    """Entropic transport between near clouds far from the origin: costs are differences of large squares.

    After `ott-jax/ott`, `src/ott/geometry/costs.py` (`SqEuclidean`: `norm(x) + norm(y) - 2 vdot(x, y)`), with five
    updates of potentials in the log domain and uniform weights.
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
    """Learned codes that are near each other, as those of a vector quantizer become: the nearest is another one.

    After `google-deepmind/dm-haiku`, `haiku/_src/nets/vqvae.py` (`VectorQuantizer`: the same differences of squares),
    with a softmax of the distances in place of the nearest code, so that the loss is smooth.
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

    After `kazewong/flowMC`, `src/flowMC/resource/nf_model/realNVP.py` (`AffineCoupling`: `(x + t) * exp(s)` with a
    bounded `s`), with halves in place of masks, and without the division by the data's deviation.
    """
    width, layers = 4, 2 if tiny else 4

    def loss_fn(params: Params, x: jax.Array) -> jax.Array:
        log_scales = 0.0
        for weights in params["layers"]:
            kept, moved = jnp.split(x, 2, -1)
            log_scale, shift = jnp.split(_network(weights, kept / 500), 2, -1)
            log_scale = 4 * jnp.tanh(log_scale)
            x = jnp.concatenate([(moved + 3 * shift) * jnp.exp(log_scale), kept], -1)
            log_scales = log_scales + log_scale.sum(-1)
        return jnp.mean(0.5 * jnp.sum(x * x, -1) - log_scales)

    params = {"layers": [_weights(key, width // 2, 32, width) for key in jr.split(jr.key(0), layers)]}
    return _case(loss_fn, params, lambda key: 600 * jr.normal(key, (32, width)))


def spline_flow(tiny: bool) -> Case:
    """Coupling layers of rational-quadratic splines with narrow bins, whose widths are differences of knots.

    After `bayesiains/nsf`, `experiments/uci.py` (a linear transform before each coupling) and
    `nde/transforms/splines/rational_quadratic.py` (knots, bins, identity outside of them), with more bins, halves in
    place of masks and an orthogonal matrix in place of an LU factorization.
    """
    bins, width, hidden, layers = (32, 4, 16, 1) if tiny else (64, 8, 64, 2)
    bound, least = 8.0, 1e-3

    def knots(sizes: jax.Array) -> jax.Array:
        sums = 2 * bound * jnp.cumsum(jax.nn.softmax(sizes) * (1 - bins * least) + least, -1) - bound
        return jnp.concatenate([jnp.full_like(sums[..., :1], -bound), sums], -1)

    def spline(x: jax.Array, parameters: jax.Array) -> tuple[jax.Array, jax.Array]:
        widths, heights, slopes = jnp.split(parameters, (bins, 2 * bins), -1)
        xs, ys, slopes = knots(widths), knots(heights), jax.nn.softplus(slopes) + least
        place = jnp.clip(jnp.sum(x[..., None] >= xs, -1, keepdims=True) - 1, 0, bins - 1)

        def ends(of_knots: jax.Array) -> list[jax.Array]:
            return [jnp.take_along_axis(of_knots, place + i, -1)[..., 0] for i in (0, 1)]

        (left, right), (bottom, top), (first, last) = ends(xs), ends(ys), ends(slopes)
        steep = (top - bottom) / (right - left)
        z = (x - left) / (right - left)
        inner = z * (1 - z)
        below = steep + (last + first - 2 * steep) * inner
        y = bottom + (top - bottom) * (steep * z**2 + first * inner) / below
        slope = last * z**2 + 2 * steep * inner + first * (1 - z) ** 2
        return y, 2 * jnp.log(steep) + jnp.log(slope) - 2 * jnp.log(below)

    def loss_fn(params: Params, x: jax.Array) -> jax.Array:
        logs = 0.0
        for number, layer in enumerate(params["layers"]):
            with jax.named_scope(f"coupling_{number}"):
                kept, moved = jnp.split(x @ layer["mix"], 2, -1)
                parameters = _network(layer["conditioner"], kept).reshape(*moved.shape, 3 * bins + 1)
                inside = jnp.abs(moved) < bound
                y, more = spline(jnp.where(inside, moved, 0), parameters)
                x, logs = jnp.concatenate([jnp.where(inside, y, moved), kept], -1), logs + jnp.sum(inside * more, -1)
        return jnp.mean(0.5 * jnp.sum(x * x, -1) - logs)

    def layer(key: jax.Array) -> Params:
        sizes = width // 2, hidden, hidden, width // 2 * (3 * bins + 1)
        return {"mix": jnp.linalg.qr(jr.normal(key, (width, width)))[0], "conditioner": _weights(key, *sizes)}

    params = {"layers": [layer(key) for key in jr.split(jr.key(0), layers)]}
    return _case(loss_fn, params, lambda key: 3 * jr.normal(key, (64, width)))


def burgers(tiny: bool) -> Case:
    """The residual of Burgers' equation for a network of fast waves: second derivatives in the thousands cancel.

    After `maziarraissi/PINNs`, `appendix/continuous_time_inference (Burgers)/Burgers.py` (`net_f` and `loss`), with
    sines of high frequency as its first layer, and no boundary values.
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

    After `magenta/magenta`, `magenta/models/sketch_rnn/model.py` (`get_mixture_coef` and `tf_2d_normal`), with a
    network in place of the decoder's recurrent one, in the log domain, and without pen states.
    """
    components, width = (4, 16) if tiny else (20, 64)

    def loss_fn(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, pen = batch
        weight, *centers, wide, high, bend = jnp.split(_network(params["layers"], x), 6, -1)
        (a, b), log_widths = centers, (wide - 5, high - 5)
        a, b = ((pen[:, i : i + 1] - c) / jnp.exp(w) for i, (c, w) in enumerate(zip((a, b), log_widths, strict=True)))
        correlation = jnp.tanh(bend)
        free = 1 - correlation**2
        distance = a**2 + b**2 - 2 * correlation * a * b
        logs = jax.nn.log_softmax(weight) - distance / (2 * free) - sum(log_widths) - 0.5 * jnp.log(free)
        return -jnp.mean(jax.nn.logsumexp(logs, axis=-1))

    def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = jr.split(key)
        x = jr.normal(one, (32, 8))
        return x, jnp.sin(x[:, :2]) + 0.1 * jr.normal(other, (32, 2))

    return _case(loss_fn, {"layers": _weights(jr.key(0), 8, width, 6 * components)}, batch)


def critic(tiny: bool) -> Case:
    """A critic of returns that are not normalized: values are beyond float16's range.

    After `vwxyzjn/cleanrl`, `cleanrl/ddpg_continuous_action_jax.py` (`update_critic` and its `mse_loss`), with returns
    in units a thousand times smaller, and without actions.
    """
    width = 16 if tiny else 128

    def value(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights[:-1]:
            x = jax.nn.relu(x @ weight)
        return 400 * (500 * (x @ weights[-1]))[:, 0]

    def loss_fn(params: Params, batch: tuple[jax.Array, ...]) -> jax.Array:
        seen, after, reward = batch
        target = jax.lax.stop_gradient(reward + 0.99 * value(params["critic"], after))
        return jnp.mean((value(params["critic"], seen) - target) ** 2)

    def batch(key: jax.Array) -> tuple[jax.Array, ...]:
        one, other, third = jr.split(key, 3)
        seen = jr.normal(one, (64, 8))
        return seen, seen + 0.05 * jr.normal(other, seen.shape), 2e4 * jr.normal(third, (64,))

    return _case(loss_fn, {"critic": _weights(jr.key(0), 8, width, width, 1)}, batch)


MODELS = (large_logits, point_clouds, codebook, coupling_flow, spline_flow, burgers, mixture_density, critic)
BREAKING = {make.__name__: make for make in MODELS}
