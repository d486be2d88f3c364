"""Options, a type and a learning rate schedule that several of these jobs share."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import optax

Arrays: TypeAlias = Mapping[str, Any]  # arrays [examples, ...] by name


@dataclasses.dataclass(frozen=True)
class FileOptions:
    """The location of a task's data.

    Args:
      data_dir: the folder of the files.
      synthetic: synthetic data of the same shapes.
    """

    data_dir: Path | None = None
    synthetic: bool = False

    def __post_init__(self) -> None:
        if self.synthetic and self.data_dir is not None:
            raise ValueError("--data-dir and --synthetic exclude each other")

    def folder(self, files: str, public: str = "") -> Path:
        """Returns the folder of the task's files; raises FileNotFoundError if none is given.

        Args:
          files: description of the folder.
          public: the public address of the files.
        """
        if self.data_dir is None:
            raise FileNotFoundError(f"--data-dir is missing: {files} (or --synthetic){public}")
        return self.data_dir


@dataclasses.dataclass(frozen=True)
class ShardedOptions:
    """The devices of a task whose batches are sharded.

    Args:
      devices: number of devices over which a batch is sharded.
    """

    devices: int = 1

    @property
    def axis_name(self) -> str | None:
        """The mesh axis over which a model's BatchNorm is synchronized; None on one device."""
        return "data" if self.devices > 1 else None


@dataclasses.dataclass(frozen=True)
class ShardedFileOptions(ShardedOptions, FileOptions):
    """The location of the data and the devices of a task with sharded batches."""


def with_warm_up(schedule: optax.Schedule, highest: float, steps: int) -> optax.Schedule:
    """Returns a learning rate that rises linearly before a schedule begins; its first step is not 0.

    Args:
      schedule: the schedule that follows, from 0 on; it begins at `highest`.
      highest: the learning rate at the end of the rise.
      steps: number of steps of the rise; 0 returns the schedule.

    Example:
      >>> rate = with_warm_up(optax.constant_schedule(1.0), 1.0, 3)
      >>> [float(rate(step)) for step in range(5)]
      [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if not steps:
        return schedule
    return optax.join_schedules([optax.linear_schedule(highest / (steps + 1), highest, steps), schedule], [steps])
