"""Autocast and what is made of integers: positions, timesteps, counts, masks, images."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from promotion import promoting

from jmp_train.policies.autocasting.explain import explain_autocast
from jmp_train.policies.autocasting.rules import TORCH_CPU, TORCH_CUDA
from jmp_train.policies.autocasting.transform import autocast, autocast_as

pytestmark = pytest.mark.quick

HALVES = pytest.mark.parametrize("half", [jnp.float16, jnp.bfloat16], ids=["float16", "bfloat16"])
F32 = jnp.float32
POSITIONS = np.arange(100_000 - 63, 100_001, dtype=np.int32)  # the last one is 100,000
FREQUENCIES = (10_000.0 ** -(np.arange(0, 16, 2) / 16)).astype(np.float32)

ON_TWO: Any = {"mesh": Mesh(jax.devices()[:2], "data"), "in_specs": (P("data"), P()), "out_specs": P("data")}
# Angles [positions, frequencies] as public models make them of int32 positions and float32 frequencies.
ANGLES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "einsum": lambda ids, f: jnp.einsum("i,j->ij", ids.astype(F32), f),
    "einsum of a batch": lambda ids, f: jnp.einsum("bi,j->bij", ids[None].astype(F32), f)[0],
    "einsum over one": lambda ids, f: jnp.einsum("ik,kj->ij", ids[:, None].astype(F32), f[None]),
    "matmul": lambda ids, f: (f[None, :, None] @ ids[None, None].astype(F32)).swapaxes(1, 2)[0],
    "tensordot": lambda ids, f: jnp.tensordot(ids.astype(F32), f, axes=0),
    "outer": lambda ids, f: jnp.outer(ids.astype(F32), f),
    "multiplied": lambda ids, f: ids[:, None].astype(F32) * f,
    "divided": lambda ids, f: ids[:, None] / (1 / f),
    "integers times floats": lambda ids, f: ids[:, None] * f,
    "dot_general": lambda ids, f: lax.dot_general(ids.astype(F32), f, (((), ()), ((), ()))),
    "vmap": lambda ids, f: jax.vmap(lambda i: jnp.einsum("...,j->...j", i.astype(F32), f))(ids),
    "jit": lambda ids, f: jax.jit(lambda t: jnp.einsum("i,j->ij", t, f))(ids.astype(F32)),
    "float positions": lambda ids, f: jax.jit(lambda t, f: jnp.einsum("i,j->ij", t, f))(jnp.arange(100_001.0)[-64:], f),
    "scaled positions": lambda ids, f: jnp.einsum("i,j->ij", ids.astype(F32) / 4.0, f) * 4.0,
    "shifted positions": lambda ids, f: jnp.einsum("i,j->ij", (ids - 3).astype(F32) + 3.0, f),
    "counted": lambda ids, f: jnp.einsum("i,j->ij", jnp.cumsum(jnp.ones(100_001), dtype=F32)[-65:-1], f),
    "a half scale": lambda ids, f: jnp.einsum(
        "i,j->ij", ids.astype(F32), f * (jnp.eye(8) @ jnp.ones((8, 1)))[0].astype(F32)
    ),
    "remat": lambda ids, f: jax.checkpoint(lambda t: t[:, None] @ f[None])(ids.astype(F32)),
    "scan": lambda ids, f: lax.scan(lambda c, t: (c, t[None] @ f[None]), 0, ids.astype(F32)[:, None])[1][:, 0].reshape(
        64, 8
    ),
    "scan over frequencies": lambda ids, f: (
        lax.scan(lambda t, w: (t, t[:, None] @ w[None, None]), ids.astype(F32), f)[1][:, :, 0].T
    ),
    "fori_loop": lambda ids, f: lax.fori_loop(
        0, 1, lambda _, a: a + ids[:, None].astype(F32) @ f[None], jnp.zeros((64, 8))
    ),
    "cond": lambda ids, f: lax.cond(
        f[0] > 0, lambda t: t[:, None] @ f[None], lambda t: t[:, None] * f[None], ids.astype(F32)
    ),
    "shard_map": lambda ids, f: jax.shard_map(lambda t, f: jnp.stack([t, 0 * t], -1) @ jnp.stack([f, f]), **ON_TWO)(
        ids.astype(F32), f
    ),
    "named and in order": lambda ids, f: jnp.matmul(
        *lax.optimization_barrier((checkpoint_name(ids[:, None].astype(F32), "t"), f[None]))
    ),
    "axes of an image": lambda ids, f: jnp.einsum(
        "ia,aj->ij", jnp.stack([ids, 0 * ids], -1).astype(F32), jnp.stack([f, f])
    ),
}


def sines(angles: Any) -> Callable[..., jax.Array]:
    return lambda *args: jnp.concatenate([jnp.sin(angles(*args)), jnp.cos(angles(*args))], -1)


@pytest.mark.quick_cases(6)
@HALVES
@pytest.mark.parametrize("name", ANGLES)
def test_the_angle_of_position_100_000_is_exact(name: str, half: Any) -> None:
    rules = TORCH_CPU if half == jnp.bfloat16 else TORCH_CUDA
    fn = promoting(sines(ANGLES[name]))
    ours = jax.jit(autocast(fn, half, rules=rules))(POSITIONS, FREQUENCIES)
    angles = POSITIONS[:, None].astype(np.float64) * FREQUENCIES.astype(np.float64)
    if name == "a half scale":  # whose ones are exact in half
        assert ours.dtype == F32
    expected = np.concatenate([np.sin(angles), np.cos(angles)], -1)
    np.testing.assert_allclose(ours, expected, atol=2e-2)  # float32 has seven digits of 100,000
    np.testing.assert_allclose(ours, jax.jit(fn)(POSITIONS, FREQUENCIES), atol=1e-5)


W = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
TOKENS = np.array([[1, 0, 5], [2, 2, 3]], np.int32)
BYTES = np.array([[0, 1, 254, 255, 128, 3]], np.uint8)

IN_HALF: dict[str, tuple[Callable[..., jax.Array], Any]] = {
    "one-hot": (lambda x: jax.nn.one_hot(x, 6) @ W, TOKENS),
    "one-hot of integers": (lambda x: (x[..., None] == jnp.arange(6)).astype(jnp.int8).astype(F32) @ W, TOKENS),
    "multi-hot": (lambda x: jax.nn.one_hot(x, 6).sum(1) @ W, TOKENS),
    "mask": (lambda x: (x[:, None] > 2).astype(F32) @ W[:1], TOKENS[0]),
    "image": (lambda x: x.astype(F32) / 255.0 @ W, BYTES),
    "centered image": (lambda x: (x.astype(F32) - 127.5) / 127.5 @ W, BYTES),
    "image by channels": (lambda x: (x / jnp.float32(255) - W[:, 0]) / W[:, 1] @ W, BYTES),
    "raw image": (lambda x: x.astype(F32) @ W, BYTES),
    "quantized weights": (
        lambda x: W[:1, :1].repeat(6, 1) @ ((x - jnp.int8(0)).astype(F32).T * W[0, 0]),
        BYTES.astype(np.int8),
    ),
    "few positions": (lambda x: jnp.arange(6.0)[None] @ W + x, np.float32(0)),
    "hidden by counts": (lambda x: (jnp.matmul(W, W.T) / jnp.maximum(x.sum(), 1).astype(F32)) @ W, TOKENS),
    "hidden times a count": (lambda x: (jnp.matmul(W, W.T) * x.sum().astype(F32)) @ W, TOKENS),
    "embedded": (lambda x: jnp.asarray(W)[x] @ W.T, TOKENS),
    "sines": (lambda x: jnp.sin(x[..., None].astype(F32) * W[:, 0]) @ W, TOKENS),
}  # fmt: skip


@pytest.mark.quick_cases(3)
@HALVES
@pytest.mark.parametrize("name", IN_HALF)
def test_what_half_holds_stays_in_half(name: str, half: Any) -> None:
    fn, x = IN_HALF[name]
    rows = explain_autocast(autocast(promoting(fn), half), x).operations
    products = [row for row in rows if row.operation == "dot_general"]
    assert products
    assert {row.rule for row in products} == {"lower"}
    assert all(row.in_half for row in products)
    ours = autocast(promoting(fn), half)(x)
    expected = np.asarray(promoting(fn)(x))
    epsilon = float(jnp.finfo(half).eps)
    np.testing.assert_allclose(ours.astype(F32), expected, rtol=4 * epsilon, atol=4 * epsilon * np.abs(expected).max())


IN_FLOAT32: dict[str, tuple[Callable[..., jax.Array], Any]] = {
    "identifiers": (lambda x: x.astype(F32) @ W[:3], TOKENS),
    "timesteps": (lambda x: (x[:, :1].astype(F32) * 1000.0) @ W[:1], TOKENS),
    "beside hidden ones": (
        lambda x: jnp.concatenate([W[:2, :3] @ jnp.eye(3), x[:, :3].astype(F32)], -1) @ W,
        TOKENS,
    ),
    "sums of integers": (lambda x: x.sum(1)[:, None].astype(F32) @ W[:1], TOKENS),
    "two bytes": (lambda x: (x.astype(F32) * 256.0 + x.astype(F32)) @ W, BYTES),
    "an offset": (lambda x: (x.astype(F32) + 1900.0) @ W, BYTES),
    "a long grid": (lambda x: (jnp.linspace(0.0, 1.0, 6000).reshape(1000, 6) + x) @ W, np.float32(0)),
    "a convolution": (
        lambda x: lax.conv(x.astype(F32)[None], jnp.ones((1, 2, 1)), (1,), "SAME"),
        TOKENS,
    ),
}  # fmt: skip


@pytest.mark.quick_cases(6)
@HALVES
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_half_does_not_hold_stays_in_float32(name: str, half: Any) -> None:
    fn, x = IN_FLOAT32[name]
    rows = explain_autocast(autocast(promoting(fn), half), x).operations
    last = [r for r in rows if r.operation in ("dot_general", "conv_general_dilated")][-1]
    assert (last.rule, last.reason) == ("float32", "operand from integers")
    ours = autocast(promoting(fn), half)(x)
    tolerance = 4e-3 if name == "beside hidden ones" else 1e-5  # whose hidden ones are half
    np.testing.assert_allclose(ours, promoting(fn)(x), rtol=tolerance, atol=tolerance)


def test_precisions_that_are_asked_for() -> None:
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))

    def decided(precision: Any) -> tuple[str, str]:
        (row,) = explain_autocast(lambda x, w: jnp.matmul(x, w, precision=precision), x, w).operations
        return row.rule, row.reason

    lower, exact = ("lower", "primitive 'dot_general'"), ("float32", "precision=HIGHEST")
    assert [decided(precision) for precision in (("default", "float32"), "high")] == [exact, lower]
    for configured, wanted in {"highest": exact, "float32": exact, "tensorfloat32": lower}.items():
        with jax.default_matmul_precision(configured):
            assert decided(None) == wanted


def test_a_rule_of_the_user_comes_before() -> None:
    rows = autocast_as("lower")(lambda t, f: jnp.einsum("i,j->ij", t.astype(F32), f))
    assert autocast(rows)(POSITIONS, FREQUENCIES).dtype == jnp.float16
    lower = TORCH_CUDA.replace(paths={"table": "lower"})

    def named(x: Any, w: Any) -> Any:
        with jax.named_scope("table"):
            return jnp.matmul(x.astype(F32), w, precision="highest")

    assert autocast(named, rules=lower)(TOKENS, W[:3]).dtype == jnp.float16
    assert autocast(named)(TOKENS, W[:3]).dtype == F32


@pytest.mark.quick_cases(1)
@HALVES
def test_gradients_of_frequencies_and_slopes(half: Any) -> None:
    def alibi(slopes: Any, x: Any, /) -> Any:
        distance = jnp.abs(jnp.arange(64)[:, None] - jnp.arange(64)).astype(F32) * 100.0
        scores = jnp.einsum("id,jd->ij", x, x) - jnp.einsum("h,ij->hij", slopes, distance)
        return jnp.sum(jax.nn.softmax(scores)[:, :, 0])

    def rope(f: Any, x: Any, /) -> Any:
        return jnp.sum(jnp.cos(jnp.einsum("i,j->ij", POSITIONS.astype(F32), f)) * x)

    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 8)) / 8, F32)
    for fn, args in ((alibi, (jnp.array([0.01, 0.02]), x)), (rope, (jnp.asarray(FREQUENCIES), x))):
        grad = jax.jit(jax.grad(autocast(fn, half)))(*args)
        expected = jax.jit(jax.grad(fn))(*args)
        assert grad.dtype == F32
        np.testing.assert_allclose(grad, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())
