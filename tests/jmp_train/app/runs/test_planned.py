"""Steps of tasks as shapes: those that the training loop would run."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from example_tasks import load_task
from user_jobs import make_task

from jmp_train.app.runs import train_batches
from jmp_train.app.runs.setups import planned_step, setup_of
from jmp_train.app.runs.task_batches import batch_shapes
from jmp_train.graphs import from_edges, stack

pytestmark = pytest.mark.quick

PRECISIONS = ("float32", "mixed_float16", "autocast_bfloat16", "torch", "apex-O2", "apex-O3-bfloat16", "naive")


@pytest.fixture(autouse=True)
def promotion_as_in_runs() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def shapes(tree: Any) -> list[tuple[str, tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in leaves]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", PRECISIONS)
def test_the_state_is_that_of_a_run(name: str) -> None:
    task = load_task("digits")
    step, state, batches = planned_step(task, name)
    setup = setup_of(task, name)
    created = setup.create_state(*task.init(jax.random.key(0)), jax.random.key(1))
    assert shapes(state) == shapes(created)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((state, batches(4))))
    next_state, metrics = jax.eval_shape(step, state, batches(4))
    assert shapes(next_state) == shapes(state)
    assert metrics["loss"].shape == ()


def test_batches_are_those_of_a_run_in_any_size() -> None:
    task = load_task("digits")
    _, _, batches = planned_step(task, "float32")
    for size in (1, 16, 48):
        (batch,) = itertools.islice(train_batches(task, size, seed=0, epochs=1), 1)
        assert shapes(batches(size)) == shapes(batch)
    assert {x.shape[0] for x in batches(10**6).values()} == {10**6}, "more than there are examples"


def test_a_whole_graph_stays_and_its_examples_grow() -> None:
    task = load_task("karate")
    step, state, batches = planned_step(task, "mixed_float16")
    small, large = batches(2), batches(20)
    assert set(task.shared()) < set(small)
    for name in small:
        grows = name not in task.shared()
        assert (shapes(small[name]) != shapes(large[name])) == grows
    jax.eval_shape(step, state, large)


def test_a_stack_of_graphs_does_not_grow() -> None:
    graph = from_edges([0, 1], [1, 0], 2, nodes={"h": jax.numpy.ones((2, 3))})
    batch = stack([{"graph": graph, "label": jax.numpy.ones(2)}])  # all of its first axes are 1
    task = make_task(train=lambda epoch: [batch])
    assert shapes(batch_shapes(task, None)) == shapes(batch)
    with pytest.raises(ValueError, match="batch_size=8: the arrays of a batch have no common number of examples"):
        batch_shapes(task, 8)
