"""Placements: how the devices of a machine hold the state of a step and share its batch; and the machines."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jmp_train.parallel import (
    data_parallel,
    fsdp_shardings,
    sharded_step,
    specs_by_path,
    state_shardings,
    zero1_shardings,
)
from jmp_train.policies.pytrees import check_count
from jmp_train.steps import TrainState, TrainStep
from jmp_train.tools.aot import GPU, GPUS, TPU, Device, tpu_slice

_MIB = 2**20
# Bandwidth from one GPU to other hosts, bytes per second in one direction: one adapter for each GPU, as in NVIDIA's DGX
# systems; AWS's instances have 400 and 3,200 Gb/s for eight GPUs.
INTERCONNECTS = {"HDR": 25e9, "NDR": 50e9, "XDR": 100e9, "p4d": 6.25e9, "p5": 50e9}


@dataclass(frozen=True)
class Allowances:
    """Memory that is not available to a training step, by reason.

    jax takes `memory_fraction` of the GPU's memory for its pool when it starts, and the program has to fit into it.
    CUDA and its libraries allocate outside of the pool, which counts only if both exceed the memory;
    `XLA_PYTHON_CLIENT_MEM_FRACTION` sets the fraction for a training script.

    On TPUs there is no such pool: libtpu reserves a part of the memory and refuses programs that need more than the
    rest, `jt.aot.TPU.program_bytes`. Only `fragmentation` is subtracted from it.

    Attributes:
      memory_fraction: fraction of the memory that jax takes; 0.75 is jax's default.
      cuda_context: bytes of the CUDA context with the kernels of all libraries that are loaded: 300 to 600 MiB on the
        GPUs that we list.
      libraries: bytes that cuBLAS and cuDNN allocate by themselves. The workspaces that XLA gives to cuBLAS are in the
        program's peak already; those of cuDNN's convolutions are not, as they come from tuning on the device.
      collectives: bytes of NCCL's buffers if there is more than one device: 4 MiB (`NCCL_BUFFSIZE`) for each of up
        to 32 channels, in both directions, and more for its kernels.
      fragmentation: the fraction of the pool that is lost in gaps between arrays: those of the last step,
        metrics that are read late, the next batch's parts.

    Raises:
      ValueError: a fraction is not between 0 and 1, or bytes are negative.

    Example:
      >>> from jmp_train.aot import GPUS
      >>> Allowances(memory_fraction=0.5, fragmentation=0).usable_bytes(GPUS["V100-16GB"], devices=1)
      8457027584

    Reference: https://docs.jax.dev/en/latest/gpu_memory_allocation.html;
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html.
    """

    memory_fraction: float = 0.75
    cuda_context: int = 600 * _MIB
    libraries: int = 256 * _MIB
    collectives: int = 512 * _MIB
    fragmentation: float = 0.02

    def __post_init__(self) -> None:
        for name in ("memory_fraction", "fragmentation"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be between 0 and 1")
        for name in ("cuda_context", "libraries", "collectives"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number of bytes")

    def usable_bytes(self, device: Device, devices: int) -> int:
        """Returns the number of bytes that a program may take on each device.

        Args:
          device: a GPU or a slice of TPUs.
          devices: number of devices that work together.
        """
        if isinstance(device, TPU):
            return int(device.program_bytes * (1 - self.fragmentation))
        outside = self.cuda_context + self.libraries + (self.collectives if devices > 1 else 0)
        pool = min(self.memory_fraction * device.memory_bytes, device.memory_bytes - outside)
        return max(0, int(pool * (1 - self.fragmentation)))


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, which may be absent, that share the batch of a step.

    Attributes:
      device: the GPU, one of `jt.aot.GPUS`, or the slice of TPUs, generation and chips along each axis: "A100-40GB",
        "v5e:4x4"; or a `jt.aot.GPU` or `TPU`.
      gpus: number of GPUs in each host. A slice of TPUs has its own number.
      hosts: number of hosts with that many GPUs.
      interconnect: bandwidth from a GPU to other hosts, in one direction: "400Gb/s", bytes per second, or one of "HDR",
        "NDR", "XDR" (an adapter of InfiniBand for each GPU), "p4d", "p5" (instances of AWS).
      price: the price of an hour of one GPU, or of one chip of TPUs; None if unknown.
      allowances: memory that a step cannot have.

    Raises:
      TypeError: the device is of another type.
      ValueError: there is no such GPU or slice, or a number is too small.

    Example:
      >>> machine = Machine("A100-40GB", gpus=8, hosts=2, interconnect="400Gb/s", price=2.5)
      >>> machine.devices, machine.bandwidth_to_hosts, machine.price_per_hour
      (16, 50000000000.0, 40.0)
      >>> Machine("v5e:4x4").devices
      16
    """

    device: str | Device
    gpus: int = 1
    hosts: int = 1
    interconnect: str | float = "NDR"
    price: float | None = None
    allowances: Allowances = Allowances()

    def __post_init__(self) -> None:
        if not isinstance(self.device, str | GPU | TPU):
            raise TypeError(f"device={self.device!r} must be a name such as 'A100-40GB' or 'v5e:2x2', or a jt.aot.GPU")
        check_count("gpus", self.gpus)
        check_count("hosts", self.hosts)
        if self.price is not None and not _is_rate(self.price):
            raise ValueError(f"price={self.price!r} must be a number above 0, for an hour")
        if not isinstance(self.allowances, Allowances):
            raise TypeError(f"allowances must be jt.planning.Allowances, got {type(self.allowances).__name__}")
        _ = self.kind, self.bandwidth_to_hosts

    @property
    def kind(self) -> Device:
        """The GPU or the slice of TPUs."""
        if not isinstance(self.device, str):
            return self.device
        if ":" in self.device:
            return tpu_slice(self.device)
        if self.device not in GPUS:
            names = ", ".join(GPUS)
            raise ValueError(
                f"device={self.device!r} must be one of {names}, a slice of TPUs such as 'v5e:2x2', or a jt.aot.GPU"
            )
        return GPUS[self.device]

    @property
    def bandwidth_to_hosts(self) -> float:
        """The bandwidth from a GPU to other hosts, in bytes per second."""
        found: object = self.interconnect
        if isinstance(found, str):
            match = re.fullmatch(r"([\d.]+) ?Gb/s", found)
            found = float(match[1]) * 1e9 / 8 if match else INTERCONNECTS.get(found)
        if not _is_rate(found):
            raise ValueError(
                f"interconnect={self.interconnect!r} must be a bandwidth from a GPU to other hosts: '400Gb/s', bytes "
                f"per second, or one of {', '.join(INTERCONNECTS)}"
            )
        return float(found)

    @property
    def devices(self) -> int:
        """Number of all devices."""
        return self.kind.devices if isinstance(self.kind, TPU) else self.gpus * self.hosts

    @property
    def usable_bytes(self) -> int:
        """Bytes that a program may take on each device."""
        return self.allowances.usable_bytes(self.kind, self.devices)

    @property
    def price_per_hour(self) -> float | None:
        """The price of an hour of all devices; None if it is unknown."""
        per_unit = self.kind.devices_per_chip if isinstance(self.kind, TPU) else 1
        return None if self.price is None else self.devices // per_unit * self.price


def _is_rate(number: object) -> TypeGuard[float]:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number < float("inf")


Shardings = str | Callable[[Any, AbstractMesh], Any] | Mapping[str, Any]

REPLICATED, ZERO1, FSDP = "replicated", "zero1", "fsdp"
DATA = "data"  # the axis of a mesh along which the batch is split
_RULES: dict[str, Callable[..., Any]] = {ZERO1: zero1_shardings, FSDP: fsdp_shardings}
_LENGTHS = (2, 4, 8, 16)  # of the axis that rules shard over, in a search


@dataclass(frozen=True)
class Placement:
    """The devices of a step and the shardings of its state.

    Attributes:
      devices: number of devices.
      shardings: "replicated", "zero1", "fsdp", rules of `specs_by_path`, or a function of the state's shapes and the
        mesh.
      mesh: the axes of the mesh and their lengths; () for one axis, "data".
      hosts: number of hosts, for GPUs.

    Example:
      >>> str(Placement()), str(Placement(8, "zero1")), str(Placement(64, "fsdp", (("data", 32), ("model", 2)), 8))
      ('1 device', '8 devices, zero1', '64 devices on 8 hosts, data 32 x model 2, fsdp')
    """

    devices: int = 1
    shardings: Shardings = REPLICATED
    mesh: tuple[tuple[str, int], ...] = ()
    hosts: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """The axes of the mesh and their lengths."""
        return dict(self.mesh or ((DATA, self.devices),))

    @property
    def batch_parts(self) -> int:
        """The number of parts into which the batch is split."""
        return self.axes[DATA]

    @property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        axes = self.axes
        return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    def spread(self, step: Callable[..., Any], state: Any) -> tuple[Callable[..., Any], Any]:
        """Returns a step over the mesh, and the shardings of its state.

        Args:
          step: the step of one device.
          state: the shapes of its state.

        Raises:
          TypeError: the shardings are for a `TrainState`, which the state is not.
        """
        mesh: Any = self.abstract_mesh
        shardings = self.shardings
        if shardings == REPLICATED:
            whole = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec()), state)
            return (data_parallel(step, mesh) if isinstance(step, TrainStep) else step), whole
        if callable(shardings):
            own = shardings(state, mesh)
        elif isinstance(state, TrainState) and isinstance(shardings, Mapping):
            own = state_shardings(state, mesh, params=specs_by_path(state.params, shardings))
        elif isinstance(state, TrainState) and isinstance(shardings, str):
            own = _RULES[shardings](state, mesh)
        else:
            raise TypeError(
                f"shardings={shardings!r} is for a TrainState, not for {type(state).__name__}: give a function"
            )
        return (sharded_step(step, mesh, shardings=own) if isinstance(step, TrainStep) else step), own

    def __str__(self) -> str:
        if self.devices == 1:
            return "1 device"
        name = self.shardings if isinstance(self.shardings, str) else getattr(self.shardings, "__name__", "own")
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        mesh = f", {' x '.join(f'{axis} {n}' for axis, n in self.mesh)}" if self.mesh else ""
        return f"{self.devices} devices{hosts}{mesh}, {name}"

    def __hash__(self) -> int:
        """Returns a hash, also of rules."""
        rules = tuple(self.shardings) if isinstance(self.shardings, Mapping) else self.shardings
        return hash((self.devices, rules, self.mesh, self.hosts))


@dataclass(frozen=True)
class PlanSearch:
    """The search of a plan: placements, and the largest batch.

    Attributes:
      largest_batch: whether to search for the largest batch that fits, which takes about five compilations. Without
        it, a batch without a common first axis, such as a graph, is planned as it is, as one example.
      shardings: shardings of the state over several devices: "replicated"; "zero1" or "fsdp", over "data"; rules of
        `specs_by_path` for the parameters; a function of the state's shapes and a mesh that returns shardings; or
        several of these.
      mesh: the axes of the mesh of all devices and their lengths, such as {"data": 16, "model": 16}; the batch is split
        along "data". None for this one axis.
      placement: whether to search for the fastest placement that fits, instead of planning the given ones: over
        "replicated", "zero1", "fsdp", and rules in `shardings` over meshes with an axis for them; where a step does not
        fit, also micro-batches and rematerialization. At most 40 programs are compiled. `Plan.fastest`,
        `Plan.smallest` and `Plan.cuts` have the result; largest batches are not searched for.
      progress: called with the number of programs compiled so far and the name of the next.

    Raises:
      TypeError: an argument is of another type.
      ValueError: there is no such sharding, or a mesh lacks the axis "data" or has a length below 1.

    Example:
      >>> [str(placed) for placed in PlanSearch(shardings=["replicated", "fsdp"]).placements(Machine("v5e:2x2"))]
      ['4 devices, replicated', '4 devices, fsdp']
    """

    largest_batch: bool = True
    shardings: Shardings | Sequence[Shardings] = REPLICATED
    mesh: Mapping[str, int] | None = None
    placement: bool = False
    progress: Callable[[int, str], None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for one in several("shardings", self.shardings, (str, Callable, Mapping)):
            if isinstance(one, str) and one not in (REPLICATED, ZERO1, FSDP):
                raise ValueError(f"shardings={one!r} must be 'replicated', 'zero1', 'fsdp', rules, or a function")
        mesh = self.mesh
        if mesh is None:
            return
        if not isinstance(mesh, Mapping) or not all(isinstance(axis, str) for axis in mesh):
            raise TypeError(f"mesh={mesh!r} must be a dict of axes and lengths, such as {{'data': 16, 'model': 16}}")
        if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in mesh.values()):
            raise ValueError(f"mesh={dict(mesh)!r} must have lengths of at least 1")
        if DATA not in mesh:
            raise ValueError(
                f"mesh={dict(mesh)!r} needs an axis {DATA!r} along which the batch is split, perhaps of length 1"
            )

    def placements(self, machine: Machine) -> list[Placement]:
        """Returns the placements to compare on a machine; with `placement`, those with which the search begins.

        Args:
          machine: the devices; on one device, nothing is sharded.

        Raises:
          ValueError: the mesh has another number of devices.
        """
        count, mesh = machine.devices, tuple((self.mesh or {}).items())
        if mesh and math.prod(n for _, n in mesh) != count:
            found = math.prod(n for _, n in mesh)
            raise ValueError(f"mesh={dict(mesh)!r} has {found} devices, but {machine.kind.name} has {count}")
        given = several("shardings", self.shardings, (str, Callable, Mapping))
        if count == 1 or not self.placement:
            return [Placement(count, one, mesh, machine.hosts) for one in (given if count > 1 else [REPLICATED])]
        own = [one for one in given if not isinstance(one, str)]
        found = [Placement(count, one, mesh, machine.hosts) for one in (REPLICATED, ZERO1, FSDP, *own)]
        return list(dict.fromkeys(mesh for placed in found for mesh in _over_meshes(placed)))


def _over_meshes(placed: Placement) -> list[Placement]:
    """Returns a placement; if it has rules without a mesh, over the meshes with an axis for them."""
    names = _axes(placed.shardings) if isinstance(placed.shardings, Mapping) else []
    if placed.mesh or len(names) != 1:
        return [placed]
    lengths = [n for n in _LENGTHS if placed.devices % n == 0]
    return [replace(placed, mesh=((DATA, placed.devices // n), (names[0], n))) for n in lengths]


def _axes(rules: Mapping[str, Any]) -> list[str]:
    """Returns the axes that rules name, without the batch's."""
    entries = [entry for spec in rules.values() for entry in (spec or ())]
    names = [name for entry in entries for name in (entry if isinstance(entry, tuple) else (entry,))]
    return [name for name in dict.fromkeys(names) if isinstance(name, str) and name != DATA]


def several(name: str, given: Any, kinds: tuple[Any, ...]) -> list[Any]:
    """Returns an argument, one item or several, as a list.

    Args:
      name: name of the argument, for errors.
      given: the argument.
      kinds: the types of one.

    Raises:
      TypeError: `given` is neither one item nor several.
      ValueError: `given` is empty.
    """
    if isinstance(given, kinds):
        return [given]
    if not isinstance(given, Iterable):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name}={given!r} must be of type {names}, or several of these")
    if not (found := list(given)):
        raise ValueError(f"{name} is empty")
    return found
