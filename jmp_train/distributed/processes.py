"""Several processes that train as one: how they start, agree before the first step, and share a state.

    jt.distributed.initialize()                             # no effect with one process
    jt.distributed.check_agreement(batch=batch, policy=policy, seed=seed)
    state = jt.distributed.broadcast_state(state, mesh)

There is no recovery inside a process: when one dies, the others end too, and their launcher starts
them again.

A signal may ask a run to stop: all processes agree on a step, save it, and end.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Self

import jax
import numpy as np

from jmp_train.distributed.background import finish_writes, tell_lost_steps

# Environment variables by which launchers tell each process the number of processes.
_LAUNCHERS = {
    "SLURM_NTASKS": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "an MPI launcher",
    "WORLD_SIZE": "a launcher of torch's kind",
    "MEGASCALE_NUM_SLICES": "a TPU pod of several slices",
}
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")  # of Google's Kubernetes: a slice's, comma-separated
_INDEXED_JOB = "JOB_COMPLETION_INDEX"  # of Kubernetes, which does not give the number of processes
_SHUTDOWN_MARGIN = 15  # further seconds that jax waits before it aborts all processes, in many lines
_READ_SECONDS = 0.5  # time for a launcher to print the reason before the other processes report the loss


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 100,
    shutdown_timeout: int = 300,
    collective_timeout: int | None = None,
) -> None:
    """Joins this process with the others of a training run; call it before any other use of jax.

    It needs no arguments if the launcher sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, as this
    package's does, nor under Slurm, Open MPI 4, Kubernetes' indexed jobs and Google's Kubernetes with TPUs, which jax
    detects. Otherwise pass the first three arguments. Without either, this process runs alone and nothing happens.

    A process that ends with an uncaught exception leaves at once, so that the others notice. By itself, jax would
    make it wait for them until `shutdown_timeout`, as it does after `sys.exit(1)`. A process that ends well while
    others still train waits for that time, reports it, and exits with code 1.

    Args:
      coordinator_address: "host:port" on which process 0 listens and which all can reach.
      num_processes: number of processes; 1 for no others, regardless of the environment.
      process_id: index of this process, from 0.
      local_device_ids: this process's GPUs on this machine; None for all, or under Slurm and Open
        MPI for the one of its local rank.
      initialization_timeout: seconds that the processes wait for each other at the start before they abort.
      heartbeat_timeout: seconds without a heartbeat after which a process counts as dead.
      shutdown_timeout: seconds that a finished process waits for the others.
      collective_timeout: seconds that a reduction waits for a slow process before the waiting processes raise an error
        (on GPUs abort). None waits without end.

    Raises:
      ValueError: a number is out of range, or there are several processes and jax cannot find their coordinator.
      RuntimeError: jax was used before, or this is the second call.

    Warns:
      UserWarning: this process has TPUs, and its environment does not show whether others share them. A machine of a
        TPU pod on Compute Engine only learns this from a server, which `jax.distributed.initialize()` asks.

    Example:
      >>> from jmp_train import distributed
      >>> distributed.initialize(num_processes=1)  # as for a script that runs alone
      >>> distributed.is_main_process()
      True
    """
    timeouts = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout": heartbeat_timeout,
        "shutdown_timeout": shutdown_timeout,
    }
    for name, seconds in {**timeouts, "collective_timeout": collective_timeout}.items():
        if seconds is not None and (not isinstance(seconds, int) or seconds < 1):
            raise ValueError(f"{name}={seconds!r} must be a whole number of seconds, at least 1")
    given = {
        "coordinator_address": coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _number("JAX_NUM_PROCESSES") if num_processes is None else num_processes,
        "process_id": _number("JAX_PROCESS_ID") if process_id is None else process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    started_by = _launcher()
    if given["num_processes"] == 1:
        return
    if len(missing) == len(given) and started_by is None:
        _warn_of_pod()
        return
    if collective_timeout is not None:
        _limit_collectives(collective_timeout)
    timer = threading.Timer(initialization_timeout, _report_lonely, [given, initialization_timeout])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            **given,
            local_device_ids=local_device_ids,
            cluster_detection_method=None if missing else "deactivate",
            initialization_timeout=initialization_timeout,
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=shutdown_timeout + _SHUTDOWN_MARGIN,
        )
    except ValueError as error:
        if not missing:
            raise
        raise ValueError(
            f"{started_by or 'the arguments'} set up several processes, but jax does not know where they "
            f"connect; also pass {', '.join(missing)} to initialize, or num_processes=1 if this process trains "
            "alone"
        ) from error
    finally:
        timer.cancel()
    leaving = threading.Event()
    threading.Thread(target=_limit_shutdown, args=(leaving, shutdown_timeout, given["process_id"]), daemon=True).start()
    atexit.register(_leave, leaving)  # runs before jax's own, which was registered earlier


def is_main_process() -> bool:
    """Returns whether this is process 0, the one that prints and writes.

    Example:
      >>> from jmp_train import distributed
      >>> distributed.is_main_process()  # a script that runs alone
      True
    """
    return jax.process_index() == 0


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(f"the environment variable {variable}={text!r} must be a whole number")
    return int(text)


def _limit_collectives(seconds: int) -> None:
    """Sets how long reductions wait for a slow process; jax reads it when it starts its devices."""
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_cpu_collective_timeout_seconds={seconds}",
        f"--xla_gpu_nccl_termination_timeout_seconds={seconds}",
    ]
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()


def _report_lonely(given: dict[str, Any], seconds: int) -> None:
    """Announces that jax is about to abort the process, which jax does without a reason."""
    print(
        f"process {given['process_id']} of {given['num_processes']} did not connect to the others at "
        f"{given['coordinator_address']} within initialization_timeout={seconds} s",
        file=sys.stderr,
        flush=True,
    )


def _launcher() -> str | None:
    """Returns the environment variable that shows that this process is not the only one; None if there is none."""
    for variable, launcher in _LAUNCHERS.items():
        if (_number(variable) or 1) > 1:
            return f"{launcher} ({variable}={os.environ[variable]})"
    for variable in _TPU_HOSTS:
        if "," in (hosts := os.environ.get(variable, "")):
            return f"a TPU pod ({variable}={hosts})"
    index = os.environ.get(_INDEXED_JOB)
    return None if index is None else f"Kubernetes ({_INDEXED_JOB}={index})"


def _warn_of_pod() -> None:
    """Warns if this process may belong to a TPU pod that its environment does not describe."""
    platforms: str | None = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    has_tpus = (platforms or "").startswith("tpu")  # jax sets it if it finds TPUs and their library
    if has_tpus and not any(variable in os.environ for variable in _TPU_HOSTS):
        warnings.warn(
            "this process has TPUs and trains alone. In a TPU pod, call jax.distributed.initialize() instead of "
            "jmp_train's; otherwise, call initialize(num_processes=1) to turn off this warning",
            stacklevel=3,
        )


def _leave(leaving: threading.Event) -> None:
    """Ends the process after an uncaught exception, without waiting for other processes that wait for this one."""
    if getattr(sys, "last_value", None) is not None:
        end_at_once(1)
    leaving.set()


def _limit_shutdown(leaving: threading.Event, seconds: int, process: int | None) -> None:
    """Ends the process if it still waits for others this many seconds after it began to leave."""
    leaving.wait()
    time.sleep(seconds)
    if not jax.distributed.is_initialized():  # all processes have met, so something else keeps this one
        return
    print(
        f"{'this process' if process is None else f'process {process}'} has ended its script, but others have "
        f"not within shutdown_timeout={seconds} s; check that all run the same number of steps",
        file=sys.stderr,
        flush=True,
    )
    time.sleep(_READ_SECONDS)
    end_at_once(1)


def end_at_once(code: int) -> NoReturn:
    """Ends this process without waiting for others, after its checkpoints are written.

    Args:
      code: its exit code.
    """
    finish_writes()
    tell_lost_steps()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed
            stream.flush()
    os._exit(code)


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
