"""Task `lm`: its text, its optimizer, every policy and mode, and bits per byte."""

import dataclasses
import math
from functools import partial
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import lm
import numpy as np
import pytest
from example_tasks import load_task
from models import Accuracy
from models.gpt import GPTConfig
from promotion import promoting_task, relaxed

from jmp_train.app.runs.setups import setup_of
from jmp_train.policies.amp_modes.config import amp_mode
from jmp_train.steps.step import train_step
from jmp_train.steps.train_state import TrainState
from jmp_train.task import Task

pytestmark = pytest.mark.quick

TINY = GPTConfig(width=16, depth=1, heads=2, kv_heads=1, mlp=32)
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", "autocast_float16", "autocast_bfloat16")
MODES = ("torch", "apex-O0", "apex-O1", "apex-O2", "apex-O3", "naive")
BFLOAT16_MODES = tuple(f"{mode}-bfloat16" for mode in MODES if mode != "apex-O0")
PHRASE = b"a policy says which dtype parameters have. "


def with_config(task: Task, config: GPTConfig) -> Task:
    """Returns the task with a model of other sizes, and with dtypes promoted within flax and optax."""
    parts: dict[str, Any] = {name: partial(getattr(lm, name), config=config) for name in ("init", "loss_fn")}
    metrics = Accuracy(partial(lm.predict, config=config), with_bits=True)
    return promoting_task(dataclasses.replace(task, **parts, metrics=metrics))


@pytest.fixture(name="phrases", scope="module")
def fixture_phrases(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """The task with a tiny model, of a text that says one thing again and again."""
    file = tmp_path_factory.mktemp("text") / "phrases"
    file.write_bytes(PHRASE * 400)
    return with_config(load_task("lm", text_file=file), TINY)


@pytest.mark.full
def test_the_sizes_are_declared_and_gpt2_small_has_its_parameters() -> None:
    assert get_args(get_type_hints(lm.Options)["model"]) == tuple(lm.RECIPES)
    counts = {}
    for name, recipe in lm.RECIPES.items():
        params, model_state = jax.eval_shape(partial(lm.init, config=recipe.config), jax.random.key(0))
        leaves = jax.tree.leaves(params)
        assert model_state == {}
        assert {x.dtype for x in leaves} == {jnp.dtype("float32")}
        counts[name] = sum(math.prod(x.shape) for x in leaves)
    assert counts == {"tiny": 820_352, "small": 9_540_480, "gpt2-small": 124_730_880}


def test_the_text_is_pythons_documentation_and_its_last_tenth_is_held_out() -> None:
    text = lm.documentation()
    assert len(text) > 300_000
    assert b'The "try" statement' in text
    task = load_task("lm")
    for data, size in ((task.train, 0.9 * len(text)), (task.test, 0.1 * len(text))):
        assert data["token"].shape == data["label"].shape == (len(data["token"]), 128)
        assert size - 130 <= data["token"].size <= size + 1
        np.testing.assert_array_equal(data["token"].ravel()[1:], data["label"].ravel()[:-1])
    begins = task.train["token"].tobytes()
    assert text.startswith(begins)
    assert text[len(begins) :].find(task.test["token"].tobytes()) <= 128
    prepared = task.prepare({name: x[:2] for name, x in task.train.items()})
    assert {x.dtype for x in prepared.values()} == {np.dtype("int32")}
    np.testing.assert_array_equal(prepared["label"], task.train["label"][:2])


@pytest.mark.full
@pytest.mark.parametrize("name", [*POLICIES, *MODES, *BFLOAT16_MODES])
def test_gradients_are_finite_in_every_policy_and_mode_and_all_parameters_move(phrases: Task, name: str) -> None:
    phrases = dataclasses.replace(phrases, optimizer=relaxed(lm.optimizer(1e-2)))
    params, model_state = phrases.init(jax.random.key(0))
    if name == "naive":  # it begins at 2**32, at which ten to twenty steps are skipped
        amp: Any = amp_mode("naive", initial_scale=2.0**10)
        loss_fn, optimizer = amp.transform(phrases.loss_fn, phrases.optimizer_for(100))
        step: Any = train_step(loss_fn, optimizer)
        state = TrainState.create(params, optimizer, model_state=model_state, cast_params=amp.cast_params)
    else:
        setup = setup_of(phrases, name)
        step, state = setup.step, setup.create_state(params, model_state, jax.random.key(1))
    batch = phrases.prepare({key: x[:4] for key, x in phrases.train.items()})
    old = jax.tree.map(np.asarray, jax.tree.leaves(state.params))
    state, metrics = jax.jit(step)(state, batch)
    assert bool(metrics["grads_finite"])
    assert float(metrics["loss"]) == pytest.approx(math.log(256), abs=0.1)  # the embedding begins near 0
    assert 0 < float(metrics["grad_norm"]) < 10
    for before, after in zip(old, jax.tree.leaves(state.params), strict=True):
        assert after.dtype == before.dtype
        assert (np.asarray(after) != before).any()
