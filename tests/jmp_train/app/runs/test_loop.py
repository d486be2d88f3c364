import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from example_tasks import NAMES, load_task
from promotion import promoting_task

import jmp_train as jt
from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.evaluation import evaluated
from jmp_train.app.runs.events import Compiled, Epoch, Event, Progress
from jmp_train.app.runs.loop import train
from jmp_train.app.runs.preparing import prepare_run
from jmp_train.app.runs.setups import setup_of
from jmp_train.task import Task

pytestmark = pytest.mark.quick


@pytest.fixture(name="digits")
def fixture_digits() -> Task:
    return load_digits_task()


def load_digits_task(devices: int = 1) -> Task:
    return promoting_task(load_task("digits", devices=devices))


@pytest.mark.full
def test_every_task_loads() -> None:
    for name in NAMES:
        synthetic = name not in ("digits", "karate", "lm")
        sizes = {"reddit": {"scale": 0.001}, "vit": {"image_size": 16}}
        task = load_task(name, **({"synthetic": True} if synthetic else {}), **sizes.get(name, {}))
        assert set(task.train) == set(task.test)
        for data in (task.train, task.test):
            assert len(data["label"]) == len(next(iter(data.values()))) > 0


def test_digits_are_the_real_ones_and_split_without_overlap(digits: Task) -> None:
    images = np.concatenate([digits.train["image"], digits.test["image"]])
    labels = np.concatenate([digits.train["label"], digits.test["label"]])
    assert images.shape == (1797, 8, 8, 1)
    assert (images.dtype, labels.dtype) == (np.float32, np.int32)
    assert (images.min(), images.max()) == (0, 1)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(digits.test["label"]).min() >= 34


@pytest.mark.full
@pytest.mark.parametrize(
    ("policy", "scale"),
    [
        ("float32", 1.0),
        ("mixed_float16", 2.0**16),
        ("mixed_bfloat16", 1.0),
        ("autocast_float16", 2.0**16),
        ("autocast_bfloat16", 1.0),
    ],
)
def test_digits_learn_in_every_policy(digits: Task, policy: str, scale: float) -> None:
    seen: list[Event] = []
    run = train(digits, policy, RunSettings(epochs=3), on_event=seen.append)
    assert run.policy == policy
    assert run.device == "cpu"
    assert run.metrics["test_accuracy"] > 0.9
    assert seen[0] == Compiled(run.compile_seconds, run.memory_of, run.costs)
    assert (run.costs.half_flops_share > 0.9) == (policy != "float32")
    assert run.epochs == tuple(event for event in seen if isinstance(event, Epoch))
    looks = [event for event in seen if isinstance(event, Progress)]
    assert run.steps == tuple(step for look in looks for step in look.recent)
    assert [step.step for step in run.steps] == list(range(1, 3 * 22 + 1))
    assert {look.total for look in looks} == {3 * 22}
    assert all(step.finite and step.grad_norm > 0 for step in run.steps)
    assert seen[-1] == run
    assert [epoch.epoch for epoch in run.epochs] == [1, 2, 3]
    assert run.epochs[-1].loss < 0.5 * run.epochs[0].loss
    assert run.epochs[-1].loss_scale == scale
    assert run.epochs[0].learning_rate > run.epochs[1].learning_rate > 0
    assert all(epoch.seconds > 0 and epoch.memory_mb > 0 for epoch in run.epochs)


@pytest.mark.full
def test_a_run_that_watches_reports_shares_of_each_step_and_their_means(digits: Task) -> None:
    small = dataclasses.replace(digits, train={name: x[:128] for name, x in digits.train.items()})
    seen: list[Event] = []
    run = train(small, "float16", RunSettings(epochs=2), watch=("lost_updates", "underflow"), on_event=seen.append)
    watched = [one for event in seen if isinstance(event, Progress) for one in event.watched]
    assert [one.step for one in watched] == [1, 2, 3, 4]
    taken = [one.shares for one, step in zip(watched, run.steps, strict=True) if step.finite]
    assert taken
    for name, groups in run.watch.items():
        assert set(groups) == {
            "Dense_0",
            *(f"{kind}_{number}" for kind in ("BatchNorm", "Conv") for number in range(3)),
        }
        for group, share in groups.items():
            assert share == pytest.approx(np.mean([shares[name][group] for shares in taken]))
    assert 0 < run.watch["lost_updates"]["Dense_0"] < 1


@pytest.mark.full
def test_a_short_growth_interval_makes_the_scale_grow(digits: Task) -> None:
    run = train(digits, "autocast_float16", RunSettings(epochs=1, growth_interval=10))
    scales = [step.loss_scale for step in run.steps]
    assert scales == [2.0**16] * 9 + [2.0**17] * 10 + [2.0**18] * 3


@pytest.mark.full
def test_the_same_seed_gives_the_same_run(digits: Task) -> None:
    runs = [train(digits, "mixed_float16", RunSettings(epochs=1, seed=seed)) for seed in (3, 3, 4)]
    assert runs[0].epochs[0].loss == runs[1].epochs[0].loss != runs[2].epochs[0].loss


@pytest.mark.full
def test_eight_devices_give_the_results_of_one(digits: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each device draws a dropout of its own; all else, BatchNorm included, is the whole batch's.
    monkeypatch.setattr("flax.linen.Dropout", lambda rate, deterministic: lambda x: x)
    one, eight = (
        train(load_digits_task(devices), "float32", RunSettings(epochs=1, devices=devices)) for devices in (1, 8)
    )
    assert (one.device, eight.device) == ("cpu", "8 x cpu")
    losses = [[step.loss for step in run.steps] for run in (one, eight)]
    np.testing.assert_allclose(losses[1][:6], losses[0][:6], atol=1e-5)
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-3)  # Adam lets rounding errors grow
    assert eight.metrics["test_accuracy"] == pytest.approx(one.metrics["test_accuracy"], abs=0.01)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["mixed_float16", "float32", "mixed_bfloat16"])
def test_nan_for_ever_ends_in_an_error(digits: Task, policy: str, tmp_path: Path) -> None:
    images = np.full_like(digits.train["image"], 1e38)  # whose variance is infinite
    broken = dataclasses.replace(digits, train={**digits.train, "image": images})
    recorder = jt.SkipRecorder(tmp_path)
    with pytest.raises(jt.policies.StalledTrainingError, match="steps were skipped for non-finite gradients") as stall:
        train(broken, policy, RunSettings(epochs=50), recorder=recorder)
    capsules = sorted(tmp_path.iterdir())
    assert f"load_capsule('{capsules[-1]}', state)" in str(stall.value)
    setup = setup_of(broken, policy)
    params, model_state = broken.init(jax.random.key(7))
    step_key = jax.random.split(jax.random.key(0))[1]
    first = setup.create_state(params, model_state, step_key)
    with pytest.raises(ValueError, match="the given state is of step 0"):
        jt.load_capsule(capsules[0], first)
    params, model_state = broken.init(jax.random.split(jax.random.key(0))[0])
    state, batch = jt.load_capsule(capsules[0], setup.create_state(params, model_state, step_key))
    assert int(state.step) == int(capsules[0].stem.removeprefix("step_"))
    assert (batch["image"] == np.float32(1e38)).all()
    assert not jax.jit(setup.step)(state, batch)[1]["grads_finite"]


def test_outputs_that_are_not_finite_are_no_accuracy(digits: Task) -> None:
    test = {**digits.test, "image": np.full_like(digits.test["image"], np.inf)}
    prepared, state = prepare_run(dataclasses.replace(digits, test=test), "float32")
    with pytest.raises(FloatingPointError, match="output for the test data is not finite"):
        evaluated(prepared, state)


@pytest.mark.full
def test_some_outputs_that_are_not_finite_are_wrong_ones(digits: Task) -> None:
    images = digits.test["image"].copy()
    images[::3] = np.nan  # of 360; argmax would else take NaN for the largest
    labels = np.where(np.arange(len(images)) % 3 == 0, 0, digits.test["label"])
    odd = dataclasses.replace(digits, test={"image": images, "label": labels})
    run = train(odd, "float32", RunSettings(epochs=1))
    assert run.metrics["nonfinite_outputs"] == 120
    assert 0.4 < run.metrics["test_accuracy"] < 2 / 3


@pytest.mark.full
def test_a_step_that_overflows_once_in_a_while_does_not_stop_the_run(digits: Task) -> None:
    images = digits.train["image"].copy()
    images[0] = 7e4  # inf in float16: one of 22 batches an epoch is skipped
    odd = dataclasses.replace(digits, train={**digits.train, "image": images})
    run = train(odd, "mixed_float16", RunSettings(epochs=2))
    assert [epoch.skipped_steps for epoch in run.epochs] == [1, 2]
    assert run.epochs[-1].loss_scale == 2.0**14
    assert len(run.skipped) == 2
    for skip, scale in zip(run.skipped, (2.0**15, 2.0**14), strict=True):
        assert skip.loss_scale == scale
        assert not np.isfinite(skip.grad_norm)
    assert np.isfinite([epoch.loss for epoch in run.epochs]).all()  # of the steps taken


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("float32", {"epochs": 10**8}, r"epochs=100000000 needs 2200000000 steps, more than the limit of 2\*\*31 - 1"),
        ("float32", {"seed": 2**32}, r"seed=4294967296 must be between 0 and 2\*\*32 - 1"),
        ("float32", {"batch_size": 90, "devices": 9}, "devices=9: only 8 x cpu available"),
        ("float32", {"devices": 0}, "devices=0 must divide batch_size=64"),
    ],
)
def test_bad_arguments_are_named(digits: Task, policy: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(digits, policy, RunSettings(**settings))
