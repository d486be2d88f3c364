"""What is tried to need less memory; what it gains is in test_planner.py, compiled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import relaxed

import jmp_train as jt
from jmp_train.tools.planning import Placement
from jmp_train.tools.planning.remedies import changes
from jmp_train.tools.planning.variants import Variant, variants_of

pytestmark = pytest.mark.quick

OPTIMIZER = jt.with_loss_scale(relaxed(optax.adam(1e-2)), jt.torch_loss_scale())
STEP = jt.train_step(jt.stateless(lambda w, x: (jnp.tanh(x @ w).astype(jnp.float32) ** 2).mean()), OPTIMIZER)
MICRO_BATCHES = ["2 micro-batches", "4 micro-batches"]
HALF = "policy mixed_float16"


def variant(policy: Any = "float32", batch: int = 16, **replaced: Any) -> Variant:
    step = dataclasses.replace(STEP, **replaced)
    state = jt.TrainState.create(jnp.eye(8), OPTIMIZER)
    (found,) = variants_of(step, state, jnp.ones((batch, 8)), None, policy)
    return found


def names(given: Variant, placement: Placement | None = None) -> list[str]:
    return [name for name, *_ in changes(given, placement or Placement())]


def test_what_is_tried_depends_on_what_is_there() -> None:
    assert names(variant()) == [*MICRO_BATCHES, "rematerialization", HALF]
    assert names(variant("mixed_bfloat16")) == [*MICRO_BATCHES, "rematerialization"]
    assert names(variant(None)) == [*MICRO_BATCHES, "rematerialization", HALF]
    assert names(variant(batch=3)) == ["rematerialization", HALF]
    assert names(variant(), Placement(8)) == ["2 micro-batches", "rematerialization", "zero1", "fsdp", HALF]
    assert names(variant(), Placement(8, "zero1")) == ["2 micro-batches", "rematerialization", HALF]
    assert names(variant(accumulate_steps=2)) == ["4 micro-batches", "8 micro-batches", "rematerialization", HALF]


def test_a_step_of_ones_own_is_left_as_it_is() -> None:
    (own,) = variants_of(lambda state, batch: (state, batch.sum()), jnp.ones(3), jnp.ones(16), None, None)
    assert names(own) == []


def test_the_changed_steps_are_what_they_are_called() -> None:
    found: dict[str, tuple[str, Any, Placement]]
    found = {name: (code, changed.step, where) for name, code, changed, where in changes(variant(), Placement(2))}
    assert found["4 micro-batches"][1].accumulate_steps == 4
    assert "accumulate_steps=4" in found["4 micro-batches"][0]
    assert str(found[HALF][1].policy) == str(jt.get_policy("mixed_float16"))
    assert str(found["fsdp"][2]) == "2 devices, fsdp"
    assert "jt.fsdp_shardings" in found["fsdp"][0]


def test_steps_that_take_less_memory_compute_the_same() -> None:
    state, batch = jt.TrainState.create(jnp.eye(8), OPTIMIZER), jnp.linspace(-1, 1, 128).reshape(16, 8)
    expected, _ = jax.jit(STEP)(state, batch)
    for name, _, changed, _ in changes(variant(), Placement()):
        found, _ = jax.jit(changed.step)(state, batch)
        np.testing.assert_allclose(found.params, expected.params, atol=1e-2 if name == HALF else 1e-5)
