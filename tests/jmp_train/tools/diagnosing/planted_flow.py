"""Ten planted faults of a normalizing flow in haiku, with transforms and densities as its users write them.

The model has the structure of google-deepmind/distrax (examples/flow.py): masked couplings in turn, whose conditioners
are perceptrons, and a base distribution.
"""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from planting import Case, Fault, Way, values
from promotion import promoting

ROWS, SIZE, BINS = 16, 8, 12
BF16 = "bfloat16"
Transform = Callable[[Any, Any], tuple[Any, Any]]


def conditioner(x: Any, numbers: int, scale: float) -> Any:
    """Returns `numbers` parameters of the transform of each element."""
    h = hk.nets.MLP([16], activate_final=True)(x)
    return hk.Linear(x.shape[-1] * numbers, w_init=hk.initializers.RandomNormal(scale))(h).reshape(*x.shape, numbers)


def couplings(x: Any, transform: Transform, numbers: int, scale: float = 0.3) -> tuple[Any, Any]:
    """Returns what two masked couplings make of x, and the logarithm of their determinant."""
    logdet = jnp.zeros(len(x), x.dtype)
    for turn in range(2):
        kept = np.arange(x.shape[-1]) % 2 == turn
        y, each = transform(x, conditioner(jnp.where(kept, x, 0), numbers, scale))
        x = jnp.where(kept, x, y)
        logdet = logdet + jnp.where(kept, 0, each).sum(-1)
    return x, logdet


def affine(x: Any, params: Any) -> tuple[Any, Any]:
    shift, log_scale = params[..., 0], jnp.tanh(params[..., 1])
    return x * jnp.exp(log_scale) + shift, log_scale


def gaussian(z: Any) -> Any:
    """The logarithm of the density of the base distribution."""
    return (-0.5 * z**2 - 0.5 * np.log(2 * np.pi)).sum(-1)


def likelihood(z: Any, logdet: Any) -> Any:
    return -(gaussian(z) + logdet).astype(jnp.float32).mean()


def flow(way: Way, forward: Callable[[Any], Any], x: Any, *others: Any) -> Case:
    """Returns the loss and the gradients of a haiku function, its parameters and a batch."""
    net: Any = hk.without_apply_rng(hk.transform(forward))
    batch = (x, *others) if others else x
    params = jax.jit(promoting(net.init))(jr.key(0), batch)
    return way.gradients(promoting(lambda params, batch: net.apply(params, batch))), (params, batch)


def unit(shape: tuple[int, ...] = (ROWS, SIZE)) -> jax.Array:
    return jr.uniform(jr.key(1), shape, minval=0.02, maxval=0.98)


def at_bin(values: Any, place: Any) -> Any:
    return jnp.take_along_axis(values, place[..., None], -1)[..., 0]


def knots_of(params: Any) -> Any:
    """Returns where bins end, of sizes that are at least 1e-3."""
    sizes = jax.nn.softmax(params, -1) * (1 - BINS * 1e-3) + 1e-3
    return jnp.pad(jnp.cumsum(sizes, -1), [(0, 0)] * (params.ndim - 1) + [(1, 0)])


def spline(x: Any, params: Any) -> tuple[Any, Any]:
    """The rational-quadratic spline of Durkan and others."""
    x_knots, y_knots = (knots_of(params[..., i * BINS : (i + 1) * BINS]) for i in (0, 1))
    slopes = jax.nn.softplus(params[..., 2 * BINS :] + 0.54)
    place = jnp.clip((x[..., None] >= x_knots).sum(-1) - 1, 0, BINS - 1)
    width, height = (at_bin(jnp.diff(knots), place) for knots in (x_knots, y_knots))  # fault: bins of a spline
    s, left, right = height / width, at_bin(slopes, place), at_bin(slopes, place + 1)
    z = jnp.clip((x - at_bin(x_knots, place)) / width, 0, 1)
    below = s + (left + right - 2 * s) * z * (1 - z)
    y = at_bin(y_knots, place) + height * (s * z**2 + left * z * (1 - z)) / below
    above = right * z**2 + 2 * s * z * (1 - z) + left * (1 - z) ** 2
    return y, 2 * jnp.log(s) + jnp.log(above) - 2 * jnp.log(below)


def spline_bins(way: Way) -> Case:
    def forward(x: Any) -> Any:
        z, logdet = couplings(x, spline, 3 * BINS + 1, 1.2)
        return likelihood(4 * z - 2, logdet)

    return flow(way, forward, unit())


def quadratic(x: Any, params: Any) -> tuple[Any, Any]:
    """The inverse of a quadratic spline of one bin, that begins near the identity."""
    a = 0.1 * jnp.tanh(params[..., 0])
    b, c = 1 - a, -x
    z = (-b + jnp.sqrt(b * b - 4 * a * c)) / (2 * a)  # fault: root of a quadratic
    return z, -jnp.log(2 * a * z + b)


def roots(way: Way) -> Case:
    def forward(x: Any) -> Any:
        z, logdet = couplings(x, quadratic, 1)
        return likelihood(4 * z - 2, logdet)

    return flow(way, forward, unit())


def logits_of_pixels(way: Way) -> Case:
    """The first layer of RealNVP and MAF, which keeps pixels off 0 and 1."""

    def forward(x: Any) -> Any:
        x = 1e-6 + (1 - 2e-6) * x
        logits = jnp.log(x) - jnp.log(1 - x)  # fault: logits of pixels
        z, logdet = couplings(logits, affine, 2)
        return likelihood(z, logdet - (jnp.log(x) + jnp.log1p(-x)).sum(-1))

    return flow(way, forward, jnp.round(255 * jnp.clip(1.1 * unit() - 0.05, 0, 1)) / 255)


def determinant(way: Way) -> Case:
    """Glow's linear layer, by a triangular matrix."""

    def forward(x: Any) -> Any:
        size = x.shape[-1]
        upper = jnp.triu(hk.get_parameter("upper", (size, size), init=hk.initializers.RandomNormal(0.1)), 1)
        diagonal = hk.get_parameter("diagonal", (size,), init=hk.initializers.RandomUniform(0.4, 0.9))
        logdet = jnp.log(jnp.abs(jnp.prod(diagonal)))  # fault: determinant by a product
        z, each = couplings(x @ (upper + jnp.diag(diagonal)), affine, 2, 0.1)
        return likelihood(z, logdet + each)

    return flow(way, forward, values(ROWS, 48))


def importance(way: Way) -> Case:
    """A flow that proposes samples of a correlated target that it has nearly learned, and their weights."""
    size = 256
    root = values(size, size, seed=3)
    precision = jnp.eye(size) + 0.005 * (root + root.T)

    def forward(batch: Any) -> Any:
        noise, precision = batch
        x, logdet = couplings(noise, affine, 2, 0.001)
        log_q = gaussian(noise) - logdet
        log_target = -0.5 * jnp.einsum("ni,ij,nj->n", x, precision, x)  # fault: density of samples
        return -jax.nn.logsumexp((log_target - log_q).astype(jnp.float32))

    return flow(way, forward, values(ROWS, size), precision)


def sigmoid_scale(way: Way) -> Case:
    """Glow's scale of a coupling, of a trained model in which some element hardly counts."""

    def transform(x: Any, params: Any) -> tuple[Any, Any]:
        raw = params[..., 1] + jnp.where(np.arange(SIZE) == 3, -20, 0)
        log_scale = jnp.log(jax.nn.sigmoid(raw + 2))  # fault: scale of a coupling
        return (x + params[..., 0]) * jnp.exp(log_scale), log_scale

    def forward(x: Any) -> Any:
        return likelihood(*couplings(x, transform, 2))

    return flow(way, forward, values(ROWS, SIZE))


def discretized(way: Way) -> Case:
    """The likelihood of pixels between two values of a logistic distribution, as PixelCNN++ and Flow++ have it."""

    def forward(x: Any) -> Any:
        params = conditioner(x, 2, 0.3)
        mean, inverse = jnp.roll(x, 1, -1) + 0.1 * params[..., 0], jnp.exp(1 - params[..., 1])
        plus, minus = ((x - mean + sign / 255) * inverse for sign in (1, -1))
        p = jax.nn.sigmoid(plus) - jax.nn.sigmoid(minus)  # fault: discretized logistic
        return -jnp.log(jnp.maximum(p, 1e-5)).astype(jnp.float32).mean()

    return flow(way, forward, 2 * unit() - 1)


def annealed(way: Way) -> Case:
    """A flow that is fit to a target which comes by and by, over 100,000 steps."""

    def forward(batch: Any) -> Any:
        noise, step = batch
        x, logdet = couplings(noise, affine, 2)
        beta = jnp.minimum(1, step.astype(x.dtype) / 100000)  # fault: annealing
        log_target = beta * (-((x**2 - 4) ** 2)).sum(-1) / 8
        return (gaussian(noise) - logdet - log_target).astype(jnp.float32).mean()

    return flow(way, forward, values(ROWS, SIZE), jnp.array(30000))


def torus(way: Way) -> Case:
    """A flow on the torus, whose angles wind around it."""

    def transform(x: Any, params: Any) -> tuple[Any, Any]:
        angle = jnp.mod(31 * x + params[..., 0], 2 * np.pi)  # fault: angles that wind
        return angle, jnp.full(x.shape, np.log(31.0), x.dtype)

    def forward(x: Any) -> Any:
        z, logdet = couplings(x, transform, 1)
        return -((2 * jnp.cos(z - 1)).sum(-1) + logdet).astype(jnp.float32).mean()

    return flow(way, forward, 2 * np.pi * unit())


def simplex(way: Way) -> Case:
    """The first layer of a flow of probabilities: the rest of a stick is broken, as Stan does."""

    def forward(x: Any) -> Any:
        rest = 1 - jnp.cumsum(x, -1)[:, :-1]  # fault: rest of a stick
        before = jnp.pad(rest, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
        z, logdet = couplings(jnp.log(x[:, :-1] / rest), affine, 2)
        return likelihood(z, logdet + (jnp.log(before) - jnp.log(x[:, :-1]) - jnp.log(rest)).sum(-1))

    return flow(way, forward, jax.nn.softmax(1.5 * values(ROWS, SIZE), -1))


FLOW = (
    Fault("bins of a spline", "NaN made", "haiku", spline_bins, BF16),
    Fault("root of a quadratic", "overflow", "haiku", roots),
    Fault("logits of pixels", "cancellation", "haiku", logits_of_pixels),
    Fault("determinant by a product", "underflow", "haiku", determinant),
    Fault("density of samples", "cancellation", "haiku", importance, BF16, autocast=True),
    Fault("scale of a coupling", "underflow", "haiku", sigmoid_scale),
    Fault("discretized logistic", "cancellation", "haiku", discretized, BF16),
    Fault("annealing", "overflow", "haiku", annealed),
    Fault("angles that wind", "cancellation", "haiku", torus, BF16),
    Fault("rest of a stick", "cancellation", "haiku", simplex, BF16),
)
