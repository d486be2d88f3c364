"""What the commands that train have in common: the task's options, folders to write to, XLA's flags and devices."""

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

import jax

from jmp_train.command_errors import WrongCall
from jmp_train.policies.cpu_convolutions import FUSION_FLAG
from jmp_train.tasks.task import TaskOptions


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
        with contextlib.suppress(RuntimeError):  # jax has started, and has the devices that it has
            jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(threads_for(count)))


def make_writable(option: str, directory: Path) -> None:
    """Makes a folder; raises a `WrongCall` that names the option if nothing can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise WrongCall(f"{option} {directory}: {error.strerror}") from None
