"""A run ready to train: its steps, its batches and its first state, on its devices."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_train.app.runs.precisions import is_schedule, phase_bounds, phases_named
from jmp_train.app.runs.resuming import run_metadata
from jmp_train.app.runs.run_settings import DEFAULT_SETTINGS, RunLength, RunSettings, check_run, first_devices
from jmp_train.app.runs.setups import Setup, make_setups, run_optimizer
from jmp_train.app.runs.task_batches import DataPosition, TaskBatch, TrainingData, batch_shapes, with_shared
from jmp_train.distributed import broadcast_state
from jmp_train.parallel import data_parallel
from jmp_train.steps import TrainState, with_fp8_state
from jmp_train.task import DATA_AXIS, Task
from jmp_train.types import Batch

_ENDLESS = 2**31  # end of the last phase if the batches have no length


@dataclasses.dataclass(frozen=True, eq=False)
class RunPhase:
    """Consecutive steps of a run with the same precision.

    Attributes:
      name: the policy or mode.
      start: number of steps before it.
      stop: number of steps by its end.
      setup: its setup.
      step: the train step, on all devices.
      shared_shapes: the shapes of the shared entries of all batches, as it casts them.
    """

    name: str
    start: int
    stop: int
    setup: Setup
    step: Callable[..., Any]
    shared_shapes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run before its first step. Its state is separate, because steps donate it.

    Attributes:
      task: the task.
      name: its policy or AMP mode, or a schedule of them.
      settings: its settings.
      length: its length.
      data: its training batches.
      devices: its devices.
      schedule: the learning rate; None if the task does not define it.
      phases: one, or those of its precision schedule.
      shared: `shared(phase)` returns the shared entries of all batches, on the device, as the phase casts them; the
        result for the last phase is cached.
      sharding: sharding of a batch, and of the shared entries if they are sharded; None on one device.
      metadata: its metadata in checkpoints, see `run_metadata`; empty if it saves none.
    """

    task: Task
    name: str
    settings: RunSettings
    length: RunLength
    data: TrainingData
    devices: list[Any]
    schedule: optax.Schedule | None
    phases: tuple[RunPhase, ...]
    shared: Callable[[RunPhase], dict[str, Any]]
    sharding: NamedSharding | None
    metadata: dict[str, Any]

    def phase_at(self, done: int) -> RunPhase:
        """Returns the phase of the next step; after the end of the run, the last phase.

        Args:
          done: number of steps done.
        """
        return next((phase for phase in self.phases if done < phase.stop), self.phases[-1])

    def items(self, done: int, place: DataPosition | None = None) -> Iterator[TaskBatch]:
        """Yields the batches of the remaining steps, or one of the last epoch if none remains.

        Args:
          done: number of steps done.
          place: place of the next batch; None to compute it.
        """
        steps = self.length.steps_per_epoch
        if place is None:
            place = DataPosition(*divmod(done, steps)) if steps else DataPosition()
        if place.epoch >= self.length.epochs:
            place = DataPosition(self.length.epochs - 1, (steps or 1) - 1)
        left = None if self.length.total is None else max(self.length.total - done, 1)
        items = self.data.items(place, self.length.epochs, self.sharding)
        for number, item in enumerate(islice(items, left), done):
            yield item._replace(batch=with_shared(item.batch, self.shared(self.phase_at(number))))

    def batches(self, done: int, place: DataPosition | None = None) -> Iterator[Batch]:
        """Yields the batches of the remaining steps, or the last batch after the end of the run; see `items`."""
        return (item.batch for item in self.items(done, place))

    def advance(
        self, state: TrainState, done: int, steps: int, place: DataPosition | None = None
    ) -> tuple[TrainState, Batch]:
        """Trains some steps, and returns the state after them and the next batch, or the last one at the end of a run.

        Args:
          state: the state, which is donated.
          done: number of steps done.
          steps: number of steps to train, at most those that remain.
          place: place of the next batch; None to compute it.
        """
        batches = self.batches(done, place)
        batch = next(batches)
        compiled = functools.cache(lambda phase: jax.jit(phase.step, donate_argnums=0))
        for number in range(done, done + steps):
            state, _ = compiled(self.phase_at(number))(state, batch)
            batch = next(batches, batch)
        return state, batch


def prepare_run(
    task: Task,
    name: str,
    settings: RunSettings = DEFAULT_SETTINGS,
    *,
    watch: Sequence[str] = (),
    with_metadata: bool = False,
) -> tuple[PreparedRun, TrainState]:
    """Returns a run before its first step, and its first state.

    Args:
      task: the task.
      name: a policy, a mode, or a schedule of them; see `phases_named`.
      settings: the settings of the run.
      watch: see `train_step`.
      with_metadata: True if it saves checkpoints, which need metadata.

    Raises:
      ValueError: see `train`.
    """
    data, length = check_run(task, settings)
    devices = first_devices(settings.devices)
    init_key, step_key = jax.random.split(jax.random.key(settings.seed))
    params, model_state = task.initial(init_key)
    optimizer = run_optimizer(task, params, length.total, settings)
    setups = make_setups(task, name, optimizer, settings, watch)
    state = setups[0].create_state(params, model_state, step_key)
    shared = task.shared()
    if settings.few_bits.has_fp8_state:
        state = _with_fp8_state(task, settings, setups[0], state, shared)
    mesh = Mesh(devices, (DATA_AXIS,)) if len(devices) > 1 else None
    sharding = None if mesh is None else NamedSharding(mesh, P(DATA_AXIS))
    shared_sharding = sharding if task.shards_shared else None
    phases = _phases(name, length.total, setups, mesh, shared, shared_sharding)
    prepared = PreparedRun(
        task=task,
        name=name,
        settings=settings,
        length=length,
        data=data,
        devices=devices,
        schedule=optimizer.schedule,
        phases=phases,
        shared=_placed(shared, phases, shared_sharding or jax.local_devices()[0]),
        sharding=sharding,
        metadata=run_metadata(task, name, data.batch_size, length.epochs, settings, shared) if with_metadata else {},
    )
    return prepared, state if mesh is None else _replicated(state, mesh)


def _replicated(state: TrainState, mesh: Mesh) -> TrainState:
    """Returns a replicated state; with several processes, that of process 0."""
    if jax.process_count() > 1:
        return broadcast_state(state, mesh)
    return jax.device_put(state, NamedSharding(mesh, P()))


def _phases(
    name: str,
    total: int | None,
    setups: Sequence[Setup],
    mesh: Mesh | None,
    shared: dict[str, Any],
    shared_sharding: NamedSharding | None,
) -> tuple[RunPhase, ...]:
    """Returns the phases of a run, each with its step on all devices."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shared_sharding)

    def phase(name: str, bounds: tuple[int, int], setup: Setup) -> RunPhase:
        step = setup.step if mesh is None else data_parallel(setup.step, mesh, DATA_AXIS)
        return RunPhase(name, *bounds, setup, step, jax.tree.map(shape, jax.eval_shape(setup.cast_shared, shared)))

    return tuple(phase(*one) for one in zip(*_bounds(name, total), setups, strict=True))


def _bounds(name: str, total: int | None) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the names of the phases, and for each the number of steps before it and by its end."""
    if total is not None:
        return [phase.name for phase in phases_named(name)], list(phase_bounds(name, total))
    if is_schedule(name):
        raise ValueError(
            f"{name!r}: a schedule needs the number of steps, which is unknown because the batches of train have "
            "no length; set steps_per_epoch in the task, or pass --steps"
        )
    return [name], list(pairwise((0, _ENDLESS)))


def _with_fp8_state(task: Task, settings: RunSettings, setup: Setup, state: TrainState, shared: Any) -> TrainState:
    if task.shards_shared:
        raise ValueError(
            f"fp8={settings.few_bits.fp8} has a state, which is not supported for a graph partitioned over "
            f"devices={settings.devices}; use Float8CurrentScaling"
        )
    size = settings.batch_size or task.batch_size
    batch = with_shared(batch_shapes(task, size), jax.eval_shape(setup.cast_shared, shared))
    return with_fp8_state(setup.step, state, batch)


def _placed(shared: dict[str, Any], phases: Sequence[RunPhase], where: Any) -> Callable[[RunPhase], dict[str, Any]]:
    """Returns a function that moves the shared entries of batches to the device or devices, as a phase casts them.

    They are cast on the host, so that the device holds only one copy. With several phases, it holds one phase's at a
    time.
    """

    def place(phase: RunPhase) -> dict[str, Any]:
        return jax.device_put(phase.setup.cast_shared(shared), where)

    if not shared:
        return lambda phase: {}
    if len(phases) > 1:
        return functools.lru_cache(maxsize=1)(place)
    placed = place(phases[0])
    return lambda phase: placed
