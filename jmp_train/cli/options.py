"""Options that the training commands share, their output folders, XLA's flags and devices."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

import jax

from jmp_train.cli.arguments import above_zero, few, one_of, path, positive, seed, state_dtype
from jmp_train.cli.errors import WrongCall
from jmp_train.launch import Output, own_output, threads_for
from jmp_train.policies.autocasting import FUSION_FLAG
from jmp_train.runs import PARAMETERS, RECIPES

DEFAULT_POLICY = "autocast_float16"


def _reads(reader: Callable[[str], Any], **said: Any) -> dict[str, Any]:
    """Returns the metadata of a field that is an option; see `add_options`."""
    return {"type": reader, **said}


@dataclasses.dataclass(frozen=True)
class PlannedOptions:
    """What commands say of the devices of a run.

    Attributes:
      devices: shard each batch over N devices, or cut the graph of tasks whose graph can be cut; default: 1
      accumulate_steps: average the gradients of N parts of each batch, one after the other; default: 1
      train_size: only the first N training examples, for tasks of arrays
    """

    devices: int | None = field(default=None, metadata=_reads(few))
    accumulate_steps: int | None = field(default=None, metadata=_reads(few))
    train_size: int | None = field(default=None, metadata=_reads(positive))


@dataclasses.dataclass(frozen=True)
class BatchOptions(PlannedOptions):
    """What commands say of the batches of a run.

    Attributes:
      epochs: passes over the training data; default: the task's
      batch_size: examples per step, for tasks of arrays; default: the task's
      seed: of parameters, dropout and the order of arrays; default: 0
      learning_rate: the largest learning rate, default: the task's; unless the task has an option of that name,
        the updates are scaled
    """

    epochs: int | None = field(default=None, metadata=_reads(positive))
    batch_size: int | None = field(default=None, metadata=_reads(positive))
    seed: int | None = field(default=None, metadata=_reads(seed))
    learning_rate: float | None = field(default=None, metadata=_reads(above_zero))


@dataclasses.dataclass(frozen=True)
class SetupOptions(BatchOptions):
    """What commands say of the precision of a run.

    Attributes:
      growth_interval: steps without overflow until a dynamic loss scale grows; default: 2000, naive 1000
      rules: autocast by the rules in FILE; default: those of the policy or mode
      state_dtypes: keep fields of the optimizer's state in few bits, such as nu=bfloat16, or mu=int8 nu=uint8
      parameters: see below.
      fp8: see below.
    """

    growth_interval: int | None = field(default=None, metadata=_reads(positive, metavar="STEPS"))
    rules: Path | None = field(default=None, metadata=_reads(path, metavar="FILE"))
    state_dtypes: tuple[str, ...] = field(default=(), metadata=_reads(state_dtype, metavar=("FIELD=DTYPE", "")))
    parameters: str | None = field(
        default=None,
        metadata=_reads(
            one_of(PARAMETERS),
            metavar="HOW",
            help=f"how parameters in half precision keep updates below their precision: {', '.join(PARAMETERS)}",
        ),
    )
    fp8: str | None = field(
        default=None,
        metadata=_reads(
            one_of(RECIPES),
            metavar="RECIPE",
            help=f"multiply an autocast policy's dense layers, or what --rules name, in 8 bits by {', '.join(RECIPES)}",
        ),
    )


@dataclasses.dataclass(frozen=True)
class RunOptions(SetupOptions):
    """What commands say of a whole run.

    Attributes:
      steps: train N steps in place of epochs
      logdir: write DIR/NAME for TensorBoard, and lines
      watch: count lost updates and vanishing gradients in every step
    """

    steps: int | None = field(default=None, metadata=_reads(positive))
    logdir: Path | None = field(default=None, metadata=_reads(path, metavar="DIR"))
    watch: bool = False


def turn_ynn_fusion_off() -> None:
    """Keeps XLA from a fusion that leaves bfloat16 results unwritten on CPUs (jaxlib 0.11, 0.12)."""
    flags = os.environ.get("XLA_FLAGS", "")
    if FUSION_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSION_FLAG}".strip()


def provide_cpu_devices(count: int) -> None:
    """Lets jax, which has not started yet, split a CPU into that many devices; accelerators stay as they are."""
    if count == 1:
        return
    given = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    if given < count:
        with contextlib.suppress(RuntimeError):  # jax has started, and has the devices that it has
            jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", str(threads_for(count)))


def check_file(option: str, file: Path) -> list[Path]:
    """Makes the folder of a file that will be written by an atomic write, and returns what `make_writable` does.

    Args:
      option: what a `WrongCall` names if the file cannot be written.
      file: the file, which may be there and is not touched.
    """
    try:
        if file.exists() and not file.is_file():
            raise WrongCall(f"{option} {file} is not a regular file")
    except OSError as error:
        raise WrongCall(f"{option} {file}: {error.strerror}") from None
    made = make_writable(option, file.parent)
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}."):  # whose name may be too long
            pass
    except OSError as error:
        remove_folders(made)
        raise WrongCall(f"{option} {file}: {error.strerror}") from None
    return made


def remove_folders(made: Iterable[Path]) -> None:
    """Removes folders that a command made and has left empty.

    Args:
      made: what `make_writable` returned.
    """
    for folder in made:
        with contextlib.suppress(OSError):  # something is in it by now
            folder.rmdir()


@contextlib.contextmanager
def output_with_folders(made: Iterable[Path], *, as_json: bool) -> Iterator[Output | None]:
    """Provides what `--json` prints on, None without it, and removes the folders that are empty in the end.

    Args:
      made: what `make_writable` or `check_file` returned.
      as_json: whether `--json` is given.
    """
    try:
        with contextlib.ExitStack() as stack:
            yield stack.enter_context(own_output()) if as_json else None
    finally:
        remove_folders(made)


def make_writable(option: str, directory: Path) -> list[Path]:
    """Makes a folder, and returns those that were not there, the inmost first.

    Args:
      option: what a `WrongCall` names if nothing can be written there.
      directory: the folder.
    """
    try:
        made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise WrongCall(f"{option} {directory}: {error.strerror}") from None
    return made
