"""An outlier of an operand in 8 bits, which makes the other elements 0, is named at its product."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planting import harmful

import jmp_train as jt

pytestmark = pytest.mark.full

UP, DOWN = jax.random.normal(jax.random.key(0), (32, 64)) / 6, jax.random.normal(jax.random.key(1), (64, 4))
PARAMS = {"up": UP, "down": DOWN}
X = jax.random.normal(jax.random.key(2), (16, 32))
RULES = jt.TORCH_CUDA.replace(primitives={"dot_general": "fp8"})


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    hidden = x @ params["up"]  # an outlier
    hidden = jnp.tanh(hidden)
    return jnp.mean(((hidden @ params["down"]).astype(jnp.float32) - 1) ** 2)


def training(rules: jt.AutocastRules) -> tuple[Any, jt.TrainState]:
    policy = dataclasses.replace(
        jt.get_policy("autocast_bfloat16"), rules=rules, fp8=jt.policies.Float8CurrentScaling()
    )
    optimizer = optax.sgd(0.1)
    return jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy), jt.TrainState.create(PARAMS, optimizer)


def test_the_product_is_named_and_only_it_leaves_the_8_bits() -> None:
    step, state = training(RULES)
    with_outlier = X.at[0, 0].set(1e6)
    report = jt.diagnose(step, state, with_outlier)
    (problem,) = harmful(report)
    assert (problem.kind, problem.primitive) == ("underflow", "dot_general")
    assert problem.code.endswith("# an outlier")
    smallest = np.abs(np.asarray(with_outlier)) < 2.0**-10 * 1e6 / 448  # which round to 0 in float8_e4m3fn
    assert problem.evidence.startswith(f"{smallest.mean():.1%} of an operand")
    assert set(dict(problem.remedy.rules.operations).values()) == {"lower"}
    assert dict(report.rules.primitives)["dot_general"] == "fp8"  # for the other product
    assert problem.trial.startswith("tried: these rules mend it")
    losses = [jax.jit(training(rules)[0])(state, with_outlier)[1]["loss"] for rules in (RULES, report.rules)]
    np.testing.assert_array_less(0.05, abs(losses[0] / loss_fn(PARAMS, with_outlier) - 1))
    np.testing.assert_allclose(losses[1], loss_fn(PARAMS, with_outlier), rtol=0.02)


def test_numbers_without_an_outlier_are_no_problem() -> None:
    step, state = training(RULES)
    assert not harmful(jt.diagnose(step, state, X))


def loss_of_blocks(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["up"])
    hidden = hidden.at[:, 0].multiply(1e6) @ params["bad"]  # an outlier in each row
    return ((jnp.tanh(hidden) @ params["down"]) ** 2).mean()


@pytest.mark.parametrize("recipe", [jt.policies.MXFP8BlockScaling(), jt.policies.Float8BlockScaling()])
def test_the_product_of_blocks_is_named(recipe: Any) -> None:
    """Its operands are multiplied by their scales first, so that the cast is not next to the product."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"up": (16, 64), "bad": (64, 64), "down": (64, 8)}
    pairs = zip(keys, shapes.items(), strict=False)
    params = {name: jax.random.normal(key, shape) / shape[0] ** 0.5 for key, (name, shape) in pairs}
    params["bad"] = params["bad"].at[0].multiply(1e-7)
    policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=RULES, fp8=recipe)
    optimizer = optax.sgd(0.1)
    step = jt.train_step(jt.stateless(loss_of_blocks), optimizer, policy=policy)
    report = jt.diagnose(step, jt.TrainState.create(params, optimizer), jax.random.normal(keys[3], (64, 16)))
    (problem,) = harmful(report)
    assert (problem.kind, problem.primitive) == ("underflow", "dot_general")
    assert problem.code.endswith("# an outlier in each row")
    assert problem.trial.startswith("tried: these rules mend it")
