"""Gradients of half values that are read many times: added in float32 under every policy."""

import dataclasses
import re
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
from jax import export, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest]

HALVES = (jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full))
READS, WIDTH = 1024, 4  # of each element: equal gradients stagnate at 256 or 2,048
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
SHARES = (*[2.0**-11] * 24, 1.0)

TABLES: dict[str, Callable[[jax.Array, jax.Array, jax.Array], Any]] = {
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
    "scan in scan": lambda t, x, i: by_scan(lambda t, xs: lax.map(lambda x: t[3] * x, xs), t, x.reshape(2, -1, WIDTH)),
    "gather in scan": lambda t, x, i: by_scan(lambda t, xs: t[i[:16]] * xs, t, x),
    "carried unchanged": lambda t, x, i: mean(lax.scan(lambda t, x: (t, t * x), t, x)[1]),
    "shared by layers": lambda t, x, i: sum(mean(t * x[:8]) * share for share in SHARES),
    "reduced by layers": lambda t, x, i: sum(mean(t.max(0)) * share for share in SHARES),
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
    "bias of images": lambda t, x, i: mean(jnp.sin(x.reshape(1, 32, 32, WIDTH) + t[0])),
    "vmap": lambda t, x, i: mean(jax.vmap(lambda t, x: t * x, (None, 0))(t, x)),
    "broadcast_to": lambda t, x, i: mean(jnp.broadcast_to(t[1], x.shape) * x),
    "repeat": lambda t, x, i: mean(jnp.repeat(t[:1], READS, 0) * x),
    "repeat by counts": lambda t, x, i: mean(jnp.repeat(t, i[:8] * 500, 0, total_repeat_length=READS)),
    "tile": lambda t, x, i: mean(jnp.tile(t[0], (READS, 1)) * x),
    "concatenate": lambda t, x, i: mean(jnp.concatenate([t[0]] * 300) * x.ravel()[:1200]),
}


def error(found: Any, right: Any) -> float:
    """Returns the largest error of any gradient, as a fraction of the largest number in it."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()) for a, b in pairs)


# One of each kind; every case costs a third of a second on each jax.
QUICK = (
    "several gathers", "dynamic_slice in scan", "cond", "custom_vjp", "shard_map", "bias",
    "repeat by counts", "reduced by layers",
)  # fmt: skip


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(TABLES), marks=pytest.mark.full)], ids=["some", "all"])
@pytest.mark.parametrize("half", HALVES)
def test_gradients_are_added_in_float32(half: Any, names: tuple[str, ...]) -> None:
    def results(apply: Callable[..., Any]) -> Any:
        def of(fn: Any) -> Any:
            return jax.grad(lambda t, x, i: apply(fn)(t, x, i))

        return jax.jit(lambda *args: {name: of(TABLES[name])(*args) for name in names})(TABLE, ROWS, IDS)

    right = results(lambda fn: fn)
    found = results(lambda fn: jt.apply_policy(fn, f"mixed_{jnp.dtype(half).name}"))
    units = {name: error(found[name], right[name]) / float(jnp.finfo(half).eps) for name in names}
    assert {name: u for name, u in units.items() if not u <= 1.0} == {}


@pytest.mark.full
@pytest.mark.parametrize("half", HALVES)
def test_the_forward_pass_has_the_same_bits(half: Any) -> None:
    def forward(t: Any, x: Any, i: Any) -> Any:
        values = {name: fn(t.astype(half), x.astype(half), i) for name, fn in TABLES.items()}
        policy = f"mixed_{jnp.dtype(half).name}"
        return values, {name: jt.apply_policy(fn, policy)(t, x, i) for name, fn in TABLES.items()}

    plain, found = jax.jit(forward)(TABLE + 1 / 3, ROWS + 1 / 3, IDS)
    assert {name for name in TABLES if plain[name] != found[name]} == set()


# --- the ways to a policy ------------------------------------------------------------------------

TOKENS = jnp.asarray(RNG.zipf(1.3, 8 * READS) % 64)
EMBEDDING = jnp.asarray(RNG.integers(64, 192, (64, WIDTH)) / 128, jnp.float32)
SCALE = jt.StaticLossScale(64.0)


def embedded(params: Any, tokens: jax.Array) -> jax.Array:
    return mean(params["e"][tokens])


def by_apex(level: str | None) -> Any:
    options = {"opt_level": level} if level else {}
    amp = jt.amp_mode("apex" if level else "naive", dtype=jnp.bfloat16, **options)
    amp = dataclasses.replace(amp, batch_norms=())
    loss_fn, _ = amp.transform(jt.stateless(embedded), optax.sgd(1.0))
    params = amp.cast_params({"e": EMBEDDING})
    return jax.jit(jax.grad(lambda p, tokens: loss_fn(p, None, tokens, None)[0]))(params, TOKENS)["e"]


def by_step() -> Any:
    step = jt.train_step(jt.stateless(embedded), optax.sgd(1.0), policy="mixed_bfloat16", accumulate_steps=2)
    state = jt.TrainState.create({"e": EMBEDDING}, optax.sgd(1.0))
    return EMBEDDING - jax.jit(step)(state, TOKENS)[0].params["e"]


def by_gradients(policy: Any) -> Any:
    fn = jt.scaled_value_and_grad(embedded, policy)
    return jax.jit(fn)(SCALE, {"e": EMBEDDING}, TOKENS)[1]["e"] / 64


def by_nnx(*, compiled: bool = True) -> Any:
    embed = nnx.Embed(64, WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    embed.embedding[...] = EMBEDDING
    fn = jt.nnx_value_and_grad(lambda model, tokens: mean(model(tokens)), "mixed_bfloat16")
    return (nnx.jit(fn) if compiled else fn)(SCALE, embed, TOKENS)[1]["embedding"][...] / 64


def by_linen() -> Any:
    embed = linen.Embed(64, WIDTH, dtype=jnp.bfloat16)
    loss = jt.apply_policy(lambda p, tokens: mean(jnp.asarray(embed.apply(p, tokens))), "mixed_bfloat16")
    return jax.jit(jax.grad(loss))({"params": {"embedding": EMBEDDING}}, TOKENS)["params"]["embedding"]


def by_haiku() -> Any:
    model = hk.without_apply_rng(hk.transform(lambda tokens: hk.Embed(64, WIDTH, name="e")(tokens)))
    loss = jt.apply_policy(lambda p, tokens: mean(model.apply(p, tokens)), "mixed_bfloat16")
    return jax.jit(jax.grad(loss))({"e": {"embeddings": EMBEDDING}}, TOKENS)["e"]["embeddings"]


def by_equinox() -> Any:
    embed = eqx.nn.Embedding(weight=EMBEDDING)
    loss = jt.apply_policy(lambda model, tokens: mean(jax.vmap(model)(tokens)), "mixed_bfloat16")
    return eqx.filter_jit(eqx.filter_grad(loss))(embed, TOKENS).weight


WAYS: dict[str, Callable[[], Any]] = {
    "O2": lambda: by_apex("O2"),
    "O3": lambda: by_apex("O3"),
    "naive": lambda: by_apex(None),
    "train_step": by_step,
    "scaled_value_and_grad": lambda: by_gradients("mixed_bfloat16"),
    "all in half": lambda: by_gradients("bfloat16"),
    "policy_by_path": lambda: by_gradients(jt.policy_by_path({"e": "mixed_bfloat16"}, default="float32")),
    "nnx": by_nnx,
    "nnx without jit": lambda: by_nnx(compiled=False),
    "linen": by_linen,
    "haiku": by_haiku,
    "equinox": by_equinox,
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("way", WAYS)
def test_embeddings_by_every_way_to_a_policy(way: str) -> None:
    right = jnp.bincount(TOKENS, length=64)[:, None] * 8 * WIDTH / (8 * READS * WIDTH) * jnp.ones(WIDTH)
    assert error(WAYS[way]().astype(jnp.float32), right) < float(jnp.finfo(jnp.bfloat16).eps)


# --- what stays ----------------------------------------------------------------------------------


def test_a_program_without_such_values_stays_the_same() -> None:
    def plain(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.nn.silu(x @ w) + jnp.where(x > 0, x, jnp.exp(x))
        return (x.astype(jnp.float32) ** 2).mean()

    def by_hand(params: Any, x: jax.Array) -> jax.Array:
        cast = [w.astype(jnp.bfloat16) for w in params]
        return plain(cast, x.astype(jnp.bfloat16))

    args = [jnp.ones((8, 8))] * 3, jnp.ones((4, 8))
    texts = [
        re.findall(r"stablehlo\.[a-z_]+|tensor<[^>]*>", jax.jit(jax.grad(fn)).lower(*args).as_text())
        for fn in (by_hand, jt.apply_policy(plain, "mixed_bfloat16"))
    ]
    assert sorted(texts[0]) == sorted(texts[1])


def test_functions_that_need_values_still_run_and_it_is_said() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return mean(w * x) if float(x[0]) > 0 else mean(w - x)

    grad = jax.grad(jt.apply_policy(loss_fn, "mixed_bfloat16"))
    with pytest.warns(UserWarning, match="the function needs the values of its arguments"):
        assert grad(jnp.ones(4), jnp.ones(4)).dtype == jnp.float32
    with pytest.raises(ZeroDivisionError):
        jax.grad(jt.apply_policy(lambda w: w * (1 // 0), "mixed_bfloat16"))(jnp.ones(()))


def test_symbolic_shapes() -> None:
    def gradient(table: jax.Array, ids: jax.Array) -> jax.Array:
        loss = jt.get_policy("mixed_bfloat16").transform(lambda table: (table[ids] + table[0]).mean())
        return jax.grad(lambda table: loss(table.astype(jnp.bfloat16)).astype(jnp.float32))(table)

    (n,) = export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    exported = export.export(jax.jit(gradient))(*shapes)
    expected = np.full((8, 4), 1 / 32) + np.eye(8, 1) / 4
    np.testing.assert_allclose(exported.call(jnp.ones((8, 4)), jnp.arange(8_000) % 8), expected, rtol=0.01)


def test_values_without_gradients_are_not_read_in_float32() -> None:
    def fn(w: jax.Array, ids: jax.Array) -> jax.Array:
        angles = jnp.outer(jnp.arange(64.0), jnp.ones(4)).astype(w.dtype)
        return (w + angles[ids]).sum() + jnp.sin(w)[:2].sum()

    program = jax.make_jaxpr(jt.apply_policy(fn, "mixed_bfloat16"))(jnp.ones((16, 4)), jnp.arange(16))
    assert "custom_jvp" not in str(program)


def test_constants_of_loops_are_stored_once() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return mean(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[0], x)[0])

    program = jax.make_jaxpr(jax.grad(jt.apply_policy(loss_fn, "mixed_bfloat16")))(
        jnp.ones((8, 8)), jnp.ones((32, 4, 8))
    )
    assert "[32,8,8]" not in str(program)


def test_the_sum_of_gradients_has_the_line_of_the_value() -> None:
    def loss(bias: jax.Array, rows: jax.Array) -> jax.Array:
        wide = bias.reshape(1, WIDTH)  # read often
        return mean(rows + wide)

    program = jax.make_jaxpr(jax.grad(jt.apply_policy(loss, "mixed_bfloat16")))(ROWS[0], ROWS)
    value = jax.ShapeDtypeStruct((1, WIDTH), jnp.bfloat16)
    made = [e for e in program.eqns if (e.outvars[0].aval.shape, e.outvars[0].aval.dtype) == (value.shape, value.dtype)]
    assert len(made) == 2  # the value, and its gradient
    for equation in made:
        frames = [frame for frame in equation.source_info.traceback.frames if frame.file_name == __file__]
        assert frames[0].line_num == loss.__code__.co_firstlineno + 1
