"""Options that the training commands share, their output folders, XLA's flags and devices."""

import argparse
import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar

import jax

from jmp_train.cli.arguments import READERS
from jmp_train.cli.errors import WrongCall
from jmp_train.launch import Output, own_output, threads_for
from jmp_train.policies.autocasting import FUSION_FLAG
from jmp_train.runs import PARAMETERS, RECIPES
from jmp_train.tasks import TaskOptions, model_choices, option, options_of

T = TypeVar("T")

DEFAULT_POLICY = "autocast_float16"


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """What a command says of the batches of a run, beside the task's options.

    Attributes:
      epochs: passes over the data; None for the task's own number.
      batch_size: examples a step; None for the task's own number.
      seed: of parameters, dropout and the order of the data.
    """

    epochs: int | None = field(default=None, metadata=option("count", "default: the task's"))
    batch_size: int | None = field(default=None, metadata=option("count", "default: the task's"))
    seed: int = field(default=0, metadata=option("seed", "default: 0"))


@dataclasses.dataclass(frozen=True)
class SetupOptions(BatchOptions):
    """What a command says of a run before its first step, beside the task's options and the precision.

    Attributes:
      growth_interval: steps without overflow after which a dynamic loss scale grows; None for the policy's own.
      rules: the file of the rules by which policies and modes autocast; None for their own.
      state_dtypes: see `FewBits`, as are the two below.
      parameters: for the policies whose parameters are in half precision.
      fp8: for the policies that autocast.
    """

    growth_interval: int | None = field(
        default=None,
        metadata=option(
            "count",
            "steps without overflow until a dynamic loss scale grows; default: 2000, naive 1000",
            metavar="STEPS",
        ),
    )
    rules: Path | None = field(
        default=None,
        metadata=option("path", "autocast by the rules in FILE; default: those of the policy or mode", metavar="FILE"),
    )
    state_dtypes: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "state_dtype",
            "keep fields of the optimizer's state in few bits, such as nu=bfloat16, or mu=int8 nu=uint8",
            metavar=("FIELD=DTYPE", ""),
            values="+",
        ),
    )
    parameters: str | None = field(
        default=None,
        metadata=option(
            "parameters",
            f"how parameters in half keep updates below their precision: {', '.join(PARAMETERS)}",
            metavar="HOW",
        ),
    )
    fp8: str | None = field(
        default=None,
        metadata=option(
            "fp8",
            f"multiply an autocast policy's dense layers, or what --rules name, in 8 bits by {', '.join(RECIPES)}",
            metavar="RECIPE",
        ),
    )


@dataclasses.dataclass(frozen=True)
class RunOptions(SetupOptions):
    """What a command says of each run, beside the task's options and the precision.

    Attributes:
      logdir: the folder of the runs' logs; None for none.
      watch: whether to count lost updates and vanishing gradients in every step.
    """

    logdir: Path | None = field(
        default=None,
        metadata=option("path", "write DIR/NAME for TensorBoard, and lines", metavar="DIR"),
    )
    watch: bool = field(
        default=False, metadata=option("flag", "count lost updates and vanishing gradients in every step")
    )


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """Adds the options that a dataclass declares to a parser.

    Args:
      parser: of a command.
      kind: the dataclass, `TaskOptions` or `RunOptions`.
    """
    for name, declared in options_of(kind).items():
        text = declared.help.format(models=model_choices())
        if declared.reads == "flag":
            parser.add_argument(_flag(name), action="store_true", help=text)
            continue
        parser.add_argument(
            _flag(name),
            type=READERS[declared.reads],
            default=getattr(kind, name),
            nargs=declared.values,
            metavar=declared.metavar,
            help=text,
        )


def read_options(kind: type[T], args: argparse.Namespace) -> T:
    """Returns the options that a call has, of those that `add_options` added.

    Args:
      kind: the dataclass.
      args: what the parser read.
    """
    values = {name: getattr(args, name) for name in options_of(kind)}
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})


def as_arguments(options: TaskOptions | RunOptions) -> list[str]:
    """Returns the arguments from which a parser reads these options, without those that are as by default.

    Args:
      options: a `TaskOptions` or a `RunOptions`.

    Example:
      >>> from jmp_train.tasks import TaskOptions
      >>> as_arguments(TaskOptions(synthetic=True, heads=(2, 1, 2), scale=0.5))
      ['--synthetic', '--heads', '2', '1', '2', '--scale=0.5']
    """
    arguments = []
    for name in options_of(type(options)):
        value = getattr(options, name)
        if value == getattr(type(options), name):
            continue
        if isinstance(value, tuple):
            arguments += [_flag(name), *map(str, value)]
        else:
            # A value may begin with a dash.
            arguments.append(_flag(name) if value is True else f"{_flag(name)}={value}")
    return arguments


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
