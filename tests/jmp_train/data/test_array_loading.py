"""A script that ends while it holds an iterator of batches by a global name ends without a word."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_tasks import load_task
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from refusals import assert_refused

from jmp_train.app.runs.task_batches import evaluation_batches as batches_of_test
from jmp_train.app.runs.task_batches import train_batches
from jmp_train.data.array_loading import array_batches, example_seeds
from jmp_train.task import Arrays, Task

pytestmark = pytest.mark.quick


def prepare(examples: Arrays) -> Arrays:
    return {"image": examples["image"].astype(np.float32), "label": examples["label"]}


@pytest.fixture(name="task", scope="module")
def fixture_task() -> Task:
    examples = {"image": np.arange(50, dtype=np.uint8), "label": np.arange(50, dtype=np.int32)}
    return dataclasses.replace(load_task("digits"), train=examples, test=examples, prepare=prepare)


def test_an_epoch_has_each_row_at_most_once_in_full_batches(task: Task) -> None:
    batches = list(train_batches(task, 8, seed=0, epochs=3))
    assert len(batches) == 3 * 6
    orders = []
    for epoch in range(3):
        of_epoch = batches[6 * epoch : 6 * epoch + 6]
        assert all(batch["label"].shape == (8,) for batch in of_epoch)
        orders.append(np.concatenate([np.asarray(batch["label"]) for batch in of_epoch]).tolist())
        assert len(set(orders[-1])) == 48
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert sorted(orders[0]) != orders[0]


def test_batches_are_prepared_and_on_the_device(task: Task) -> None:
    batch = next(train_batches(task, 8, seed=0, epochs=1))
    assert isinstance(batch["image"], jax.Array)
    assert batch["image"].devices() == {jax.local_devices()[0]}
    assert (batch["image"].dtype, batch["label"].dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(batch["image"], np.asarray(batch["label"], np.float32))


def test_a_step_on_an_uncommitted_state_is_compiled_once(task: Task) -> None:
    step: Any = jax.jit(lambda state, batch: state + batch["image"].sum())
    state = jnp.zeros(())
    for batch in train_batches(task, 8, seed=0, epochs=1):
        state = step(state, batch)
    assert step._cache_size() == 1


def test_the_order_depends_on_the_seed_alone(task: Task) -> None:
    def order(seed: int, epochs: int) -> list[int]:
        batches = train_batches(task, 8, seed, epochs)
        return [int(label) for batch in batches for label in np.asarray(batch["label"])]

    assert order(5, 2) == order(5, 2)
    assert order(5, 2)[:48] == order(5, 1)
    assert order(5, 1) != order(6, 1)


@pytest.mark.parametrize(("size", "counts"), [(50, [50]), (20, [20, 20, 10]), (64, [50])])
def test_the_test_data_comes_in_order_and_once(task: Task, size: int, counts: list[int]) -> None:
    batches = list(batches_of_test(task, size))
    assert [count for _, count in batches] == counts
    assert [len(batch["image"]) for batch, _ in batches] == counts
    labels = np.concatenate([batch["label"] for batch, _ in batches])
    np.testing.assert_array_equal(labels, np.arange(50))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_same_global_batches(processes: int) -> None:
    arrays = {"x": np.arange(50), "y": np.arange(50) ** 2}
    whole = list(array_batches(arrays, 8, seed=3, epochs=2))
    parts = [
        list(array_batches(arrays, 8, seed=3, epochs=2, process_index=i, process_count=processes))
        for i in range(processes)
    ]
    assert {len(part) for part in parts} == {len(whole)} == {12}
    for number, batch in enumerate(whole):
        for name in arrays:
            examples = np.concatenate([part[number][name] for part in parts])
            np.testing.assert_array_equal(examples, batch[name])


def test_batches_resume_with_another_number_of_processes() -> None:
    arrays = {"x": np.arange(50)}
    whole = [np.asarray(batch["x"]) for batch in array_batches(arrays, 8, epochs=3)]
    of_two = array_batches(arrays, 8, epochs=3, process_index=1, process_count=2)
    for _ in range(8):
        next(of_two)
    alone = array_batches(arrays, 8, epochs=3)
    alone.set_state(of_two.get_state())
    rest = [np.asarray(batch["x"]) for batch in alone]
    np.testing.assert_array_equal(rest, whole[8:])
    later = array_batches(arrays, 8, epochs=3, start=8)
    np.testing.assert_array_equal([np.asarray(batch["x"]) for batch in later], whole[8:])
    without_end = array_batches(arrays, 8, epochs=None, start=17)
    np.testing.assert_array_equal(next(without_end)["x"], whole[17])


@pytest.mark.parametrize("options", [{}, {"num_threads": 4}, {"start": 7}, {"process_index": 1, "process_count": 2}])
def test_augment_gets_a_seed_for_each_row_and_epoch(options: dict[str, Any]) -> None:
    def augment(examples: Any, seeds: np.ndarray) -> Any:
        assert seeds.dtype == np.uint64
        return {**examples, "high": (seeds >> np.uint64(32)).astype(np.uint32), "low": seeds.astype(np.uint32)}

    batches = list(array_batches({"x": np.arange(50)}, 8, seed=3, epochs=3, augment=augment, **options))
    start = options.get("start", 0)
    assert len(batches) == 18 - start
    drawn = set()
    for number, batch in enumerate(batches, start):
        for example, high, low in zip(*map(np.asarray, (batch["x"], batch["high"], batch["low"])), strict=True):
            words = np.random.SeedSequence((3, number // 6, int(example))).generate_state(2, np.uint32)
            assert (low, high) == tuple(words)
            drawn.add((low, high))
    assert len(drawn) == sum(len(batch["x"]) for batch in batches)


def test_seeds_of_examples_depend_on_the_run_the_epoch_and_the_example() -> None:
    seeds = [example_seeds(seed, epoch, np.arange(100)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(np.unique(seeds)) == 400


def test_batches_are_split_over_devices() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batch = next(array_batches({"x": np.arange(64)}, 16, sharding=sharding))
    assert batch["x"].sharding.is_equivalent_to(sharding, 1)
    assert batch["x"].addressable_shards[0].data.shape == (2,)


def test_batches_are_read_as_the_sharding_says() -> None:
    """Examples that several devices have are there once; one dimension of the spec is of examples."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    arrays = {"x": np.arange(32).reshape(16, 2)}
    plain = next(array_batches(arrays, 8))
    batch = next(array_batches(arrays, 8, sharding=sharding))
    np.testing.assert_array_equal(batch["x"], plain["x"])
    assert batch["x"].addressable_shards[0].data.shape == (2, 2)
    with pytest.raises(ValueError, match="batch_size=6 does not suit the sharding"):
        array_batches(arrays, 6, sharding=sharding)


def test_the_step_of_a_state_is_a_number_to_start_from() -> None:
    arrays = {"x": np.arange(8)}
    batches = [array_batches(arrays, batch_size=4, epochs=1, start=start) for start in (1, jnp.int32(1))]
    np.testing.assert_array_equal(*[next(each)["x"] for each in batches])


REFUSALS: dict[str, dict[str, Any]] = {
    "batch_size=51 must be between 1 and the 50 examples": {"batch_size": 51},
    "2 processes must divide": {"batch_size": 9, "process_index": 0, "process_count": 2},
    "process_index=2 must be in [0, 2)": {"process_index": 2, "process_count": 2},
    "epochs=0 must be at least 1": {"epochs": 0},
    "start=-1 must be at least 0": {"start": -1},
    "seed=-1 must be between 0 and": {"seed": -1},
    "'x' has 3, 'y/z' has 4": {"arrays": {"x": np.ones(3), "y": {"z": np.ones(4)}}},
    "the 0 examples": {"arrays": {"x": np.ones(())}},
    "TypeError: batch_size=8.0 must be an integer": {"batch_size": 8.0},
    "TypeError: seed=None must be an integer": {"seed": None},
    "TypeError: epochs='2' must be an integer": {"epochs": "2"},
    "TypeError: arrays 'x/0' must be an array [examples, ...], got float": {"arrays": {"x": [1.0, 2.0]}},
    "TypeError: sharding must be a jax.sharding.Sharding, got Mesh": {"sharding": jax.make_mesh((1,), ("data",))},
}


@pytest.mark.parametrize("error", REFUSALS)
def test_wrong_options_are_named(error: str) -> None:
    options = {"arrays": {"x": np.ones(50)}, "batch_size": 8} | REFUSALS[error]
    assert_refused({error: lambda: array_batches(**options)})


SCRIPT = """
import numpy as np
from jmp_train import graphs
from jmp_train.data import array_batches, graph_batches

first = array_batches({"x": np.arange(64.0)}, 4)  # reads ahead by one thread
next(first)
second = array_batches({"x": np.arange(64.0)}, 4, epochs=None)  # nothing was read yet
third = graph_batches(graphs.synthetic_proteins(8), batch_size=2)  # and by two threads, one behind the other
next(third)
print("done")
"""


@pytest.mark.full
def test_a_script_that_holds_iterators_ends_silently() -> None:
    result = subprocess.run((sys.executable, "-c", SCRIPT), capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")
