"""An outlier of an operand in 8 or 4 bits, which costs the others their digits, is named at its product."""

import dataclasses
from typing import Any

import few_bits_models
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


RECIPES = [
    jt.policies.Float8CurrentScaling(),
    jt.policies.MXFP8BlockScaling(),
    jt.policies.Float8BlockScaling(),
    jt.policies.Int8RowwiseScaling(),
    jt.policies.NVFP4BlockScaling(),
]
IN_BLOCKS_OR_ROWS = pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda recipe: type(recipe).__name__)


def training(
    rules: jt.AutocastRules, recipe: Any = RECIPES[0], fn: Any = loss_fn, params: Any = PARAMS
) -> tuple[Any, jt.TrainState]:
    policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=recipe)
    optimizer = optax.sgd(0.1)
    state = jt.TrainState.create(params, optimizer, rng=jax.random.key(0))
    return jt.train_step(jt.stateless(fn), optimizer, policy=policy), state


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


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_numbers_without_an_outlier_are_no_problem(recipe: Any) -> None:
    step, state = training(RULES, recipe)
    assert not harmful(jt.diagnose(step, state, X))


@pytest.mark.parametrize("recipe", RECIPES[-2:], ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("name", ["nnx_language_model", "mixture_of_experts"])
def test_models_are_no_problem(name: str, recipe: Any) -> None:
    """Attention, gelu and, in plain JAX, experts as ragged products."""
    subject = getattr(few_bits_models, name)()
    rules = jt.TORCH_CUDA.replace(primitives={"dot_general": "fp8", "ragged_dot_general": "fp8"})
    rules = rules.replace(paths={"router": "float32"} if name == "mixture_of_experts" else {})
    step, state = training(rules, recipe, subject.loss_fn, subject.params)
    report = jt.diagnose(step, state, subject.batch(0))
    assert not harmful(report)
    in_few_bits = [row for row in report.rows if row.primitive == "to_few_bits"]
    assert {row.direction for row in in_few_bits} == {"forward", "backward"}
    assert all(row.local_error > 1e-3 for row in in_few_bits)  # the shadow does not have the rounding


def loss_of_blocks(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["up"])
    hidden = hidden.at[:, 0].multiply(1e6) @ params["bad"]  # an outlier in each row
    return ((jnp.tanh(hidden) @ params["down"]) ** 2).mean()


def loss_of_a_loop(params: Any, x: jax.Array) -> jax.Array:
    def layer(hidden: Any, bad: Any) -> Any:
        hidden = jnp.tanh(hidden.at[:, 0].multiply(1e6) @ bad)  # an outlier in each row
        return hidden, None

    hidden, _ = jax.lax.scan(layer, jnp.tanh(x @ params["up"]), params["bad"][None])
    return ((hidden @ params["down"]) ** 2).mean()


def loss_of_groups(params: Any, x: jax.Array) -> jax.Array:
    hidden, sizes = jnp.tanh(x @ params["up"]), jnp.array([40, 20], jnp.int32)  # the last rows have no group
    weights = jnp.stack([params["bad"]] * 2)
    hidden = jax.lax.ragged_dot(hidden.at[:, 0].multiply(1e6), weights, sizes)  # an outlier in each row
    return ((jnp.tanh(hidden) @ params["down"]) ** 2).mean()


@IN_BLOCKS_OR_ROWS
@pytest.mark.parametrize("fn", [loss_of_blocks, loss_of_a_loop, loss_of_groups], ids=lambda fn: fn.__name__)
def test_the_product_of_an_outlier_is_named(recipe: Any, fn: Any) -> None:
    """With scales of blocks, operands are multiplied by them first, so that the cast is not next to the product."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"up": (16, 64), "bad": (64, 64), "down": (64, 8)}
    pairs = zip(keys, shapes.items(), strict=False)
    params = {name: jax.random.normal(key, shape) / shape[0] ** 0.5 for key, (name, shape) in pairs}
    params["bad"] = params["bad"].at[0].multiply(1e-7)
    rules = RULES.replace(primitives={"ragged_dot_general": "fp8"})
    step, state = training(rules, recipe, fn, params)
    report = jt.diagnose(step, state, jax.random.normal(keys[3], (64, 16)))
    (problem,) = harmful(report)
    assert problem.kind == "underflow"
    assert problem.primitive == ("ragged_dot_general" if fn is loss_of_groups else "dot_general")
    assert problem.code.endswith("# an outlier in each row")
    assert problem.trial.startswith("tried: these rules mend it")
