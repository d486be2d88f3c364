"""Training setups of policies and AMP modes by name, and tasks that train with them."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_tasks import load_task
from jax.sharding import Mesh
from made_runs import first_examples
from promotion import promoting, promoting_task

import jmp_train as jt
from jmp_train.app.runs import RulesFile, RunSettings
from jmp_train.app.runs.loop import train
from jmp_train.app.runs.precisions import autocasts, loss_scale_for, precision_of
from jmp_train.app.runs.resuming import Saving, Stopped
from jmp_train.app.runs.setups import setup_of
from jmp_train.app.tasks import digits as digits_task
from jmp_train.parallel.parallel_steps import data_parallel
from jmp_train.policies.pytrees.paths import named_leaves
from jmp_train.task import Task

pytestmark = pytest.mark.quick

KEY = jax.random.key(0)
MODES = ("torch", "apex-O0", "apex-O1", "apex-O2", "apex-O3", "naive")


def load(name: str, devices: int = 1) -> Task:
    task = load_task(name, **({"devices": devices} if name == "digits" else {}))
    task = first_examples(task, 128) if devices > 1 else task
    return dataclasses.replace(promoting_task(task), batch_norms=promoting(task.batch_norms))


@pytest.fixture(name="digits", scope="module")
def fixture_digits() -> Task:
    return load("digits")


@pytest.mark.parametrize("name", MODES)
def test_a_mode_has_a_name_in_either_half_type(name: str) -> None:
    family, _, level = name.partition("-")
    options: dict[str, Any] = {"opt_level": level} if level else {}
    assert precision_of(name) == jt.amp_mode(family, **options)
    bfloat16 = precision_of(f"{name}-bfloat16")
    assert bfloat16 == jt.amp_mode(family, **options, dtype=jnp.bfloat16)
    assert bfloat16 != precision_of(name)


def test_other_names_are_those_of_policies() -> None:
    assert precision_of("p=f32,c=f16") == jt.get_policy("p=f32,c=f16")
    assert precision_of("float32") == jt.get_policy("float32")


@pytest.mark.parametrize("name", ["apex-O4", "apex", "naive-float16", "Torch", "float32-bfloat16"])
def test_an_unknown_name_is_told_the_choices(name: str) -> None:
    text = (
        f"Unknown dtype '{name}' must be .*; or a policy: mixed_float16, .*; or an AMP mode: torch, "
        "apex-O0, apex-O1, apex-O2, apex-O3, naive, each also with -bfloat16$"
    )
    with pytest.raises(ValueError, match=text):
        precision_of(name)


AUTOCAST = ("autocast_float16", "autocast_bfloat16", "p=f32,a=f16", "torch", "apex-O1", "torch-bfloat16")


@pytest.mark.parametrize("name", AUTOCAST)
def test_rules_take_the_place_of_those_of_a_name_that_autocasts(name: str) -> None:
    assert autocasts(precision_of(name))
    rules = jt.AutocastRules(primitives=(("dot_general", "float32"),))
    precision = precision_of(name, rules)
    found = (
        precision.precision.autocast_rules
        if isinstance(precision, jt.policies.Amp)
        else getattr(precision, "rules", None)
    )
    assert found == rules
    assert precision != precision_of(name)
    assert precision_of(name, None) == precision_of(name)


@pytest.mark.parametrize("name", ["float32", "mixed_float16", "apex-O0", "apex-O2-bfloat16", "naive"])
def test_a_name_that_does_not_autocast_takes_no_rules(name: str) -> None:
    assert not autocasts(precision_of(name))
    text = f"{name} does not autocast, so it has no rules; use autocast_float16, autocast_bfloat16, torch and apex-O1"
    with pytest.raises(ValueError, match=text):
        precision_of(name, jt.TORCH_CUDA)


@pytest.mark.parametrize("name", ["autocast_float16", pytest.param("apex-O1", marks=pytest.mark.full)])
def test_a_setup_trains_and_predicts_by_the_rules(digits: Task, name: str) -> None:
    rules = jt.AutocastRules(primitives=(("dot_general", "float32"), ("conv_general_dilated", "float32")))
    files = (None, RulesFile(Path("x"), rules))
    own, other = (setup_of(digits, name, RunSettings(growth_interval=30, rules=file)) for file in files)
    assert other.loss_scale == own.loss_scale
    state = jax.eval_shape(lambda key: own.create_state(*digits.init(key), key), KEY)
    batch = {key: x[:8] for key, x in digits.train.items()}
    for setup, has_half in ((own, True), (other, False)):
        step = jax.make_jaxpr(setup.step)(state, batch)
        predict = jax.make_jaxpr(setup.forward(promoting(digits_task.predict)))(state.params, state.model_state, batch)
        assert ["f16[" in str(program) for program in (step, predict)] == [has_half] * 2


PERIODS = {
    "autocast_float16": 2000, "mixed_float16": 2000, "torch": 2000, "apex-O1": 2000, "apex-O2": 2000, "naive": 1000,
    "float32": None, "autocast_bfloat16": None, "torch-bfloat16": None, "apex-O3": None,
}  # fmt: skip


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", PERIODS)
def test_a_growth_interval_is_that_of_the_dynamic_scale_and_of_nothing_else(digits: Task, name: str) -> None:
    own, set_ = (setup_of(digits, name, RunSettings(growth_interval=steps)).loss_scale for steps in (None, 30))
    period = PERIODS[name]
    if period is None:
        assert set_ == own
        return
    assert isinstance(own, jt.DynamicLossScale)
    assert own.period == period
    assert set_ == dataclasses.replace(own, period=30)


def test_only_float16_gets_a_scale() -> None:
    for name in ("float16", "mixed_float16", "p=f32,c=f16,o=f32"):
        scale = loss_scale_for(jt.get_policy(name))
        assert isinstance(scale, jt.DynamicLossScale)
        assert float(scale.min_loss_scale) == 1
    for name in ("float32", "bfloat16", "mixed_bfloat16"):
        assert loss_scale_for(jt.get_policy(name)) == jt.NoOpLossScale()
    assert jnp.float16 == jt.get_policy("float16").param_dtype


@pytest.mark.parametrize(
    ("name", "halves", "statistics"),
    [
        ("float32", 0, "float32"),
        ("float16", 11, "float32"),
        ("torch", 0, "float32"),
        ("apex-O0", 0, "float32"),
        ("apex-O1", 0, "float32"),
        ("apex-O2", 5, "float32"),  # all but the three BatchNorms' scales and biases
        ("apex-O3", 11, "float16"),
        ("naive", 11, "float16"),
    ],
)
def test_the_state_is_stored_as_the_name_says(digits: Task, name: str, halves: int, statistics: str) -> None:
    setup = setup_of(digits, name)
    state = jax.eval_shape(lambda key: setup.create_state(*digits.init(key), key), KEY)
    dtypes = {path: x.dtype.name for path, x in named_leaves(state.params)}
    assert Counter(dtypes.values()) == Counter(float16=halves, float32=11 - halves)
    is_norm = {path: "BatchNorm" in path for path in dtypes}
    assert sum(is_norm.values()) == 6
    if name == "apex-O2":
        assert is_norm == {path: dtype == "float32" for path, dtype in dtypes.items()}
    assert {x.dtype.name for x in jax.tree.leaves(state.model_state)} == {statistics}


COMPUTED = {
    "mixed_float16": "float16", "autocast_float16": "float32", "torch": "float32", "apex-O0": "float32",
    "apex-O1-bfloat16": "float32", "apex-O2": "float16", "naive-bfloat16": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED)
def test_what_batches_share_is_cast_on_the_host(digits: Task, name: str) -> None:
    cast = setup_of(digits, name).cast_shared({"features": np.ones(2, np.float32), "count": np.ones(2, np.int32)})
    assert {key: (type(x), x.dtype.name) for key, x in cast.items()} == {
        "features": (np.ndarray, COMPUTED[name]),
        "count": (np.ndarray, "int32"),
    }


@pytest.mark.full
@pytest.mark.parametrize("name", ["torch", *(pytest.param(x, marks=pytest.mark.full) for x in ("apex-O2", "apex-O3"))])
def test_the_club_is_told_apart(name: str) -> None:
    run = train(load("karate"), name)
    assert run.policy == name
    assert run.metrics["test_accuracy"] > 0.9
    assert run.epochs[-1].loss < 0.1
    assert run.skipped == ()


@pytest.mark.full
def test_a_run_in_a_mode_goes_on_where_it_stopped(tmp_path: Path) -> None:
    task = dataclasses.replace(load("karate"), epochs=30)
    whole = train(task, "naive")
    assert whole.metrics["test_accuracy"] > 0.9
    assert len(whole.skipped) > 10  # from 2**32 the scale has a long way to fall
    with jt.CheckpointStore(tmp_path) as store:
        answers = iter([False] * 19 + [True])
        with pytest.raises(Stopped, match="after step 20"):
            train(task, "naive", saving=Saving(store, 100, should_stop=lambda: next(answers)))
        with pytest.raises(ValueError, match="policy: the run has naive, this call apex-O2"):
            train(task, "apex-O2", saving=Saving(store, resume=True))
        again = train(task, "naive", saving=Saving(store, 100, resume=True))
    # The norm of a step that is skipped may be NaN, which is not equal to itself.
    first, second = ([dataclasses.replace(step, grad_norm=0.0) for step in run.steps] for run in (whole, again))
    assert first == second
    assert again.metrics["test_accuracy"] == whole.metrics["test_accuracy"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixed_float16", *MODES])
def test_a_step_on_two_devices_and_the_test_keep_to_the_setup(name: str) -> None:
    """Traces them, which is cheap, on a model with BatchNorm and dropout."""
    task = load("digits", devices=2)
    setup = setup_of(task, name)
    state = jax.eval_shape(lambda key: setup.create_state(*task.init(key), key), KEY)
    step = data_parallel(setup.step, Mesh(jax.devices()[:2], ("data",)))
    new_state, metrics = jax.eval_shape(step, state, task.train)
    assert new_state == state
    assert metrics["loss"].dtype == jnp.float32
    logits = jax.eval_shape(setup.forward(promoting(digits_task.predict)), state.params, state.model_state, task.test)
    assert logits.shape == (360, 10)
    assert logits.dtype == (jnp.float16 if name in ("torch", "apex-O1") else jnp.float32)


@pytest.mark.full
def test_batch_norms_of_a_half_model_stay_float32_on_two_devices() -> None:
    run = train(load("digits", devices=2), "apex-O2", RunSettings(epochs=1, devices=2))
    assert run.device == "2 x cpu"
    assert [step.finite for step in run.steps] == [True, True]
    assert run.epochs[-1].loss_scale == 2.0**16
