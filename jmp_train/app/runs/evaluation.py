"""The evaluation of a trained model: a task's `evaluate`, or its `metrics` over the batches of `test`."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_train.app.runs.preparing import PreparedRun
from jmp_train.app.runs.task_batches import evaluation_batches, with_shared
from jmp_train.graphs.structure import GraphStack
from jmp_train.policies.pytrees import change_nodes
from jmp_train.steps import TrainState
from jmp_train.task import DATA_AXIS

NONFINITE = "nonfinite_outputs"  # a count that reports show as a note


def evaluated(prepared: PreparedRun, state: TrainState) -> dict[str, float]:
    """Returns the metrics of a model in the precision of the run's last phase; empty if the task has none.

    Args:
      prepared: the run.
      state: the state after the last step.

    Raises:
      TypeError: a metric is not a number.
      FloatingPointError: a metric counts outputs, and none of them is finite.
    """
    task, setup = prepared.task, prepared.phases[-1].setup
    if task.evaluate is not None:
        params, model_state = _local((state.params, state.model_state))
        found = task.evaluate(setup.cast_params(params), model_state)
        if not isinstance(found, Mapping):
            raise TypeError(f"Task: evaluate must return a dict of numbers, got a {type(found).__name__}")
        return {str(name): _number(name, value) for name, value in found.items()}
    return {} if task.metrics is None else _over_batches(prepared, state, task.metrics)


def _over_batches(prepared: PreparedRun, state: TrainState, metrics: Callable[..., Any]) -> dict[str, float]:
    names: list[str] = []

    def listed(params: Any, model_state: Any, batch: Any) -> list[Any]:
        found = metrics(params, model_state, batch)
        names[:] = _checked_names(found)  # in this order; jax would sort them
        return list(found.values())

    values_of = prepared.phases[-1].setup.forward(listed)
    where: Any = jax.local_devices()[0]
    if prepared.task.shards_shared and prepared.sharding is not None:
        values_of, where = _on_parts(values_of, prepared.sharding), NamedSharding(prepared.sharding.mesh, P())
        params, model_state = jax.device_put((state.params, state.model_state), where)
    else:  # off the mesh, where several devices trained: otherwise each of them would compute the same
        params, model_state = jax.device_put(_local((state.params, state.model_state)), where)
    run = jax.jit(values_of)
    shared = prepared.shared(prepared.phases[-1])
    totals: dict[str, _Total] = {}
    size = prepared.settings.batch_size or prepared.task.batch_size
    for batch, rows in evaluation_batches(prepared.task, size):
        values = jax.device_get(run(params, model_state, with_shared(batch, shared)))
        for name, value in zip(names, values, strict=True):
            totals.setdefault(name, _Total(name)).add(value, rows)
    if not totals:
        raise ValueError("Task: test() returned no batches")
    nonfinite, headline = totals.get(NONFINITE), next(iter(totals.values()))
    if nonfinite is not None and nonfinite.amount and nonfinite.amount >= headline.count:
        raise FloatingPointError("the model's output for the test data is not finite")
    return {name: total.value for name, total in totals.items()}


class _Total:
    """The sum of a metric over batches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.amount = 0.0
        self.count = 0.0
        self.is_count = False

    def add(self, value: Any, rows: int | None) -> None:
        """Adds a batch's value: a pair (sum, count), an integer count, or a mean over its examples."""
        if isinstance(value, tuple | list):
            amount, count = value
        elif np.issubdtype(value.dtype, np.integer) or value.dtype == bool:
            self.is_count = True
            amount, count = value, 0
        else:
            count = 1 if rows is None else rows
            amount = np.float64(value) * count
        self.amount += float(amount)
        self.count += float(count)

    @property
    def value(self) -> float:
        """The metric."""
        if self.is_count:
            return int(self.amount)
        return self.amount / self.count if self.count else math.nan


def _checked_names(found: Any) -> list[str]:
    """Returns the names of metrics; raises TypeError if one is not a scalar, or a pair of scalars."""
    if not isinstance(found, Mapping) or not found:
        raise TypeError(f"Task: metrics must return a dict of numbers, got {_described(found)}")
    for name, value in found.items():
        pair = isinstance(value, tuple | list)
        parts = list(value) if pair else [value]
        if len(parts) != 1 + pair or not all(_is_scalar(part) for part in parts):
            raise TypeError(
                f"Task: metrics: {name!r} must be a scalar, or a pair of a sum and a count, got {_described(value)}"
            )
    return [*map(str, found)]


def _is_scalar(value: Any) -> bool:
    if value is None:
        return False
    try:
        dtype = jnp.result_type(value)
    except TypeError:
        return False
    return jnp.shape(value) == () and (jnp.issubdtype(dtype, jnp.number) or dtype == bool)


def _number(name: str, value: Any) -> float:
    array = None if isinstance(value, str | bytes) else np.asarray(value)
    if array is None or array.size != 1 or (array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16"):
        raise TypeError(f"Task: evaluate: {name!r} must be a number, got {_described(value)}")
    number = array.reshape(()).astype(np.float64 if array.dtype.kind not in "biu" else array.dtype).item()
    return int(number) if array.dtype.kind in "biu" else number


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = f"a {type(value).__name__}" if shape is None else f"an array of shape {shape} and dtype {value.dtype}"
    return f"{kind}: {value!r}" if shape is None and len(repr(value)) < 60 else kind


def _local(tree: Any) -> Any:
    """Returns a replicated tree as arrays of this process."""
    return jax.tree.map(lambda x: x if getattr(x, "is_fully_addressable", True) else x.addressable_data(0), tree)


def _on_parts(values_of: Callable[..., Any], sharding: NamedSharding) -> Callable[..., Any]:
    """Returns a function that sums metrics over the devices' parts of an example, such as a partitioned graph."""

    def of_part(params: Any, model_state: Any, batch: dict[str, Any]) -> Any:
        batch = change_nodes(batch, GraphStack, operator.itemgetter(0))
        values = values_of(params, model_state, batch)
        return jax.tree.map(lambda value: jax.lax.psum(jnp.asarray(value), DATA_AXIS), values)

    return jax.shard_map(
        of_part, mesh=sharding.mesh, in_specs=(P(), P(), sharding.spec), out_specs=P(), check_vma=False
    )
