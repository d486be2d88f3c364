"""Logs of a run while it goes: TensorBoard's event files and JSON lines, side by side."""

import dataclasses
import json
from pathlib import Path
from typing import Self

from jmp_train.records import Compiled, Epoch, Event, Progress, Run, finite_or_none

JSON_LINES = "metrics.jsonl"


class RunLog:
    """Writes a run's events to a folder, as a context manager.

    TensorBoard gets the scalars `step/loss`, `step/grad_norm`, `step/loss_scale`, `step/finite`,
    those of `Epoch` as `epoch/...`, and `test_accuracy`; metrics.jsonl has them too, a line a step,
    an epoch and the end. A killed run leaves its log: the lines at once, TensorBoard's within a
    second.

    Args:
      directory: the run's own folder; it is made.

    Raises:
      FileExistsError: there is a run's log already.

    Example:
      >>> import tempfile
      >>> from jmp_train.records import Step
      >>> folder = Path(tempfile.mkdtemp()) / "float32"
      >>> with RunLog(folder) as log:
      ...     log.write(Progress(total=1, skipped_steps=0, recent=(Step(1, 0.5, 2.0, 1.0, True),)))
      >>> print((folder / "metrics.jsonl").read_text(), end="")
      {"step": 1, "loss": 0.5, "grad_norm": 2.0, "loss_scale": 1.0, "finite": true}
    """

    def __init__(self, directory: Path) -> None:
        from tensorboardX import SummaryWriter

        check_unused(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._lines = (directory / JSON_LINES).open("x")
        self._events = SummaryWriter(str(directory), flush_secs=1)

    def __enter__(self) -> Self:
        """Returns the log."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the files."""
        self._lines.close()
        self._events.close()

    def write(self, event: Event) -> None:
        """Writes an event."""
        match event:
            case Progress():
                for step in event.recent:
                    self._record("step", dataclasses.asdict(step))
            case Epoch():
                self._record("epoch", dataclasses.asdict(event))
            case Run():
                self._line({"test_accuracy": event.test_accuracy})
                self._events.add_scalar("test_accuracy", event.test_accuracy, len(event.steps))
            case Compiled():
                self._line({"compile_seconds": event.seconds})
        self._lines.flush()

    def _record(self, kind: str, fields: dict[str, float]) -> None:
        self._line(fields)
        index = int(fields.pop(kind))
        for name, value in fields.items():
            self._events.add_scalar(f"{kind}/{name}", float(value), index)

    def _line(self, fields: dict[str, float]) -> None:
        self._lines.write(json.dumps(finite_or_none(fields)) + "\n")


def check_unused(directory: Path) -> None:
    """Raises FileExistsError if a folder has a run's log, which is not to be mixed with another."""
    if (directory / JSON_LINES).exists():
        raise FileExistsError(f"--logdir: {directory} holds the log of another run")
