"""The compiled steps of a run: one program per phase, and per size of batches."""

import dataclasses
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from jmp_train.capsules import SkipRecorder
from jmp_train.runs.events import Compiled, Phase
from jmp_train.runs.preparing import PreparedRun, RunPhase, with_shared
from jmp_train.runs.step_records import peak_memory
from jmp_train.steps import StepCosts, TrainState, step_costs
from jmp_train.types import Batch, Metrics

_Step: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Program(NamedTuple):
    """The compiled step of a phase.

    Attributes:
      phase: the description of the phase.
      step: the step, which donates its state; None for a completed phase, which is not compiled.
    """

    phase: Phase
    step: Any


def compile_phases(
    prepared: PreparedRun, state: TrainState, batch: Batch, done: int, recorder: SkipRecorder | None
) -> tuple[Compiled, list[Program]]:
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


def _compiled(phase: RunPhase, state: TrainState, batch: Batch, done: int, recorder: SkipRecorder | None) -> Program:
    jitted = jax.jit(phase.step, donate_argnums=0)
    traced = jitted.trace(state, batch)
    costs = step_costs(traced, state)
    step = _of_any_size(jitted, traced.lower().compile(), batch) if phase.stop > done else None
    if step is not None and recorder is not None:
        step = recorder.watch(step)
    return Program(Phase(phase.name, phase.start, phase.stop, costs), step)


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


def program_at(programs: Sequence[Program], done: int) -> Program:
    """Returns the program of the next step.

    Args:
      programs: the programs of all phases.
      done: number of steps done, below the length of the run.
    """
    return next(program for program in programs if done < program.phase.stop)
