"""A loss scale for each of several losses whose gradients are summed for one optimizer."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jmp_train.policies.loss_scaling.loss_scale import LossScale, check_adjusted, check_loss_scale, is_loss_scale
from jmp_train.policies.pytrees import all_finite, map_overwritten
from jmp_train.policies.types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerLossScale:
    """Independent loss scales, one per loss: an overflow of one loss reduces only its own scale.

    It replaces a `LossScale` in `with_loss_scale`. It takes tuples of losses and of gradients,
    in the same order; `train_step`'s loss function then returns a tuple of losses, and
    `get_loss_scale(opt_state, loss_id=1)` is the second loss's scale.

    Args:
      loss_scales: the loss scales, at least one.

    Raises:
      TypeError: the argument is not a tuple.
      ValueError: there is none.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import StaticLossScale, torch_loss_scale, with_loss_scale
      >>> scales = PerLossScale((StaticLossScale(8.0), torch_loss_scale(4.0)))
      >>> optimizer = with_loss_scale(optax.sgd(1.0), scales)
      >>> params = jnp.ones(())
      >>> state = optimizer.init(params)
      >>> grads = (jnp.array(8.0), jnp.array(4.0))  # of two losses, scaled: 1 and 1
      >>> float(optimizer.update(grads, state, params)[0])
      -2.0

    Reference: `num_losses` and `loss_id` of NVIDIA Apex e13873de, apex/amp/handle.py.
    """

    loss_scales: tuple[LossScale, ...]

    def __post_init__(self) -> None:
        # jax puts other objects here, such as shardings
        if is_loss_scale(self.loss_scales) or isinstance(self.loss_scales, int | float | str):
            raise TypeError(f"loss_scales must be a tuple of loss scales, got {self.loss_scales!r}")
        if isinstance(self.loss_scales, list):
            object.__setattr__(self, "loss_scales", tuple(self.loss_scales))
        if self.loss_scales == ():
            raise ValueError("loss_scales=() must have at least one loss scale")

    @property
    def loss_scale(self) -> jax.Array:
        """The scales, float32 [losses]."""
        return jnp.stack([jnp.asarray(s.loss_scale, jnp.float32) for s in self.loss_scales])

    def scale(self, losses: Sequence[Any]) -> tuple[Any, ...]:
        """Returns each loss times its scale."""
        self._check_count("loss_fn returned", losses)
        return tuple(s.scale(loss) for s, loss in zip(self.loss_scales, losses, strict=True))

    def unscale(self, trees: Sequence[Any]) -> tuple[Any, ...]:
        """Returns each loss's gradients divided by its scale."""
        self._check_count("updates is", trees)
        return tuple(s.unscale(tree) for s, tree in zip(self.loss_scales, trees, strict=True))

    def adjust(self, grads_finite: Sequence[Any]) -> "PerLossScale":
        """Returns the scales for the next step, given for each loss whether its gradients were finite."""
        pairs = zip(self.loss_scales, grads_finite, strict=True)
        return PerLossScale(tuple(s.adjust(finite) for s, finite in pairs))

    def _check_count(self, what: str, given: PyTree) -> None:
        count = len(self.loss_scales)
        if not isinstance(given, tuple) or len(given) != count:
            came = f"{len(given)} losses" if isinstance(given, tuple) else "one"
            raise ValueError(f"{what} {came}, but there are {count} loss scales: a tuple of {count} is needed")


LossScales: TypeAlias = LossScale | PerLossScale  # in an optimizer's state


def check_loss_scales(loss_scale: object, hint: str) -> None:
    """Raises an error unless an object can scale gradients; see `check_loss_scale`.

    Args:
      loss_scale: the loss scale; each one of a `PerLossScale` is checked.
      hint: source of a loss scale, for the message.
    """
    for scale in loss_scale.loss_scales if isinstance(loss_scale, PerLossScale) else (loss_scale,):
        if isinstance(scale, PerLossScale):
            raise TypeError(f"each of loss_scales must be the scale of one loss, got {scale!r}")
        check_loss_scale(scale, hint)


def scales_in(loss_scale: LossScales) -> tuple[LossScale, ...]:
    """Returns the scale of each loss, or the single scale."""
    return loss_scale.loss_scales if isinstance(loss_scale, PerLossScale) else (loss_scale,)


class CheckedGradients(NamedTuple):
    """The result of `unscale_and_check`.

    Attributes:
      grads: unscaled gradients; the sum over several losses.
      finite: bool scalar, True if all of them are finite, on all devices of the axes.
      next_loss_scale: the loss scale of the next step.
    """

    grads: Any
    finite: jax.Array
    next_loss_scale: LossScales


def unscale_and_check(loss_scale: LossScales, grads: Any, axis_names: Sequence[str]) -> CheckedGradients:
    """Returns unscaled gradients, whether all are finite, and the loss scale for the next step.

    Args:
      loss_scale: the loss scale of the forward pass.
      grads: scaled gradients, in float32; under a `PerLossScale` a tuple of them, which is summed.
      axis_names: axes over which the devices agree on `finite`.
    """
    if not isinstance(loss_scale, PerLossScale):
        unscaled = loss_scale.unscale(grads)
        finite = all_finite(unscaled, axis_names)
        return CheckedGradients(unscaled, finite, _adjusted(loss_scale, finite))
    parts = loss_scale.unscale(grads)
    tests = [all_finite(part, axis_names) for part in parts]
    total = functools.reduce(lambda a, b: map_overwritten(jnp.maximum, jnp.add, a, b), parts)
    finite = functools.reduce(jnp.logical_and, tests, all_finite(total, axis_names))
    return CheckedGradients(total, finite, _adjusted(loss_scale, tests))


def _adjusted(loss_scale: LossScales, finite: Any) -> LossScales:
    adjusted = loss_scale.adjust(finite)
    check_adjusted(adjusted, loss_scale)
    return adjusted
