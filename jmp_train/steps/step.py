"""The train step: policy -> loss -> gradients -> optimizer -> state, as one pure function."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import KeyPath

from jmp_train.policies import Grads, OptState, Params
from jmp_train.policies.dtype_policies import FirstTrace, PathPolicy, Policy, PolicySchedule, named_policy
from jmp_train.policies.loss_scaling import (
    LossScales,
    PerLossScale,
    check_is_stateless,
    check_takes_state,
    loss_and_aux,
    only_losses,
    refuse_pair,
    refuse_second_cast,
    unpack_loss,
    unscale_and_check,
)
from jmp_train.policies.optimizers import (
    Addition,
    LossScaledState,
    ParamsOptimizer,
    SkipRuleState,
    ZeroGradientsState,
    as_transformation,
    check_nesting,
    has_nested_scale,
    loss_scale_of,
    proposed_params,
    reason_of_skip,
    scaled_states,
    taken_by_rules,
)
from jmp_train.policies.pytrees import (
    cast_like,
    find_nodes,
    is_float_array,
    is_inexact_array,
    is_key,
    map_overwritten,
    mean_over_axes,
    named_leaves,
    path_name,
    pvary,
    reduce_gradients,
    select_tree,
    trained,
    trained_gradients,
    upcast_to_float32,
    with_overwritten,
)
from jmp_train.steps.batch_parts import (
    check_divides,
    check_has_examples,
    in_parts,
    unstacked,
    with_shares,
    without_shares,
)
from jmp_train.steps.device_keys import keys_of_device, keys_of_first
from jmp_train.steps.fp8_scales import delayed_scaling, next_state, own_state, scales_for, state_after_step
from jmp_train.steps.gradients import float32_scalar, value_and_grad_with_scales
from jmp_train.steps.optimizer_arguments import Evaluate, extra_arguments
from jmp_train.steps.step_checks import (
    NO_KEY,
    check_is_train_state,
    check_local_loss,
    check_same_optimizer,
    missing_key_explained,
    names_of_axes,
)
from jmp_train.steps.train_state import TrainState
from jmp_train.steps.watches import checked_watches, watch_metrics
from jmp_train.types import Batch, Metrics, ModelState

# loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux)); users write more specific types
LossFn = Callable[[Any, Any, Any, Any], tuple[jax.Array, tuple[Any, Any]]]

_STATELESS = (
    "stateless is for a loss_fn that draws nothing; train_step gives a key to loss_fn(params, model_state, batch, rng)"
)


def stateless(loss_fn: Callable[..., Any], has_aux: bool | None = None) -> LossFn:
    """Adapts a plain loss function to what `train_step` takes.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, or `-> (loss, aux)`. `loss` may be a tuple of losses.
      has_aux: whether `loss_fn` returns `(loss, aux)`. Where it returns two scalars and the optimizer has no
        `PerLossScale`, it has to be said: False if both are losses.

    Returns:
      `fn(params, model_state, batch, rng) -> (loss, (model_state, aux))`, which passes the model
      state on and draws nothing.

    Raises:
      TypeError: `loss_fn` cannot take two arguments; when called, a part of what it returned is not a loss, and
        `has_aux` is not set.

    Example:
      >>> import jax.numpy as jnp
      >>> fn = stateless(lambda params, batch: (params * batch).sum())
      >>> loss, (model_state, aux) = fn(jnp.ones(2), None, jnp.ones(2), None)
      >>> float(loss), aux
      (2.0, None)
    """
    check_is_stateless(loss_fn)

    def with_state(
        params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        del rng
        with missing_key_explained(_STATELESS):
            result = loss_fn(params, batch)
        loss, aux = loss_and_aux(result, True) if has_aux else (only_losses(result, has_aux), None)
        return loss, (model_state, aux)

    with_state.__qualname__ = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)  # for messages
    return with_state


def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    policy: Policy | PathPolicy | str | None = None,
    accumulate_steps: int = 1,
    watch: Sequence[str] = (),
) -> "TrainStep":
    """Returns a pure training step `(state, batch) -> (state, metrics)` in mixed precision.

    A step with non-finite gradients is skipped, if the optimizer is a `with_loss_scale`:
    parameters, inner optimizer state and model state stay as they were to the last bit, the scale
    falls, the counters tell. `step` and `rng` go on. So is a step that its rule `skip` skips, but the scale stays.

    Args:
      loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux))`; see
        `stateless` for less. It gets parameters and batch in the compute dtype and the model state
        as it is stored. `rng` is a fresh key each step, or None if the state has none. Floating
        targets in the batch are cast too: where that loses too much, use `apply_policy` on the
        model inside `loss_fn` and no policy here.
        `loss` may be a tuple of losses: the step follows their sum. Where the optimizer has a
        `PerLossScale`, each has a scale of its own.
      optimizer: any optax optimizer, usually a `with_loss_scale(...)`. It is given the loss as the
        extra argument `value`; a line search, as in `optax.lbfgs`, the loss as a function of the
        parameters, too, and so are `optax.contrib`'s `sophia` and `sam`, unless the step runs on
        several devices.
      policy: the dtypes, or the name of a policy; None casts nothing.
      accumulate_steps: into how many micro-batches the batch is split along its first axis. They
        share one scale, one overflow check and one update. Of a `jmp_train.graphs.stack` in the batch each
        has one graph; a graph that is in no stack is refused. `ShardedFeatures` are not split.
      watch: what to count in every step, of "lost_updates" and "underflow"; see the metrics.

    Returns:
      A `TrainStep`: call it, jit it, or pass it to a parallel transform. Its metrics:
        * loss: float32 scalar, the mean over the batch, unscaled; of several losses the sum;
        * aux: what `loss_fn` returned, in the output dtype; stacked if there are micro-batches;
        * grad_norm: float32 scalar, of the unscaled gradients before the optimizer clips them;
        * grads_finite: bool scalar, whether this batch's gradients were;
        * loss_scale: float32 scalar, the scale that the next step will use; of several losses an
          array [losses];
        * skipped_steps: int32 scalar, how many steps were skipped so far, this one included;
        * skip_reason: int32 scalar, if the optimizer has a skip rule: 0 if the step was taken, 1 if it was skipped for
          non-finite gradients, 2 if the rule skipped it;
        * num_zeros_in_grad: int32 scalar, if the optimizer has a `count_zero_gradients`;
        * watch: what `watch` names, as `{name: {group: float32 scalar}}`; a group is a module right under the root of
          the parameters. "lost_updates" is the share of the updates that are not zero and leave the parameter what it
          was in the dtype that it is kept in, "underflow" that of the scaled gradients that are not zero and below the
          smallest normal number of the half type.

    Raises:
      ValueError: `accumulate_steps` is below 1 or, when called, does not divide the batch; the batch has no examples;
        64-bit integers of NumPy in the batch do not fit into the 32 bits that JAX keeps, where it is called without
        `jax.jit`; the state has several loss scales, or is another optimizer's; the optimizer's wrappers are
        nested so that they compute something else; parameters are stored in a lower precision than the
        policy says.
      TypeError: an argument is of another type; when called, the model state changes its
        structure, shapes or dtypes (between floating dtypes it is cast back), or there is a graph
        among what is split into micro-batches.

    Warns:
      Float32ProductsWarning: when the step is first traced, for which `loss_fn` is traced once more.
      MissingLossScaleWarning: `policy` computes in float16, and the optimizer is no `with_loss_scale`.
      CpuConvolutionWarning: it has bfloat16 convolutions that this jaxlib gets wrong on CPUs.
      CollapsedValuesWarning: called without `jax.jit`, values of the batch become one when cast, by the policy or by
        JAX, from float64 to float32.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> loss_fn = lambda params, x: ((x @ params["w"]).astype(jnp.float32) ** 2).mean()
      >>> optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
      >>> step = jt.train_step(jt.stateless(loss_fn), optimizer, policy="mixed_float16")
      >>> state = jt.TrainState.create({"w": jnp.ones((2, 1))}, optimizer)
      >>> state, metrics = jax.jit(step, donate_argnums=0)(state, jnp.full((4, 2), 0.25))
      >>> float(metrics["loss"]), bool(metrics["grads_finite"])
      (0.25, True)
    """
    if not isinstance(accumulate_steps, int) or accumulate_steps < 1:
        raise ValueError(f"accumulate_steps={accumulate_steps!r} must be an integer of at least 1")
    if isinstance(policy, PolicySchedule):
        raise TypeError(
            "policy must be that of one step, got a PolicySchedule: its phases have a step each, schedule.steps("
            "lambda policy: jax.jit(train_step(..., policy=policy), donate_argnums=0), total_steps)"
        )
    policy = None if policy is None else named_policy(policy)
    check_takes_state(loss_fn)
    refuse_second_cast(loss_fn, policy)
    return TrainStep(loss_fn, as_transformation(optimizer), policy, accumulate_steps, watch=checked_watches(watch))


class StepGradients(NamedTuple):
    """What a step makes of a batch before the optimizer sees it.

    Attributes:
      loss: scalar, unscaled.
      model_state: the next one.
      aux: what the loss function returned beside, for the metrics.
      grads: scaled; of several losses a tuple of them.
    """

    loss: jax.Array
    model_state: Any
    aux: Any
    grads: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """What `train_step` returns: its arguments and the mesh axes, as a callable value.

    Args:
      loss_fn: see `train_step`.
      optimizer: see `train_step`.
      policy: see `train_step`.
      accumulate_steps: see `train_step`.
      axis_names: mesh axes over which the batch is split.
      model_axis_names: mesh axes over which the parameters are split.
      watch: see `train_step`.
      first_trace: warns when the step is first traced; copies share it.

    Example:
      >>> import optax
      >>> step = train_step(stateless(lambda params, batch: params * batch), optax.sgd(0.1))
      >>> step.with_axes("data").axis_names
      ('data',)
    """

    loss_fn: LossFn
    optimizer: optax.GradientTransformationExtraArgs
    policy: Policy | PathPolicy | None = None
    accumulate_steps: int = 1
    axis_names: tuple[str, ...] = ()
    model_axis_names: tuple[str, ...] = ()
    watch: tuple[str, ...] = ()
    first_trace: FirstTrace = dataclasses.field(default_factory=FirstTrace, repr=False)

    def __str__(self) -> str:
        name = getattr(self.loss_fn, "__qualname__", type(self.loss_fn).__name__)
        return f"TrainStep of {name}, policy {self.policy}"

    def with_axes(self, *names: str, model: Sequence[str] = ()) -> "TrainStep":
        """Returns this step for use inside a `shard_map` or `pmap` with these axes.

        Gradients are averaged over them in the policy's `reduce_dtype`, all devices take or skip
        the step together, loss, floating aux and batch statistics are averaged in float32, and
        every device draws from keys of its own, also where they are typed keys in the model state. Whole-number
        aux stays each device's own.

        Args:
          *names: axes over which the batch is split.
          model: axes over which the parameters are split, by tensor or by pipeline parallelism: nothing is
            averaged over them, but the step is taken or skipped by all of their devices together. The norm
            and the count of zeros in the metrics are those of a device's own part.
        """
        return dataclasses.replace(self, axis_names=names, model_axis_names=tuple(model))

    @property
    def _all_axes(self) -> tuple[str, ...]:
        return (*self.axis_names, *self.model_axis_names)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Returns the next state and the metrics of this step."""
        check_is_train_state(state)
        self.first_trace.look_at_values({"batch": batch}, self.policy)
        next_rng, step_rng = (None, None) if state.rng is None else jax.random.split(state.rng)
        result = self.gradients(loss_scale_of(state.opt_state), state.params, state.model_state, batch, step_rng)
        evaluate = None if self._all_axes else self._evaluation(state, batch, step_rng)
        return self.apply_gradients(state, result, next_rng, evaluate)

    def gradients(
        self,
        loss_scale: LossScales,
        params: Params,
        model_state: ModelState,
        batch: Batch,
        rng: jax.Array | None,
    ) -> StepGradients:
        """Returns loss, next model state, aux and scaled gradients, reduced over the axes.

        Args:
          loss_scale: the optimizer state's.
          params: as they are stored.
          model_state: as it is stored.
          batch: this device's examples.
          rng: the step's random key, the same for all devices, or None.
        """
        check_param_dtypes(params, self.policy)
        loss, model_state, aux, grads = self.local_gradients(loss_scale, params, model_state, batch, rng)
        grads = reduce_gradients(grads, self.axis_names, self.reduce_dtype)
        averaged = mean_over_axes((loss, model_state, aux), self.axis_names)
        return StepGradients(*averaged, grads)

    def local_gradients(
        self,
        loss_scale: LossScales,
        params: Params,
        model_state: ModelState,
        batch: Batch,
        rng: jax.Array | None,
    ) -> StepGradients:
        """Returns what `gradients` does of this device's examples alone, before anything is reduced.

        Args:
          loss_scale: see `gradients`, as are the others.
          params: whole, as they are stored or in their compute dtype.
          model_state: as it is stored.
          batch: this device's examples.
          rng: the step's random key, the same for all devices, or None.
        """
        if rng is not None and self.axis_names:
            rng = jax.random.fold_in(rng, lax.axis_index(self.axis_names))
        params = pvary(params, self.axis_names)
        model_state = keys_of_device(self._varying(model_state), self.axis_names)
        no_key = NO_KEY if rng is None else None
        with names_of_axes(self._all_axes), missing_key_explained(no_key):
            result = self._gradients(loss_scale, params, model_state, batch, rng)
        check_local_loss(result.loss, params, self.axis_names)
        return result._replace(model_state=keys_of_first(result.model_state, self.axis_names))

    def apply_gradients(
        self,
        state: TrainState,
        result: StepGradients,
        rng: jax.Array | None,
        evaluate: Evaluate | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Returns the next state, with the step taken or skipped, and the metrics.

        Args:
          state: the one whose gradients these are.
          result: of `gradients`.
          rng: the next state's random key, or None.
          evaluate: returns loss and unscaled gradients at other parameters, for optimizers that ask for them.
        """
        loss, model_state, aux, grads = result
        check_same_optimizer(self.optimizer, state.opt_state, trained(state.params))
        if not scaled_states(state.opt_state):
            self.first_trace.miss_loss_scale(self.policy)
        # with_loss_scale computes both of these too, and XLA computes them once.
        unscaled, finite, _ = unscale_and_check(loss_scale_of(state.opt_state), grads, self._all_axes)

        extra = extra_arguments(state.opt_state, loss, trained(unscaled), evaluate)
        seen = _finite_or_nan(finite, trained_gradients(grads), state.opt_state)
        new_params, opt_state, additions = self._update(seen, state, extra)
        new_params = with_overwritten(new_params, unscaled)
        taken = taken_by_rules(finite, opt_state)
        model_state = state_after_step(model_state, self.policy)
        if scaled_states(opt_state):
            new_params = select_tree(taken, new_params, state.params)
            model_state = select_tree(taken, model_state, state.model_state)
        metrics = {
            "loss": loss,
            "aux": aux,
            "grad_norm": optax.tree.norm(trained(unscaled)),
            "grads_finite": finite,
            **_state_metrics(opt_state),
            **({"skip_reason": reason_of_skip(finite, taken)} if find_nodes(opt_state, SkipRuleState) else {}),
            **watch_metrics(self, state, grads, additions, taken),
        }
        return TrainState(new_params, opt_state, model_state, rng, state.step + 1), metrics

    @property
    def reduce_dtype(self) -> Any:
        """In what gradients are reduced: the policy's dtype, or float32."""
        return jnp.float32 if self.policy is None else self.policy.reduce_dtype

    def _gradients(
        self,
        loss_scale: LossScales,
        params: Params,
        model_state: ModelState,
        batch: Batch,
        rng: jax.Array | None,
    ) -> StepGradients:
        """Returns loss, next model state, aux and scaled gradients of a local batch."""
        count = self.accumulate_steps
        check_has_examples(batch)
        if count == 1:
            return self._micro_gradients(loss_scale, params, model_state, batch, rng)

        def add_micro_batch(
            carry: tuple[ModelState, Grads], inputs: tuple[Batch, jax.Array | None]
        ) -> tuple[tuple[ModelState, Grads], tuple[jax.Array, object]]:
            (model_state, total), (part, rng) = carry, inputs
            micro_batch = with_shares(part, batch)
            loss, model_state, aux, grads = self._micro_gradients(loss_scale, params, model_state, micro_batch, rng)
            total = map_overwritten(jnp.maximum, jnp.add, total, grads)
            return (self._varying(model_state), total), (loss, aux)

        split = without_shares(batch)
        check_divides(split, count, f"accumulate_steps={count}")
        rngs = None if rng is None else jax.random.split(rng, count)
        zeros = pvary(jax.tree.map(jnp.zeros_like, upcast_to_float32(params)), self.axis_names)
        if isinstance(loss_scale, PerLossScale):
            zeros = (zeros,) * len(loss_scale.loss_scales)
        (model_state, grads), (shares_of_loss, aux) = lax.scan(
            add_micro_batch, (model_state, zeros), (in_parts(split, count), rngs)
        )
        return StepGradients(shares_of_loss.sum(), model_state, aux, grads)

    def _varying(self, model_state: ModelState) -> ModelState:
        """Returns a model state whose floats and random keys are marked as a device's own, also those set anew."""
        return jax.tree.map(lambda x: pvary(x, self.axis_names) if is_inexact_array(x) or is_key(x) else x, model_state)

    def _micro_gradients(
        self,
        loss_scale: LossScales,
        params: Params,
        model_state: ModelState,
        batch: Batch,
        rng: jax.Array | None,
    ) -> StepGradients:
        batch = unstacked(batch, self.accumulate_steps)
        own = own_state(model_state)
        share_of_loss = self._share_of_loss(loss_scale, own, rng)
        self.first_trace.look(
            lambda params, batch, model_state, rng: self.loss_fn(params, model_state, batch, rng),
            self.policy,
            (params, batch),
            {},
            uncast=(own, rng),
            names=("params", "batch", "model_state", "rng"),
        )
        value_and_grad = value_and_grad_with_scales(share_of_loss, self.policy, has_aux=True)
        delayed = delayed_scaling(self.policy) is not None
        scales = scales_for(model_state, loss_scale, self.axis_names) if delayed else None
        value, grads, magnitudes = value_and_grad(loss_scale, scales, params, batch)
        loss, (new_own, aux) = value
        if self.policy is not None:
            aux = self.policy.default.cast_to_output(aux)
        if isinstance(loss, tuple):
            loss = functools.reduce(jnp.add, loss)
        _check_alike(new_own, own)
        new_own = cast_like(new_own, own)
        new_model_state = next_state(model_state, new_own, magnitudes, loss_scale, self.axis_names)
        return StepGradients(loss, new_model_state, aux, grads)

    def _share_of_loss(
        self, loss_scale: LossScales, model_state: ModelState, rng: jax.Array | None
    ) -> Callable[[Params, Batch], tuple[Any, Any]]:
        """Returns a micro-batch's share of the loss as a function of parameters and batch."""

        def share_of_loss(params: Params, batch: Batch) -> tuple[Any, Any]:
            # Rebuilt here, because nnx lets variables change only in the trace that made them.
            state = jax.tree.map(lambda x: x, model_state)
            loss, extra = unpack_loss(self.loss_fn(params, state, batch, rng))
            if not isinstance(loss, tuple | list):
                return float32_scalar(loss) / self.accumulate_steps, extra
            losses = tuple(float32_scalar(x) / self.accumulate_steps for x in loss)
            if isinstance(loss_scale, PerLossScale):
                return losses, extra
            refuse_pair(loss)
            return functools.reduce(jnp.add, losses), extra

        return share_of_loss

    def fp8_places(self, state: TrainState, batch: Batch) -> list[str]:
        """Returns the places of the products that run in 8 bits with delayed scaling; nothing is computed.

        Args:
          state: arrays or their shapes, as is `batch`.
          batch: as the step is given it.
        """
        found: dict[str, tuple[int, ...]] = {}

        def ones(extents: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
            found.update(extents)
            return {place: jnp.ones((*lengths, 3)) for place, lengths in extents.items()}

        def note(state: TrainState, batch: Batch) -> None:
            if self.accumulate_steps > 1:
                parts = in_parts(without_shares(batch), self.accumulate_steps)
                batch = with_shares(jax.tree.map(lambda x: x[0], parts), batch)
            loss_scale = loss_scale_of(state.opt_state)
            batch = unstacked(batch, self.accumulate_steps)
            share_of_loss = self._share_of_loss(loss_scale, own_state(state.model_state), state.rng)
            run = value_and_grad_with_scales(share_of_loss, self.policy, has_aux=True)
            run(loss_scale, ones, state.params, batch)

        jax.eval_shape(note, state, batch)
        return list(found)

    def _evaluation(self, state: TrainState, batch: Batch, rng: jax.Array | None) -> Evaluate:
        """Returns loss and unscaled gradients of this batch as a function of the parameters."""
        loss_scale = loss_scale_of(state.opt_state)

        def evaluate(float32_params: Params) -> tuple[jax.Array, Any]:
            params = with_overwritten(float32_params, state.params)
            params = jax.tree.map(lambda x, old: x.astype(old.dtype), params, state.params)
            result = self.gradients(loss_scale, params, state.model_state, batch, rng)
            unscaled = trained(unscale_and_check(loss_scale, result.grads, ()).grads)
            return result.loss, jax.tree.map(lambda g, x: g.astype(x.dtype), unscaled, float32_params)

        return evaluate

    def _update(self, grads: Grads, state: TrainState, extra: dict[str, Any]) -> tuple[Any, Any, list[Addition]]:
        """Returns parameters and optimizer state after the optimizer's step, taken or not, and what it added."""
        optimizer = self.optimizer
        if self._all_axes:
            extra = {**extra, "axis_names": self._all_axes}
        params = trained(state.params)
        check_nesting(optimizer, grads, state.opt_state, params, **extra)
        if not (isinstance(optimizer, ParamsOptimizer) or scaled_states(state.opt_state)):
            # bare optax wants gradients like parameters
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        additions: list[Addition] = []
        on_addition = additions.append if "lost_updates" in self.watch else None
        params, opt_state = proposed_params(optimizer, grads, state.opt_state, params, on_addition, **extra)
        return params, _clear_emitted(opt_state), additions


def _finite_or_nan(finite: jax.Array, grads: Grads, opt_state: OptState) -> Any:
    """Returns gradients of which each part tells whether all are finite.

    A `with_loss_scale` within `multi_transform` sees its parameters' gradients only, and has to skip when those
    of frozen ones overflow, too: the step is not taken then, and the scale has to fall.
    """
    if not has_nested_scale(opt_state):
        return grads
    if isinstance(loss_scale_of(opt_state), PerLossScale):
        return grads  # which loss overflowed is told by its own gradients
    return jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), grads)


def _check_alike(new: ModelState, old: ModelState) -> None:
    """Raises TypeError if a new model state is not the old one's but for floating dtypes."""
    old_tree, new_tree = jax.tree.structure(old), jax.tree.structure(new)
    if old_tree != new_tree:
        raise TypeError(
            f"loss_fn returned a model_state of another structure:\n  {new_tree}\nthan the "
            f"state has:\n  {old_tree}\nTrainState.create(model_state=...) takes the first one"
        )

    def check(path: KeyPath, x: jax.Array, y: jax.Array) -> None:
        both_float = is_float_array(x) and is_float_array(y)
        if jnp.shape(x) != jnp.shape(y) or not (both_float or x.dtype == y.dtype):
            raise TypeError(
                f"loss_fn returned model_state {path_name(path)!r} as {y.dtype}{list(y.shape)}, "
                f"the state has {x.dtype}{list(x.shape)}"
            )

    jax.tree_util.tree_map_with_path(check, old, new)


def check_param_dtypes(params: Params, policy: Policy | PathPolicy | None) -> None:
    """Raises ValueError if parameters are stored in a lower precision than their policy says, and names them."""
    if policy is None:
        return
    too_low = [
        f"{path!r} is {x.dtype.name}, not {jnp.dtype(wanted).name}"
        for path, x in named_leaves(params)
        if is_float_array(x) and jnp.finfo(x.dtype).bits < jnp.finfo(wanted := policy.policy_of(path).param_dtype).bits
    ]
    if too_low:
        raise ValueError(
            "parameters are stored in a lower precision than the policy's param_dtype; policy.cast_to_param "
            "before TrainState.create keeps what they have:\n  " + "\n  ".join(too_low)
        )


def _state_metrics(opt_state: OptState) -> Metrics:
    loss_scale = jnp.asarray(loss_scale_of(opt_state).loss_scale, jnp.float32)
    skipped = [state.skipped_steps for _, state in scaled_states(opt_state)]
    zeros = [state.zeros for _, state in find_nodes(opt_state, ZeroGradientsState)]
    return {
        "loss_scale": loss_scale,
        "skipped_steps": skipped[0] if skipped else jnp.zeros((), jnp.int32),
        **({"num_zeros_in_grad": sum(zeros)} if zeros else {}),
    }


def _clear_emitted(opt_state: OptState) -> Any:
    """Empties the accumulators of a MultiSteps that has just emitted its gradients.

    optax 0.2.8 does that by multiplying them with zero, which makes NaN of an inf, for good.
    """

    def clear(node: object) -> Any:
        if not isinstance(node, optax.MultiStepsState):
            return node
        emitted = node.mini_step == 0
        return node._replace(acc_grads=jax.tree.map(lambda g: jnp.where(emitted, jnp.zeros_like(g), g), node.acc_grads))

    return jax.tree.map(clear, opt_state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState | LossScaledState))
