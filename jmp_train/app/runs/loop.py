"""The training loop of the command line: compiled steps, then one task from its first batch to its test accuracy."""

import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jmp_train.app.runs.evaluation import evaluated
from jmp_train.app.runs.events import Compiled, Event, Note, Phase, Run, StepRecords, peak_memory
from jmp_train.app.runs.foreign_batches import examples_in
from jmp_train.app.runs.preparing import PreparedRun, RunPhase, prepare_run
from jmp_train.app.runs.resuming import SavedRun, Saver, Saving
from jmp_train.app.runs.run_settings import DEFAULT_SETTINGS, RunSettings
from jmp_train.app.runs.task_batches import DataPosition, TaskBatch, with_shared
from jmp_train.steps import StepCosts, TrainState, step_costs
from jmp_train.task import Task
from jmp_train.tools.capsules import SkipRecorder
from jmp_train.types import Batch, Metrics

_Step: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class CompiledPhase(NamedTuple):
    """The compiled step of a phase.

    Attributes:
      phase: the description of the phase.
      step: the step, which donates its state; None for a completed phase, which is not compiled.
    """

    phase: Phase
    step: Any


def compile_phases(
    prepared: PreparedRun, state: TrainState, batch: Batch, done: int, recorder: SkipRecorder | None
) -> tuple[Compiled, list[CompiledPhase]]:
    """Compiles the steps of the remaining phases, and returns the report and the programs.

    Completed phases are traced too, because the report of a resumed run includes their costs.

    Args:
      prepared: the run.
      state: the state to start from; all phases have its structure, shapes and dtypes.
      batch: the next batch.
      done: number of steps done.
      recorder: records skipped steps; None for none.
    """
    start = time.perf_counter()
    programs = [
        _compiled(phase, state, with_shared(batch, phase.shared_shapes), done, recorder) for phase in prepared.phases
    ]
    seconds = time.perf_counter() - start
    costs = _costs_of_run([program.phase for program in programs])
    return Compiled(seconds, peak_memory()[1], costs), programs


def _compiled(
    phase: RunPhase, state: TrainState, batch: Batch, done: int, recorder: SkipRecorder | None
) -> CompiledPhase:
    jitted = jax.jit(phase.step, donate_argnums=0)
    traced = jitted.trace(state, batch)
    costs = step_costs(traced, state)
    step = _of_any_size(jitted, traced.lower().compile(), batch) if phase.stop > done else None
    if step is not None and recorder is not None:
        step = recorder.watch(step)
    return CompiledPhase(Phase(phase.name, phase.start, phase.stop, costs), step)


def _of_any_size(jitted: _Step, compiled: _Step, batch: Batch) -> _Step:
    """Returns a step that runs the compiled program for batches of this size, and compiles others as they come."""
    size = _size(batch)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return (compiled if _size(batch) == size else jitted)(state, batch)

    return step


def _size(batch: Batch) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(batch)
    return structure, [x.shape for x in leaves]


def _costs_of_run(phases: Sequence[Phase]) -> StepCosts:
    """Returns the mean fraction of flops in half precision over the steps of all phases, and the largest bytes."""
    steps = [phase.stop - phase.start for phase in phases]
    shares = [phase.costs.half_flops_share for phase in phases]
    return dataclasses.replace(
        max((phase.costs for phase in phases), key=lambda costs: costs.residual_bytes or 0),
        half_flops_share=sum(map(operator.mul, shares, steps)) / sum(steps),
    )


def program_at(programs: Sequence[CompiledPhase], done: int) -> CompiledPhase:
    """Returns the program of the next step.

    Args:
      programs: the programs of all phases.
      done: number of steps done, below the length of the run.
    """
    return next(program for program in programs if done < program.phase.stop)


_OWN_SCALE = "the task's optimizer has a loss scale of its own, which stays"


def train(
    task: Task,
    name: str,
    settings: RunSettings = DEFAULT_SETTINGS,
    *,
    watch: Sequence[str] = (),
    saving: Saving | None = None,
    recorder: SkipRecorder | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Run:
    """Trains a task in one policy or AMP mode, or in several in sequence, and evaluates it in the last.

    With several devices, each batch is sharded over them by `data_parallel`, and the evaluation runs on the first of
    them. Examples that the devices share, such as a partitioned graph, are also shared in the evaluation.

    Args:
      task: the task.
      name: a policy, a mode, or a schedule of them; see `phases_named`.
      settings: the settings of the run.
      watch: see `train_step`.
      saving: where to save checkpoints, and whether to resume; None for no checkpoints.
      recorder: writes capsules of skipped steps; its creator closes it. None for none.
      on_event: called with each `Note`, with a `Compiled`, with each `Phase` of a schedule that begins or continues,
        with a `Progress` now and then, with each `Epoch` and with the `Run`.

    Returns:
      The run.

    Raises:
      ValueError: an unknown policy or mode, phases with different states or without steps, rules for a precision that
        does not autocast, a seed out of range, fewer than one epoch, a batch larger than the data or that cannot be
        sharded evenly, too few devices, batches that change or run out, or checkpoints of another run.
      TypeError: the task's functions return other types than `Task` requires.
      OSError: another run saves its checkpoints there.
      Stopped: `saving` requested a stop.
      StalledTrainingError: non-finite gradients caused every step to be skipped.
      FloatingPointError: the first batch has NaN and so has its loss; or none of the trained model's outputs for the
        test data is finite. If only some are not finite, they count as wrong.
    """
    prepared, state = prepare_run(task, name, settings, watch=watch, with_metadata=saving is not None)
    return train_prepared(prepared, state, saving=saving, recorder=recorder, on_event=on_event)


def train_prepared(
    prepared: PreparedRun,
    state: TrainState,
    *,
    saving: Saving | None = None,
    recorder: SkipRecorder | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Run:
    """Trains a prepared run; see `train`.

    Args:
      prepared: the run, with metadata if it saves.
      state: its first state, which is donated.
      saving: see `train`.
      recorder: see `train`.
      on_event: see `train`.
    """
    saver = None if saving is None else Saver(saving, prepared.length)
    saved = SavedRun(0, state, [], []) if saver is None else saver.begin(state, prepared.metadata)
    for text in [*saved.notes, *([_OWN_SCALE] if prepared.phases[-1].setup.keeps_loss_scale else [])]:
        on_event(Note(text))
    items = prepared.items(saved.done, saved.place)
    first = next(items)
    # Compiled here, so that epochs only time training.
    compiled, programs = compile_phases(prepared, saved.state, first.batch, saved.done, recorder)
    on_event(compiled)
    if saver is not None:
        saver.write_run_file()
    records = StepRecords(saved.state, prepared.length.total, saved.steps, saved.epochs, on_event, recorder)
    length = prepared.length
    is_over = length.epochs == len(saved.epochs) if length.total is None else saved.done >= length.total
    left = [] if is_over else itertools.chain([first], items)
    state = _train_steps(prepared, programs, saved.state, left, records, saver)
    run = _run_of(prepared, records, compiled, programs, first, evaluated(prepared, state))
    on_event(run)
    return run


def _train_steps(
    prepared: PreparedRun,
    programs: Sequence[CompiledPhase],
    state: TrainState,
    items: Iterable[TaskBatch],
    records: StepRecords,
    saver: Saver | None,
) -> TrainState:
    """Trains on all remaining batches, and returns the state after the last."""
    length, current = prepared.length, None
    for item in items:
        program = program_at(programs, records.count)
        if program is not current and len(programs) > 1:
            records.begin_phase(state, program.phase)
        current = program
        state, metrics = program.step(state, item.batch)
        records.after_step(state, metrics)
        if item.nans and records.count == 1:
            records.look(state)
            loss = records.steps[-1].loss
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss of step 1 is {loss}: {'; '.join(item.nans)}")
        place = item.after
        is_last = records.count == length.total or (item.ends_epoch and place.epoch + 1 == length.epochs)
        ends_epoch = item.ends_epoch or is_last
        if ends_epoch:
            records.end_epoch(state, place.epoch + 1, place.batch, functools.partial(_rate, prepared))
            place = DataPosition(place.epoch + 1)
        if saver and saver.is_due(records.count, ends_epoch=ends_epoch, is_last=is_last):
            records.look(state)
            saver.save(state, records.steps, records.epochs, place, is_last=is_last)
        if ends_epoch:
            records.begin_epoch()
    return state


def _run_of(
    prepared: PreparedRun,
    records: StepRecords,
    compiled: Compiled,
    programs: Sequence[CompiledPhase],
    first: TaskBatch,
    metrics: dict[str, float],
) -> Run:
    kind = prepared.devices[0].device_kind
    return Run(
        policy=prepared.name,
        device=kind if len(prepared.devices) == 1 else f"{len(prepared.devices)} x {kind}",
        metrics=metrics,
        compile_seconds=compiled.seconds,
        memory_of=peak_memory()[1],
        batch_size=prepared.data.batch_size or examples_in(first.batch),
        epochs=tuple(records.epochs),
        steps=tuple(records.steps),
        costs=compiled.costs,
        higher_is_better=prepared.task.higher_is_better,
        watch=records.mean_shares,
        rules=None if prepared.settings.rules is None else prepared.settings.rules.name,
        phases=tuple(program.phase for program in programs) if len(programs) > 1 else (),
    )


def _rate(prepared: PreparedRun, taken: int) -> float:
    """Returns the learning rate after a number of steps; NaN if the task does not define it."""
    return math.nan if prepared.schedule is None else float(np.asarray(prepared.schedule(taken)))
