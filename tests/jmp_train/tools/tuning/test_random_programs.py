"""Of random programs with planted faults: what tuning finds passes under autocast itself, and each entry is needed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_train as jt
from jmp_train.policies.autocasting.emulating import COMPILER_OPTIONS

pytestmark = pytest.mark.full

SIZE = 8
TOLERANCE = np.array([0.01, 0.05, 0.25])  # of loss, gradient and leaf, as by default
HARMLESS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda h, w: h @ w,
    lambda h, w: jnp.tanh(h),
    lambda h, w: jax.nn.softplus(h),
    lambda h, w: h * jax.nn.sigmoid(h),
    lambda h, w: h + jnp.sin(h @ w),
    lambda h, w: jax.nn.softmax(h) * SIZE,
    lambda h, w: (h - h.mean(-1, keepdims=True)) / (h.std(-1, keepdims=True) + 1.0),
)
# Each leaves float16's range, or its precision, and comes back; h is about 1.
FAULTS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda h, w: jnp.tanh(jnp.sqrt((300 * h) ** 4 + 1.0) / 9e4),
    lambda h, w: jnp.tanh(((h + 1.5) * 1e-4 * ((h + 1.5) * 1e-4)) * 1e8),
    lambda h, w: jnp.tanh(jnp.exp(jnp.tanh(h) + 12.0) / 3e5),
    lambda h, w: jnp.tanh(jnp.log(jnp.exp(-jnp.abs(h) - 20.0) * 1e9)),
    lambda h, w: jnp.tanh((h + (4096.0 + w[:1])) - (4096.0 + w[:1])),
    lambda h, w: jnp.tanh((h * 2e3) @ (w * 2e3) / 4e6),
)


def program(seed: int) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """Returns a loss of random operations, one to three of them faults, and examples."""
    rng = np.random.default_rng(seed)
    operations = [HARMLESS[i] for i in rng.integers(len(HARMLESS), size=rng.integers(2, 6))]
    for i in rng.choice(len(FAULTS), size=rng.integers(1, 4), replace=False):
        operations.insert(int(rng.integers(len(operations) + 1)), FAULTS[i])

    def loss_fn(params: Sequence[Any], x: Any) -> Any:
        h = x @ params[0]
        for i, (operation, w) in enumerate(zip(operations, params[1:], strict=True)):
            with jax.named_scope(f"operation{i}"):
                h = operation(h, w)
        return jnp.mean(jnp.tanh(h) ** 2)

    params = [jnp.asarray(rng.normal(size=(SIZE, SIZE)) / 3, jnp.float32) for _ in range(len(operations) + 1)]
    return loss_fn, [(params, jnp.asarray(rng.normal(size=(16, SIZE)), jnp.float32)) for _ in range(3)]


def errors_under(rules: jt.AutocastRules, loss_fn: Any, example: Any, scale: float, **options: Any) -> list[float]:
    """Returns the relative errors of loss, gradient and the worst leaf's gradient under autocast itself."""
    half_loss = jt.autocast(loss_fn, jnp.float16, rules=rules)
    scaled = jax.value_and_grad(lambda *args: half_loss(*args).astype(jnp.float32) * scale)
    loss, grads = jax.jit(scaled, **options)(*example)
    exact_loss, exact_grads = jax.jit(jax.value_and_grad(loss_fn))(*example)
    found, exact = ([np.asarray(x, np.float64) for x in y] for y in (grads, exact_grads))
    off = np.array([np.linalg.norm(x / scale - y) for x, y in zip(found, exact, strict=True)])
    norms = np.array([np.linalg.norm(y) for y in exact])
    whole = np.linalg.norm(norms)
    leaves = off / np.maximum(norms, 1e-3 * whole / np.sqrt(len(norms)))
    return [abs(float(loss) / scale / float(exact_loss) - 1), float(np.linalg.norm(off) / whole), float(leaves.max())]


@pytest.mark.parametrize("seed", range(20))
def test_each_entry_is_needed_and_all_together_suffice(seed: int) -> None:
    loss_fn, examples = program(seed)
    tuned = jt.tune(loss_fn, examples, tolerance=jt.tuning.Tolerance(sensitivity=0))
    assert tuned.complete
    assert tuned.verification.passed
    for example in examples:
        errors = errors_under(tuned.rules, loss_fn, example, tuned.loss_scale)
        assert np.all(np.array(errors) <= TOLERANCE)
    for entry in tuned.entries:
        assert not entry.repaired
        assert entry.without is not None
        assert not tuned.tolerance.passes(entry.without), entry
        rest = tuple(pair for pair in tuned.rules.operations if pair[0] not in entry.expressions)
        # By default a compiler may round less often than each operation by itself.
        errors = [
            errors_under(
                dataclasses.replace(tuned.rules, operations=rest),
                loss_fn,
                example,
                tuned.loss_scale,
                compiler_options=COMPILER_OPTIONS,
            )
            for example in examples
        ]
        assert not np.all(np.array(errors) <= TOLERANCE / 2), entry
