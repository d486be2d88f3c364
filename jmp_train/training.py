"""The training loop of the command line: one task, one policy, from data to test accuracy."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.memory import peak_memory
from jmp_train.policies.loss_scale import DynamicLossScale, LossScale, NoOpLossScale
from jmp_train.policies.loss_scaled_optimizer import with_loss_scale
from jmp_train.policies.policy import Policy, apply_policy, get_policy
from jmp_train.policies.progress import check_progress, skips_to_floor
from jmp_train.tasks.task import Arrays, Task
from jmp_train.train_state import TrainState
from jmp_train.train_step import train_step

CHECK_EVERY = 20  # steps between two looks at the skips, each of which waits for the device
PATIENCE = 20  # skips in a row at the loss scale's floor until the run is given up


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What the loop reports after an epoch.

    Attributes:
      epoch: from 1.
      loss: the mean training loss.
      learning_rate: that of the next step.
      seconds: of training, without compilation and test.
      memory_mb: peak memory so far, see `peak_memory`.
      loss_scale: that of the next step.
      skipped_steps: since the start of the run.
    """

    epoch: int
    loss: float
    learning_rate: float
    seconds: float
    memory_mb: float
    loss_scale: float
    skipped_steps: int


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: the policy's name, its test accuracy from 0 to 1, and its epochs."""

    policy: str
    test_accuracy: float
    epochs: tuple[Epoch, ...]


def loss_scale_for(policy: Policy) -> LossScale:
    """Returns the loss scale that a policy needs: a dynamic one for float16, none for the others.

    It is torch's, but never falls below 1.

    Example:
      >>> loss_scale_for(get_policy("mixed_bfloat16"))
      NoOpLossScale()
    """
    if jnp.float16 in (policy.param_dtype, policy.compute_dtype):
        return DynamicLossScale(2.0**16)
    return NoOpLossScale()


def train(
    task: Task,
    policy_name: str,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> Run:
    """Trains a task in one policy and tests it.

    Args:
      task: what to train.
      policy_name: see `get_policy`.
      epochs: passes over the data; None for the task's own number.
      batch_size: rows a step; None for the task's own number. An incomplete batch is left out.
      seed: of parameters, dropout and the order of the data.
      on_epoch: called after each epoch.

    Returns:
      The run.

    Raises:
      ValueError: an unknown policy, fewer than one epoch, or a batch larger than the data.
      StalledTrainingError: non-finite gradients made the loop skip every step.
      FloatingPointError: the trained model's output for the test data is not finite.
    """
    policy = get_policy(policy_name)
    _check_float64(policy, policy_name)
    epochs = task.epochs if epochs is None else epochs
    batch_size = task.batch_size if batch_size is None else batch_size
    steps_per_epoch = count_steps(task, epochs, batch_size)
    schedule = task.schedule(epochs * steps_per_epoch)
    loss_scale = loss_scale_for(policy)
    optimizer = with_loss_scale(task.optimizer(schedule), loss_scale)
    stop_after = skips_to_floor(loss_scale) + PATIENCE

    init_key, step_key = jax.random.split(jax.random.key(seed))
    params, model_state = task.init(init_key)
    state = TrainState.create(
        policy.cast_to_param(params), optimizer, model_state=model_state, rng=step_key
    )
    first_batch = next(_batches(task.train, batch_size, seed, epoch=0))
    step = jax.jit(train_step(task.loss_fn, optimizer, policy=policy), donate_argnums=0)
    step = step.lower(state, first_batch).compile()  # so that the first epoch times training only

    records = []
    for epoch in range(epochs):
        start = time.perf_counter()
        losses, metrics = [], {}
        for index, batch in enumerate(_batches(task.train, batch_size, seed, epoch)):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
            if index % CHECK_EVERY == CHECK_EVERY - 1:
                check_progress(state.opt_state, stop_after=stop_after)
        mean_loss = float(np.mean(jax.device_get(losses)))
        seconds = time.perf_counter() - start
        check_progress(state.opt_state, stop_after=stop_after)
        skipped = int(metrics["skipped_steps"])
        records.append(
            Epoch(
                epoch=epoch + 1,
                loss=mean_loss,
                learning_rate=float(np.asarray(schedule(int(state.step) - skipped))),
                seconds=seconds,
                memory_mb=peak_memory()[0],
                loss_scale=float(metrics["loss_scale"]),
                skipped_steps=skipped,
            )
        )
        on_epoch(records[-1])
    return Run(policy_name, _test_accuracy(task, policy, state), tuple(records))


def count_steps(task: Task, epochs: int, batch_size: int) -> int:
    """Returns the number of steps an epoch; raises ValueError if the numbers do not fit the data.

    Args:
      task: the task.
      epochs: passes over the data.
      batch_size: rows a step.
    """
    rows = _rows(task.train)
    if epochs < 1:
        raise ValueError(f"epochs={epochs} must be at least 1")
    if not 1 <= batch_size <= rows:
        raise ValueError(f"batch_size={batch_size} must lie between 1 and the {rows} training rows")
    return rows // batch_size


def _check_float64(policy: Policy, name: str) -> None:
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    if jnp.float64 in dtypes and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ValueError(f"policy {name!r} has float64, which needs JAX_ENABLE_X64=1")


def _rows(data: Arrays) -> int:
    return len(next(iter(data.values())))


def _batches(data: Arrays, batch_size: int, seed: int, epoch: int) -> Iterator[Arrays]:
    """Yields full batches in an order that depends on the seed and the epoch alone."""
    order = np.random.default_rng((seed, epoch)).permutation(_rows(data))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        rows = order[start : start + batch_size]
        yield {name: array[rows] for name, array in data.items()}


def _test_accuracy(task: Task, policy: Policy, state: TrainState) -> float:
    def predict(params: Any, inputs: Any) -> jax.Array:
        return task.predict(params, state.model_state, inputs)

    logits = np.asarray(jax.jit(apply_policy(predict, policy))(state.params, task.test))
    if not np.isfinite(logits.astype(np.float32)).all():
        raise FloatingPointError("the model's output for the test data is not finite")
    return float(np.mean(np.argmax(logits, -1) == task.test["label"]))
