"""The train step: policy -> loss -> gradients -> devices -> optimizer -> state, as one pure function."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies import Params, PathPolicy, PolicySchedule
from jmp_train.policies.autocasting import missing_key_explained
from jmp_train.policies.dtype_policies import Policy, named_policy
from jmp_train.policies.loss_scaling import check_takes_state, refuse_second_cast, unscale_and_check
from jmp_train.policies.optimizers import (
    Addition,
    Evaluate,
    as_transformation,
    extra_arguments,
    loss_scale_of,
    optimizer_step,
    scaled_states,
    taken_by_rules,
)
from jmp_train.policies.pytrees import (
    check_count,
    select_state_leaf,
    select_tree,
    stays_finite,
    trained,
    trained_gradients,
    with_overwritten,
)
from jmp_train.steps.call_checks import check_call
from jmp_train.steps.fp8_scaling import delayed_scaling, scaled_products, with_next_scales
from jmp_train.steps.gradient_functions import (
    GradientFunction,
    GradientTransform,
    LossFn,
    StepGradients,
    StepOptions,
    accumulated,
    averaged,
    of_own_device,
)
from jmp_train.steps.metrics import checked_watches, step_metrics
from jmp_train.steps.step_losses import NO_KEY, loss_gradients
from jmp_train.steps.train_state import TrainState, Update
from jmp_train.types import Batch, Metrics

StepFunction = Callable[[TrainState, Any], tuple[TrainState, Metrics]]


def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    policy: Policy | PathPolicy | str | None = None,
    accumulate_steps: int = 1,
    watch: Sequence[str] = (),
) -> "TrainStep":
    """Returns a pure training step `(state, batch) -> (state, metrics)` in mixed precision.

    If the optimizer is a `with_loss_scale`, a step with non-finite gradients is skipped. Parameters, inner optimizer
    state and model state stay bitwise unchanged, the loss scale decreases, and the skip counters increase. `step` and
    `rng` advance. A step that the optimizer's rule `skip` skips leaves the loss scale unchanged. If the gradients are
    finite and a floating number of the model state becomes non-finite, the step is taken, and the whole old model state
    stays, except for random keys.

    Args:
      loss_fn: `loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux))`; `stateless` adapts simpler
        ones. It gets parameters and batch in the compute dtype, and the model state in its stored dtypes. `rng` is a
        fresh key in each step, or None if the state has none. Floating targets in the batch are cast too. If that loses
        too much, use `apply_policy` on the model inside `loss_fn`, and no policy here. `loss` may be a tuple of losses,
        whose sum is minimized. If the optimizer has a `PerLossScale`, each loss has its own scale.
      optimizer: any optax optimizer, usually a `with_loss_scale(...)`. It gets the loss as the extra argument `value`.
        Line searches, as in `optax.lbfgs`, and `optax.contrib`'s `sophia` and `sam` also get the loss as a function of
        the parameters, unless the step runs on several devices.
      policy: the dtypes, or the name of a policy; None casts nothing.
      accumulate_steps: number of micro-batches into which the batch is split; see `jmp_train.steps.accumulated`. Their
        losses and gradients are averaged, as those of devices are. If a loss counts tokens, and micro-batches have
        different counts, `weighted` gives the mean over all of them.
      watch: the quantities to count in every step: "lost_updates" or "underflow"; see the metrics.

    Returns:
      A `TrainStep`: call it, jit it, or pass it to a parallel transform. Its metrics:
        * loss: float32 scalar, the mean over the batch, unscaled; the sum of several losses;
        * aux: the `aux` of `loss_fn`, in the output dtype; stacked over micro-batches;
        * grad_norm: float32 scalar, of the unscaled gradients before the optimizer clips them;
        * grads_finite: bool scalar, True if all gradients of this batch are finite;
        * loss_scale: float32 scalar, the scale of the next step; [losses] under a `PerLossScale`;
        * skipped_steps: int32 scalar, the number of steps skipped so far, including this one;
        * model_state_finite: bool scalar, if the optimizer is a `with_loss_scale` and the model state has floating
          arrays: False if this batch's model state overflowed and the old one stays;
        * skip_reason: int32 scalar, if the optimizer has a skip rule: 0 if the step was taken, 1 if it was skipped for
          non-finite gradients, 2 if the rule skipped it;
        * num_zeros_in_grad: int32 scalar, if the optimizer has a `count_zero_gradients`;
        * watch: if `watch` is given, `{name: {group: float32 scalar}}`, where a group is a module right under the root
          of the parameters. "lost_updates" is the fraction of nonzero updates that leave the stored parameter
          unchanged. "underflow" is the fraction of nonzero scaled gradients below the smallest normal number of the
          half type.

    Raises:
      ValueError: `accumulate_steps` is below 1. When called: it does not divide the batch; the batch has no examples,
        or NumPy's 64-bit integers that do not fit into 32 bits; the state is another optimizer's; the optimizer's
        wrappers are nested in the wrong order; parameters are stored in a lower precision than the policy's.
      TypeError: an argument is of another type. When called: the model state changes its structure, shapes or dtypes.

    Warns:
      Float32ProductsWarning: when the step is first traced.
      InnerGradientWarning: `loss_fn` takes a gradient, which runs in float16; `scaled_grad` scales it.
      MissingLossScaleWarning: `policy` computes in float16, and the optimizer is no `with_loss_scale`.
      CpuConvolutionWarning: the loss has bfloat16 convolutions that this jaxlib gets wrong on CPUs.
      CollapsedValuesWarning: when called without `jax.jit`, if different values of the batch become equal when cast, by
        the policy or by JAX, from float64 to float32.

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
    check_count("accumulate_steps", accumulate_steps)
    if isinstance(policy, PolicySchedule):
        raise TypeError(
            "policy must be a single policy, got a PolicySchedule; make one step per phase with "
            "schedule.steps(lambda policy: jax.jit(train_step(..., policy=policy), donate_argnums=0), total_steps)"
        )
    policy = None if policy is None else named_policy(policy)
    check_takes_state(loss_fn)
    refuse_second_cast(loss_fn, policy)
    return TrainStep(loss_fn, as_transformation(optimizer), policy, accumulate_steps, watch=checked_watches(watch))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep(StepOptions):
    """A train step, from `train_step`: its arguments and the mesh axes, as a callable value.

    Args:
      loss_fn: see `train_step`.
      optimizer: see `train_step`.
      policy: see `train_step`.
      accumulate_steps: see `train_step`.
      axis_names: mesh axes over which the batch is split.
      model_axis_names: mesh axes over which the parameters are split.
      watch: see `train_step`.
      transforms: see `with_transforms`.
      first_trace: warns when the step is first traced; copies share it.

    Example:
      >>> step = train_step(lambda w, s, x, rng: (w * x, (s, None)), optax.sgd(0.1))
      >>> step.with_axes("data").axis_names
      ('data',)
    """

    def __str__(self) -> str:
        name = getattr(self.loss_fn, "__qualname__", type(self.loss_fn).__name__)
        return f"TrainStep of {name}, policy {self.policy}"

    def with_axes(self, *names: str, model: Sequence[str] = ()) -> "TrainStep":
        """Returns this step for use inside a `shard_map` or `pmap` with these axes.

        Gradients are averaged over them in the policy's `reduce_dtype`; loss, floating aux and batch statistics are
        averaged in float32. All devices take or skip the step together. Each device draws from its own random keys,
        including typed keys in the model state.

        Args:
          *names: axes over which the batch is split.
          model: axes over which the parameters are split, by tensor or pipeline parallelism. Nothing is averaged over
            them, but their devices take or skip the step together. The metrics `grad_norm` and `num_zeros_in_grad`
            count only a device's own part.
        """
        return dataclasses.replace(self, axis_names=names, model_axis_names=tuple(model))

    @property
    def reduce_dtype(self) -> Any:
        """The dtype in which gradients are reduced over devices."""
        return jnp.float32 if self.policy is None else self.policy.reduce_dtype

    def with_transforms(self, *transforms: GradientTransform) -> "TrainStep":
        """Returns this step with further transforms of its gradient function.

        Args:
          *transforms: each takes a gradient function and returns another. They see the gradients of this device's
            whole batch, before devices average them; the first one is the innermost.

        Example:
          >>> def clipped(gradients):
          ...     def run(*args):
          ...         result = gradients(*args)
          ...         return result._replace(grads=jax.tree.map(lambda g: jnp.clip(g, -1, 1), result.grads))
          ...     return run
          >>> step = train_step(lambda w, s, x, rng: (w * x, (s, None)), optax.sgd(0.5)).with_transforms(clipped)
          >>> state, _ = step(TrainState.create(jnp.ones(()), optax.sgd(0.5)), jnp.array(8.0))
          >>> float(state.params)
          0.5
        """
        return dataclasses.replace(self, transforms=(*self.transforms, *transforms))

    @property
    def local_gradients(self) -> GradientFunction:
        """The gradient function of this device's examples, before anything is reduced."""
        recipe = delayed_scaling(self.policy)
        gradients = loss_gradients(self.loss_fn, self.policy, first_trace=self.first_trace)
        gradients = scaled_products(gradients, recipe, self.axis_names)
        gradients = accumulated(gradients, self.accumulate_steps)
        for transform in self.transforms:
            gradients = transform(gradients)
        return of_own_device(explained(gradients, self.all_axes), self.axis_names)

    @property
    def gradients(self) -> GradientFunction:
        """The gradient function of the whole batch, reduced over the axes."""
        gradients = averaged(self.local_gradients, self.axis_names, self.reduce_dtype, self.accumulate_steps)
        return with_next_scales(gradients, delayed_scaling(self.policy))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Returns the next state and the metrics of this step."""
        check_call(self, state, batch)
        return self.updated(state, batch, self.gradients, evaluates=not self.all_axes)

    def updated(
        self, state: TrainState, batch: Batch, gradients: GradientFunction, *, evaluates: bool
    ) -> tuple[TrainState, Metrics]:
        """Returns the next state and the metrics, given the gradient function of the whole batch.

        Args:
          state: the state.
          batch: the batch.
          gradients: the gradient function.
          evaluates: True to let optimizers evaluate the loss again, as line searches do.
        """
        next_rng, step_rng = (None, None) if state.rng is None else jax.random.split(state.rng)
        result = gradients(loss_scale_of(state.opt_state), state.params, state.model_state, batch, step_rng)
        update = apply_gradients(
            self.optimizer,
            state,
            result,
            next_rng,
            axis_names=self.all_axes,
            model_axis_names=self.model_axis_names,
            evaluate=evaluation(gradients, state, batch, step_rng) if evaluates else None,
            with_additions="lost_updates" in self.watch,
        )
        return update.state, step_metrics(self, state, result, update)


def apply_gradients(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    result: StepGradients,
    rng: jax.Array | None = None,
    *,
    axis_names: Sequence[str] = (),
    model_axis_names: Sequence[str] = (),
    evaluate: Evaluate | None = None,
    with_additions: bool = False,
) -> Update:
    """Returns the next train state: unscales and checks the gradients, then takes or skips the step.

    If the optimizer is a `with_loss_scale`, a step with non-finite gradients leaves parameters, inner optimizer state
    and model state bitwise unchanged. If only the model state overflows, the step is taken with the old model state.

    Args:
      optimizer: the optimizer of `state.opt_state`.
      state: the state in which the gradients were computed.
      result: the result of a gradient function, averaged over devices.
      rng: the random key of the next state, or None.
      axis_names: mesh axes whose devices take or skip the step together.
      model_axis_names: those of them over which the model state is split, so that its overflow is seen on all.
      evaluate: the result of `evaluation`, for optimizers that evaluate the loss again.
      with_additions: True to return the optimizer's addition to the parameters.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> from jmp_train.steps import loss_gradients
      >>> gradients = loss_gradients(jt.stateless(lambda w, x: (w * x).sum()))
      >>> state = jt.TrainState.create(jnp.ones(()), optax.sgd(0.5))
      >>> result = gradients(jt.NoOpLossScale(), state.params, None, jnp.ones(2), None)
      >>> float(apply_gradients(optax.with_extra_args_support(optax.sgd(0.5)), state, result).state.params)
      0.0
    """
    loss, model_state, _, grads = result
    # with_loss_scale computes both of these too, but XLA computes them only once.
    unscaled, finite, _ = unscale_and_check(loss_scale_of(state.opt_state), grads, axis_names)
    extra = extra_arguments(state.opt_state, loss, trained(unscaled), evaluate)
    if axis_names:
        extra["axis_names"] = tuple(axis_names)
    additions: list[Addition] = []
    on_addition = additions.append if with_additions else None
    old = trained(state.params)
    seen = trained_gradients(grads)
    params, opt_state = optimizer_step(optimizer, seen, finite, state.opt_state, old, on_addition, **extra)
    params = with_overwritten(params, unscaled)
    taken = taken_by_rules(finite, opt_state)
    state_finite = None
    if scaled_states(opt_state):
        params = select_tree(taken, params, state.params)
        state_finite = stays_finite(model_state, state.model_state, model_axis_names)
        model_state = jax.tree_util.tree_map_with_path(
            lambda path, *pair: select_state_leaf(path, taken, state_finite, *pair), model_state, state.model_state
        )
    after = TrainState(params, opt_state, model_state, rng, state.step + 1)
    return Update(after, unscaled, finite, taken, tuple(additions), state_finite)


def evaluation(gradients: GradientFunction, state: TrainState, batch: Batch, rng: jax.Array | None) -> Evaluate:
    """Returns a function from parameters to the loss and unscaled gradients of a batch.

    Args:
      gradients: the gradient function of the step.
      state: has the loss scale and the model state.
      batch: the batch of the step.
      rng: the random key of the step.
    """
    loss_scale = loss_scale_of(state.opt_state)

    def evaluate(float32_params: Params) -> tuple[jax.Array, Any]:
        params = with_overwritten(float32_params, state.params)
        params = jax.tree.map(lambda x, old: x.astype(old.dtype), params, state.params)
        result = gradients(loss_scale, params, state.model_state, batch, rng)
        unscaled = trained(unscale_and_check(loss_scale, result.grads, ()).grads)
        return result.loss, jax.tree.map(lambda g, x: g.astype(x.dtype), unscaled, float32_params)

    return evaluate


def explained(gradients: GradientFunction, axis_names: Sequence[str]) -> GradientFunction:
    """Returns a gradient function whose errors about axes and random keys name those of the step.

    Args:
      gradients: gradient function that calls the loss function.
      axis_names: mesh axes of the step.
    """

    def run(*call: Any) -> StepGradients:
        *_, rng = call
        with names_of_axes(axis_names), missing_key_explained(lambda: NO_KEY if rng is None else None):
            return gradients(*call)

    return run


@contextlib.contextmanager
def names_of_axes(axis_names: Sequence[str]) -> Iterator[None]:
    """Names the mesh axes of the step if a loss function reduces over another one.

    Args:
      axis_names: mesh axes of the step.

    Raises:
      NameError: in place of jax's error.
    """
    try:
        yield
    except NameError as error:
        found = re.search(r"unbound axis name: ([^\s.]+)", str(error))
        if found is None:
            raise
        name = found[1]
        there = ", ".join(map(repr, axis_names)) or "none, as on one device"
        raise NameError(
            f"loss_fn reduces over the axis {name!r} (a layer's axis_name?), but the step's axes are {there}. "
            f'Use pmap_step(step, axis="{name}"), or data_parallel(step, mesh, axis="{name}") or '
            f'sharded_step with a Mesh(devices, ("{name}",)); or pass the step\'s axis to the layer'
        ) from error
