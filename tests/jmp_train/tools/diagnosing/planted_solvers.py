"""Ten planted faults of neural differential equations in equinox and of optimal transport, as in diffrax and ott.

The models follow patrick-kidger/diffrax (`examples/latent_ode.py`, `continuous_normalising_flow.py`, `neural_cde.py`,
`stiff_ode.py`) with solvers of fixed steps, and ott-jax/ott (`solvers/linear/sinkhorn.py`,
`tools/sinkhorn_divergence.py`), in small sizes.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from planting import Case, Fault, Way, mean_square, values

BATCH, DATA, WIDTH, POINTS = 16, 4, 16, 24
BF16 = "bfloat16"


def module(way: Way, model: Any, loss: Callable[[Any, Any], jax.Array], batch: Any) -> Case:
    """Returns the loss and the gradients of a module's arrays."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return way.gradients(lambda params, batch: loss(eqx.combine(params, static), batch)), (params, batch)


def field(data: int = DATA, out: int | None = None, seed: int = 0) -> eqx.nn.MLP:
    """Returns the vector field of diffrax's examples."""
    size = data if out is None else out
    return eqx.nn.MLP(data, size, WIDTH, 1, jax.nn.softplus, jnp.tanh, key=jr.key(seed))


def estimated(way: Way) -> Case:
    """A solver whose estimated errors are regularized, so that the equation becomes easy to solve."""
    dt = 0.05

    def loss(func: Any, batch: Any) -> jax.Array:
        start, target = batch

        def step(y: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            k1 = jax.vmap(func)(y)
            euler = y + dt * k1
            heun = y + 0.5 * dt * (k1 + jax.vmap(func)(euler))
            error = heun - euler  # fault: estimated error
            return heun, jnp.abs(error).mean()

        y, errors = lax.scan(step, start, None, length=20)
        return 0.01 * mean_square(y - target) + errors.astype(jnp.float32).sum()

    return module(way, field(), loss, (values(BATCH, DATA), values(BATCH, DATA, seed=1)))


def flow(way: Way) -> Case:
    """A continuous normalizing flow with exact traces, in many small steps."""
    dt, width = 1 / 400, 2

    def loss(func: Any, data: jax.Array) -> jax.Array:
        def derivative(y: jax.Array) -> tuple[jax.Array, jax.Array]:
            return func(y), jnp.trace(jax.jacfwd(func)(y))

        def step(state: Any, _: None) -> tuple[Any, None]:
            y, log_det = state
            dy, dlog = jax.vmap(derivative)(y)
            return (y - dt * dy, log_det - dt * dlog), None  # fault: small steps of a flow

        (y, log_det), _ = lax.scan(step, (data, jnp.zeros_like(data[:, 0])), None, length=400)
        log_likelihood = log_det - 0.5 * jnp.sum(y**2, axis=-1)
        return -jnp.mean(log_likelihood.astype(jnp.float32))

    return module(way, field(width), loss, values(BATCH, width))


def latent(way: Way) -> Case:
    """The loss of diffrax's latent equation at the start, where the posterior is near the prior."""
    model = eqx.nn.Linear(DATA, 2 * DATA, key=jr.key(0)), eqx.nn.Linear(DATA, DATA, key=jr.key(1))

    def loss(model: Any, ys: jax.Array) -> jax.Array:
        encode, decode = model
        context = 0.1 * jax.vmap(encode)(ys)
        mean, logstd = context[:, :DATA], context[:, DATA:]
        std = jnp.exp(logstd)
        reconstruction = 0.5 * jnp.sum((ys - jax.vmap(decode)(mean)) ** 2, axis=-1)
        variational = 0.5 * jnp.sum(mean**2 + std**2 - 2 * jnp.log(std) - 1, axis=-1)  # fault: distance to the prior
        return jnp.mean((0.001 * reconstruction + variational).astype(jnp.float32))

    return module(way, model, loss, values(BATCH, DATA))


def squared(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns squared distances, of which none cancels."""
    return jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)


def potentials(cost: jax.Array, epsilon: float, iterations: int = 20) -> tuple[jax.Array, jax.Array]:
    """Returns the dual potentials of uniform weights, by Sinkhorn's iterations as ott has them."""
    log_weight = -jnp.log(jnp.asarray(len(cost), cost.dtype))

    def iterate(fg: Any, _: None) -> tuple[Any, None]:
        f, g = fg
        g = epsilon * (log_weight - jax.nn.logsumexp((f[:, None] - cost) / epsilon, axis=0)).astype(cost.dtype)
        f = epsilon * (log_weight - jax.nn.logsumexp((g[None] - cost) / epsilon, axis=1)).astype(cost.dtype)
        return (f, g), None

    start = jnp.zeros_like(cost[0]), jnp.zeros_like(cost[0])
    return lax.scan(iterate, start, None, length=iterations)[0]


def transported(way: Way) -> Case:
    """How far an entropic transport moves the points of an embedding, whose coordinates are large."""
    epsilon = 0.02

    def loss(model: Any, batch: Any) -> jax.Array:
        x, y = batch
        x = 6 + jax.vmap(model)(x)
        cost = squared(x, y)
        f, g = lax.stop_gradient(potentials(cost, epsilon))
        plan = jnp.exp((f[:, None] + g[None] - cost) / epsilon)
        displacement = plan @ y / jnp.sum(plan, axis=1, keepdims=True) - x  # fault: displacement of points
        return mean_square(displacement)

    x = values(POINTS, 2)
    model = eqx.nn.Linear(2, 2, key=jr.key(0))
    y = 6 + jax.vmap(model)(x) + 0.1 * values(POINTS, 2, seed=1)
    return module(way, model, loss, (x, y))


def debiased(way: Way) -> Case:
    """The Sinkhorn divergence of two point clouds that are nearly alike."""

    def transport(x: jax.Array, y: jax.Array) -> jax.Array:
        f, g = potentials(squared(x, y), 0.5)
        return f.mean() + g.mean()

    def loss(model: Any, batch: Any) -> jax.Array:
        x, y = batch
        x = jax.vmap(model)(x)
        apart = transport(x, y) - 0.5 * transport(x, x) - 0.5 * transport(y, y)  # fault: divergence
        return apart.astype(jnp.float32)

    x, model = values(POINTS, 2), eqx.nn.Linear(2, 2, key=jr.key(0))
    return module(way, model, loss, (x, jax.vmap(model)(x) + 0.1 * values(POINTS, 2, seed=1)))


def gaps(way: Way) -> Case:
    """A recurrent network between whose observations its state decays, by the hours of a patient's stay."""

    def loss(model: Any, batch: Any) -> jax.Array:
        times, ys = batch
        cell, rate, readout = model
        apart = jnp.diff(times, axis=0)  # fault: gaps of time

        def step(h: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
            gap, y = inputs
            h = h * jnp.exp(-gap[:, None] * jax.nn.softplus(rate))
            h = jax.vmap(cell)(y, h)
            return h, jax.vmap(readout)(h)

        _, out = lax.scan(step, jnp.zeros((BATCH, WIDTH), ys.dtype), (apart, ys[:-1]))
        return mean_square(out - ys[1:])

    model = eqx.nn.GRUCell(DATA, WIDTH, key=jr.key(0)), jnp.zeros(WIDTH), eqx.nn.Linear(WIDTH, DATA, key=jr.key(1))
    times = 700 + jnp.cumsum(jr.uniform(jr.key(2), (12, BATCH)), axis=0)
    return module(way, model, loss, (times, values(12, BATCH, DATA)))


def scaled(way: Way) -> Case:
    """Sinkhorn's iterations on the kernel instead of its logarithm, with points that are far from all others."""

    def loss(model: Any, batch: Any) -> jax.Array:
        x, y = batch
        cost = squared(jax.vmap(model)(x), y)
        kernel = jnp.exp(-cost / 0.3)

        def iterate(uv: Any, _: None) -> tuple[Any, None]:
            u, v = uv
            u = (1 / POINTS) / (kernel @ v)
            v = (1 / POINTS) / (kernel.T @ u)  # fault: scaling of a far point
            return (u, v), None

        start = jnp.ones_like(cost[0]), jnp.ones_like(cost[0])
        (u, v), _ = lax.scan(iterate, start, None, length=10)
        return jnp.sum((u[:, None] * kernel * v[None] * cost).astype(jnp.float32))

    x, model = values(POINTS, 2), eqx.nn.Linear(2, 2, key=jr.key(0))
    y = jax.vmap(model)(x) + 0.1 * values(POINTS, 2, seed=1)
    return module(way, model, loss, (x, y.at[0].add(3.9)))


def stiff(way: Way) -> Case:
    """Robertson's reaction, whose rates are learned as factors of known ones."""
    rates = eqx.nn.Linear(3, 3, key=jr.key(0))

    def loss(rates: Any, batch: Any) -> jax.Array:
        y, target = batch
        factor = jnp.exp(0.1 * jax.vmap(rates)(y))
        slow = 0.04 * factor[:, 0] * y[:, 0]
        fast = 3e7 * factor[:, 1] * y[:, 1] ** 2  # fault: rate constant
        back = 1e4 * factor[:, 2] * y[:, 1] * y[:, 2]
        return mean_square(jnp.stack([back - slow, slow - back - fast, fast], axis=-1) - target)

    y = jnp.stack([1 - 0.3 * jr.uniform(jr.key(1), (BATCH,)), jnp.full(BATCH, 3.65e-5), jnp.full(BATCH, 1e-3)], -1)
    return module(way, rates, loss, (y, 0.1 * values(BATCH, 3)))


def gravity(way: Way) -> Case:
    """The acceleration of a satellite, of which a network learns what the law leaves out."""

    def loss(model: Any, batch: Any) -> jax.Array:
        mass, func = model
        r, target = batch
        law = -mass * r / jnp.sum(r**2, axis=-1, keepdims=True) ** 1.5  # fault: inverse cube
        return mean_square(law + 0.01 * jax.vmap(func)(r / 64) - target)

    r = 60 + 5 * values(BATCH, 3)
    target = -900.0 * r / jnp.sum(r**2, axis=-1, keepdims=True) ** 1.5
    return module(way, (jnp.array(700.0), field(3)), loss, (r, target))


def path(way: Way) -> Case:
    """A neural controlled differential equation along the line between fine samples."""
    dt = 1 / 64

    def loss(model: Any, batch: Any) -> jax.Array:
        xs, target = batch
        func, readout = model
        slopes = (xs[1:] - xs[:-1]) / dt  # fault: slopes of a path

        def step(h: jax.Array, slope: jax.Array) -> tuple[jax.Array, None]:
            matrix = jax.vmap(func)(h).reshape(BATCH, DATA, 2)
            return h + dt * jnp.einsum("bij,bj->bi", matrix, slope), None

        h, _ = lax.scan(step, jnp.zeros((BATCH, DATA), xs.dtype), slopes)
        # The derivative of the control is an input of its own, as the energy of the path.
        return mean_square(jax.vmap(readout)(h) + jnp.mean(slopes**2, axis=0) - target)

    time, phase = jnp.linspace(0, 0.25, 17)[:, None, None], values(1, BATCH, 2)
    model = field(DATA, 2 * DATA), eqx.nn.Linear(DATA, 2, key=jr.key(1))
    return module(way, model, loss, (2 + jnp.sin(time + phase), values(BATCH, 2, seed=2)))


SOLVERS = (
    Fault("estimated error", "cancellation", "equinox", estimated, where="scan"),
    Fault("small steps of a flow", "stagnation", "equinox", flow, BF16, where="scan"),
    Fault("distance to the prior", "cancellation", "equinox", latent, BF16),
    Fault("displacement of points", "cancellation", "equinox", transported),
    Fault("divergence", "cancellation", "equinox", debiased),
    Fault("gaps of time", "cancellation", "equinox", gaps),
    Fault("slopes of a path", "cancellation", "equinox", path, BF16),
    Fault("scaling of a far point", "overflow", "equinox", scaled, where="scan"),
    Fault("rate constant", "underflow", "equinox", stiff),
    Fault("inverse cube", "overflow", "equinox", gravity),
)
