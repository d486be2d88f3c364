"""Where a jaxlib gets bfloat16 convolutions wrong on CPUs, tracing one warns, and the flag ends that."""

import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jmp_train as jt
from jmp_train.policies.autocasting import program_warnings
from jmp_train.policies.autocasting.program_warnings import FUSION_FLAG, is_faulty

pytestmark = [pytest.mark.quick, pytest.mark.newest]

X, W = jnp.ones((1, 2, 4, 4)), jnp.ones((2, 2, 3, 3))
JAXLIB = tuple(map(int, version("jaxlib").split(".")[:2]))


def conv(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.conv(x, w, (1, 1), "SAME").astype(jnp.float32).mean()


def looped(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (lax.conv(c, w, (1, 1), "SAME"), None), x, None, length=2)[0].sum()


def step(loss_fn: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
    optimizer = optax.sgd(0.1)
    run = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    return lambda w, x: run(jt.TrainState.create(w, optimizer), x)


def in_bfloat16(w: jax.Array, x: jax.Array) -> jax.Array:
    return conv(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))


def texts(fn: Callable[..., Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.eval_shape(fn, W, X)
    assert {w.category for w in seen} <= {jt.policies.CpuConvolutionWarning}
    return [str(w.message) for w in seen]


@pytest.mark.parametrize(
    ("make", "concerned"),
    [
        (lambda: jt.apply_policy(conv, jt.get_policy("mixed_bfloat16")), True),
        (lambda: jt.apply_policy(looped, jt.get_policy("mixed_bfloat16")), True),
        (lambda: jt.apply_policy(conv, jt.get_policy("mixed_float16")), False),
        (lambda: jt.autocast(looped, jnp.bfloat16), True),
        (lambda: jt.autocast(conv), False),
        (lambda: jt.autocast(lambda w, x: (w * x[:, :, :3, :3]).sum(), jnp.bfloat16), False),
        (lambda: step(conv, "autocast_bfloat16"), True),
        (lambda: step(in_bfloat16, None), True),
        (lambda: step(conv, None), False),
    ],
)
def test_a_traced_convolution_warns(
    make: Callable[[], Callable[..., Any]], concerned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", FUSION_FLAG)
    assert not texts(make())
    monkeypatch.setenv("XLA_FLAGS", "")
    found = texts(make())
    if concerned and (0, 11) <= JAXLIB < (0, 13):
        assert found and all(f"set XLA_FLAGS={FUSION_FLAG}" in text for text in found)
    else:
        assert not found


def test_which_versions_and_flags_are_faulty() -> None:
    assert is_faulty((0, 11, 0), "--xla_dump_to=x") and is_faulty((0, 12, 0), "")
    assert not is_faulty((0, 10, 2), "") and not is_faulty((0, 13, 0), "")
    assert not is_faulty((0, 12, 0), f"--xla_dump_to=x {FUSION_FLAG}")


def test_a_convolution_that_only_a_later_trace_has_warns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_warnings, "_jaxlib", lambda: (0, 12, 0))
    monkeypatch.setenv("XLA_FLAGS", "")
    fn = jt.autocast(lambda w, x: conv(w, x) if x.shape[0] > 1 else (x * x).sum(), jnp.bfloat16)
    assert not texts(fn)
    with pytest.warns(jt.policies.CpuConvolutionWarning):
        jax.eval_shape(fn, W, jnp.ones((2, 2, 4, 4)))
