"""`Device`, and networks of devices: the links that a collective operation takes, and its least time on them.

Devices of one host, or chips of a slice of TPUs, exchange over one kind of link; hosts of GPUs over another. Rings and
trees that reduce on the devices send, in a group of n, (n - 1) / n of an array to scatter or gather it, and twice that
to reduce it everywhere. Over several hosts, the reduction inside a host comes first, so that each of its devices sends
only its part of the array to other hosts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from jmp_train.tools.aot.gpus import GPU
from jmp_train.tools.aot.hlo_collectives import Collective, axes_of, fraction_sent
from jmp_train.tools.aot.tpus import TPU

Device = GPU | TPU
"""A device that programs can be compiled for without having it.

This package and plans read the attributes that both classes have: `name`, `description`, `platform`, `memory_bytes`,
`bandwidth`, `rates`, `matrix_rate`, `link`, `link_bandwidth`, `l2_cache_size`, `overlaps` and `topology`.
"""


@dataclass(frozen=True)
class Route:
    """The way of a collective operation's bytes; those that each device must send, and the least time.

    Attributes:
      axis: the axes of the mesh along which it communicates: "data", "data x model"; "" if unknown.
      dimensions: the axes of the slice of TPUs whose links it takes.
      sent_bytes: bytes over the links inside a host, or a slice.
      seconds: the least time of these.
      sent_between_hosts: bytes to other hosts.
      seconds_between_hosts: the least time of these.
    """

    axis: str
    dimensions: tuple[int, ...]
    sent_bytes: float
    seconds: float
    sent_between_hosts: float = 0
    seconds_between_hosts: float = 0


@dataclass(frozen=True)
class Network:
    """Devices with their links.

    Attributes:
      device: the kind of GPU, or the slice of TPUs.
      mesh: the axes of the mesh of devices, and their lengths.
      hosts: number of hosts with GPUs; a slice of TPUs counts as one.
      interconnect: bandwidth from a GPU to other hosts, in bytes per second, in one direction.
      coordinates: the coordinates of each TPU's chip, in the order of the mesh; empty if they are not known, and the
        whole slice is assumed.
    """

    device: Device
    mesh: Mapping[str, int] = field(hash=False)
    hosts: int = 1
    interconnect: float = float("inf")
    coordinates: Sequence[Sequence[int]] = field(default=(), repr=False, hash=False)

    def route(self, item: Collective) -> Route:
        """Returns the way of one execution of a collective operation.

        Args:
          item: the operation.
        """
        axis = axes_of(item.group, self.mesh)
        if isinstance(self.device, TPU):
            extents = self._extents(self.device, item.group)
            dimensions = tuple(place for place, extent in enumerate(extents) if extent > 1)
            return Route(axis, dimensions, item.sent_bytes, item.sent_bytes / self.device.bandwidth_over(extents))
        inside, between = self._split(item)
        link = self.device.link_bandwidth
        return Route(axis, (), inside, inside / link, between, between / self.interconnect)

    def least_seconds(self, routes: Sequence[tuple[int, Route]]) -> float:
        """Returns the least time of operations that may overlap if they use different links.

        Args:
          routes: number of executions and route of each operation.

        Example:
          >>> from jmp_train.aot import GPUS
          >>> network = Network(GPUS["H100-80GB"], {"data": 16}, hosts=2, interconnect=50e9)
          >>> network.least_seconds([(2, Route("data", (), 450e9, 1.0, 50e9, 1.0)), (1, Route("data", (), 0, 0, 1, 1))])
          3.0
        """
        if not isinstance(self.device, TPU):
            inside = sum(times * route.seconds for times, route in routes)
            return max(inside, sum(times * route.seconds_between_hosts for times, route in routes))
        tpu, found = self.device, [0.0]
        for dimensions in {route.dimensions for _, route in routes}:
            found.append(sum(times * route.seconds for times, route in routes if route.dimensions == dimensions))
        axes = range(len(tpu.shape))
        for chosen in (chosen for n in axes for chosen in combinations(axes, n + 1)):
            # At best, what takes only these axes uses all of their links all the time.
            taken = [(times, r) for times, r in routes if r.dimensions and set(r.dimensions) <= set(chosen)]
            extents = [length if place in chosen else 1 for place, length in enumerate(tpu.shape)]
            found.append(sum(times * r.sent_bytes for times, r in taken) / tpu.bandwidth_over(extents))
        return max(found)

    def _extents(self, tpu: TPU, group: Sequence[int]) -> tuple[int, ...]:
        """Returns the chips of a group along each axis of the slice."""
        if not self.coordinates or max(group, default=0) >= len(self.coordinates):
            return tpu.shape
        places = [self.coordinates[n] for n in group]
        return tuple(len({place[axis] for place in places}) for axis in range(len(tpu.shape)))

    def _split(self, item: Collective) -> tuple[float, float]:
        """Returns the bytes that each GPU must send inside of its host, and to other hosts."""
        per_host = math.prod(self.mesh.values()) // self.hosts
        hosts = len({n // per_host for n in item.group}) if self.hosts > 1 else 1
        if hosts < 2:
            return item.sent_bytes, 0
        members = -(-len(item.group) // hosts)  # of a group, in one host
        inside, between = (fraction_sent(item.kind, n) * item.n_bytes for n in (members, hosts))
        if item.kind == "all-to-all":  # each part goes to another device, so a host cannot join them
            return item.n_bytes * (members - 1) / len(item.group), between
        return inside, between if item.kind == "collective-permute" else between / members
