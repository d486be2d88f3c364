"""Recipes in train steps: experts, loops, random keys and skipped steps."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from promotion import relaxed
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies.autocasting import RECIPES

pytestmark = pytest.mark.quick

KEYS = jax.random.split(jax.random.key(0), 4)
EXPERTS = {"up": jax.random.normal(KEYS[0], (4, 32, 64)) / 6, "down": jax.random.normal(KEYS[1], (4, 64, 32)) / 8}
BATCH = jax.random.normal(KEYS[2], (64, 32))
SIZES = jnp.array([20, 0, 30, 14], jnp.int32)
EXPERTS_ONLY = jt.TORCH_CUDA.replace(paths={"experts": "fp8"})


def grouped(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("experts"):
        hidden = jnp.tanh(lax.ragged_dot(x, params["up"], SIZES))
        return lax.ragged_dot(hidden, params["down"], SIZES)


def in_batches(params: Any, x: jax.Array) -> jax.Array:
    with jax.named_scope("experts"):
        hidden = jnp.tanh(jnp.einsum("etd,edf->etf", x.reshape(4, 16, 32), params["up"]))
        return jnp.einsum("etf,efd->etd", hidden, params["down"])


def looped(params: Any, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        with jax.named_scope("experts"):
            hidden = jnp.einsum("gtd,df->gtf", jnp.tanh(x), layer["up"])
            return x + jnp.einsum("gtf,fd->gtd", hidden, layer["down"]), None

    return lax.scan(body, x.reshape(4, 16, 32), params)[0]


SGD, ADAM = optax.sgd(0.1), relaxed(optax.adam(1e-2))


def step_of(model: Any, recipe: Any, optimizer: Any = SGD, rng: Any = None) -> tuple[Any, Any]:
    """Returns a step that learns to predict the batch, and the first state."""
    policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=EXPERTS_ONLY, fp8=recipe)

    def loss_fn(params: Any, state: Any, x: Any, rng: Any) -> Any:
        del rng
        return ((model(params, x).astype(jnp.float32).reshape(64, 32) - x) ** 2).mean(), (state, None)

    return jt.train_step(loss_fn, optimizer, policy=policy), jt.TrainState.create(EXPERTS, optimizer, rng=rng)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", [grouped, in_batches, looped])
def test_experts_learn_in_few_bits(model: Any, name: str) -> None:
    step, state = step_of(model, RECIPES[name](), ADAM)
    exact = dataclasses.replace(step, policy=jt.get_policy("float32"))
    state = jt.steps.with_fp8_state(step, state, BATCH) if name == "DelayedScaling" else state
    report = jt.explain_autocast(step.policy.transform(model), EXPERTS, BATCH)
    products = [row for row in report.operations if "dot_general" in row.operation]
    assert {(row.rule, *row.dtypes_in[:2]) for row in products} == {("fp8", *[RECIPES[name]().forward_dtype.name] * 2)}
    plain = jt.TrainState.create(EXPERTS, ADAM)
    run, plainly = jax.jit(step), jax.jit(exact)
    losses = []
    for _ in range(8):
        (state, metrics), (plain, wanted) = run(state, BATCH), plainly(plain, BATCH)
        losses.append((metrics["loss"], wanted["loss"]))
    noise = 0.1 * losses[0][1] if name == "NVFP4BlockScaling" else 0  # 4 bits round by up to a sixth
    np.testing.assert_allclose(*losses[-1], rtol=0.1, atol=noise)


def test_products_of_activations_need_a_rule_of_their_own() -> None:
    def attend(x: jax.Array) -> jax.Array:
        with jax.named_scope("experts"):
            query = jnp.sin(x).reshape(4, 16, 32)
            return jnp.einsum("hqd,hkd->hqk", query, query + 1)

    operation = jt.TORCH_CUDA.replace(operations={"experts.*dot_general": "fp8"})
    with pytest.warns(jt.policies.UnmetRulesWarning, match="what it matches cannot be 'fp8'"):
        jt.autocast(attend, jnp.bfloat16, rules=EXPERTS_ONLY)(BATCH)
    rows = [jt.explain_autocast(jt.autocast(attend, rules=x), BATCH).operations for x in (EXPERTS_ONLY, operation)]
    found = [next((r.rule, r.reason) for r in x if r.operation == "dot_general") for x in rows]
    assert found == [("lower", "no operand is a weight"), ("fp8", "operation 'experts.*dot_general'")]


@pytest.mark.full
def test_the_key_of_a_step_rounds_its_gradients() -> None:
    recipe = jt.policies.NVFP4BlockScaling()
    step, state = step_of(looped, recipe, rng=jax.random.key(0))
    run = jax.jit(step)
    states = [dataclasses.replace(state, rng=jax.random.key(seed)) for seed in (0, 0, 1)]
    after = [run(state, BATCH)[0].params for state in states]
    assert_bitwise_equal(after[0], after[1])
    assert (after[0]["up"] != after[2]["up"]).mean() > 0.3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "DelayedScaling"])
def test_an_overflow_is_seen_and_its_step_skipped(name: str) -> None:
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
    step, state = step_of(in_batches, RECIPES[name](), optimizer)
    after, metrics = jax.jit(step)(state, BATCH.at[0, 0].set(jnp.inf))
    assert not metrics["grads_finite"]
    assert_bitwise_equal(after.params, state.params)
