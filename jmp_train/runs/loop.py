"""The training loop of the command line: one task, one policy, AMP mode or schedule, from data to test accuracy."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jmp_train.capsules import SkipRecorder
from jmp_train.policies.optimizers import check_progress, loss_scale_of, skips_to_floor
from jmp_train.runs.evaluation import evaluated
from jmp_train.runs.events import Epoch, Event, Note, Progress, Run, Step, Watched
from jmp_train.runs.foreign_batches import rows_of
from jmp_train.runs.memory import peak_memory
from jmp_train.runs.preparing import PreparedRun, prepare_run
from jmp_train.runs.programs import compile_phases, program_at
from jmp_train.runs.resuming import Saved, Saver, Saving
from jmp_train.runs.run_settings import DEFAULT_SETTINGS, RunSettings
from jmp_train.runs.task_batches import Place
from jmp_train.steps import TrainState
from jmp_train.task import Task
from jmp_train.types import Metrics

LOOK_EVERY = 20  # steps between two looks at the skips, each of which waits for the device
LOOK_SECONDS = 0.5  # and the time after which a slow job is looked at all the same
PATIENCE = 20  # skips in a row at the loss scale's floor until the run is given up

_OWN_SCALE = "the task's optimizer has a loss scale of its own, which stays"
_KEPT = ("loss", "grad_norm", "loss_scale", "grads_finite")  # of the metrics of each step, and "watch"


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
    """Trains a task in one policy or AMP mode, or in several one after another, and evaluates it in the last.

    With several devices each batch is sharded over them by `data_parallel`; the evaluation runs on the first of them.
    What the devices share, such as a graph that is cut, is so in the evaluation too.

    Args:
      task: what to train.
      name: of the policy or mode, or of a schedule of them; see `phases_named`.
      settings: of the run.
      watch: see `train_step`.
      saving: where to save checkpoints, and whether to go on from the last; None for nowhere.
      recorder: writes capsules of steps that are skipped; who made it closes it. None for none.
      on_event: called with each `Note`, with a `Compiled`, of a schedule with each `Phase` that begins or goes on, with
        a `Progress` now and then, with each `Epoch` and with the `Run`.

    Returns:
      The run.

    Raises:
      ValueError: an unknown policy or mode, phases that do not have one state or have no step, rules for what does not
        autocast, a seed out of range, fewer than one epoch, a batch larger than the data or not to be sharded evenly,
        fewer devices than wanted, batches that change or run out, or checkpoints of another run.
      TypeError: the task's functions return other things than `Task` says.
      OSError: another run saves its checkpoints there.
      Stopped: `saving` said so.
      StalledTrainingError: non-finite gradients made the loop skip every step.
      FloatingPointError: the first batch has NaN and so has its loss; or none of the trained model's outputs for the
        test data is finite. Some may be otherwise, they count as wrong.
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
    """Trains a run that is prepared; see `train`.

    Args:
      prepared: the run, which has metadata if it saves.
      state: its first, which is taken over.
      saving: see `train`.
      recorder: see `train`.
      on_event: see `train`.
    """
    length = prepared.length
    saver = None if saving is None else Saver(saving, length)
    saved = Saved(0, state, [], []) if saver is None else saver.begin(state, prepared.metadata)
    for text in [*saved.notes, *([_OWN_SCALE] if prepared.phases[-1].setup.keeps_loss_scale else [])]:
        on_event(Note(text))
    done, state, steps, records = saved[:4]
    items = prepared.items(done, saved.place)
    first = next(items)
    # Here, so that epochs time training only.
    compiled, programs = compile_phases(prepared, state, first.batch, done, recorder)
    on_event(compiled)
    if saver is not None:
        saver.write_run_file()
    current = None
    loss_scale = loss_scale_of(state.opt_state)
    looks = _Looks(length.total, skips_to_floor(loss_scale) + PATIENCE, steps, on_event, recorder)
    is_over = length.epochs == len(records) if length.total is None else done >= length.total
    start = time.perf_counter()
    for item in [] if is_over else itertools.chain([first], items):
        program = program_at(programs, looks.count)
        if program is not current and len(programs) > 1:
            looks.look(state)
            on_event(program.phase)
        current = program
        state, metrics = program.step(state, item.batch)
        looks.after_step(state, metrics)
        if item.nans and looks.count == 1:
            looks.look(state)
            _check_first_loss(looks.steps[-1], item.nans)
        is_last = looks.count == length.total or (item.ends_epoch and item.after.epoch + 1 == length.epochs)
        ends_epoch, place = item.ends_epoch or is_last, item.after
        if ends_epoch:
            looks.look(state)
            seconds = time.perf_counter() - start
            rate = _rate(prepared, len(looks.steps) - looks.skipped_steps)
            records.append(_epoch(place.epoch + 1, looks, place.batch, rate, seconds))
            on_event(records[-1])
            place = Place(place.epoch + 1)
        if saver and saver.is_due(looks.count, ends_epoch=ends_epoch, is_last=is_last):
            looks.look(state)
            saver.save(state, looks.steps, records, place, is_last=is_last)
        if ends_epoch:
            start = time.perf_counter()
    kind = prepared.devices[0].device_kind
    run = Run(
        policy=prepared.name,
        device=kind if len(prepared.devices) == 1 else f"{len(prepared.devices)} x {kind}",
        metrics=evaluated(prepared, state),
        compile_seconds=compiled.seconds,
        memory_of=peak_memory()[1],
        batch_size=prepared.data.batch_size or rows_of(first.batch),
        epochs=tuple(records),
        steps=tuple(looks.steps),
        costs=compiled.costs,
        higher_is_better=prepared.task.higher_is_better,
        watch=looks.mean_shares,
        rules=None if prepared.settings.rules is None else prepared.settings.rules.name,
        phases=tuple(program.phase for program in programs) if len(programs) > 1 else (),
    )
    on_event(run)
    return run


def _check_first_loss(step: Step, nans: Sequence[str]) -> None:
    """Raises FloatingPointError if the first step's loss is not finite, nor is its batch."""
    if not math.isfinite(step.loss):
        raise FloatingPointError(f"the loss of step {step.step} is {step.loss}: {'; '.join(nans)}")


def _rate(prepared: PreparedRun, taken: int) -> float:
    """Returns the learning rate after so many steps were taken; NaN if the task does not say it."""
    return math.nan if prepared.schedule is None else float(np.asarray(prepared.schedule(taken)))


@dataclasses.dataclass
class _Looks:
    """Fetches the steps' metrics now and then, because each time waits for the device."""

    total: int | None
    stop_after: int
    steps: list[Step]  # those of before, if the run goes on
    on_event: Callable[[Event], None]
    recorder: SkipRecorder | None

    def __post_init__(self) -> None:
        self.skipped_steps = sum(not step.finite for step in self.steps)
        self._waiting: list[Metrics] = []
        self._looked = time.perf_counter()
        self._share_totals: dict[str, dict[str, float]] = {}
        self._taken = 0  # of the steps whose shares are in the totals

    @property
    def count(self) -> int:
        """How many steps are done."""
        return len(self.steps) + len(self._waiting)

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        """Takes note of a step, and looks if it is time."""
        self._waiting.append({name: metrics[name] for name in (*_KEPT, "watch") if name in metrics})
        late = time.perf_counter() - self._looked > LOOK_SECONDS
        if late or len(self._waiting) == LOOK_EVERY:
            self.look(state)

    def look(self, state: TrainState) -> None:
        """Reports the steps since the last look; raises StalledTrainingError if all are skipped."""
        recent, watched = [], []
        for metrics in jax.device_get(self._waiting):
            loss, grad_norm, loss_scale = (float(metrics[name]) for name in _KEPT[:3])
            finite = bool(metrics["grads_finite"])
            number = len(self.steps) + len(recent) + 1
            recent.append(Step(number, loss, grad_norm, loss_scale, finite))
            if "watch" in metrics:
                watched.append(Watched(number, jax.tree.map(float, metrics["watch"])))
                self._add_shares(watched[-1].shares, finite)
        if recent:
            self.steps += recent
            self.skipped_steps += sum(not step.finite for step in recent)
            self.on_event(Progress(self.total, self.skipped_steps, tuple(recent), tuple(watched)))
        check_progress(state.opt_state, stop_after=self.stop_after, recorder=self.recorder)
        self._waiting = []
        self._looked = time.perf_counter()

    @property
    def mean_shares(self) -> dict[str, dict[str, float]]:
        """The mean share of each group under each watch over the steps that were taken; 0 if none was."""
        return jax.tree.map(lambda total: total / max(self._taken, 1), self._share_totals)

    def _add_shares(self, shares: dict[str, dict[str, float]], taken: bool) -> None:
        self._taken += taken
        totals = self._share_totals or jax.tree.map(lambda share: 0.0, shares)
        self._share_totals = jax.tree.map(lambda total, share: total + share * taken, totals, shares)


def _epoch(epoch: int, looks: _Looks, steps: int, learning_rate: float, seconds: float) -> Epoch:
    losses = [step.loss for step in looks.steps[-steps:] if step.finite]
    return Epoch(
        epoch=epoch,
        loss=float(np.mean(losses)) if losses else math.nan,
        learning_rate=learning_rate,
        seconds=seconds,
        memory_mb=peak_memory()[0],
        loss_scale=looks.steps[-1].loss_scale,
        skipped_steps=looks.skipped_steps,
    )
