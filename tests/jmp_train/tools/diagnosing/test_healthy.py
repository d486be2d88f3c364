"""Models that half precision does not harm have no problem, at the start nor after some steps."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from healthy_models import MODELS, Model, gru, language_model, normal, perceptron
from planting import harmful
from promotion import promoting

import jmp_train as jt

pytestmark = pytest.mark.quick

POLICIES = ("mixed_float16", "autocast_float16")


@pytest.fixture(autouse=True)
def few_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each model has hundreds of equations, and a process no room for the compiled programs of all models."""
    yield
    if "bfloat16" in request.node.name or "after_training" in request.node.name:  # the last one of a model
        jax.clear_caches()


def training(make: Callable[[], Any], policy: str) -> Any:
    """Returns a train step, its state and a batch; with a loss scale for float16."""
    model = make()
    scale = jt.torch_loss_scale(2.0**12) if policy.endswith("_float16") else None
    step, state = model.training(policy, scale)
    return promoting(step), state, model.batch


@pytest.mark.full
@pytest.mark.parametrize(
    ("make", "policy"),
    [
        pytest.param(make, policy, id=f"{make.__name__}-{policy}")
        for number, make in enumerate(MODELS)
        for policy in (*POLICIES, ("mixed_bfloat16", "autocast_bfloat16")[number % 2])
    ],
)
def test_a_healthy_model_has_no_problem(make: Callable[[], Any], policy: str) -> None:
    report = jt.diagnose(*training(make, policy))
    assert not harmful(report), report
    assert {row.direction for row in report.rows} == {"forward", "backward", "update"}


def biased_keys() -> Model:
    """Masked attention whose keys have a bias, the gradient of which is zero except for its rounding."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        logits = (x @ params["query"]) @ (x @ params["key"] + params["bias"]).T
        weights = jax.nn.softmax(jnp.where(jnp.tri(len(x), dtype=bool), logits, -1e30))
        return jnp.mean((weights @ x).astype(jnp.float32) ** 2)

    params = {"query": normal(8, 8) / 4, "key": normal(8, 8, seed=1) / 4, "bias": jnp.zeros(8)}
    return Model(jt.stateless(loss_fn), params, None, normal(16, 8, seed=2))


def test_a_gradient_that_is_zero_except_for_rounding_makes_no_problem() -> None:
    report = jt.diagnose(*training(biased_keys, "mixed_float16"))
    assert [(problem.severity, problem.kind) for problem in report.problems] == [("note", "invalid mask")], report


@pytest.mark.full
@pytest.mark.parametrize("make", [language_model, gru, perceptron], ids=lambda make: make.__name__)
def test_nothing_is_wrong_after_training(make: Callable[[], Any]) -> None:
    step, state, batch = training(make, "autocast_float16")
    run = eqx.filter_jit(step)
    losses = []
    for _ in range(200):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    report = jt.diagnose(step, state, batch, steps=2)
    assert not harmful(report), report
