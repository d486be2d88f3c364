"""Options that the training commands share, XLA's flags and devices."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jmp_train.cli.arguments import above_zero, few, one_of, path, positive, seed, state_dtype
from jmp_train.launch import threads_for
from jmp_train.policies.autocasting import FUSION_FLAG
from jmp_train.runs import PARAMETERS, RECIPES

DEFAULT_POLICY = "autocast_float16"


def option(
    reader: Callable[[str], Any], metavar: str | tuple[str, ...] | None = None, *, default: Any = None, **said: Any
) -> Any:
    """Returns a dataclass field for an option; see `add_options`.

    Args:
      reader: reads the value, or each of several.
      metavar: the value's name in the help; None for that of the field's type.
      default: the field's default.
      **said: "help", if it is not in the docstring.
    """
    shown = {} if metavar is None else {"metavar": metavar}
    return dataclasses.field(default=default, metadata={"type": reader, **shown, **said})


@dataclasses.dataclass(frozen=True)
class PlannedOptions:
    """Options about the devices of a run.

    Attributes:
      devices: shard each batch over N devices, or split the graph of tasks that support it; default: 1
      accumulate_steps: average the gradients of N parts of each batch, one after the other; default: 1
      train_size: use only the first N training examples, for tasks of arrays
    """

    devices: int | None = option(few)
    accumulate_steps: int | None = option(few)
    train_size: int | None = option(positive)


@dataclasses.dataclass(frozen=True)
class BatchOptions(PlannedOptions):
    """Options about the batches of a run.

    Attributes:
      epochs: passes over the training data; default: the task's
      batch_size: examples per step, for tasks of arrays; default: the task's
      seed: seed of parameters, dropout and the order of arrays; default: 0
      learning_rate: the largest learning rate; default: the task's. Unless the task has an option of that name,
        the updates are scaled
    """

    epochs: int | None = option(positive)
    batch_size: int | None = option(positive)
    seed: int | None = option(seed)
    learning_rate: float | None = option(above_zero)


@dataclasses.dataclass(frozen=True)
class SetupOptions(BatchOptions):
    """Options about the precision of a run.

    Attributes:
      growth_interval: steps without overflow before a dynamic loss scale grows; default: 2000, naive 1000
      rules: autocast by the rules in FILE; default: those of the policy or mode
      state_dtypes: store fields of the optimizer's state in few bits, such as nu=bfloat16, or mu=int8 nu=uint8
      parameters: see below.
      fp8: see below.
    """

    growth_interval: int | None = option(positive, "STEPS")
    rules: Path | None = option(path, "FILE")
    state_dtypes: tuple[str, ...] = option(state_dtype, ("FIELD=DTYPE", ""), default=())
    parameters: str | None = option(
        one_of(PARAMETERS),
        "HOW",
        help=f"how parameters in half precision keep updates below their precision: {', '.join(PARAMETERS)}",
    )
    fp8: str | None = option(
        one_of(RECIPES),
        "RECIPE",
        help=f"multiply an autocast policy's dense layers, or what --rules name, in 8 bits by {', '.join(RECIPES)}",
    )


@dataclasses.dataclass(frozen=True)
class RunOptions(SetupOptions):
    """Options about a whole run.

    Attributes:
      steps: train N steps in place of epochs
      logdir: write logs to DIR/NAME, for TensorBoard and as JSON lines
      watch: count lost updates and underflowing gradients in every step
    """

    steps: int | None = option(positive)
    logdir: Path | None = option(path, "DIR")
    watch: bool = False


def turn_ynn_fusion_off() -> None:
    """Disables a fusion in XLA that leaves bfloat16 results unwritten on CPUs (jaxlib 0.11, 0.12)."""
    flags = os.environ.get("XLA_FLAGS", "")
    if FUSION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSION_FLAG}".strip()


def provide_cpu_devices(count: int) -> None:
    """Splits a CPU into this many devices, before jax starts; accelerators stay as they are."""
    if count == 1:
        return
    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < count:
        with contextlib.suppress(RuntimeError):  # jax has started, and its devices are fixed
            jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(threads_for(count)))
