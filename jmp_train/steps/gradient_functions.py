"""Gradient functions: the part of a train step before the optimizer.

A gradient function has the signature `(loss_scale, params, model_state, batch, rng) -> StepGradients`. A transform
takes one and returns another, and a step chains them:

    gradients = loss_gradients(loss_fn, policy)
    gradients = accumulated(gradients, 4)
    gradients = over_axes(gradients, ("data",))

`Summed` marks parts of a model state that devices add instead of averaging, such as counts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike

from jmp_train.policies import Grads, Params, PathPolicy, pvary, reduce_gradients
from jmp_train.policies.dtype_policies import FirstTrace, Policy
from jmp_train.policies.loss_scaling import LossScale, LossScales, PerLossScale
from jmp_train.policies.pytrees import (
    check_count,
    is_inexact_array,
    is_key,
    map_overwritten,
    mean_over_axes,
    sum_over_axes,
    upcast_to_float32,
    vary_like,
)
from jmp_train.steps.batch_parts import check_divides, in_parts, unstacked, with_shares, without_shares
from jmp_train.steps.gradients import Weighted, divisor, times, weighed
from jmp_train.types import Batch, ModelState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summed:
    """A part of the model state that counts examples: devices add what each of them has added to it.

    Floating parts of a model state are averaged over devices. That is right for means, but a count, or a sum, of the
    whole batch is the sum of those of the devices. On one device it is only a container. A step must add to the value:
    one that starts it again needs `decay=0`.

    Args:
      value: pytree of arrays.
      decay: the factor of the old value in the new one; below 1 for moving averages. Integers need 1.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> def loss_fn(w, seen, batch, rng):
      ...     seen = jt.steps.Summed(0.5 * seen.value + 0.5 * batch.size, decay=0.5)
      ...     return (w * batch).mean(), (seen, None)
      >>> optimizer, mesh = optax.sgd(0.1), jax.sharding.Mesh(jax.devices(), ("data",))
      >>> step = jt.data_parallel(jt.train_step(loss_fn, optimizer), mesh)
      >>> state = jt.TrainState.create(jnp.ones(()), optimizer, model_state=jt.steps.Summed(jnp.zeros(()), decay=0.5))
      >>> state, _ = step(state, jnp.ones(2 * mesh.size))
      >>> float(state.model_state.value) == mesh.size
      True
    """

    value: Any
    decay: float = dataclasses.field(default=1.0, metadata={"static": True})


def with_device_sums(new: ModelState, old: ModelState, axis_names: Sequence[str], micro_batches: int) -> Any:
    """Returns the model state of a device with all devices' additions to its `Summed` parts.

    Args:
      new: the state after the device's examples.
      old: the state before, the same on all devices.
      axis_names: mesh axes over which the batch is split.
      micro_batches: the number of times that the device has updated the state.
    """

    def add(new: Any, old: Any) -> Any:
        if not isinstance(new, Summed):
            return new
        factor = new.decay**micro_batches

        def total(x: jax.Array, y: jax.Array) -> Any:
            wide, kept = upcast_to_float32(x), upcast_to_float32(y)
            kept = kept * factor if is_inexact_array(y) else kept
            return (kept + sum_over_axes(wide - kept, axis_names)).astype(x.dtype)

        return Summed(jax.tree.map(total, new.value, old.value), new.decay)

    return jax.tree.map(add, new, old, is_leaf=_is_summed)


def without_sums(model_state: ModelState) -> Any:
    """Returns a model state with None in place of its `Summed` parts."""
    return jax.tree.map(lambda x: None if _is_summed(x) else x, model_state, is_leaf=_is_summed)


def _is_summed(x: object) -> bool:
    return isinstance(x, Summed)


# loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux)); users write more specific types
LossFn: TypeAlias = Callable[[Any, Any, Any, Any], tuple[jax.Array, tuple[Any, Any]]]


class StepGradients(NamedTuple):
    """Loss, gradients and model state of one batch, before the optimizer update.

    Attributes:
      loss: scalar, unscaled.
      model_state: the next model state.
      aux: further results of the loss function, for the metrics.
      grads: scaled gradients, in float32 or higher precision; a tuple of them under a `PerLossScale`.

    Example:
      >>> result = StepGradients(loss=0.5, model_state=None, aux=None, grads={"w": 2.0})
      >>> result._replace(grads=jax.tree.map(lambda g: 0.5 * g, result.grads)).grads
      {'w': 1.0}
    """

    loss: jax.Array
    model_state: Any
    aux: Any
    grads: Any


GradientFunction: TypeAlias = Callable[[LossScales, Params, ModelState, Batch, jax.Array | None], StepGradients]
GradientTransform: TypeAlias = Callable[[GradientFunction], GradientFunction]


@dataclasses.dataclass(frozen=True, eq=False)
class StepOptions:
    """The arguments of a train step, and its mesh axes; see `TrainStep`."""

    loss_fn: LossFn
    optimizer: optax.GradientTransformationExtraArgs
    policy: Policy | PathPolicy | None = None
    accumulate_steps: int = 1
    axis_names: tuple[str, ...] = ()
    model_axis_names: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()
    transforms: tuple[GradientTransform, ...] = ()
    first_trace: FirstTrace = dataclasses.field(default_factory=FirstTrace, repr=False)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices take or skip the step together."""
        return (*self.axis_names, *self.model_axis_names)


def accumulated(gradients: GradientFunction, count: int) -> GradientFunction:
    """Returns a gradient function that splits its batch into micro-batches and averages their gradients.

    The micro-batches run one after another, share one loss scale, and pass the model state on. Each scales its
    fraction of the loss, so that half-precision gradients are as small as those of the whole batch. A loss from
    `weighted` is averaged over what all micro-batches count.

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
    check_count("count", count)
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
            if isinstance(aux, Weighted):
                loss, grads = (times(divisor(aux.weight), x) for x in (loss, grads))
            total = map_overwritten(jnp.maximum, jnp.add, total, grads)
            return (vary_like(model_state, state), total), (loss / count, aux)

        (state, grads), (losses, aux) = lax.scan(add_part, (model_state, zeros), (in_parts(split, count), rngs))
        loss = losses.sum()
        if isinstance(aux, Weighted):
            weight = aux.weight.sum()
            loss, grads = (times(count / divisor(weight), x) for x in (loss, grads))
            aux = Weighted(aux.aux, weight)
        return StepGradients(loss, state, aux, grads)

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


def over_axes(
    gradients: GradientFunction,
    axis_names: Sequence[str],
    reduce_dtype: DTypeLike = jnp.float32,
    micro_batches: int = 1,
) -> GradientFunction:
    """Returns a gradient function that averages over all devices, for use inside a `shard_map` or `pmap`.

    Args:
      gradients: gradient function of the examples of one device.
      axis_names: mesh axes over which the batch is split; none returns `gradients`.
      reduce_dtype: dtype of the reduction of gradients; see `reduce_gradients`. Loss, model state and `aux` are
        averaged in float32. Arrays that are neither floating nor complex stay those of each device.
      micro_batches: the number of micro-batches of a device, if the model state has a `Summed` with a decay.

    Example:
      >>> import jmp_train as jt
      >>> from jmp_train.steps import loss_gradients
      >>> gradients = over_axes(loss_gradients(jt.stateless(lambda w, x: w * x)), ("data",))
      >>> of_device = lambda x: gradients(jt.NoOpLossScale(), jnp.ones(()), None, x, None).grads
      >>> jax.vmap(of_device, axis_name="data")(jnp.array([1.0, 3.0]))
      Array([2., 2.], dtype=float32)
    """
    return averaged(of_own_device(gradients, axis_names), axis_names, reduce_dtype, micro_batches)


def of_own_device(gradients: GradientFunction, axis_names: Sequence[str]) -> GradientFunction:
    """Returns a gradient function with different random keys on each device and local gradients.

    Args:
      gradients: gradient function of the examples of one device.
      axis_names: mesh axes over which the batch is split; none returns `gradients`.
    """
    if not axis_names:
        return gradients
    names = tuple(axis_names)

    def of_device(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        if rng is not None:
            rng = jax.random.fold_in(rng, lax.axis_index(names))
        params = pvary(params, names)
        # Marked as varying over devices, because the loss function may compute them from its examples.
        own = jax.tree.map(lambda x: pvary(x, names) if is_inexact_array(x) or is_key(x) else x, model_state)
        result = gradients(loss_scale, params, keys_of_device(own, names), batch, rng)
        check_local_loss(result.loss, params, names)
        return result._replace(model_state=keys_of_first(result.model_state, names))

    return of_device


def check_local_loss(loss: jax.Array, params: Params, axis_names: Sequence[str]) -> None:
    """Raises ValueError if a loss is already averaged over devices and its gradients would be too small.

    Inside a `shard_map` that checks varying types, each of N devices gets an Nth of the gradient of such a loss.

    Args:
      loss: the loss of this device.
      params: marked as varying over the axes; otherwise jax does not check.
      axis_names: the axes over which gradients are averaged.
    """
    varies = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(params)]
    checked = set().union(*varies)
    own = jax.typeof(loss).manual_axis_type.varying
    for name in axis_names:
        if name in checked and name not in own:
            raise ValueError(
                f"loss_fn averages its loss over the axis {name!r}, but the step does too, so gradients would be "
                "averaged twice. Return the loss of the device's own examples"
            )


def averaged(
    gradients: GradientFunction, axis_names: Sequence[str], reduce_dtype: DTypeLike, micro_batches: int
) -> GradientFunction:
    """Returns a gradient function whose results are averaged over devices.

    Args:
      gradients: gradient function with local gradients, from `of_own_device`.
      axis_names: mesh axes; none returns `gradients`.
      reduce_dtype: see `over_axes`.
      micro_batches: see `over_axes`.
    """
    if not axis_names:
        return gradients

    def over_devices(*call: Any) -> StepGradients:
        loss, model_state, aux, grads = gradients(*call)
        loss, aux, grads = weighed(loss, aux, grads, axis_names)
        model_state = with_device_sums(model_state, call[2], axis_names, micro_batches)
        grads = reduce_gradients(grads, axis_names, reduce_dtype)
        return StepGradients(*mean_over_axes((loss, model_state, aux), axis_names), grads)

    return over_devices


def keys_of_device(model_state: ModelState, axis_names: Sequence[str]) -> Any:
    """Returns the model state with different random keys on each device; the first device keeps its own.

    Args:
      model_state: the same on all devices. Untyped keys stay, because they look like counts.
      axis_names: mesh axes over which the batch is split; none changes nothing.
    """
    if not axis_names:
        return model_state
    index = lax.axis_index(tuple(axis_names))

    def of_device(key: jax.Array) -> jax.Array:
        folded = jax.vmap(lambda key: jax.random.fold_in(key, index))(key.reshape(-1)).reshape(key.shape)
        return jnp.where(index == 0, key, folded)

    return jax.tree.map(lambda x: of_device(x) if is_key(x) else x, model_state)


def keys_of_first(model_state: ModelState, axis_names: Sequence[str]) -> Any:
    """Returns the model state with the first device's random keys on all devices.

    Args:
      model_state: the state after a step that began with `keys_of_device`. Keys that the model only reads are
        unchanged.
      axis_names: mesh axes over which the batch is split; none changes nothing.
    """
    if not axis_names or not any(map(is_key, jax.tree.leaves(model_state))):
        return model_state
    is_first = lax.axis_index(tuple(axis_names)) == 0
    data = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else None, model_state)
    flat, as_data = ravel_pytree(data)  # one sum for all keys
    signed = lax.bitcast_convert_type(flat, jnp.int32)  # XLA sums these and the test for overflow in one all-reduce
    total = sum_over_axes(jnp.where(is_first, signed, 0), axis_names)
    first = as_data(lax.bitcast_convert_type(total, flat.dtype))

    def with_data(x: Any, data: jax.Array | None) -> Any:
        return x if data is None else jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))

    return jax.tree.map(with_data, model_state, first)
