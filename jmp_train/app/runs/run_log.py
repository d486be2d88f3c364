"""Logs of a run, written while it runs: TensorBoard event files and JSON lines."""

import contextlib
import dataclasses
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from jmp_train.app.runs.evaluation import NONFINITE
from jmp_train.app.runs.events import Compiled, Epoch, Event, Phase, Progress, Run
from jmp_train.extras import extra_packages
from jmp_train.policies.files import escaped
from jmp_train.tools.documents import as_json

JSON_LINES = "metrics.jsonl"


class RunLog:
    """Writes a run's events to a folder, as a context manager.

    TensorBoard gets the scalars `step/loss`, `step/grad_norm`, `step/loss_scale`, `step/finite`, with watches also
    `step/WATCH/GROUP`, those of `Epoch` as `epoch/...`, and the metrics of the evaluation.
    metrics.jsonl has them too, with a line per step, per epoch, for the end, and when a phase of a schedule begins or
    continues. A killed run leaves its log.

    If the disk is full or the files are removed, the log lacks a part of the run: `warn` is called once, and nothing is
    raised. The log has no partial records, and continues when there is space again.

    Args:
      directory: the run's own folder, which is created.
      warn: called with a line for the user.

    Raises:
      FileExistsError: the folder already has the log of a run.
      OSError: the folder or its files cannot be created, for other reasons than a full disk.

    Example:
      >>> import tempfile
      >>> from jmp_train.app.runs.events import StepRecord
      >>> folder = Path(tempfile.mkdtemp()) / "float32"
      >>> with RunLog(folder) as log:
      ...     log.write(Progress(total=1, skipped_steps=0, recent=(StepRecord(1, 0.5, 2.0, 1.0, True),)))
      >>> print((folder / "metrics.jsonl").read_text(), end="")
      {"step": 1, "loss": 0.5, "grad_norm": 2.0, "loss_scale": 1.0, "finite": true}
    """

    def __init__(self, directory: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        check_unused(directory)
        self._warn_user = warn
        first = _event_record(file_version="brain.Event:2")
        self._directory = directory
        self._warned = False
        self._lines = self._events = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lines = _GrowingFile(directory / JSON_LINES)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname().replace(os.sep, '-')}"
            self._events = _GrowingFile(directory / name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._warn(error)
        self._append(self._events, first)

    def __enter__(self) -> Self:
        """Returns the log."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the files."""
        for file in (self._lines, self._events):
            try:
                if file is not None:
                    file.close()
            except OSError as error:  # a network's disk may only now report that it is full
                self._warn(error)

    def write(self, event: Event) -> None:
        """Writes an event."""
        match event:
            case Progress():
                shares = {watched.step: _flat(watched.shares) for watched in event.watched}
                self._record("step", [dataclasses.asdict(step) | shares.get(step.step, {}) for step in event.recent])
            case Epoch():
                self._record("epoch", [dataclasses.asdict(event)])
            case Run():
                tested = {name: value for name, value in event.metrics.items() if name != NONFINITE or value}
                self._append(self._lines, _line(tested))
                scalars = [_scalar_record(name, value, len(event.steps)) for name, value in tested.items()]
                self._append(self._events, b"".join(scalars))
            case Phase():
                self._append(self._lines, _line({"phase": event.policy, "start": event.start, "stop": event.stop}))
            case Compiled():
                costs = dataclasses.asdict(event.costs)
                self._append(self._lines, _line({"compile_seconds": event.seconds, **costs}))

    def _record(self, kind: str, rows: list[dict[str, float]]) -> None:
        self._append(self._lines, b"".join(map(_line, rows)))
        scalars = [
            _scalar_record(f"{kind}/{name}", value, int(row[kind]))
            for row in rows
            for name, value in row.items()
            if name != kind
        ]
        self._append(self._events, b"".join(scalars))

    def _append(self, file: "_GrowingFile | None", records: bytes) -> None:
        if file is None:
            return
        try:
            file.append(records)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self._warned:
            return
        self._warned = True
        self._warn_user(f"--logdir {self._directory}: {error.strerror}; the log lacks some of the run")


class _GrowingFile:
    """A new file that grows by whole records.

    TensorBoard's own writers use a thread that dies when the disk is full; the run would then wait forever.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)

    def append(self, records: bytes) -> None:
        """Appends all records, or raises OSError and appends none."""
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise OSError(errno.ENOENT, "it was removed")
        end = self._file.tell()
        rest = memoryview(records)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            self._file.seek(end)
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _flat(shares: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{watch}/{group}": share for watch, groups in shares.items() for group, share in groups.items()}


def _line(fields: Mapping[str, float | str]) -> bytes:
    return json.dumps(as_json(dict(fields))).encode() + b"\n"


def _scalar_record(tag: str, value: float, step: int) -> bytes:
    with extra_packages():
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    # Not by tensorboardX's own `scalar`, which prints a line for each NaN, and so for each skipped step.
    return _event_record(summary=Summary(value=[Summary.Value(tag=escaped(tag), simple_value=float(value))]), step=step)


def _event_record(**fields: Any) -> bytes:
    """Returns an event in the format of TensorBoard's files: length, data, and a checksum after each."""
    with extra_packages():
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.record_writer import masked_crc32c

    data = Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(data))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + checksums[0] + data + checksums[1]


def check_unused(directory: Path) -> None:
    """Raises FileExistsError if a folder already has the log of a run."""
    if (directory / JSON_LINES).exists():
        raise FileExistsError(f"--logdir: {directory} holds the log of another run")
