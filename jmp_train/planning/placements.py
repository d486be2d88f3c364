"""The placements of a plan: numbers of devices and hosts, the mesh, and the shardings of the state."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jmp_train.aot import TPU
from jmp_train.planning.variants import DATA, FSDP, REPLICATED, ZERO1, Placement, Shardings, several

# Bandwidth from one GPU to other hosts, bytes per second in one direction: one adapter for each GPU, as in NVIDIA's DGX
# systems; AWS's instances have 400 and 3,200 Gb/s for eight GPUs.
INTERCONNECTS = {"HDR": 25e9, "NDR": 50e9, "XDR": 100e9, "p4d": 6.25e9, "p5": 50e9}


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
