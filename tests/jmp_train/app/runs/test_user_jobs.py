"""Runs of users' jobs: each source of batches gives the same run, in one piece, in parts and on several devices."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from user_jobs import SOURCES, STEPS, batches, examples, init, loss_fn, make_task

import jmp_train as jt
from jmp_train.app.runs import Event, Note, RunSettings, train
from jmp_train.app.runs.evaluation import evaluated
from jmp_train.app.runs.events import Run
from jmp_train.app.runs.foreign_batches import as_arrays
from jmp_train.app.runs.preparing import prepare_run
from jmp_train.app.runs.resuming import Saving, Stopped

pytestmark = pytest.mark.quick


def run(task: jt.Task, policy: str = "float32", events: list[Event] | None = None, **settings: Any) -> Run:
    on_event = (lambda event: None) if events is None else events.append
    with jax.numpy_dtype_promotion("standard"):  # optax's
        return train(task, policy, RunSettings(**settings), on_event=on_event)


def losses(one: Run) -> list[float]:
    return [step.loss for step in one.steps]


def stopped_or_ended(task: jt.Task, folder: Path, policy: str, stop_after: int = 0) -> Run | None:
    """Returns the run, which goes on from what is in the folder; None if it was stopped after so many steps more."""
    count = itertools.count(1)
    with jt.CheckpointStore(folder) as store, jax.numpy_dtype_promotion("standard"):
        # It is asked after each step, and once more when all is saved.
        saving = Saving(store, None, True, lambda: bool(stop_after) and next(count) >= stop_after)
        try:
            return train(task, policy, saving=saving)
        except Stopped:
            return None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("source", SOURCES)
def test_a_run_in_parts_is_the_run_in_one_piece(source: str, tmp_path: Path) -> None:
    task = make_task(source)
    whole = run(task, "mixed_float16")
    for stop_after in (3, 2, 4):  # within an epoch, at its end, within the next
        assert stopped_or_ended(task, tmp_path, "mixed_float16", stop_after) is None
    again = stopped_or_ended(task, tmp_path, "mixed_float16")
    assert again is not None
    assert again.steps == whole.steps
    assert again.metrics == whole.metrics
    assert [epoch.loss for epoch in again.epochs] == [epoch.loss for epoch in whole.epochs]


def test_a_grain_iterator_goes_on_from_its_own_state(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counted:
        """A loader that keeps its own place."""

        def __init__(self, epoch: int) -> None:
            self.epoch, self.place = epoch, 0

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            if self.place == STEPS:
                raise StopIteration
            seen.append(self.place)
            self.place += 1
            return examples(16, 100 * self.epoch + self.place)

        def get_state(self) -> Any:
            return {"place": self.place}

        def set_state(self, state: Any) -> None:
            self.place = state["place"]

    task = make_task(train=Counted, epochs=1)
    whole = losses(run(task))
    assert stopped_or_ended(task, tmp_path, "float32", stop_after=3) is None
    seen.clear()
    resumed = stopped_or_ended(task, tmp_path, "float32")
    assert resumed is not None
    assert losses(resumed) == whole
    assert seen == [3, 4]  # it was not run forward


def test_the_last_step_is_saved_where_the_number_of_steps_is_unknown(tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path) as store, jax.numpy_dtype_promotion("standard"):
        train(make_task(), "float32", saving=Saving(store, every=4))
        store.wait()
        assert max(store.steps()) == 3 * STEPS


def test_the_number_of_steps_is_known_where_the_batches_or_the_task_say_it() -> None:
    for source, changes, total in (
        ("generator", {}, None),
        ("generator", {"steps_per_epoch": 3}, 9),
        ("list", {}, 3 * STEPS),
        ("arrays", {}, 3 * STEPS),
    ):
        prepared, _ = prepare_run(make_task(source, **changes), "float32")
        assert prepared.length.total == total
        if source == "generator":
            found = run(make_task(source, **changes))
            assert len(found.steps) == (total or 3 * STEPS)
            assert [epoch.epoch for epoch in found.epochs] == [1, 2, 3]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("source", ["generator", "arrays"])
def test_steps_replace_epochs(source: str) -> None:
    found = run(make_task(source), steps=7)
    assert len(found.steps) == 7
    assert [epoch.epoch for epoch in found.epochs] == [1, 2]
    assert losses(run(make_task(source)))[:5] == losses(found)[:5] or source == "arrays"  # whose cosine is shorter


def test_what_needs_the_number_of_steps_says_how_to_give_it() -> None:
    task = make_task(optimizer=lambda steps: optax.adam(0.1))
    message = r"optimizer is a function of the number of steps.*steps_per_epoch, or .*--steps"
    with pytest.raises(ValueError, match=message):
        run(task)
    assert len(run(task, steps=4).steps) == 4
    with pytest.raises(ValueError, match=r"a schedule needs the number of steps, which is unknown"):
        run(make_task(), "mixed_float16,0.5:float32")


@pytest.mark.full
@pytest.mark.parametrize("source", ["generator", "arrays"])
def test_devices_and_parts_give_the_same_run(source: str) -> None:
    def without_dropout(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return loss_fn(params, model_state, batch, None)

    task = make_task(source, loss_fn=without_dropout)
    one = losses(run(task))
    np.testing.assert_allclose(losses(run(task, devices=4)), one, rtol=1e-5)
    np.testing.assert_allclose(losses(run(task, accumulate_steps=2)), one, rtol=1e-5)


def test_metrics_are_means_counts_and_ratios_over_all_examples() -> None:
    test = examples(40, seed=1)
    found = run(make_task("arrays", batch_size=16))
    assert list(found.metrics) == ["loss", "rows", "mean_x"]
    assert found.headline == "loss"
    assert found.metrics["rows"] == 40
    assert found.metrics["mean_x"] == pytest.approx(float(test["x"].astype(np.float64).mean()), abs=1e-6)
    task = make_task("arrays")
    _, state = prepare_run(task, "float32")
    unequal = make_task("arrays", metrics=lambda params, state, batch: {"mean": batch["y"].mean()})
    assert run(unequal).metrics["mean"] == pytest.approx(float(test["y"].mean()), abs=1e-6)  # of 16, 16 and 8 rows
    assert state.params["in"].shape == (3, 8)


def test_metrics_run_in_the_precision_of_the_policy_and_evaluate_has_its_parameters() -> None:
    def metrics(params: Any, model_state: Any, batch: Any) -> dict[str, Any]:
        thousands = 0 * batch["x"][:2, :2] + 1000
        return {"product": (thousands @ thousands).max()}  # 2e6, which float16 does not have

    task = make_task("arrays", metrics=metrics, batch_norms=tuple)
    for policy in ("mixed_float16", "autocast_float16", "apex-O2"):
        assert evaluated(*prepare_run(task, policy)) == {"product": math.inf}, policy
    assert evaluated(*prepare_run(task, "float32")) == {"product": 2e6}

    def evaluate(params: Any, model_state: Any) -> dict[str, Any]:
        return {"dtype": params["in"].dtype.itemsize, "mean": model_state["mean"].sum()}

    task = make_task("arrays", metrics=None, test=None, evaluate=evaluate)
    for policy, size in (("mixed_float16", 2), ("autocast_float16", 4)):
        assert evaluated(*prepare_run(task, policy))["dtype"] == size


def test_names_of_metrics_need_not_be_text_and_there_may_be_none() -> None:
    for evaluate, metrics, headline in ((lambda *args: {3: 0.5}, {"3": 0.5}, "3"), (None, {}, None)):
        found = run(make_task("arrays", metrics=None, test=None, evaluate=evaluate), steps=1)
        assert (found.metrics, found.headline) == (metrics, headline)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("high", "'bad' must be a scalar, or a pair of a sum and a count, got a str: 'high'"),
        (np.ones(3), r"'bad' must be a scalar, .* got an array of shape \(3,\) and dtype float64"),
        ((1.0, 2.0, 3.0), r"'bad' must be a scalar, .* got a tuple"),
        (None, "'bad' must be a scalar, .* got a NoneType"),
    ],
)
def test_metrics_that_are_no_numbers_are_named(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        run(make_task("arrays", metrics=lambda *args: {"bad": value}), steps=1)


def test_what_evaluate_returns_has_to_be_numbers() -> None:
    task = make_task("arrays", metrics=None, test=None, evaluate=lambda *args: {"bad": "high"})
    with pytest.raises(TypeError, match="'bad' must be a number, got a str: 'high'"):
        run(task, steps=1)


def _changing(number: int, batch: Any) -> Callable[[int], Iterator[Any]]:
    def train(epoch: int) -> Iterator[Any]:
        for place, found in enumerate(batches(epoch)):
            yield batch(found) if (epoch, place) == (1, number) else found

    return train


def once(epoch: int, batches: Iterator[Any] = iter(list(batches(0)))) -> Iterator[Any]:  # noqa: B008
    return batches


def batches_of(batch: Any) -> dict[str, Any]:
    return {"train": lambda epoch: [batch]}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"train": _changing(2, lambda batch: {"x": batch["x"]})}, ValueError,
            r"batch 2 of train\(1\) has other arrays .*: 'x' float32 2D; the .* has 'x' float32 2D, 'y' float32 1D",
        ),
        (
            {"train": _changing(1, lambda batch: batch | {"y": batch["y"].astype(np.int32)})}, ValueError,
            r"batch 1 of train\(1\) has other arrays .*'y' int32 1D; the first batch has .*'y' float32 1D",
        ),
        ({"train": lambda epoch: iter(())}, ValueError, r"train\(0\) returned no batches"),
        ({"train": once}, ValueError, r"train\(1\) returned no batches; .* a new iterator for each"),
        ({"steps_per_epoch": 9}, ValueError, r"train\(0\) ended after 5 batches, but steps_per_epoch=9"),
        (
            {"train": lambda epoch: list(batches(epoch))[epoch:]}, ValueError,
            r"train\(1\) ended after 4 batches, but train\(0\) has 5",
        ),
        (
            batches_of({"x": ["a", "b"]}), TypeError,
            r"batch 0 of train\(0\).*'x/0' must be an array of numbers, got a str; .* with_format\('numpy'\)",
        ),
        (batches_of({"x": np.array(["a"])}), TypeError, "'x' must be an array of numbers, got an array of dtype <U1"),
        (batches_of({}), TypeError, r"batch 0 of train\(0\).* has no arrays: it is a dict"),
        (batches_of(3), TypeError, "'the batch' must be an array of numbers, got a int"),
        (
            {"train": lambda epoch: 3, "steps_per_epoch": 3}, TypeError,
            r"train\(0\) must return an iterable of batches, got a int",
        ),
        (
            {"source": "list", "init": lambda key: init(key)[0]}, TypeError,
            r"init must return \(params, model_state\), got a dict",
        ),
        (
            {"source": "list", "optimizer": lambda steps: 3}, TypeError,
            r"optimizer\(15\) must return an optax optimizer, got a int",
        ),
    ],
)  # fmt: skip
def test_what_a_jobs_functions_must_not_return(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(make_task(**changes))


def test_nan_in_the_first_batch_is_named_where_the_loss_has_it_too() -> None:
    def with_nan(field: str) -> Callable[[int], list[Any]]:
        def train(epoch: int) -> list[Any]:
            found = list(batches(epoch))
            found[0][field] = found[0][field].copy()
            found[0][field][3] = np.nan
            return found

        return train

    message = r"the loss of step 1 is nan: 'x' of batch 0 of train\(0\) has NaN in 3"
    with pytest.raises(FloatingPointError, match=message):
        run(make_task(train=with_nan("x")))

    def masked(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        known = ~jnp.isnan(batch["y"])
        return loss_fn(params, model_state, {**batch, "y": jnp.where(known, batch["y"], 0)}, rng)

    assert run(make_task(train=with_nan("y"), loss_fn=masked, epochs=1)).steps[-1].finite  # NaN for what is not known
    linear = jt.stateless(lambda params, batch: (batch["x"] * params["in"][0, 0]).sum())
    batch = {"x": np.full((4, 3), np.inf, np.float32), "y": np.ones(4)}
    with pytest.raises(FloatingPointError, match=r"'x' of batch 0 of .* has infinity in 12 of 12 values"):
        run(make_task(loss_fn=linear, **batches_of(batch)))


def test_tensors_become_arrays_without_a_copy() -> None:
    class Tensor:
        """A tensor as torch's, which NumPy reads by its `__array__`."""

        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
            return self.array

    x = np.ones((4, 2), np.float32)
    found = as_arrays([Tensor(x), (Tensor(x[0]),)], "batch 0")
    assert np.shares_memory(found[0], x)
    assert np.shares_memory(found[1][0], x)


def test_a_loss_scale_of_the_tasks_own_is_kept_and_said() -> None:
    for policy in ("mixed_float16", "apex-O2"):
        events: list[Event] = []
        optimizer = jt.with_loss_scale(optax.sgd(0.01), jt.StaticLossScale(8.0))
        found = run(make_task("arrays", optimizer=optimizer), policy, events, steps=2)
        assert {step.loss_scale for step in found.steps} == {8.0}
        [note] = [event.text for event in events if isinstance(event, Note)]
        assert note == "the task's optimizer has a loss scale of its own, which stays"


def test_a_learning_rate_scales_the_updates_relative_to_the_peak() -> None:
    plain = make_task("arrays", optimizer=optax.sgd(0.1), learning_rate=0.1)
    faster = make_task("arrays", optimizer=optax.sgd(0.2), learning_rate=0.2)
    scaled = run(plain, learning_rate=0.2, epochs=1)
    np.testing.assert_allclose(losses(scaled), losses(run(faster, epochs=1)), rtol=1e-6)
    assert scaled.epochs[-1].learning_rate == pytest.approx(0.2)
    assert math.isnan(run(make_task("arrays", optimizer=optax.sgd(0.1)), steps=1).epochs[-1].learning_rate)
    with pytest.raises(ValueError, match="learning_rate needs the task's own learning rate"):
        run(make_task("arrays", optimizer=optax.sgd(0.1)), learning_rate=0.2)


def test_numbers_that_a_task_does_not_take_are_refused() -> None:
    shared = dataclasses.replace(make_task("arrays"), shared=lambda: {"graph": np.ones(3)})
    cases: list[tuple[jt.Task, dict[str, Any], str]] = [
        (make_task(), {"batch_size": 8}, "the task's train creates its own batches"),
        (shared, {"devices": 2}, "devices=2: all batches share arrays"),
        (shared, {"accumulate_steps": 2}, "accumulate_steps=2: all batches share arrays"),
        (make_task("arrays"), {"steps": 3, "epochs": 2}, "epochs=2 and steps=3 exclude each other"),
        (make_task(), {"devices": 3}, r"batch 0 of train\(0\): 'x' has shape \(16, 3\); devices=3 must divide"),
    ]
    for task, settings, message in cases:
        with pytest.raises(ValueError, match=message), jax.numpy_dtype_promotion("standard"):
            train(task, "float32", RunSettings(**settings))
