"""The options of a task: its fields are the one declaration of each.

The parser of the command line, the arguments that `compare` passes to its processes, and what a checkpoint says of its
run are made of these fields.
"""

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

DATA_AXIS = "data"  # the mesh axis over which a batch is sharded

_NONE_OF_ITS_OWN = "{option}={value}: task {task} has no such option, only {having} has"
_BRINGS_DATA = "task {task} brings its data: it takes no --data-dir and no --synthetic"


@dataclasses.dataclass(frozen=True)
class Option:
    """What is declared of an option beside its name, its type and its default.

    Attributes:
      reads: how the command line reads its text; `count`, `few` and `seed` are whole numbers, a `share` is above 0 and
        up to 1.
      help: what `--help` says; `{models}` stands for the models of the tasks.
      metavar: what stands for its value there; None for its name.
      values: how many values it takes, which make a tuple, "+" for one or more; None for one.
      decides: what of a run depends on it: its "data", only its "training", or nothing (None), as on where files are.
      refusal: what is said where a task that does not have it is given it, see `refuse`.
    """

    reads: Literal["flag", "path", "text", "count", "few", "seed", "share", "state_dtype", "parameters", "fp8"]
    help: str
    metavar: str | None = None
    values: int | Literal["+"] | None = None
    decides: Literal["data", "training"] | None = "training"
    refusal: str = _NONE_OF_ITS_OWN

    def refuse(self, option: str, value: object, task: str, having: str) -> ValueError:
        """Returns the error of a task that does not have the option.

        Args:
          option: its name.
          value: what it was given.
          task: the task's name.
          having: the tasks that have it.
        """
        return ValueError(self.refusal.format(option=option, value=value, task=task, having=having))


def option(*args: Any, **declared: Any) -> dict[str, Option]:
    """Returns the metadata of a dataclass' field that is an option; see `Option`."""
    return {"option": Option(*args, **declared)}


def options_of(kind: type[Any]) -> dict[str, Option]:
    """Returns the options of a dataclass by their names.

    Args:
      kind: the dataclass, all of whose fields are options.

    Example:
      >>> list(options_of(TaskOptions))[:3]
      ['devices', 'data_dir', 'synthetic']
    """
    return {field.name: field.metadata["option"] for field in dataclasses.fields(kind)}


class FolderWanted(Exception):
    """A task has files, and no folder was named; its text says which."""


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Which data a task is to load, and which of its models.

    Attributes:
      devices: over how many devices a batch is sharded, or the graph cut, for tasks where that can be.
      data_dir: the folder of its files, for tasks that have files.
      synthetic: synthetic data of the same shapes, for those tasks.
      train_size: train on that many examples only, the first; None for all.
      model: which model, for tasks that have several; None for the task's own choice.
      dataset: which data set, for tasks that have several; None for the task's own choice.
      heads: the attention heads of each layer, for tasks that let choose; None for the task's own.
      scale: the size of the synthetic data, for tasks that let choose; None for the real data's.
      image_size: the side of an image in pixels, for tasks that let choose; None for the task's own.
      text_file: the text, for tasks of text; None for the task's own.
      remat: whether the gradient recomputes what is within a block, for tasks that let choose.
      accumulate_steps: of how many parts of a batch, computed one after the other, the gradients are averaged, for
        tasks whose batches have parts.
    """

    devices: int = field(
        default=1,
        metadata=option(
            "few",
            "shard each batch over so many, or cut the graph of cora and reddit; default: 1",
            refusal="task {task} trains on a whole graph, which it does not cut: --devices is for {having}",
        ),
    )
    data_dir: Path | None = field(
        default=None,
        metadata=option("path", "where the files are", metavar="DIR", decides=None, refusal=_BRINGS_DATA),
    )
    synthetic: bool = field(
        default=False,
        metadata=option("flag", "synthetic data, same shapes", decides="data", refusal=_BRINGS_DATA),
    )
    train_size: int | None = field(
        default=None, metadata=option("count", "only the first N training examples", decides="data")
    )
    model: str | None = field(
        default=None,
        metadata=option("text", "{models}", refusal="model={value!r}: task {task} has one model only"),
    )
    dataset: str | None = field(
        default=None,
        metadata=option("text", "of planetoid: Cora, Citeseer or Pubmed; default: Cora", metavar="NAME", decides=None),
    )
    heads: tuple[int, ...] | None = field(
        default=None,
        metadata=option("count", "of each layer of reddit's GAT; default: 1 1 1", metavar="N", values=3),
    )
    scale: float | None = field(
        default=None,
        metadata=option(
            "share",
            "with --synthetic, the share of reddit's nodes and edges; default: 1",
            decides="data",
        ),
    )
    image_size: int | None = field(
        default=None,
        metadata=option(
            "count",
            "the side of vit-b16's images in pixels, a multiple of 16; default: 224",
            metavar="N",
            decides="data",
        ),
    )
    text_file: Path | None = field(
        default=None,
        metadata=option(
            "path", "the text of lm, any file; default: Python's documentation", metavar="FILE", decides=None
        ),
    )
    remat: bool = field(
        default=False,
        metadata=option("flag", "recompute lm's blocks for the gradient, which saves memory", decides=None),
    )
    accumulate_steps: int = field(
        default=1,
        metadata=option(
            "few",
            "average the gradients of so many parts of each batch, one after the other; default: 1",
            metavar="N",
            refusal="task {task} trains on a whole graph, which has no parts: --accumulate-steps is for {having}",
        ),
    )

    def folder(self, files: str, public: str = "") -> Path:
        """Returns the folder of the task's files; raises `FolderWanted` if none is named.

        Args:
          files: which folder is wanted.
          public: where the files are public.
        """
        if self.data_dir is None:
            raise FolderWanted(f"{files} (or --synthetic){public}")
        return self.data_dir

    @property
    def axis_name(self) -> str | None:
        """The mesh axis over which a model's BatchNorm is synchronized; None on one device."""
        return DATA_AXIS if self.devices > 1 else None
