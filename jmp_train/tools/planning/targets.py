"""The targets of a plan, and the checked arguments of `plan` that they are made from: devices, placements, prices.

A `Target` is one program of a plan, a step in one precision on some devices of one kind.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jmp_train.tools.aot import GPU, GPUS, TPU, Device, tpu_slice
from jmp_train.tools.planning.variants import DATA, FSDP, REPLICATED, ZERO1, Placement, Shardings, Variant, several

# Bandwidth from one GPU to other hosts, bytes per second in one direction: one adapter for each GPU, as in NVIDIA's DGX
# systems; AWS's instances have 400 and 3,200 Gb/s for eight GPUs.
INTERCONNECTS = {"HDR": 25e9, "NDR": 50e9, "XDR": 100e9, "p4d": 6.25e9, "p5": 50e9}


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """The subject of a plan's row.

    Attributes:
      kind: the kind of GPU, or the slice of TPUs.
      variant: the step in one precision.
      placement: the number of devices and the shardings of the state.
    """

    kind: Device
    variant: Variant
    placement: Placement

    @property
    def multiple(self) -> int:
        """Batch sizes must be multiples of this number."""
        return self.variant.multiple(self.placement)

    def __str__(self) -> str:
        return f"{self.kind.name}, {self.variant.policy}, {self.placement}"


def checked_gpus(gpus: str | GPU | Sequence[str | GPU]) -> list[GPU]:
    """Returns GPUs, given by name or as objects.

    Args:
      gpus: see `plan`.

    Raises:
      TypeError: the argument is neither one item nor several.
      ValueError: there is no such GPU, or there are none.
    """
    found = several("gpus", gpus, (str, GPU))
    for gpu in found:
        if not isinstance(gpu, GPU) and gpu not in GPUS:
            raise ValueError(f"gpus has {gpu!r}, which must be one of {', '.join(GPUS)}, or a jt.aot.GPU")
    return [gpu if isinstance(gpu, GPU) else GPUS[gpu] for gpu in found]


def checked_tpus(tpus: str | TPU | Sequence[str | TPU]) -> list[TPU]:
    """Returns slices of TPUs, given by name or as objects.

    Args:
      tpus: see `plan`; may be empty.

    Raises:
      TypeError: the argument is neither one item nor several.
      ValueError: there is no such slice; the message names the nearest.
    """
    found = [tpus] if isinstance(tpus, str | TPU) else list(tpus)
    for tpu in found:
        if not isinstance(tpu, str | TPU):
            raise TypeError(f"tpus has {tpu!r}, which must be a name such as 'v5e:2x2', or a jt.aot.TPU")
    return [tpu if isinstance(tpu, TPU) else tpu_slice(tpu) for tpu in found]


def targets_of(
    kinds: Sequence[Device], variants: Sequence[Variant], placements: Callable[[Device], Sequence[Placement]]
) -> list[Target]:
    """Returns each step on each placement of each kind of device, in the order of a plan's rows.

    Args:
      kinds: the GPUs, and the slices of TPUs.
      variants: the steps.
      placements: returns the placements of a kind.

    Raises:
      ValueError: a batch cannot be divided by a placement.
    """
    for variant in variants:
        for placement in dict.fromkeys(placement for kind in kinds for placement in placements(kind)):
            if variant.batch_size % (multiple := variant.multiple(placement)):
                raise ValueError(
                    f"batch_size={variant.batch_size} must be a multiple of {multiple} for {placement} and its "
                    "micro-batches"
                )
    return every_target(kinds, variants, placements)


def every_target(
    kinds: Sequence[Device], variants: Sequence[Variant], placements: Callable[[Device], Sequence[Placement]]
) -> list[Target]:
    """Returns the targets of `targets_of` and those whose batches cannot be divided, which a search cuts.

    Args:
      kinds: see `targets_of`.
      variants: see `targets_of`.
      placements: see `targets_of`.
    """
    return [Target(kind, variant, placed) for kind in kinds for variant in variants for placed in placements(kind)]


def checked_placements(
    devices: int | Sequence[int],
    shardings: Shardings | Sequence[Shardings],
    mesh: Mapping[str, int] | None = None,
    hosts: int | Sequence[int] = 1,
) -> list[Placement]:
    """Returns the placements for the given numbers of GPUs and hosts and the shardings; one device has no shardings.

    Args:
      devices: number of GPUs per host, or several numbers.
      shardings: one or several; see `plan`.
      mesh: the axes of the mesh and their lengths; None for one axis.
      hosts: number of hosts, or several numbers.

    Raises:
      TypeError: an argument is neither one item nor several.
      ValueError: a number is below 1, there is no such sharding, there are none, or a mesh has another number of
        devices.
    """
    counts, of_hosts = several("devices", devices, (int,)), several("hosts", hosts, (int,))
    for name, numbers in (("devices", counts), ("hosts", of_hosts)):
        for number in numbers:
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r} must be an integer of at least 1")
    what = "hosts x devices" if of_hosts != [1] else "devices"
    return [
        placement
        for n_hosts in of_hosts
        for n in counts
        for placement in _placements(n * n_hosts, shardings, mesh, n_hosts, f"{what} is {n * n_hosts}")
    ]


def placements_of_slice(tpu: TPU, shardings: Any, mesh: Mapping[str, int] | None) -> list[Placement]:
    """Returns the placements on all devices of a slice of TPUs.

    Args:
      tpu: the slice.
      shardings: see `plan`.
      mesh: see `plan`.

    Raises:
      ValueError: see `checked_placements`.
    """
    return _placements(tpu.devices, shardings, mesh, 1, f"{tpu.name} has {tpu.devices}")


def checked_interconnect(interconnect: str | float) -> float:
    """Returns the bandwidth from a GPU to other hosts, in bytes per second.

    Args:
      interconnect: bytes per second, a text such as "400Gb/s", or one of `INTERCONNECTS`.

    Raises:
      ValueError: `interconnect` is none of these.

    Example:
      >>> checked_interconnect("400Gb/s") == checked_interconnect("NDR") == checked_interconnect(50e9)
      True
    """
    if isinstance(interconnect, str):
        match = re.fullmatch(r"([\d.]+) ?Gb/s", interconnect)
        found = float(match[1]) * 1e9 / 8 if match else INTERCONNECTS.get(interconnect, 0.0)
    else:
        found = interconnect
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < float("inf"):
        names = ", ".join(INTERCONNECTS)
        raise ValueError(
            f"interconnect={interconnect!r} must be a bandwidth from a GPU to other hosts: '400Gb/s', bytes per "
            f"second, or one of {names}"
        )
    return float(found)


def _placements(count: int, shardings: Any, mesh: Mapping[str, int] | None, hosts: int, has: str) -> list[Placement]:
    rules = several("shardings", shardings, (str, Callable, Mapping))
    for one in rules:
        if isinstance(one, str) and one not in (REPLICATED, ZERO1, FSDP):
            raise ValueError(f"shardings={one!r} must be 'replicated', 'zero1', 'fsdp', rules, or a function")
    axes = _checked_mesh(mesh, count, has)
    return [Placement(count, one, axes, hosts) for one in (rules if count > 1 else [REPLICATED])]


def _checked_mesh(mesh: Mapping[str, int] | None, count: int, has: str) -> tuple[tuple[str, int], ...]:
    if mesh is None:
        return ()
    if not isinstance(mesh, Mapping) or not all(isinstance(axis, str) for axis in mesh):
        raise TypeError(f"mesh={mesh!r} must be a dict of axes and their lengths, such as {{'data': 16, 'model': 16}}")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in mesh.values()):
        raise ValueError(f"mesh={dict(mesh)!r} must have lengths of at least 1")
    if DATA not in mesh:
        raise ValueError(
            f"mesh={dict(mesh)!r} needs an axis {DATA!r} along which the batch is split, perhaps of length 1"
        )
    if math.prod(mesh.values()) != count:
        raise ValueError(f"mesh={dict(mesh)!r} has {math.prod(mesh.values())} devices, but {has}")
    return tuple(mesh.items())


def checked_prices(price: Mapping[str, float] | None, kinds: Sequence[Device]) -> dict[str, float]:
    """Returns the prices of an hour, by the name of a GPU or of a generation of TPUs.

    Args:
      price: see `plan`.
      kinds: the planned devices.

    Raises:
      TypeError: `price` is not a mapping.
      ValueError: a name is not a planned device, or a price is not above 0.
    """
    if not isinstance(price, Mapping | None):
        raise TypeError(f"price={price!r} must be a dict, such as {{'v5e': 1.2}}")
    names = {_priced_name(kind) for kind in kinds}
    for name, value in (price or {}).items():
        if name not in names:
            raise ValueError(f"price has {name!r}, which is not planned for; the names are {', '.join(sorted(names))}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"price[{name!r}]={value!r} must be a number above 0, for an hour")
    return dict(price or {})


def price_of(kind: Device, devices: int, prices: Mapping[str, float]) -> float | None:
    """Returns the price of an hour of all devices, or None if it is unknown.

    Args:
      kind: the GPU, or the slice of TPUs, whose price is that of a chip.
      devices: number of devices.
      prices: from `checked_prices`.
    """
    if _priced_name(kind) not in prices:
        return None
    units = devices // kind.devices_per_chip if isinstance(kind, TPU) else devices
    return units * prices[_priced_name(kind)]


def _priced_name(kind: Device) -> str:
    return kind.name.partition(":")[0] if isinstance(kind, TPU) else kind.name
