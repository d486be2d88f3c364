"""What the commands that train have in common: how they fail, the task's options, XLA's flags and devices."""

import argparse
import os

import jax

from jmp_train.policies.cpu_convolutions import FUSION_FLAG
from jmp_train.tasks.task import TaskOptions


class Failure(Exception):
    """A run that did not end well; its text is the line that the user sees."""


def task_options(args: argparse.Namespace) -> TaskOptions:
    """Returns the options of the task that a command trains."""
    return TaskOptions(
        data_dir=args.data_dir,
        synthetic=args.synthetic,
        train_size=args.train_size,
        model=args.model,
        heads=None if args.heads is None else tuple(args.heads),
        scale=args.scale,
        image_size=args.image_size,
        devices=args.devices,
    )


def turn_ynn_fusion_off() -> None:
    """Keeps XLA from a fusion that leaves bfloat16 results unwritten on CPUs (jaxlib 0.11, 0.12)."""
    flags = os.environ.get("XLA_FLAGS", "")
    if FUSION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSION_FLAG}".strip()


def provide_cpu_devices(count: int) -> None:
    """Lets jax, which has not started yet, cut a CPU into that many devices; accelerators stay as they are."""
    if count == 1:
        return
    from jmp_train.launcher import threads_for

    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < count:
        jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(threads_for(count)))
