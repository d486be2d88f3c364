"""A run that is ready to train: its steps, its batches and its first state, on its devices."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_train.data import check_seed
from jmp_train.parallel import data_parallel
from jmp_train.runs.few_bits import DEFAULT_FEW_BITS, FewBits
from jmp_train.runs.phase_names import phase_bounds, phases_named
from jmp_train.runs.phase_setups import make_setups
from jmp_train.runs.rules_files import RulesFile
from jmp_train.runs.run_identity import run_metadata
from jmp_train.runs.setups import Setup
from jmp_train.runs.task_batches import batch_shapes, count_examples, train_batches
from jmp_train.steps import TrainState, with_fp8_state
from jmp_train.tasks import DATA_AXIS, Task
from jmp_train.types import Batch


@dataclasses.dataclass(frozen=True, eq=False)
class RunPhase:
    """Steps of a run that have the same precision.

    Attributes:
      name: of the policy or mode.
      start: how many steps are done before the first of them.
      stop: how many are done after the last.
      setup: its pieces.
      step: the train step, on all devices.
      shared_shapes: the shapes of what all batches share, as it casts it.
    """

    name: str
    start: int
    stop: int
    setup: Setup
    step: Callable[..., Any]
    shared_shapes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run before its first step, whose state is apart, as steps take it over.

    Attributes:
      task: what is trained.
      epochs: passes over the data.
      batch_size: examples a step.
      seed: of parameters, dropout and the order of the data.
      steps_per_epoch: how many steps an epoch has.
      devices: those it runs on.
      schedule: the learning rate.
      phases: one, or those of its precision schedule.
      shared: `shared(phase)` returns what all batches share, on the device, as the phase casts it; the last phase's
        is kept.
      sharding: of a batch, and of what all batches share if the graph is cut; None on one device.
      metadata: what its checkpoints say of it, see `run_metadata`; empty where it has none.
    """

    task: Task
    epochs: int
    batch_size: int
    seed: int
    steps_per_epoch: int
    devices: list[Any]
    schedule: optax.Schedule
    phases: tuple[RunPhase, ...]
    shared: Callable[[RunPhase], dict[str, Any]]
    sharding: NamedSharding | None
    metadata: dict[str, Any]

    @property
    def total(self) -> int:
        """How many steps it has."""
        return self.epochs * self.steps_per_epoch

    def phase_at(self, done: int) -> RunPhase:
        """Returns the phase of the next step; of a run that is ready the last one.

        Args:
          done: how many steps are done.
        """
        return next((phase for phase in self.phases if done < phase.stop), self.phases[-1])

    def batches(self, done: int) -> Iterator[dict[str, Any]]:
        """Yields the batches of the steps that are left, of a run that is ready the last one.

        Args:
          done: how many steps are done.
        """
        start = min(done, self.total - 1)
        examples = None if self.task.is_partitioned else self.sharding
        batches = train_batches(self.task, self.batch_size, self.seed, self.epochs, examples, start)
        if self.task.is_partitioned:
            batches = (jax.device_put(batch, self.sharding) for batch in batches)
        for phase in self.phases:
            count = phase.stop - max(start, phase.start)
            yield from (batch | self.shared(phase) for batch in islice(batches, max(count, 0)))

    def advance(self, state: TrainState, done: int, steps: int) -> tuple[TrainState, Batch]:
        """Trains some steps, and returns the state after them and the next batch; at a run's end that is the last one.

        Args:
          state: is taken over.
          done: how many steps are done.
          steps: how many to train, no more than are left.
        """
        batches = self.batches(done)
        batch = next(batches)
        compiled = functools.cache(lambda phase: jax.jit(phase.step, donate_argnums=0))
        for number in range(done, done + steps):
            state, _ = compiled(self.phase_at(number))(state, batch)
            batch = next(batches, batch)
        return state, batch


def prepare_run(
    task: Task,
    name: str,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    growth_interval: int | None = None,
    watch: Sequence[str] = (),
    rules: RulesFile | None = None,
    few_bits: FewBits = DEFAULT_FEW_BITS,
    with_metadata: bool = False,
) -> tuple[PreparedRun, TrainState]:
    """Returns a run before its first step, and its first state.

    Args:
      task: what to train.
      name: of the policy or mode, or of a schedule of them; see `phases_named`.
      epochs: see `train`.
      batch_size: see `train`.
      seed: see `train`.
      growth_interval: see `train`.
      watch: see `train_step`.
      rules: see `train`.
      few_bits: see `train`.
      with_metadata: whether it has checkpoints, which say whose they are.

    Raises:
      ValueError: see `train`.
    """
    epochs = task.epochs if epochs is None else epochs
    batch_size = task.batch_size if batch_size is None else batch_size
    steps_per_epoch = check_run(task, epochs, batch_size, seed)
    devices = _first_devices(task.devices)
    schedule = task.schedule(epochs * steps_per_epoch)
    bounds = phase_bounds(name, epochs * steps_per_epoch)
    own_rules = None if rules is None else rules.rules
    setups = make_setups(task, name, schedule, growth_interval, watch, own_rules, few_bits)

    init_key, step_key = jax.random.split(jax.random.key(seed))
    params, model_state = task.init(init_key)
    state = setups[0].create_state(params, model_state, step_key)
    shared = task.shared()
    if few_bits.has_fp8_state:
        if task.is_partitioned:
            raise ValueError(
                f"fp8={few_bits.fp8} has a state, which a graph that is cut over devices={task.devices} cannot begin "
                "with; Float8CurrentScaling has none"
            )
        batch = batch_shapes(task, batch_size) | jax.eval_shape(setups[0].cast_shared, shared)
        state = with_fp8_state(setups[0].step, state, batch)
    sharding = None
    steps: list[Callable[..., Any]] = [setup.step for setup in setups]
    if len(devices) > 1:
        mesh = Mesh(devices, (DATA_AXIS,))
        steps = [data_parallel(setup.step, mesh, DATA_AXIS) for setup in setups]
        sharding = NamedSharding(mesh, P(DATA_AXIS))
        state = jax.device_put(state, NamedSharding(mesh, P()))
    shared_sharding = sharding if task.is_partitioned else None

    def shared_shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shared_sharding)

    metadata: dict[str, Any] = {}
    if with_metadata:
        metadata = run_metadata(task, name, epochs, batch_size, seed, shared, growth_interval, rules, few_bits)
    phases = tuple(
        RunPhase(
            phase.name, start, stop, setup, step, jax.tree.map(shared_shape, jax.eval_shape(setup.cast_shared, shared))
        )
        for phase, (start, stop), setup, step in zip(phases_named(name), bounds, setups, steps, strict=True)
    )
    prepared = PreparedRun(
        task=task,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        steps_per_epoch=steps_per_epoch,
        devices=devices,
        schedule=schedule,
        phases=phases,
        shared=_placed(shared, phases, shared_sharding or jax.local_devices()[0]),
        sharding=sharding,
        metadata=metadata,
    )
    return prepared, state


def check_run(task: Task, epochs: int, batch_size: int, seed: int) -> int:
    """Returns the number of steps an epoch; raises ValueError if a number does not fit the data or the devices.

    Args:
      task: what to train.
      epochs: passes over the data.
      batch_size: examples a step.
      seed: of the run.
    """
    count = count_examples(task.train)
    if epochs < 1:
        raise ValueError(f"epochs={epochs} must be at least 1")
    if not 1 <= batch_size <= count:
        raise ValueError(f"batch_size={batch_size} must be between 1 and the {count} training examples")
    if task.devices < 1 or (batch_size % task.devices and not task.is_partitioned):
        raise ValueError(f"devices={task.devices} must divide batch_size={batch_size}")
    parts = task.options.accumulate_steps
    if parts < 1 or batch_size // task.devices % parts:
        of = "" if task.devices == 1 else f" / devices={task.devices}"
        raise ValueError(f"accumulate_steps={parts} must divide batch_size={batch_size}{of}")
    if (total := epochs * (count // batch_size)) >= 2**31:
        raise ValueError(f"epochs={epochs} makes {total} steps; they are counted up to 2**31 - 1")
    check_seed(seed)
    _first_devices(task.devices)
    return count // batch_size


def _first_devices(count: int) -> list[Any]:
    """Returns that many of this process' devices; raises ValueError if there are fewer."""
    devices = jax.local_devices()
    if len(devices) < count:
        there = f"{len(devices)} x {devices[0].device_kind}"
        raise ValueError(f"devices={count}: there is no more than {there}")
    return devices[:count]


def _placed(shared: dict[str, Any], phases: Sequence[RunPhase], where: Any) -> Callable[[RunPhase], dict[str, Any]]:
    """Returns what puts what all batches share on its device, or devices, as a phase casts it.

    It is cast on the host, so that it is there once only. Of several phases one's is there at a time.
    """

    def place(phase: RunPhase) -> dict[str, Any]:
        return jax.device_put(phase.setup.cast_shared(shared), where)

    if len(phases) > 1:
        return functools.lru_cache(maxsize=1)(place)
    placed = place(phases[0])
    return lambda phase: placed
