"""The start of a command with a task: options of jax, and the import of the task's file."""

import contextlib
import os

import jax

from jmp_train.app.cli.errors import WrongCall, checking_the_call
from jmp_train.app.launch import threads_for
from jmp_train.app.tasks import TaskSource, find_task
from jmp_train.distributed import initialize
from jmp_train.policies.autocasting import FUSION_FLAG


def find_task_of(command: str, text: str, devices: int | None) -> TaskSource:
    """Returns the source of a task, after setting options of jax that must be set before a user's file may use it.

    Args:
      command: the command.
      text: see `find_task`.
      devices: the devices of the run; None for one.

    Raises:
      WrongCall: there is no such task, or the command cannot run in several processes.
      FileError: the user's file fails.
    """
    several = os.environ.get("JAX_NUM_PROCESSES", "1") != "1"
    if several and command != "train":
        raise WrongCall(f"{command} runs in one process; of the commands, only train runs in several")
    if command == "plan":
        jax.config.update("jax_platforms", "cpu")  # so that a GPU stays free for measurements
    else:
        turn_ynn_fusion_off()
        initialize() if several else provide_cpu_devices(devices or 1)
    with checking_the_call():
        return find_task(text)


def turn_ynn_fusion_off() -> None:
    """Disables a fusion in XLA that leaves bfloat16 results unwritten on CPUs (jaxlib 0.11, 0.12)."""
    flags = os.environ.get("XLA_FLAGS", "")
    if FUSION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSION_FLAG}".strip()


def provide_cpu_devices(count: int) -> None:
    """Splits a CPU into this many devices, before jax starts; accelerators are not changed."""
    if count == 1:
        return
    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < count:
        with contextlib.suppress(RuntimeError):  # jax has started, and its devices are fixed
            jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(threads_for(count)))
