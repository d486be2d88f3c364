"""Changes of a step that could reduce its memory, compiled like the step itself."""

import dataclasses
from collections.abc import Iterator

from jmp_train.planning.segments import in_segments
from jmp_train.planning.variants import FSDP, REPLICATED, ZERO1, Placement, Variant, in_precision
from jmp_train.policies import Policy
from jmp_train.steps import TrainState, TrainStep

_SEGMENTS = 8


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of the step, and its memory and time with the same batch.

    Attributes:
      name: the change.
      code: code of the change.
      peak_bytes: bytes allocated on each device.
      fits: True if that fits.
      step_seconds_bound: a lower bound of the step's time.
    """

    name: str
    code: str
    peak_bytes: int
    fits: bool
    step_seconds_bound: float


def changes(
    variant: Variant, placement: Placement, half: str = "mixed_float16"
) -> Iterator[tuple[str, str, Variant, Placement]]:
    """Yields the changes to try for a `TrainStep`: name, code, and the changed step and placement.

    Args:
      variant: the step.
      placement: the devices and shardings.
      half: the policy to try if the step computes in float32.
    """
    step, state = variant.step, variant.state
    if not isinstance(step, TrainStep) or not isinstance(state, TrainState):
        return
    examples = variant.batch_size // placement.batch_parts
    for parts in (2, 4):
        total = parts * step.accumulate_steps
        if examples % total == 0:
            smaller = dataclasses.replace(step, accumulate_steps=total)
            code = f"jt.train_step(..., accumulate_steps={total})"
            yield f"{total} micro-batches", code, dataclasses.replace(variant, step=smaller), placement
    again = dataclasses.replace(step, loss_fn=in_segments(step.loss_fn, _SEGMENTS))
    yield (
        "rematerialization",
        f"jax.checkpoint on the model's blocks; computed with the loss in {_SEGMENTS} segments",
        dataclasses.replace(variant, step=again),
        placement,
    )
    if placement.devices > 1 and placement.shardings == REPLICATED:
        for name, function in ((ZERO1, "jt.zero1_shardings"), (FSDP, "jt.fsdp_shardings")):
            code = f"jt.sharded_step(step, mesh, shardings={function}(state, mesh))"
            yield name, code, variant, dataclasses.replace(placement, shardings=name)
    if _is_float32(step):
        halved = dict(zip(("step", "state"), in_precision(step, state, half), strict=True))
        changed = dataclasses.replace(variant, policy=half, **halved)
        yield f"policy {half}", f'jt.train_step(..., policy="{half}")', changed, placement


def _is_float32(step: TrainStep) -> bool:
    return step.policy is None or (isinstance(step.policy, Policy) and step.policy.compute_dtype == "float32")
