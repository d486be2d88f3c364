"""Signals that ask a run to stop: all processes agree on a step, save it, and end."""

import ctypes
import os
import signal
import sys
from types import FrameType
from typing import Any, Self

import jax
import numpy as np

from jmp_train.distributed.background import finish_writes, tell_lost_steps

LAUNCHED = "JMP_TRAIN_LAUNCHED"  # set by `jmp-train launch` in the environment of its processes
_ACTION_BYTES = 512  # more than C's `struct sigaction` has on any platform


class StopSignals:
    """Notes SIGTERM, SIGINT and SIGHUP, so that a run can save and end; a second signal raises KeyboardInterrupt.

    Make it in the main thread, with several processes after `initialize`. If one process gets a signal, or several
    or all do, `agreed` returns True after the same step in all of them. The agreement is that of
    `jax.experimental.multihost_utils.reached_preemption_sync_point`: it costs no communication until a signal
    arrives, and then takes up to a second and the steps meanwhile.

    A signal that is ignored, such as SIGHUP under `nohup`, stays ignored. Below the launcher, which passes signals
    on, a process takes two for one: the third ends it, or the second to the launcher. As a context manager, it restores
    the former handlers on leaving.

    Example:
      >>> import os, signal
      >>> from jmp_train import distributed
      >>> with distributed.StopSignals() as stop:
      ...     before = stop.agreed()
      ...     os.kill(os.getpid(), signal.SIGTERM)
      ...     before, stop.agreed(), stop.finish()
      (False, True, 143)
    """

    def __init__(self) -> None:
        self._several = jax.process_count() > 1
        self._received: list[int] = []
        self._steps = 0
        # A batch system may signal both the launcher, which passes it on, and this process.
        self._signals_for_one_stop = 2 if LAUNCHED in os.environ else 1
        # jax's own handler of SIGTERM, which notifies its preemption service; Python cannot hold it.
        self._jax_action = _action(signal.SIGTERM) if self._several else None
        names = [name for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]  # no SIGHUP on Windows
        kinds = [getattr(signal, name) for name in names]
        self._previous: dict[int, Any] = {
            kind: signal.signal(kind, self._note) for kind in kinds if signal.getsignal(kind) != signal.SIG_IGN
        }

    def __enter__(self) -> Self:
        """Returns this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the former handlers."""
        for kind, handler in self._previous.items():
            if handler is not None:  # None: it was not Python's
                signal.signal(kind, handler)
            elif self._jax_action is not None:
                _set_action(kind, self._jax_action)

    def agreed(self) -> bool:
        """Returns True if the processes have agreed to stop after this step; all call it once after each step.

        Raises:
          RuntimeError: there are several processes, and jax's option `jax_enable_preemption_service` is off.
        """
        if not self._several:
            return bool(self._received)
        from jax.experimental import multihost_utils

        self._steps += 1
        return multihost_utils.reached_preemption_sync_point(self._steps)

    def finish(self) -> int:
        """Waits until all processes have written their checkpoints, disconnects them, and returns the exit code.

        Call it in all processes when they have agreed to stop; jax cannot be used afterwards.

        Returns:
          128 + the number of the signal, such as 143 for SIGTERM, also where another process got it. 1 if a
          checkpoint could not be written; its process prints the reason.
        """
        finish_writes()
        is_lost = tell_lost_steps()
        if self._several:
            from jax.experimental import multihost_utils

            is_lost = bool(multihost_utils.process_allgather(np.int32(is_lost)).any())
            jax.distributed.shutdown()  # otherwise process 0 might end first, and jax would abort the others
        return 1 if is_lost else 128 + next(iter(self._received), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        # When a terminal is closed, both it and its shell may send SIGHUP.
        if len(self._received) > self._signals_for_one_stop and number != getattr(signal, "SIGHUP", None):
            raise KeyboardInterrupt
        if self._jax_action is not None and len(self._received) == 1:
            _set_action(signal.SIGTERM, self._jax_action)
            signal.raise_signal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, self._note)


def _action(number: int) -> Any:
    """Returns what C does at a signal; None on Windows."""
    if sys.platform == "win32":
        return None
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    ctypes.CDLL(None).sigaction(number, None, action)
    return action


def _set_action(number: int, action: Any) -> None:
    ctypes.CDLL(None).sigaction(number, action, None)
