"""The rows of a plan, one per machine, precision and placement."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jmp_train.tools.aot import Buffer, Costs
from jmp_train.tools.planning.batches import LargestBatch
from jmp_train.tools.planning.placements import Machine, Placement


@dataclass(frozen=True)
class PlanRow:
    """Memory and time of a step on one machine, in one precision and placement. Numbers are per device.

    Attributes:
      machine: the devices.
      policy: the precision's name.
      placement: the number of devices and the shardings of the state.
      batch_size: examples per step, over all devices.
      peak_bytes: bytes allocated for a step: arguments (parameters, optimizer state, batch), results that take no
        argument's place, constants, and the block of all temporaries.
      live_bytes: the most that is alive at one time, which XLA calls the peak: without the gaps of that block.
      costs: arithmetic, communication, and lower bounds of the time.
      buffers: the buffers in memory at the peak, the largest first; they add up to `peak_bytes`.
      largest: the largest batch that fits, over all devices; None if it was not searched for or memory does not grow.

    Example:
      >>> import jmp_train as jt
      >>> (row,) = jt.plan(Workload(step, state, batch), "V100-16GB").rows  # doctest: +SKIP
      >>> row.fits, row.largest_batch, row.bytes_by_kind["optimizer state"]  # doctest: +SKIP
      (True, 4216, 3162133)
    """

    machine: Machine
    policy: str
    placement: Placement
    batch_size: int
    peak_bytes: int
    live_bytes: int
    costs: Costs = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    largest: LargestBatch | None = None

    @property
    def device(self) -> str:
        """The name of the GPU or of the slice of TPUs: "A100-40GB", "v5e:4x4"."""
        return self.machine.kind.name

    @property
    def usable_bytes(self) -> int:
        """Memory of the device that the step can have, see `Allowances`."""
        return self.machine.usable_bytes

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
        price = self.machine.price_per_hour
        return None if price is None else price * self.step_seconds_bound / 3600

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
        names = (
            "device", "policy", "batch_size", "peak_bytes", "live_bytes", "usable_bytes", "fits", "headroom_bytes",
            "largest_batch", "step_seconds_bound", "step_cost_bound", "bytes_by_kind",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "devices": self.placement.devices,
            "placement": str(self.placement),
            "memory_bytes": self.machine.kind.memory_bytes,
            "tried_batches": {} if self.largest is None else {str(k): v for k, v in self.largest.tried.items()},
            "bound_by": self.costs.bound_by,
            "operations": self.costs.operations,
            "communication": [vars(item) for item in self.costs.communication],
            "communication_seconds_bound": self.costs.communication_seconds,
            "buffers": [vars(buffer) for buffer in self.buffers[:buffers]],
            "price_per_hour": self.machine.price_per_hour,
        }


def table_cells(rows: Sequence[PlanRow]) -> list[tuple[str, ...]]:
    """Returns a table of rows, the heads first, without columns that say nothing.

    Args:
      rows: the rows of a plan.
    """
    cells = [_cells_of(row) for row in rows]
    kept = [head for head in (cells[0] if cells else ()) if {row[head] for row in cells} not in ({""}, {"1 device"})]
    return [tuple(kept), *(tuple(row[head] for head in kept) for row in cells)]


def _cells_of(row: PlanRow) -> dict[str, str]:
    return {
        "device": row.device,
        "policy": row.policy,
        "placement": str(row.placement),
        "batch": str(row.batch_size),
        "memory": gigabytes(row.peak_bytes),
        "of": gigabytes(row.usable_bytes),
        "fits": "yes" if row.fits else "no",
        "largest batch": "" if row.largest_batch is None else str(row.largest_batch),
        "least time": milliseconds(row.step_seconds_bound),
        "bound by": row.costs.bound_by,
        "least cost of 1000 steps": "" if row.step_cost_bound is None else f"{1000 * row.step_cost_bound:.3g}",
    }


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
