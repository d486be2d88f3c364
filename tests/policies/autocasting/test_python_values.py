"""An `if` on a traced value is named at the user's line, wherever the function is traced for a report."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_train as jt

pytestmark = pytest.mark.quick

W = jnp.ones((3, 2))


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
        lambda x: jt.diagnose(loss_fn, W, x),
        lambda x: jt.diagnose(step, jt.TrainState.create(W, optax.sgd(0.1)), x),
        lambda x: jt.explain_autocast(loss_fn, W, x),
        lambda x: jt.explain_policy(loss_fn, "mixed_float16", W, x),
        lambda x: jt.parity(loss_fn, loss_fn, W, 0 * x),
        lambda x: jt.tune(loss_fn, [(W, x)]),
        lambda x: jt.autocast(loss_fn)(W, x),
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
