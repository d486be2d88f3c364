"""A report names causes and not what comes of them, has a problem where the loss is wrong, and its remedies work."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from planting import harmful
from promotion import promoting

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = pytest.mark.quick

F16, BF16 = jnp.float16, jnp.bfloat16
X = jax.random.normal(jax.random.key(1), (8, 4))


def mended_by(report: jt.tools.NumericsReport, dtype: Any) -> jt.AutocastPolicy:
    full = jnp.float32
    return jt.AutocastPolicy(full, full, full, autocast_dtype=jnp.dtype(dtype), rules=report.rules)


def test_a_loss_that_is_far_off_is_a_problem_of_the_operation_that_loses_most() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ w).astype(jnp.float32) ** 2)  # differences of two large columns

    w, x = jnp.array([1.0, -1.0]), 100 * jnp.stack([X[:, 0], X[:, 0] + 1e-3 * X[:, 1]], 1)
    report = jt.diagnose(jt.autocast(jax.value_and_grad(loss_fn), BF16), w, x)
    (problem,) = harmful(report)
    assert (problem.kind, problem.primitive) == ("cancellation", "dot_general")
    assert problem.code.startswith("return jnp.mean((x @ w)")
    assert problem.evidence.startswith("the loss is off by ")
    mended = jt.autocast(jax.value_and_grad(loss_fn), BF16, rules=report.rules)
    assert not jt.diagnose(mended, w, x).problems
    np.testing.assert_allclose(mended(w, x)[0], loss_fn(w, x), rtol=1e-5)


def test_a_loss_that_is_small_beside_its_terms_is_none() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w).astype(jnp.float32)
        return jnp.mean(h - jax.lax.stop_gradient(jnp.mean(h)))  # as of normalized advantages

    assert not harmful(jt.diagnose(jt.autocast(jax.value_and_grad(loss_fn), BF16), X[0], X))


def test_infinities_that_errors_have_grown_into_are_an_overflow() -> None:
    def grown(x: jax.Array) -> jax.Array:
        return jnp.exp((x.astype(F16) - F16(1490)) * F16(1.01))  # 10.6 becomes 11

    (problem,) = harmful(jt.diagnose(grown, jnp.full(4, 1500.6)))
    assert (problem.kind, problem.primitive) == ("overflow", "exp")


def test_what_comes_of_a_wrong_variance_is_no_underflow() -> None:
    def normalized(x: jax.Array) -> jax.Array:
        h = x.astype(F16) + F16(30)
        mean = h.mean(-1, keepdims=True)
        variance = (h * h).mean(-1, keepdims=True) - mean * mean
        return ((h - mean) / jnp.sqrt(jnp.maximum(variance, 0) + F16(1e-4))) ** 5

    found = harmful(jt.diagnose(normalized, 0.05 * X))
    assert {problem.kind for problem in found} == {"cancellation"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_the_logarithm_of_what_jax_has_whole_is_proposed(name: str) -> None:
    function = getattr(jax.nn, name)
    first, *_ = jt.diagnose(lambda x: jnp.log(function(x) + 1e-10), X.astype(F16)).problems
    assert first.remedy.text.startswith(f"jax.nn.log_{name} in place of the logarithm, or an epsilon of at least ")


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_counter_that_stands_still_is_named_wherever_it_is_in_the_state(steps: int) -> None:
    def step(w: jax.Array, count: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        w = w - 1e-2 * jnp.cos(count.astype(jnp.float32)) * grads
        return w, count + 1

    report = jt.diagnose(step, X[0], jnp.asarray(254.0, BF16), X, steps=steps)
    assert not report.problems
    assert {row.runs for row in report.rows} == {steps}
    (problem,) = harmful(jt.diagnose(step, X[0], jnp.asarray(256.0, BF16), X, steps=steps))
    assert (problem.kind, problem.code) == ("stagnation", "return w, count + 1")
    assert problem.remedy.text == "float32 for it, or an integer if it counts"


def adam_step(optimizer: Any) -> Callable[..., Any]:
    """Returns a step that keeps its state apart from the model, whose leaves include a function as equinox's do."""

    def step(model: Any, opt_state: Any, x: jax.Array) -> Any:
        def loss_fn(w: jax.Array) -> jax.Array:
            return 1e-2 * jnp.mean(model["activation"](x.astype(w.dtype) @ w).astype(jnp.float32))

        grads = jax.grad(loss_fn)(model["w"])
        updates, opt_state = optimizer.update(grads, opt_state, model["w"])
        return model | {"w": optax.apply_updates(model["w"], updates)}, opt_state

    return promoting(step)


@pytest.mark.full
def test_adam_on_float16_needs_master_weights_and_its_epsilon_is_named() -> None:
    model = {"w": jnp.ones((4, 4), F16), "activation": jnp.tanh}
    optimizer: Any = optax.adam(1e-3)
    report = jt.diagnose(adam_step(optimizer), model, optimizer.init(model["w"]), X, steps=3)
    assert report.steps == 1  # what comes of a lost state says nothing
    (problem,) = harmful(report)
    assert (problem.kind, problem.direction, problem.remedy.action) == ("underflow", "update", "state")
    assert "are infinite, and not in float32: an operand has become 0" in problem.evidence
    # Gradients cast to float32 would not help, as moments stay float16; stochastic rounding refuses float16.
    assert problem.remedy.text == "float32 for it: of an optimizer by with_master_weights(optimizer)"
    assert report.explanation.endswith(" are not finite, and its eps is 0 in float16.")
    mended: Any = jt.with_master_weights(optimizer)
    report = jt.diagnose(adam_step(mended), model, mended.init(model["w"]), X)
    assert not harmful(report)
    assert not report.explanation


@pytest.mark.full
@pytest.mark.parametrize("policy", ["mixed_float16", "autocast_float16"])
def test_times_as_features_of_a_graph_stay_in_float32(policy: str) -> None:
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, 10, (2, 60))
    times = (1.6e9 + 3e7 * rng.random((60, 1))).astype(np.float32)
    graph = graphs.from_edges(
        senders, receivers, 10, edges={"t": times}, nodes={"now": np.full((10, 1), 1.63e9, np.float32)}
    )

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        since: Any = fn.v_sub_e
        edges = graphs.apply_edges(batch, since("now", "t", "dt")).edges["dt"]
        return jnp.mean((jnp.log1p(edges * 1e-4) * params).astype(jnp.float32) ** 2)

    optimizer = jt.with_loss_scale(optax.sgd(1e-3), jt.NoOpLossScale())
    state = jt.TrainState.create(jnp.ones(()), optimizer)
    step = promoting(jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy))
    report = jt.diagnose(step, state, graph)
    assert 'functions={"graph_storage": "float32"}' in harmful(report)[0].remedy.text
    mended = jt.train_step(jt.stateless(loss_fn), optimizer, policy=mended_by(report, F16))
    assert not harmful(jt.diagnose(promoting(mended), state, graph))
    np.testing.assert_allclose(mended(state, graph)[1]["loss"], loss_fn(jnp.ones(()), graph), rtol=1e-3)
