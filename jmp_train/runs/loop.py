"""The training loop of the command line: one task, one policy, AMP mode or schedule, from data to test accuracy."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmp_train.capsules import SkipRecorder
from jmp_train.policies.optimizers import check_progress, skips_to_floor
from jmp_train.runs.events import Epoch, Event, Progress, Run, Step, Watched
from jmp_train.runs.few_bits import DEFAULT_FEW_BITS, FewBits
from jmp_train.runs.memory import peak_memory
from jmp_train.runs.preparing import PreparedRun, check_run, prepare_run
from jmp_train.runs.programs import compile_phases, program_at
from jmp_train.runs.resuming import Saver, Saving
from jmp_train.runs.rules_files import RulesFile
from jmp_train.runs.task_batches import evaluation_batches
from jmp_train.runs.watched_shares import ShareTotals
from jmp_train.steps import TrainState
from jmp_train.tasks import Task
from jmp_train.types import Metrics

LOOK_EVERY = 20  # steps between two looks at the skips, each of which waits for the device
LOOK_SECONDS = 0.5  # and the time after which a slow job is looked at all the same
PATIENCE = 20  # skips in a row at the loss scale's floor until the run is given up

Predict = Callable[[Any, Any, Any], jax.Array]

_KEPT = ("loss", "grad_norm", "loss_scale", "grads_finite")  # of the metrics of each step, and "watch"


def train(
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
    saving: Saving | None = None,
    recorder: SkipRecorder | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Run:
    """Trains a task in one policy or AMP mode, or in several one after another, and evaluates it in the last.

    With `task.devices` above 1 each batch is sharded over that many local devices, by `data_parallel`; the evaluation
    runs on the first of them. A graph that is cut over the devices is so in the evaluation too.

    Args:
      task: what to train.
      name: of the policy or mode, or of a schedule of them; see `phases_named`.
      epochs: passes over the data; None for the task's own number.
      batch_size: examples a step; None for the task's own number. An incomplete batch is left out.
      seed: of parameters, dropout and the order of the data; below 2**32.
      growth_interval: steps without overflow after which a dynamic loss scale grows; None for the policy's own.
        Those that have none, such as float32, take no notice.
      watch: see `train_step`.
      rules: by which the policy or mode autocasts, in place of its own; None for these.
      few_bits: what is kept and computed in few bits, of which a policy or mode takes what it can have.
      saving: where to save checkpoints, and whether to go on from the last; None for nowhere.
      recorder: writes capsules of steps that are skipped; who made it closes it. None for none.
      on_event: called with a `Compiled`, of a schedule with each `Phase` that begins or goes on, with a `Progress` now
        and then, with each `Epoch` and with the `Run`.

    Returns:
      The run.

    Raises:
      ValueError: an unknown policy or mode, phases that do not have one state or have no step, rules for what does not
        autocast, a seed out of range, fewer than one epoch, a batch larger than the data or not to be sharded evenly,
        fewer devices than the task wants, or checkpoints of another run.
      OSError: another run saves its checkpoints there.
      Stopped: `saving` said so.
      StalledTrainingError: non-finite gradients made the loop skip every step.
      FloatingPointError: none of the trained model's outputs for the test data is finite; some may be otherwise,
        they count as wrong.
    """
    epochs = task.epochs if epochs is None else epochs
    batch_size = task.batch_size if batch_size is None else batch_size
    steps_per_epoch = check_run(task, epochs, batch_size, seed)
    total = epochs * steps_per_epoch
    saver = None if saving is None else Saver(saving, total, steps_per_epoch)
    prepared, state = prepare_run(
        task,
        name,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        growth_interval=growth_interval,
        watch=watch,
        rules=rules,
        few_bits=few_bits,
        with_metadata=saver is not None,
    )
    devices, last = prepared.devices, prepared.phases[-1]
    done, steps, records = 0, [], []
    if saver:
        done, state, steps, records = saver.begin(state, prepared.metadata)
    batches = prepared.batches(done)
    first_batch = next(batches)
    compiled, programs = compile_phases(prepared, state, first_batch, done)  # so that epochs time training only
    on_event(compiled)

    batches = itertools.chain([first_batch], batches)
    if recorder is not None:
        programs = [program.watched_by(recorder) for program in programs]
    current = None
    looks = _Looks(total, skips_to_floor(last.setup.loss_scale) + PATIENCE, steps, on_event, recorder)
    for epoch in range(done // steps_per_epoch + 1, epochs + 1):
        start = time.perf_counter()
        for batch in itertools.islice(batches, epoch * steps_per_epoch - looks.count):
            program = program_at(programs, looks.count)
            if program is not current and len(programs) > 1:
                looks.look(state)
                on_event(program.phase)
            current = program
            state, metrics = program.step(state, batch)
            looks.after_step(state, metrics)
            if saver and looks.count % steps_per_epoch and saver.is_due(looks.count):
                looks.look(state)
                saver.save(state, looks.steps, records)
        looks.look(state)
        seconds = time.perf_counter() - start
        learning_rate = float(np.asarray(prepared.schedule(len(looks.steps) - looks.skipped_steps)))
        records.append(_epoch(epoch, looks, steps_per_epoch, learning_rate, seconds))
        on_event(records[-1])
        if saver and saver.is_due(looks.count):
            saver.save(state, looks.steps, records)
    kind = devices[0].device_kind
    tested = _test(prepared, state)
    run = Run(
        policy=name,
        device=kind if len(devices) == 1 else f"{len(devices)} x {kind}",
        test_accuracy=tested.accuracy,
        compile_seconds=compiled.seconds,
        memory_of=peak_memory()[1],
        batch_size=batch_size,
        epochs=tuple(records),
        steps=tuple(looks.steps),
        costs=compiled.costs,
        nonfinite_outputs=tested.nonfinite_outputs,
        watch=looks.shares.means(),
        rules=None if rules is None else rules.name,
        bits_per_byte=tested.bits_per_byte,
        phases=tuple(program.phase for program in programs) if len(programs) > 1 else (),
    )
    on_event(run)
    return run


class _Looks:
    """Fetches the steps' metrics now and then, because each time waits for the device."""

    def __init__(
        self,
        total: int,
        stop_after: int,
        steps: list[Step],
        on_event: Callable[[Event], None],
        recorder: SkipRecorder | None = None,
    ) -> None:
        self.total = total
        self.stop_after = stop_after
        self.on_event = on_event
        self.recorder = recorder
        self.steps = steps  # those of before, if the run goes on
        self.skipped_steps = sum(not step.finite for step in steps)
        self.shares = ShareTotals()
        self._waiting: list[Metrics] = []
        self._looked = time.perf_counter()

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
                self.shares.add(watched[-1].shares, finite)
        if recent:
            self.steps += recent
            self.skipped_steps += sum(not step.finite for step in recent)
            self.on_event(Progress(self.total, self.skipped_steps, tuple(recent), tuple(watched)))
        check_progress(state.opt_state, stop_after=self.stop_after, recorder=self.recorder)
        self._waiting = []
        self._looked = time.perf_counter()


def _epoch(epoch: int, looks: _Looks, steps_per_epoch: int, learning_rate: float, seconds: float) -> Epoch:
    losses = [step.loss for step in looks.steps[-steps_per_epoch:] if step.finite]
    return Epoch(
        epoch=epoch,
        loss=float(np.mean(losses)) if losses else math.nan,
        learning_rate=learning_rate,
        seconds=seconds,
        memory_mb=peak_memory()[0],
        loss_scale=looks.steps[-1].loss_scale,
        skipped_steps=looks.skipped_steps,
    )


class _Tested(NamedTuple):
    """What the evaluation found; see `Run`."""

    accuracy: float
    nonfinite_outputs: int
    bits_per_byte: float | None


def _test(prepared: PreparedRun, state: TrainState) -> _Tested:
    """Evaluates the model on the test data; raises if no output is finite."""
    task, last = prepared.task, prepared.phases[-1]
    predict, shared = last.setup.predict, prepared.shared(last)
    # Off the mesh, where several devices trained: else each of them would compute the same.
    where: Any = jax.local_devices()[0]
    if task.is_partitioned and prepared.sharding is not None:
        predict, where = _on_parts(predict, prepared.sharding), NamedSharding(prepared.sharding.mesh, P())
    judge = jax.jit(partial(_judged, task=task, predict=predict))
    params, model_state = jax.device_put((state.params, state.model_state), where)
    total = correct = finite = 0
    bits = 0.0
    for batch, count in evaluation_batches(task, prepared.batch_size):
        judged = jax.device_get(judge(params, model_state, batch | shared))
        real: Any = batch["label"] >= 0 if task.is_partitioned else slice(count)
        is_finite, is_right = judged["finite"][real], judged["right"][real]
        total += is_finite.size
        finite += int(is_finite.sum())
        correct += int((is_finite & is_right).sum())
        if task.bits_per_byte:
            bits += float(judged["bits"][real][is_finite].sum(dtype=np.float64))
    if not finite:
        raise FloatingPointError("the model's output for the test data is not finite")
    return _Tested(correct / total, total - finite, bits / finite if task.bits_per_byte else None)


def _on_parts(predict: Predict, sharding: NamedSharding) -> Predict:
    """Returns what predicts the rows of a graph that is cut over a mesh, each device those of its part."""

    def of_part(params: Any, model_state: Any, batch: dict[str, Any]) -> jax.Array:
        return predict(params, model_state, {**batch, "graph": batch["graph"][0]})

    specs = (P(), P(), sharding.spec)
    return jax.shard_map(of_part, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)


def _judged(params: Any, model_state: Any, batch: dict[str, Any], task: Task, predict: Predict) -> dict[str, jax.Array]:
    """Returns of each label whether the output is finite, whether it is right, and in how many bits it is coded."""
    logits = predict(params, model_state, batch)
    label = jnp.asarray(batch["label"])
    judged = {
        "finite": jnp.isfinite(logits).all(-1),
        "right": logits.argmax(-1).astype(label.dtype) == label,
    }
    if task.bits_per_byte:
        logits = logits.astype(jnp.float32)
        judged["bits"] = optax.softmax_cross_entropy_with_integer_labels(logits, label) / np.float32(math.log(2))
    return judged
