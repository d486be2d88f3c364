"""`accumulated`: computes the gradients of a batch as the mean over its micro-batches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_train.policies import Grads, Params
from jmp_train.policies.loss_scaling import LossScale, LossScales, PerLossScale
from jmp_train.policies.pytrees import map_overwritten, upcast_to_float32, vary_like
from jmp_train.steps.batch_parts import check_divides, in_parts, unstacked, with_shares, without_shares
from jmp_train.steps.gradient_functions import GradientFunction, StepGradients
from jmp_train.types import Batch, ModelState


def accumulated(gradients: GradientFunction, count: int) -> GradientFunction:
    """Returns a gradient function that splits its batch into micro-batches and averages their gradients.

    The micro-batches run one after another, share one loss scale, and pass the model state on. Each scales its
    fraction of the loss, so that half-precision gradients are as small as those of the whole batch.

    Args:
      gradients: gradient function of one micro-batch.
      count: number of micro-batches; 1 returns `gradients`.

    Returns:
      A gradient function with stacked `aux`, [count, ...]. It splits the first axis of every array of the batch. Each
      micro-batch gets one graph of a `jmp_train.graphs.stack`, and all `ShardedFeatures`.

    Raises:
      ValueError: when called, `count` does not divide the batch.
      TypeError: when called, the batch has a graph outside a stack.

    Example:
      >>> import jmp_train as jt
      >>> from jmp_train.steps import loss_gradients
      >>> gradients = loss_gradients(jt.stateless(lambda w, x: (w * x).mean()))
      >>> result = accumulated(gradients, 2)(jt.NoOpLossScale(), jnp.ones(()), None, jnp.array([1.0, 3.0]), None)
      >>> float(result.loss), float(result.grads)
      (2.0, 2.0)
    """
    if count == 1:
        return gradients

    def over_parts(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        split = without_shares(batch)
        check_divides(split, count, f"accumulate_steps={count}")
        rngs = None if rng is None else jax.random.split(rng, count)
        zeros = vary_like(params, jax.tree.map(jnp.zeros_like, upcast_to_float32(params)))
        if isinstance(loss_scale, PerLossScale):
            zeros = (zeros,) * len(loss_scale.loss_scales)
        scale_of_part = _of_part(loss_scale, count)

        def add_part(
            carry: tuple[ModelState, Grads], inputs: tuple[Batch, jax.Array | None]
        ) -> tuple[tuple[ModelState, Grads], tuple[jax.Array, object]]:
            (state, total), (part, rng) = carry, inputs
            part = unstacked(with_shares(part, batch), count)
            loss, state, aux, grads = gradients(scale_of_part, params, state, part, rng)
            total = map_overwritten(jnp.maximum, jnp.add, total, grads)
            return (vary_like(model_state, state), total), (loss / count, aux)

        (state, grads), (losses, aux) = lax.scan(add_part, (model_state, zeros), (in_parts(split, count), rngs))
        return StepGradients(losses.sum(), state, aux, grads)

    return over_parts


def _of_part(loss_scale: LossScales, count: int) -> LossScales:
    if isinstance(loss_scale, PerLossScale):
        return PerLossScale(tuple(_PartScale(scale, count) for scale in loss_scale.loss_scales))
    return _PartScale(loss_scale, count)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _PartScale:
    """Scales the loss of a micro-batch as its fraction of the batch's mean loss."""

    whole: LossScale
    count: int = dataclasses.field(metadata={"static": True})

    @property
    def loss_scale(self) -> Any:
        return self.whole.loss_scale

    def scale(self, tree: Any) -> Any:
        return self.whole.scale(jax.tree.map(lambda x: x / self.count, tree))

    def unscale(self, tree: Any) -> Any:
        return self.whole.unscale(tree)

    def adjust(self, grads_finite: Any) -> LossScale:
        return self.whole.adjust(grads_finite)
