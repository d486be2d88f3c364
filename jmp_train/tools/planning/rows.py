"""The rows of a plan, one per kind of device, precision and placement."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jmp_train.tools.aot import GPU, Buffer, Costs, Device, Measured
from jmp_train.tools.planning.batches import LargestBatch
from jmp_train.tools.planning.remedies import Remedy
from jmp_train.tools.planning.variants import Placement


@dataclass(frozen=True)
class PlanRow:
    """Memory and time of a step on one kind of device, in one precision and placement. Numbers are per device.

    Attributes:
      kind: the GPU, or the slice of TPUs.
      policy: the precision's name.
      placement: the number of devices and the shardings of the state.
      batch_size: examples per step, over all devices.
      peak_bytes: bytes allocated for a step: arguments (parameters, optimizer state, batch), results that take no
        argument's place, constants, and the block of all temporaries.
      live_bytes: the most that is alive at one time, which XLA calls the peak: without the gaps of that block.
      usable_bytes: memory of the device that the step can have, see `Allowances`.
      largest: the largest batch that fits, over all devices; None if it was not searched for or memory does not grow.
      costs: arithmetic, bytes, casts, communication, and lower bounds of the time.
      buffers: the buffers in memory at the peak, the largest first; they add up to `peak_bytes`.
      remedies: changes that could help, the least memory first.
      measured: memory and time measured on such a GPU, if it is present and this was requested.
      notes: notes about the precision on this device.
      price_per_hour: price of an hour of all devices, by the user's prices; None if unknown.

    Example:
      >>> import jmp_train as jt
      >>> (row,) = jt.plan(step, state, batch, gpus="V100-16GB").rows  # doctest: +SKIP
      >>> row.fits, row.largest_batch, row.bytes_by_kind["optimizer state"]  # doctest: +SKIP
      (True, 4216, 3162133)
    """

    kind: Device
    policy: str
    placement: Placement
    batch_size: int
    peak_bytes: int
    live_bytes: int
    usable_bytes: int
    largest: LargestBatch | None
    costs: Costs = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    remedies: tuple[Remedy, ...]
    measured: Measured | None = None
    notes: tuple[str, ...] = ()
    price_per_hour: float | None = None

    @property
    def device(self) -> str:
        """The name of the GPU or of the slice of TPUs: "A100-40GB", "v5e:4x4"."""
        return self.kind.name

    @property
    def gpu(self) -> GPU:
        """The GPU.

        Raises:
          AttributeError: the row is about TPUs.
        """
        if not isinstance(self.kind, GPU):
            raise AttributeError(f"row.gpu: this row is about TPUs; row.device is {self.device!r}, row.kind its data")
        return self.kind

    @property
    def tile_bytes(self) -> int:
        """The part of `peak_bytes` that only fills tiles of TPUs, 0 on GPUs."""
        return sum(buffer.tile_bytes for buffer in self.buffers)

    @property
    def fits(self) -> bool:
        """True if the step fits."""
        return self.peak_bytes <= self.usable_bytes

    @property
    def headroom_bytes(self) -> int:
        """The bytes that remain; negative if the step does not fit."""
        return self.usable_bytes - self.peak_bytes

    @property
    def largest_batch(self) -> int | None:
        """Examples of the largest batch that fits, over all devices; 0 if none does, None if it is not known."""
        return None if self.largest is None else self.largest.size

    @property
    def step_seconds_bound(self) -> float:
        """A lower bound of the step's time: a roofline, by the device's peak rates and bandwidth."""
        return self.costs.seconds

    @property
    def step_cost_bound(self) -> float | None:
        """A lower bound of the step's cost, by its time and the user's price; None without a price."""
        return None if self.price_per_hour is None else self.price_per_hour * self.step_seconds_bound / 3600

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """The bytes in memory at the peak by kind, the most first."""
        counter: Counter[str] = Counter()
        for buffer in self.buffers:
            counter[buffer.kind] += buffer.n_bytes
        return dict(counter.most_common())

    def to_json(self, buffers: int = 20) -> dict[str, Any]:
        """Returns the row as JSON values.

        Args:
          buffers: number of the largest buffers.
        """
        costs = self.costs
        return {
            "device": self.device,
            "gpu": self.device if isinstance(self.kind, GPU) else None,
            "policy": self.policy,
            "devices": self.placement.devices,
            "placement": str(self.placement),
            "batch_size": self.batch_size,
            "peak_bytes": self.peak_bytes,
            "live_bytes": self.live_bytes,
            "usable_bytes": self.usable_bytes,
            "memory_bytes": self.kind.memory_bytes,
            "tile_bytes": self.tile_bytes,
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "largest_batch": self.largest_batch,
            "tried_batches": {} if self.largest is None else {str(k): v for k, v in self.largest.tried.items()},
            "step_seconds_bound": self.step_seconds_bound,
            "step_seconds_without_cache": costs.seconds_without_cache,
            "operations": costs.operations,
            "read_bytes": costs.read_bytes,
            "written_bytes": costs.written_bytes,
            "cast_bytes": costs.cast_bytes,
            "communication": [vars(item) for item in costs.communication],
            "communication_seconds_bound": costs.communication_seconds,
            "bytes_by_kind": self.bytes_by_kind,
            "buffers": [vars(buffer) for buffer in self.buffers[:buffers]],
            "measured": None if self.measured is None else vars(self.measured),
            "remedies": [vars(remedy) for remedy in self.remedies],
            "notes": list(self.notes),
            "price_per_hour": self.price_per_hour,
            "step_cost_bound": self.step_cost_bound,
        }


_HEADS = (
    "device",
    "policy",
    "placement",
    "batch",
    "memory",
    "of",
    "fits",
    "largest batch",
    "least time",
    "casts",
    "least cost of 1000 steps",
    "measured memory",
    "measured time",
)


def table_cells(rows: Sequence[PlanRow]) -> list[tuple[str, ...]]:
    """Returns a table of rows, the heads first, without empty columns.

    Args:
      rows: the rows of a plan.
    """
    cells = [(device_head(rows), *_HEADS[1:]), *(_cells_of(row) for row in rows)]
    unused = set()
    if all(row.placement.devices == 1 for row in rows):
        unused.add("placement")
    if all(row.measured is None for row in rows):
        unused |= {"measured memory", "measured time"}
    if all(row.price_per_hour is None for row in rows):
        unused.add("least cost of 1000 steps")
    kept = [i for i, head in enumerate(_HEADS) if head not in unused]
    return [tuple(row[i] for i in kept) for row in cells]


def device_head(rows: Sequence[PlanRow]) -> str:
    """Returns the kind of the rows' devices: "GPU", "TPU", or "device" if they differ.

    Args:
      rows: the rows of a plan.
    """
    kinds = device_kinds(rows)
    return kinds[0] if len(kinds) == 1 else "device"


def device_kinds(rows: Sequence[PlanRow]) -> list[str]:
    """Returns the kinds of the rows' devices, "GPU" before "TPU"; "GPU" without rows.

    Args:
      rows: the rows of a plan.
    """
    return sorted({type(row.kind).__name__ for row in rows} or {"GPU"})


def _cells_of(row: PlanRow) -> tuple[str, ...]:
    return (
        row.device,
        row.policy,
        str(row.placement),
        str(row.batch_size),
        gigabytes(row.peak_bytes),
        gigabytes(row.usable_bytes),
        "yes" if row.fits else "no",
        "" if row.largest_batch is None else str(row.largest_batch),
        milliseconds(row.step_seconds_bound),
        gigabytes(row.costs.cast_bytes),
        "" if row.step_cost_bound is None else f"{1000 * row.step_cost_bound:.3g}",
        *_measured_cells(row.measured),
    )


def _measured_cells(measured: Measured | None) -> tuple[str, str]:
    if measured is None:
        return "", ""
    return "" if measured.peak_bytes is None else gigabytes(measured.peak_bytes), milliseconds(measured.seconds)


def gigabytes(n_bytes: float) -> str:
    """Returns bytes as decimal gigabytes, with two significant digits for small numbers.

    Example:
      >>> gigabytes(12_345_678_900), gigabytes(67_800_000)
      ('12.35 GB', '0.068 GB')
    """
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e9:.3f} GB"


def milliseconds(seconds: float) -> str:
    """Returns a time with three digits, in milliseconds up to a second.

    Example:
      >>> milliseconds(0.01234), milliseconds(1.0321)
      ('12.3 ms', '1.03 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
