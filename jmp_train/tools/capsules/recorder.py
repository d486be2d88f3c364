"""`SkipRecorder`: watches a train step from outside, and writes a capsule for each skipped step."""

import functools
import os
import warnings
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from jmp_train.policies.pytrees import check_count, check_flag, checked_path, has_tracers
from jmp_train.steps import StepFunction, TrainState, check_not_replicated
from jmp_train.tools.capsules.capsule_files import capsules_in, write_capsule
from jmp_train.tools.capsules.state_parts import Snapshot, StateParts, parts_of, snapshot
from jmp_train.types import Batch, Metrics

_MOST_PENDING = 4  # steps whose batches are held until the device reports whether they were skipped


class _Pending(NamedTuple):
    """A step whose outcome, taken or skipped, is not known yet."""

    flag: jax.Array  # whether its gradients were finite; with a skip rule, the reason of the skip
    batch: Batch
    parts: StateParts
    before: Snapshot
    after: TrainState | None  # the next state, if the recorder waits for each step


class SkipRecorder:
    """Writes a capsule for each skipped step, from which `load_capsule` rebuilds its gradients.

    A skipped step changes neither parameters nor model state. So a capsule stores the batch and, from before the step,
    the part of the state that a skip changes: random key, step number, loss scales, their counters, and the state of a
    skip rule. It stores fingerprints of parameters and model state, so that another state is refused. The compiled step
    stays unchanged.

    At most four steps wait until the device reports whether they were skipped; then the recorder waits for the oldest
    one. Each keeps a reference to its batch and small arrays on the device. So a skip is seen a few steps late. If a
    later step was taken meanwhile, the capsule only fits the state before that step, such as one from a checkpoint;
    otherwise `load_capsule` raises an error. Use `wait` or `save_state` if there is no such state. Without `wait`,
    NumPy arrays of a batch must not be overwritten in place meanwhile. `close`, or the end of a `with`, writes the
    capsules of the last steps.

    Args:
      directory: the folder of the capsules, created if needed. Each of several processes writes its own files there.
      keep: number of capsules to keep, at least 1; older ones are deleted, those of earlier runs first.
      wait: True to wait for each step. The state that the step returned then fits its capsule.
      save_state: True to store parameters and model state in a capsule, so that it fits any state of the run. It also
        waits for each step.

    Raises:
      ValueError: `keep` is below 1.
      OSError: the directory cannot be created.

    Warns:
      RuntimeWarning: a capsule could not be written; training continues.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(1024.0))
      >>> step = jt.train_step(jt.stateless(lambda w, x: (w * x).mean()), optimizer, policy="mixed_float16")
      >>> run = jax.jit(step, donate_argnums=0)
      >>> state = jt.TrainState.create(jnp.ones(2), optimizer)
      >>> with SkipRecorder(tempfile.mkdtemp()) as recorder:
      ...     watched = recorder.watch(run)
      ...     for x in (0.5, 1.0, jnp.inf):
      ...         state, metrics = watched(state, jnp.full(2, x))
      >>> recorder.last_capsule().name  # of the step before which two were made
      'step_00000002.capsule'
      >>> before, batch = jt.load_capsule(recorder.last_capsule(), state)
      >>> float(jt.get_loss_scale(before.opt_state).loss_scale), int(before.step), batch[0].item()
      (1024.0, 2, inf)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        wait: bool = False,
        save_state: bool = False,
    ) -> None:
        check_count("keep", keep)
        check_flag("wait", wait)
        check_flag("save_state", save_state)
        self.directory = checked_path("directory", directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._wait = wait or save_state
        self._save_state = save_state
        self._pending: deque[_Pending] = deque()
        self._written: list[Path] = []

    def watch(self, step: StepFunction) -> StepFunction:
        """Returns a step that records its skips. Call it in place of the given step, outside of `jax.jit`.

        Args:
          step: a compiled `(state, batch) -> (state, metrics)` of a `TrainState`: `jax.jit(step, donate_argnums=0)`,
            or the result of `data_parallel`, `sharded_step` or `pmap_step`. The optimizer has a loss scale.

        Returns:
          A function with the same arguments and results.

        Raises:
          TypeError: when called, it is traced, the state is no `TrainState`, or `metrics["grads_finite"]` is not a
            single flag.
          ValueError: when called, the optimizer has no loss scale, or the state is replicated along a first axis.
        """
        parts: dict[Any, StateParts] = {}

        @functools.wraps(step, updated=())
        def watched(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            check_not_replicated(state)
            if has_tracers((state, batch)):
                raise TypeError("a watched step is called outside of jit: recorder.watch(jax.jit(step))")
            leaves, structure = jax.tree.flatten(state)
            if structure not in parts:
                parts[structure] = parts_of(state)
            now = parts[structure]
            before = snapshot(leaves, now.changed, () if self._wait else now.kept)
            new_state, metrics = step(state, batch)
            after = new_state if self._wait else None
            self._pending.append(_Pending(_flag(metrics), batch, now, before, after))
            while self._pending and (self._wait or self._is_known() or len(self._pending) > _MOST_PENDING):
                self._finish()
            return new_state, metrics

        return watched

    def flush(self) -> None:
        """Waits for the steps so far, and writes the capsules of the skipped ones."""
        while self._pending:
            self._finish()

    def close(self) -> None:
        """Does the same as `flush`, as does the end of a `with`."""
        self.flush()

    def last_capsule(self) -> Path | None:
        """Returns the file of this recorder's newest capsule, after a `flush`; None if there is none."""
        self.flush()
        return self._written[-1] if self._written else None

    def __enter__(self) -> Self:
        """Returns the recorder."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Writes the remaining capsules."""
        self.close()

    def _is_known(self) -> bool:
        return self._pending[0].flag.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def _finish(self) -> None:
        """Waits for the oldest step, and writes its capsule if it was skipped."""
        made = self._pending.popleft()
        flag = jax.device_get(made.flag)
        if flag if flag.dtype == bool else flag == 0:  # finite gradients, or no reason to skip
            return
        try:
            with jax.transfer_guard("allow"):  # a skip may be slow
                self._write(made)
        except (OSError, TypeError, ValueError, RuntimeError) as error:
            warnings.warn(
                f"no capsule of a skipped step was written to {self.directory}: {error}", RuntimeWarning, stacklevel=3
            )

    def _write(self, made: _Pending) -> None:
        before, kept = made.before, None
        if made.after is not None:  # its parameters and model state are unchanged by the skip
            leaves = jax.tree.leaves(made.after)
            before = before._replace(fingerprints=snapshot(leaves, kept=made.parts.kept).fingerprints)
            kept = [leaves[i] for i in made.parts.kept] if self._save_state else None
        path = write_capsule(self.directory, made.batch, made.parts, before, kept, len(self._pending))
        self._written = [*(old for old in self._written if old != path), path]
        there = capsules_in(self.directory, jax.process_index(), jax.process_count())
        earlier = [old for old in there if old not in self._written]
        for old in [*earlier, *self._written][: -self._keep]:
            old.unlink(missing_ok=True)
        self._written = self._written[-self._keep :]


def _flag(metrics: Metrics) -> jax.Array:
    """Returns this process's copy of the flag of whether the step was taken, on its way to the host."""
    finite = metrics.get("grads_finite") if isinstance(metrics, dict) else None
    if not isinstance(finite, jax.Array) or finite.ndim:
        raise TypeError('metrics["grads_finite"] must be a single flag, from a step that is called once per batch')
    flag = metrics.get("skip_reason", finite)
    if not flag.is_fully_addressable:
        flag = flag.addressable_data(0)
    flag.copy_to_host_async()
    return flag
