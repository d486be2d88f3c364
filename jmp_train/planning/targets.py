"""`Target`: one program of a plan, a step in one precision on some GPUs of one kind."""

import dataclasses
from collections.abc import Sequence

from jmp_train.aot import GPU, GPUS
from jmp_train.planning.variants import Placement, Variant, several


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """What a row of a plan is about.

    Attributes:
      gpu: the kind of GPU.
      variant: the step in one precision.
      placement: on how many GPUs, and how they hold the state.
    """

    gpu: GPU
    variant: Variant
    placement: Placement

    @property
    def multiple(self) -> int:
        """The number of which batch sizes have to be multiples."""
        return self.variant.multiple(self.placement)

    def __str__(self) -> str:
        return f"{self.gpu.name}, {self.variant.policy}, {self.placement}"


def checked_gpus(gpus: str | GPU | Sequence[str | GPU]) -> list[GPU]:
    """Returns GPUs that are given by name or as such.

    Args:
      gpus: see `plan`.

    Raises:
      TypeError: it is neither one nor several.
      ValueError: there is no such GPU, or there are none.
    """
    found = several("gpus", gpus, (str, GPU))
    for gpu in found:
        if not isinstance(gpu, GPU) and gpu not in GPUS:
            raise ValueError(f"gpus has {gpu!r}, which must be one of {', '.join(GPUS)}, or a jt.aot.GPU")
    return [gpu if isinstance(gpu, GPU) else GPUS[gpu] for gpu in found]


def targets_of(gpus: Sequence[GPU], variants: Sequence[Variant], placements: Sequence[Placement]) -> list[Target]:
    """Returns each step on each placement of each GPU, in the order of a plan's rows.

    Args:
      gpus: the kinds.
      variants: the steps.
      placements: of each of them.

    Raises:
      ValueError: a batch cannot be divided by a placement.
    """
    for variant in variants:
        for placement in placements:
            if variant.batch_size % (multiple := variant.multiple(placement)):
                raise ValueError(
                    f"batch_size={variant.batch_size} must be a multiple of {multiple} for {placement} and its "
                    "micro-batches"
                )
    return [Target(gpu, variant, placement) for gpu in gpus for variant in variants for placement in placements]
