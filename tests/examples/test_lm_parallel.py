"""Task `lm` in micro-batches, by FSDP and by tensor parallelism: the steps of one device on the whole batch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import lm
import numpy as np
import pytest
from example_tasks import load_task
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models.gpt import GPTConfig
from promotion import promoting_task

import jmp_train as jt
from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.setups import Setup, setup_of
from jmp_train.task import Task

pytestmark = pytest.mark.full

CONFIG = GPTConfig(width=32, depth=1, heads=4, kv_heads=2, mlp=64)
CONTEXT, BATCH, STEPS, RATE = 128, 16, 3, 1e-2
# Of the weights' largest, for each of the steps that Adam makes of its signs; and of the loss.
TOLERANCES = {"float32": 1e-5, "mixed_bfloat16": 2e-2, "autocast_float16": 4e-3}
# As in Megatron-LM: heads and the features of a SwiGLU are sharded, and the words of the vocabulary.
TENSOR_PARALLEL = {
    "(query|key|value|gate|up)/kernel": P(None, "model"),
    "(out|down)/kernel": P("model"),
    "embedding": P("model"),
}


def mesh_of(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))


def fsdp(setup: Setup, state: jt.TrainState) -> Any:
    mesh = mesh_of(data=8)
    return jt.sharded_step(setup.step, mesh, shardings=jt.fsdp_shardings(state, mesh, min_size=64))


def tensor_parallel(setup: Setup, state: jt.TrainState) -> Any:
    mesh = mesh_of(data=4, model=2)
    specs = jt.parallel.specs_by_path(state.params, TENSOR_PARALLEL)
    return jt.sharded_step(setup.step, mesh, shardings=jt.parallel.state_shardings(state, mesh, params=specs))


def data_parallel(setup: Setup, state: jt.TrainState) -> Any:
    del state
    return jt.data_parallel(setup.step, mesh_of(data=8))


def one_device(setup: Setup, state: jt.TrainState) -> Any:
    del state
    return jax.jit(setup.step)


def task_of() -> Task:
    """Returns the task with a small model, on windows from the beginning of the text."""
    task = load_task("lm")
    parts = {name: functools.partial(getattr(lm, name), config=CONFIG) for name in ("init", "loss_fn")}
    cut = lm.windows(lm.documentation(), CONTEXT)
    return promoting_task(dataclasses.replace(task, **parts, train=cut, batch_size=BATCH))


def losses_and_params(way: Callable[..., Any], policy: str, accumulate_steps: int = 1) -> tuple[np.ndarray, list[Any]]:
    """Returns the losses of the first steps, and the parameters after them."""
    task = task_of()
    setup = setup_of(task, policy, RunSettings(accumulate_steps=accumulate_steps))
    state = setup.create_state(*task.init(jax.random.key(0)), jax.random.key(1))
    step, losses = way(setup, state), []
    for number in range(STEPS):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        batch = task.prepare({name: x[rows] for name, x in task.train.items()})
        state, metrics = step(state, batch)
        assert bool(metrics["grads_finite"])
        losses.append(float(metrics["loss"]))
    return np.array(losses), [np.asarray(x, np.float64) for x in jax.tree.leaves(state.params)]


@functools.cache
def alone(policy: str) -> tuple[np.ndarray, list[Any]]:
    return losses_and_params(one_device, policy)


def assert_the_steps_of_one_device(found: tuple[np.ndarray, list[Any]], policy: str) -> None:
    losses, params = alone(policy)
    tolerance = TOLERANCES[policy]
    np.testing.assert_allclose(found[0], losses, rtol=tolerance)
    for x, wanted in zip(found[1], params, strict=True):
        # Where a gradient is near 0, rounding decides on its sign, and Adam on a whole step.
        difference = np.sqrt(np.mean((x - wanted) ** 2))
        assert difference <= tolerance * STEPS * RATE + 10 * tolerance * np.sqrt(np.mean(wanted**2))


@pytest.mark.parametrize("policy", TOLERANCES)
@pytest.mark.parametrize("way", [data_parallel, fsdp, tensor_parallel])
def test_sharded_steps_are_those_of_one_device(way: Callable[..., Any], policy: str) -> None:
    assert_the_steps_of_one_device(losses_and_params(way, policy), policy)


@pytest.mark.parametrize(("way", "policy"), [(one_device, "float32"), (data_parallel, "autocast_float16")])
def test_parts_of_a_batch_make_the_steps_of_the_whole(way: Callable[..., Any], policy: str) -> None:
    assert_the_steps_of_one_device(losses_and_params(way, policy, accumulate_steps=2), policy)


@pytest.mark.parametrize("way", [fsdp, tensor_parallel])
def test_a_device_holds_its_part_of_the_weights_alone(way: Callable[..., Any]) -> None:
    task = task_of()
    setup = setup_of(task, "mixed_float16")
    state = setup.create_state(*task.init(jax.random.key(0)), jax.random.key(1))
    batch = task.prepare({name: x[:BATCH] for name, x in task.train.items()})
    after, _ = way(setup, state)(state, batch)
    kernels = [x for x in jax.tree.leaves((after.params, after.opt_state)) if x.ndim == 2]
    parts = {x.size // x.addressable_shards[0].data.size for x in kernels}
    assert parts == ({8} if way is fsdp else {2})
