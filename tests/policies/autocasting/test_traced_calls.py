"""A function that draws and got no key: the argument that is None is named, whatever the function runs under.

An `if` on a traced value is named at the user's line, wherever the function is traced for a report.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import jmp_train as jt

pytestmark = pytest.mark.quick

W, X = jnp.ones((3, 2)), jnp.ones((4, 3))
NOTE = "the argument rng is None: pass a key, such as jax.random.key(0)"


def draws(w: jax.Array, x: jax.Array, rng: jax.Array | None = None) -> jax.Array:
    return (x * jax.random.bernoulli(rng, 0.5, x.shape) @ w).sum()  # pyright: ignore[reportArgumentType]


def log_probs(w: jax.Array, x: jax.Array, rng: jax.Array | None = None) -> jax.Array:
    return jax.nn.log_softmax(draws(w, x, rng) * x)


def exact(w: jax.Array, x: jax.Array, rng: jax.Array | None = None) -> jax.Array:
    del rng
    return jax.nn.log_softmax(x * w.sum())


CALLS = {
    "autocast": lambda *args, **kwargs: jt.autocast(draws)(*args, **kwargs),
    "autocast in jit": lambda *args, **kwargs: jax.jit(jax.grad(jt.autocast(draws)))(*args, **kwargs),
    "explain_autocast": lambda *args, **kwargs: jt.explain_autocast(draws, *args, **kwargs),
    "mixed": lambda *args, **kwargs: jt.apply_policy(draws, "mixed_float16")(*args, **kwargs),
    "autocast policy": lambda *args, **kwargs: jt.apply_policy(draws, "autocast_float16")(*args, **kwargs),
    "explain_policy": lambda *args, **kwargs: jt.explain_policy(draws, "mixed_float16", *args, **kwargs),
    "explain_policy of autocast": lambda *args, **kwargs: jt.explain_policy(draws, "autocast_float16", *args, **kwargs),
    "gradients": lambda *args, **kwargs: jt.scaled_value_and_grad(draws, "mixed_float16")(
        jt.StaticLossScale(8.0), *args, **kwargs
    ),
}
REPORTS = {
    "diagnose": lambda *args: jt.diagnose(draws, *args),
    "diagnose jit": lambda *args: jt.diagnose(jax.jit(jax.grad(jt.autocast(draws))), *args),
    "parity, training": lambda *args: jt.parity(log_probs, exact, *args),
    "parity, inference": lambda *args: jt.parity(exact, log_probs, *args),
    "tune": lambda *args: jt.tune(draws, [args]),
}


@pytest.mark.parametrize("args", [(W, X, None), (W, X)], ids=["None", "left out"])
@pytest.mark.parametrize("call", [*CALLS.values(), *REPORTS.values()], ids=[*CALLS, *REPORTS])
def test_the_argument_that_is_none_is_named_once(call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="unexpected PRNG key type") as raised:
        call(*args)
    assert [note for note in raised.value.__notes__ if "is None" in note] == [NOTE]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_by_keyword_too(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="unexpected PRNG key type") as raised:
        call(W, X, rng=None)
    assert [note for note in raised.value.__notes__ if "is None" in note] == [NOTE]


def test_models_of_libraries_say_what_they_take() -> None:
    module, dropout = linen.Dropout(0.5, deterministic=False), eqx.nn.Dropout(0.5)
    with pytest.raises(Exception, match="needs PRNG") as raised:
        jt.autocast(module.apply)({}, X)
    assert 'the argument rngs is None: pass keys, such as {"dropout": jax.random.key(0)} or nnx.Rngs(0)' in (
        raised.value.__notes__
    )
    with pytest.raises(RuntimeError, match="requires a key") as raised:
        jt.diagnose(jt.apply_policy(dropout, "mixed_float16"), X)
    assert "the argument key is None: pass a key, such as jax.random.key(0)" in raised.value.__notes__
    with pytest.raises(ValueError, match="rngs") as raised:
        jt.apply_policy(nnx.Dropout(0.5), "mixed_float16")(X)
    assert any("the argument rngs is None: pass keys" in note for note in raised.value.__notes__)


def test_other_arguments_and_other_errors_are_left_alone() -> None:
    def attends(query: jax.Array, key_mask: Any = None, monkey: Any = None, rng: Any = None) -> jax.Array:
        del key_mask, monkey
        return jax.random.normal(rng) * query

    with pytest.raises(TypeError) as raised:
        jt.autocast(attends)(X)
    assert [note for note in raised.value.__notes__ if "is None" in note] == [NOTE]
    with pytest.raises(TypeError) as raised:
        jt.autocast(lambda x, mask=None: jax.random.normal(None) * x)(X)  # pyright: ignore[reportArgumentType]
    assert not any("is None" in note for note in raised.value.__notes__)
    with pytest.raises(ZeroDivisionError) as raised:
        jt.autocast(lambda x, rng=None: x * (1 // 0))(X)
    assert not any("is None" in note for note in getattr(raised.value, "__notes__", []))


WEIGHT = jnp.ones((3, 2))


def loss_fn(w: jax.Array, x: jax.Array) -> Any:
    total = (x @ w).sum()
    if total > 0:
        return total
    return -total


def step(state: Any, batch: Any) -> Any:
    return jt.train_step(jt.stateless(loss_fn), optax.sgd(0.1))(state, batch)


@pytest.mark.parametrize(
    "trace",
    [
        lambda x: jt.diagnose(loss_fn, WEIGHT, x),
        lambda x: jt.diagnose(step, jt.TrainState.create(WEIGHT, optax.sgd(0.1)), x),
        lambda x: jt.explain_autocast(loss_fn, WEIGHT, x),
        lambda x: jt.explain_policy(loss_fn, "mixed_float16", WEIGHT, x),
        lambda x: jt.parity(loss_fn, loss_fn, WEIGHT, 0 * x),
        lambda x: jt.tune(loss_fn, [(WEIGHT, x)]),
        lambda x: jt.autocast(loss_fn)(WEIGHT, x),
    ],
    ids=["diagnose", "diagnose step", "explain_autocast", "explain_policy", "parity", "tune", "autocast"],
)
def test_the_line_that_asks_for_a_value_is_named(trace: Callable[[jax.Array], Any]) -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        trace(jnp.ones((4, 3)))
    line = loss_fn.__code__.co_firstlineno + 2
    (note,) = [note for note in raised.value.__notes__ if "asks for the value" in note]
    assert note.startswith(f"{__file__}:{line}: `if total > 0:` asks for the value of an array")
    assert note.endswith("jnp.where and jax.lax.cond need none")
