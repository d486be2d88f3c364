"""Memory of a device that a program cannot have."""

from dataclasses import dataclass

from jmp_train.tools.aot import TPU, Device

_MIB = 2**20


@dataclass(frozen=True)
class Allowances:
    """Memory that a training step cannot have, each part with the reason.

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
