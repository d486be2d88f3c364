"""The machines of a plan: devices of one kind, the memory that a step can have on them, and their price."""

import re
from dataclasses import dataclass
from typing import TypeGuard

from jmp_train.policies.pytrees import check_count
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
