"""The compiled steps of a run: one program for each of its phases, and for each size that batches have."""

import dataclasses
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from jmp_train.capsules import SkipRecorder
from jmp_train.runs.events import Compiled, Phase
from jmp_train.runs.memory import peak_memory
from jmp_train.runs.preparing import PreparedRun, RunPhase, with_shared
from jmp_train.steps import StepCosts, TrainState, step_costs
from jmp_train.types import Batch, Metrics

_Step: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class Program(NamedTuple):
    """The compiled step of a phase.

    Attributes:
      phase: what is said of it.
      step: takes over a state; of a phase that is over it is not compiled, and None.
    """

    phase: Phase
    step: Any


def compile_phases(
    prepared: PreparedRun, state: TrainState, batch: Batch, done: int, recorder: SkipRecorder | None
) -> tuple[Compiled, list[Program]]:
    """Compiles the steps of the phases that are left, and returns what that took, and the programs.

    Phases that are over are traced, too, as what they cost belongs to the report of a run that goes on.

    Args:
      prepared: the run.
      state: where it begins or goes on; all phases have its structure, shapes and dtypes.
      batch: the next one.
      done: how many steps are done.
      recorder: records the programs' skips; None for none.
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
    """Returns the step: what was compiled for this batch, for those of its size; others are compiled as they come."""
    size = _size(batch)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return (compiled if _size(batch) == size else jitted)(state, batch)

    return step


def _size(batch: Batch) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(batch)
    return structure, [x.shape for x in leaves]


def _costs_of_run(phases: Sequence[Phase]) -> StepCosts:
    """Returns the mean of the phases' shares of flops in half precision over the steps, and the most bytes."""
    steps = [phase.stop - phase.start for phase in phases]
    shares = [phase.costs.half_flops_share for phase in phases]
    return dataclasses.replace(
        max((phase.costs for phase in phases), key=lambda costs: costs.residual_bytes or 0),
        half_flops_share=sum(map(operator.mul, shares, steps)) / sum(steps),
    )


def program_at(programs: Sequence[Program], done: int) -> Program:
    """Returns the program of the next step.

    Args:
      programs: of all phases.
      done: how many steps are done, fewer than the run has.
    """
    return next(program for program in programs if done < program.phase.stop)
