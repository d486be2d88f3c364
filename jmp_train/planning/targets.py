"""`Target`: one program of a plan, a step in one precision on some devices of one kind."""

import dataclasses
from collections.abc import Callable, Sequence

from jmp_train.aot import GPU, GPUS, TPU, Device, tpu_slice
from jmp_train.planning.variants import Placement, Variant, several


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
