"""Phases of a schedule have one state, or are refused by name."""

import itertools
from pathlib import Path
from typing import Any

import jax
import pytest
from example_tasks import load_task
from promotion import promoting_task

import jmp_train as jt
from jmp_train.app.runs import RulesFile, RunSettings, run_optimizer, setup_of
from jmp_train.app.runs.precisions import phase_precisions
from jmp_train.app.runs.setups import make_setups, shapes_of_init
from jmp_train.policies.loss_scaling import NoOpLossScale
from jmp_train.task import Task

pytestmark = pytest.mark.quick

NAMES = (
    "float32", "mixed_float16", "mixed_bfloat16", "autocast_float16", "float16", "p=f16,c=f32,o=f32",
    "torch", "torch-bfloat16", "apex-O0", "apex-O1", "apex-O1-bfloat16", "apex-O2", "apex-O3", "naive",
)  # fmt: skip


@pytest.fixture(name="digits", scope="module")
def fixture_digits() -> Task:
    return promoting_task(load_task("digits"))


def state_of(task: Task, setup: Any) -> tuple[Any, ...]:
    """Returns structure, shapes and dtypes of a setup's state; its loss scale apart, as where it is 1."""
    state = jax.eval_shape(lambda key: setup.create_state(*task.init(key), key), jax.random.key(0))
    without_scale = jax.tree.map(
        lambda node: node._replace(loss_scale=()) if isinstance(node, jt.policies.LossScaledState) else node,
        state,
        is_leaf=lambda node: isinstance(node, jt.policies.LossScaledState),
    )
    leaves, structure = jax.tree.flatten(without_scale)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


@pytest.mark.full
def test_two_phases_are_taken_if_and_only_if_their_states_and_loss_scales_are_the_same(digits: Task) -> None:
    setups = {name: setup_of(digits, name) for name in NAMES}
    states = {name: state_of(digits, setup) for name, setup in setups.items()}
    taken = 0
    for first, second in itertools.permutations(NAMES, 2):
        scales = [setups[name].loss_scale for name in (first, second)]
        one_scale = any(isinstance(scale, NoOpLossScale) for scale in scales) or scales[0] == scales[1]
        name = f"{first},0.5:{second}"
        if states[first] == states[second] and one_scale:
            assert [phase.name for phase in phase_precisions(name)] == [first, second]
            taken += 1
            continue
        with pytest.raises(
            ValueError, match=f"'{name}': all phases must (store parameters|have the same loss scale)"
        ) as refusal:
            phase_precisions(name)
        assert all(part in str(refusal.value).split(": ", 1)[1] for part in (first, second))
    assert taken > 30


def test_the_phases_have_the_loss_scale_of_those_that_need_one(digits: Task) -> None:
    made = run_optimizer(digits, shapes_of_init(digits)[0], 100, RunSettings())
    for name in ("float32,0.5:mixed_float16", "mixed_float16,0.5:mixed_bfloat16", "torch,0.5:float32"):
        first, second = make_setups(digits, name, made, RunSettings(growth_interval=7))
        assert first.loss_scale is second.loss_scale
        assert isinstance(first.loss_scale, jt.DynamicLossScale)
        assert first.loss_scale.period == 7
        assert first.create_state is second.create_state
        assert first.step is not second.step
    assert make_setups(digits, "mixed_bfloat16,0.5:float32", made)[0].loss_scale == NoOpLossScale()


def test_rules_are_for_the_phases_that_autocast(digits: Task) -> None:
    made = run_optimizer(digits, shapes_of_init(digits)[0], 100, RunSettings())
    rules = jt.TORCH_CUDA.replace(paths={"Dense_0": "float32"})
    settings = RunSettings(rules=RulesFile(Path("x"), rules))
    first, second = make_setups(digits, "autocast_float16,0.5:float32", made, settings)
    assert isinstance(first.step.policy, jt.AutocastPolicy)
    assert first.step.policy.rules == rules
    assert second.step.policy == jt.get_policy("float32")
    with pytest.raises(ValueError, match="mixed_float16 does not autocast, so it has no rules; use"):
        make_setups(digits, "mixed_float16,0.5:float32", made, settings)
