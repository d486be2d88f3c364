"""Task `lm`: its text, its optimizer, every policy and mode, and bits per byte."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from process_helpers import jmp_train_command
from promotion import promoting_task, relaxed

from jmp_train.policies.amp_modes.mode import amp_mode
from jmp_train.runs import RunSettings
from jmp_train.runs.loop import train
from jmp_train.runs.setups import setup_of
from jmp_train.runs.task_batches import evaluation_batches
from jmp_train.steps.step import train_step
from jmp_train.steps.train_state import TrainState
from jmp_train.task import Task
from jmp_train.tasks import lm, load_task
from jmp_train.tasks.models import Accuracy
from jmp_train.tasks.models.gpt import GPTConfig

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


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"x" * 1289, ValueError, "has 1289 bytes; windows of 128 need at least 1290"),
        (b"", ValueError, "has 0 bytes"),
        (None, FileNotFoundError, "No such file"),
    ],
)
def test_a_text_that_does_not_do_is_named(
    tmp_path: Path, content: bytes | None, error: type[Exception], message: str
) -> None:
    file = tmp_path / "some.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=message) as raised:
        load_task("lm", text_file=file)
    assert "some.txt" in str(raised.value)
    with pytest.raises(ValueError, match="is not a regular file"):
        load_task("lm", text_file=tmp_path)


def test_a_text_of_the_least_size_has_one_window_to_be_tested_on(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 5 + b"0123456789")
    task = load_task("lm", text_file=file)
    assert {len(x) for x in task.test.values()} == {1}
    assert {len(x) for x in task.train.values()} == {9}
    assert task.test["label"].tobytes().endswith(b"0123456789")


def test_matrices_decay_and_norms_and_the_embedding_do_not() -> None:
    params, _ = jax.eval_shape(partial(lm.init, config=TINY), jax.random.key(0))
    flat = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(lm.decays(params))}
    decaying = {name for name, x in flat.items() if jax.tree.leaves(x) == [True]}
    assert decaying == {
        "blocks.0.attention.query.kernel", "blocks.0.attention.key.kernel", "blocks.0.attention.value.kernel",
        "blocks.0.attention.out.kernel", "blocks.0.mlp.gate.kernel", "blocks.0.mlp.up.kernel",
        "blocks.0.mlp.down.kernel",
    }  # fmt: skip
    assert set(flat) - decaying == {
        "embedding",
        "norm.scale",
        "blocks.0.attention_norm.scale",
        "blocks.0.mlp_norm.scale",
    }


def test_the_optimizer_clips_then_steps_then_decays() -> None:
    params = {"norm": jnp.ones(3), "kernel": jnp.full((2, 2), 2.0), "embedding": jnp.full((2, 2), 2.0)}
    optimizer = relaxed(lm.optimizer(0.5))
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    first = second = 0.0
    for number, (grad, clipped) in enumerate([(7.0, 1 / math.sqrt(11)), (0.1, 0.1)]):
        grads = jax.tree.map(lambda x, size=grad: jnp.full_like(x, size), params)
        updates, state = update(grads, state, params)
        first = 0.9 * first + 0.1 * clipped
        second = 0.95 * second + 0.05 * clipped**2
        adam = first / (1 - 0.9 ** (number + 1)) / math.sqrt(second / (1 - 0.95 ** (number + 1)))
        for name, decayed in (("norm", 0.0), ("kernel", 0.1 * 2), ("embedding", 0.0)):
            np.testing.assert_allclose(updates[name], -0.5 * (adam + decayed), rtol=1e-5)


@pytest.mark.parametrize(("steps", "first", "last"), [(1, 1.0, 1.0), (10, 0.5, 0.127), (408, 1 / 41, 0.1)])
def test_the_rate_warms_up_and_falls_to_a_tenth(steps: int, first: float, last: float) -> None:
    with jax.numpy_dtype_promotion("standard"):
        rates = [float(np.asarray(lm.schedule(steps, 1e-3)(step))) / 1e-3 for step in range(steps)]
    assert (rates[0], rates[-1]) == pytest.approx((first, last), abs=1e-3)
    highest = rates.index(max(rates))
    assert highest == steps // 10
    assert max(rates) == pytest.approx(1)
    assert rates == sorted(rates[:highest]) + sorted(rates[highest:], reverse=True)


@pytest.mark.quick_cases(1)
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


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "devices"),
    [("float32", 1), ("mixed_float16", 1), ("apex-O2", 1), ("torch-bfloat16", 1), ("autocast_bfloat16", 2)],
)
def test_it_learns_a_phrase_and_says_in_how_many_bits(phrases: Task, policy: str, devices: int) -> None:
    highest = lm.schedule(600, 1e-2)
    task = dataclasses.replace(phrases, optimizer=relaxed(lm.optimizer(highest)))
    run = train(task, policy, RunSettings(epochs=12, batch_size=8, devices=devices))
    assert run.steps[0].loss == pytest.approx(math.log(256), abs=0.1)
    shares = np.bincount(np.frombuffer(PHRASE, np.uint8)) / len(PHRASE)
    without_context = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    assert run.steps[-1].loss < 2 < without_context - 0.5
    assert run.metrics["bits_per_byte"] is not None
    # The test's bytes are the training's: but for the first of a window they are told from those before.
    assert run.metrics["bits_per_byte"] * math.log(2) == pytest.approx(run.steps[-1].loss, abs=0.3)
    assert run.metrics["test_accuracy"] > 2 * shares.max()
    assert run.metrics["nonfinite_outputs"] == 0


@pytest.mark.full
def test_bits_per_byte_are_the_mean_over_all_bytes_of_the_test(phrases: Task) -> None:
    # 13 windows of the test in batches of 8, of which the last has 5.
    settings = RunSettings(epochs=1, batch_size=8)
    run = train(phrases, "float32", settings)
    turned = {name: x[::-1] for name, x in phrases.test.items()}
    again = train(dataclasses.replace(phrases, test=turned), "float32", settings)
    assert len(phrases.test["label"]) % 8
    assert run.metrics["bits_per_byte"] == pytest.approx(again.metrics["bits_per_byte"], rel=1e-6)
    assert run.metrics["test_accuracy"] == again.metrics["test_accuracy"]
    assert sum(count or 0 for _, count in evaluation_batches(phrases, 8)) == len(phrases.test["label"])

    def uniform(params: Any, model_state: Any, batch: Any) -> jax.Array:
        return 0 * phrases.metrics.predict(params, model_state, batch)

    flat = train(dataclasses.replace(phrases, metrics=Accuracy(uniform, with_bits=True)), "float32", settings)
    assert flat.metrics["bits_per_byte"] == pytest.approx(8)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_command_line_trains_it(tmp_path: Path) -> None:
    call = "train lm --policy mixed_float16 --epochs 1 --train-size 128 --remat --json --logdir log"
    result = jmp_train_command(*call.split(), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    run = json.loads(result.stdout.splitlines()[-1])
    assert run["event"] == "run"
    assert len(run["steps"]) == 16
    assert run["steps"][-1]["loss"] < run["steps"][0]["loss"] - 1
    assert 3 < run["bits_per_byte"] < 7
    assert 0.1 < run["test_accuracy"] < 0.5
    logged = (tmp_path / "log/mixed_float16/metrics.jsonl").read_text().splitlines()
    assert json.loads(logged[-1]) == {name: run[name] for name in ("test_accuracy", "bits_per_byte")}
