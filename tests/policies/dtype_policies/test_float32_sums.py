"""Gradients of half values that are read many times: added in float32 under every policy, with the same forward bits."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest]

HALVES = (jnp.bfloat16, jnp.float16)
READS, WIDTH = 4096, 4  # of each element: equal gradients stagnate at 256 or 2,048
RNG = np.random.default_rng(0)
IDS = jnp.asarray(RNG.integers(0, 8, READS))
# Both half types hold these numbers, so that only gradients are rounded.
ROWS, TABLE = (jnp.asarray(RNG.integers(64, 192, (n, WIDTH)) / 128, jnp.float32) for n in (READS, 8))


def mean(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).mean() * 8 * WIDTH


def by_scan(body: Callable[..., Any], table: jax.Array, xs: Any) -> jax.Array:
    return mean(lax.scan(lambda carry, x: (carry, body(table, x)), None, xs)[1])


def in_branches(table: jax.Array, x: jax.Array) -> jax.Array:
    branches = [lambda t, x: (t[0] * x).sum(), lambda t, x: (t[jnp.arange(64) % 8] * x).mean()]
    return lax.cond(x[0] > 0, *reversed(branches), table, x)


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def over_devices(table: jax.Array, rows: jax.Array, ids: jax.Array) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))
    specs = (P(), P("i"), P("i"))
    return mean(jax.shard_map(lambda t, x, i: t[i] * x, mesh=mesh, in_specs=specs, out_specs=P("i"))(table, rows, ids))


# Backward, the first of these gradients is 1 and the others are at most half a unit of its rounding.
SHARES = (*[2.0**-11] * 40, 1.0)

TABLES: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    "indexed": lambda t, x, i: mean(t[i]),
    "take": lambda t, x, i: mean(jnp.take(t, i, axis=0)),
    "at[].get": lambda t, x, i: mean(t.at[i - 1].get(mode="fill", fill_value=7, wrap_negative_indices=False)),
    "columns": lambda t, x, i: mean(t[:, i % WIDTH]),
    "take_along_axis": lambda t, x, i: mean(jnp.take_along_axis(t, jnp.broadcast_to(i % WIDTH, (8, READS)), 1)),
    "several gathers": lambda t, x, i: mean(t[i] * jnp.take(t, i, 0)) + mean(x[:8] * t),
    "gathers of few": lambda t, x, i: sum(mean(t[i[:8]]) * share for share in SHARES),
    "vmap of dynamic_slice": lambda t, x, i: mean(jax.vmap(lambda i: lax.dynamic_index_in_dim(t, i, 0))(i)),
    "dynamic_slice in scan": lambda t, x, i: by_scan(
        lambda t, xs: lax.dynamic_index_in_dim(t, xs[1], 0) * xs[0], t, (x, i)
    ),
    "map": lambda t, x, i: mean(lax.map(lambda x: t * x, x)),
    "scan in scan": lambda t, x, i: by_scan(
        lambda t, xs: lax.map(lambda x: t[3] * x, xs), t, x.reshape(2, -1, WIDTH)
    ),
    "gather in scan": lambda t, x, i: by_scan(lambda t, xs: t[i[:16]] * xs, t, x),
    "carried unchanged": lambda t, x, i: mean(lax.scan(lambda t, x: (t, t * x), t, x)[1]),
    "shared by layers": lambda t, x, i: sum(mean(t * x[:8]) * share for share in SHARES),
    "jit": lambda t, x, i: mean(jax.jit(lambda t, x: t[i] * x[0])(t, x)),
    "remat": lambda t, x, i: mean(jax.checkpoint(lambda t, x: jnp.sin(t[i] * x[0]))(t, x)),
    "cond": lambda t, x, i: by_scan(in_branches, t, x[:512]),
    "custom_vjp": lambda t, x, i: mean(doubled(doubled(t)[i])),
    "shard_map": over_devices,
    "bias": lambda t, x, i: mean((x + t[0]) * x),
    "scale": lambda t, x, i: mean(x * t[:, None]),
    "scalar": lambda t, x, i: mean(x * t[0, 0]),
    "divisor": lambda t, x, i: mean(x / t[:, None]),
    "maximum": lambda t, x, i: mean(jnp.maximum(x, t[:, None])),
    "where": lambda t, x, i: mean(jnp.where(x > 1, x, t[:, None])),
    "bias of images": lambda t, x, i: mean(jnp.sin(x.reshape(1, 64, 64, WIDTH) + t[0])),
    "vmap": lambda t, x, i: mean(jax.vmap(lambda t, x: t * x, (None, 0))(t, x)),
    "broadcast_to": lambda t, x, i: mean(jnp.broadcast_to(t[1], x.shape) * x),
    "repeat": lambda t, x, i: mean(jnp.repeat(t, READS, 0)),
    "repeat by counts": lambda t, x, i: mean(jnp.repeat(t, i[:8] * 500, 0, total_repeat_length=READS)),
    "tile": lambda t, x, i: mean(jnp.tile(t, (READS, 1))),
    "concatenate": lambda t, x, i: mean(jnp.concatenate([t] * 300)),
}


def error(found: Any, right: Any) -> float:
    """Returns the largest error of any gradient, as a fraction of the largest number in it."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()) for a, b in pairs)


def test_gradients_are_added_in_float32_and_the_forward_pass_has_the_same_bits() -> None:
    def results(apply: Callable[..., Any]) -> Any:
        def of(fn: Any) -> Any:
            return jax.value_and_grad(lambda t, x, i: apply(fn)(t, x, i))

        return jax.jit(lambda *args: {name: of(fn)(*args) for name, fn in TABLES.items()})(TABLE, ROWS, IDS)

    right = results(lambda fn: fn)
    for half in HALVES:
        found = results(lambda fn, half=half: jt.apply_policy(fn, f"mixed_{jnp.dtype(half).name}"))
        bits = results(lambda fn, half=half: lambda t, x, i: fn(t.astype(half), x.astype(half), i))
        assert {n for n in TABLES if found[n][0] != bits[n][0]} == set()
        units = {name: error(found[name][1], right[name][1]) / float(jnp.finfo(half).eps) for name in TABLES}
        assert {name: u for name, u in units.items() if not u <= 1.0} == {}
