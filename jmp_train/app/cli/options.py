"""Options of the commands: dataclasses with a field per option, also for the options of tasks."""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jmp_train.app.cli.option_values import (
    above_zero,
    few,
    number,
    path,
    positive,
    schedule_of_precisions,
    seed,
    state_dtype,
)
from jmp_train.app.cli.results import WrongCall
from jmp_train.app.runs import MODE_CHOICES, PARAMETERS, RECIPES, SCHEDULE_FORM

T = TypeVar("T")
Fields: Any = dataclasses.fields  # of any options class

_KINDS = "int, float, str, bool, Path, a Literal, and tuples of them"


def add_options(parser: Any, kind: type[Any], *, without: Collection[str] = ()) -> None:
    """Adds an option to a parser for each field of a dataclass.

    A field's help is `metadata["help"]`, or its entry under Args or Attributes of the class's docstring. Its
    `metadata` may also have argparse's "metavar", "type" and "const", the value of an option without one, and
    "exclusive" if it excludes the other such fields.

    Args:
      parser: the parser of a command, or a group of it.
      kind: the dataclass.
      without: fields that are already options of the command.

    Raises:
      WrongCall: a field has an unsupported type.
    """
    try:
        helps, hints = _helps(kind), typing.get_type_hints(kind)
    except NameError as error:
        raise WrongCall(f"{kind.__name__}: {error}, in the type of a field") from error
    own = inspect.get_annotations(kind)
    # First names of policies, then the class's own fields, then those that it shares with others.
    fields = sorted(dataclasses.fields(kind), key=lambda x: ("exclusive" not in x.metadata, x.name not in own))
    exclusive = parser.add_mutually_exclusive_group() if fields and "exclusive" in fields[0].metadata else parser
    for field in fields:
        if field.name in without or not field.init:
            continue
        said, name = field.metadata, field.name
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        text = said.get("help", helps.get(name, ""))
        options = _argument(kind, name, hints[name], said.get("type"))
        if "metavar" in options:
            options["metavar"] = said.get("metavar", options["metavar"])
        if "choices" in said:
            options["choices"] = said["choices"]
        if "const" in said:
            options |= {"nargs": "?", "const": said["const"]}
        if default is True:
            name, text, options["action"] = f"no_{name}", f"{text}; default: it is so", "store_false"
        elif default is dataclasses.MISSING:
            options |= {"default": False} if "action" in options else {"required": True}
        elif default not in (None, ()) and "metavar" in options and "default:" not in text:
            text = f"{text}; default: {' '.join(map(str, default)) if isinstance(default, tuple) else default}"
        place = exclusive if "exclusive" in said else parser
        place.add_argument(flag(name), dest=field.name, help=text.replace("%", "%%"), **options)


def read_options(kind: type[T], given: Mapping[str, Any]) -> T:
    """Returns a dataclass of the options that are given; the others have their defaults.

    Args:
      kind: the dataclass.
      given: values by name; other names than those of its fields are left out.

    Raises:
      WrongCall: the dataclass refuses the values.
    """
    names = [field.name for field in Fields(kind) if field.init and field.name in given]
    try:
        return kind(**{name: tuple(x) if isinstance(x := given[name], list) else x for name in names})
    except (ValueError, TypeError) as error:
        raise WrongCall(str(error)) from error


def flag(name: str) -> str:
    """Returns the option for a field.

    Example:
      >>> flag("batch_size")
      '--batch-size'
    """
    return f"--{name.replace('_', '-')}"


def _argument(kind: type[Any], name: str, hint: Any, reader: Callable[[str], Any] | None) -> dict[str, Any]:
    """Returns argparse's arguments for a type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        [*others] = [part for part in parts if part is not types.NoneType]
        if len(others) == 1:
            return _argument(kind, name, others[0], reader)
    if hint is bool:
        return {"action": "store_true"}
    if origin is tuple and parts and len(set(parts) - {Ellipsis}) == 1:
        item = _argument(kind, name, parts[0], reader)
        if item.get("action") is None:
            return {**item, "nargs": "+" if parts[-1] is Ellipsis else len(parts)}
    if origin is typing.Literal and len({type(part) for part in parts}) == 1:
        word = _READERS.get(type(parts[0]))
        if word is not None:
            return {"type": reader or word, "choices": parts, "metavar": "{" + ",".join(map(str, parts)) + "}"}
    if hint in _READERS or reader is not None:
        return {"type": reader or _READERS[hint], "metavar": _METAVARS.get(hint)}
    raise WrongCall(
        f"{kind.__name__}.{name} cannot be an option because its type is {_shown(hint)}; supported types are {_KINDS}"
    )


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


_READERS: dict[Any, Callable[[str], Any]] = {int: _whole, float: number, str: str, Path: path}
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _helps(kind: type[Any]) -> dict[str, str]:
    """Returns the entries under Args or Attributes in the docstrings of a dataclass and its bases, by field."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        indent, name = None, ""
        for line in inspect.cleandoc(part.__dict__.get("__doc__") or "").splitlines():
            margin = len(line) - len(line.lstrip())
            if re.fullmatch(r"(Args|Arguments|Attributes):", line):
                indent = 0
            elif line and not margin:
                indent = None
            elif line and indent is not None:
                indent = indent or margin
                entry = re.fullmatch(r"(\w+)(?: \(.*\))?: (.*)", line.strip()) if margin == indent else None
                name = entry[1] if entry else name
                found[name] = entry[2] if entry else f"{found.get(name, '')} {line.strip()}"
    return {name: text.rstrip(".") for name, text in found.items()}


DEFAULT_POLICY = "autocast_float16"
SCHEDULES = f"{SCHEDULE_FORM} for a schedule; mixed_float16,0.9:float32 trains the last tenth of the steps in float32"


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


def names_option(reader: Callable[[str], str] = schedule_of_precisions, **said: Any) -> Any:
    """Returns a field for names of policies and modes; a call has one such option, which takes both.

    Args:
      reader: reads a name.
      **said: see `option`.
    """
    return option(reader, "NAME", exclusive=True, **said)


@dataclasses.dataclass(frozen=True)
class NameOptions:
    """The policy or mode of a run."""

    policy: str | None = names_option(help=f"such as float32, or a mode, or {SCHEDULES}; default: {DEFAULT_POLICY}")
    mode: str | None = names_option(help=f"{MODE_CHOICES}; or a policy")

    @property
    def name(self) -> str:
        """The policy, mode or schedule."""
        return self.policy or self.mode or DEFAULT_POLICY


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
        str,
        "HOW",
        choices=PARAMETERS,
        help=f"how parameters in half precision keep updates below their precision: {', '.join(PARAMETERS)}",
    )
    fp8: str | None = option(
        str,
        "RECIPE",
        choices=RECIPES,
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
