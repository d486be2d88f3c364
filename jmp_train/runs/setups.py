"""Training setups by name: policy or AMP mode, optimizer, loss scale, step.

The way of the data: name -> `precision_of` -> `Policy` or `Amp` -> `make_setup`, the pieces that the training
loop puts together, the same for both. The phases of a schedule have a setup each, see `make_setups`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies import AutocastRules, Params, PyTree
from jmp_train.policies.amp_modes import Amp, ApexOptions, amp_mode
from jmp_train.policies.dtype_policies import AutocastPolicy, Policy, apply_policy, get_policy
from jmp_train.policies.loss_scaling import DynamicLossScale, LossScale, LossScales, NoOpLossScale
from jmp_train.policies.optimizers import with_loss_scale
from jmp_train.policies.pytrees import cast_floating
from jmp_train.runs.few_bits import DEFAULT_FEW_BITS, FewBits
from jmp_train.runs.phase_names import is_schedule
from jmp_train.steps import TrainState, TrainStep, own_state, train_step
from jmp_train.tasks import Task
from jmp_train.types import Batch, ModelState

_MODES: dict[str, dict[str, Any]] = {
    "torch": {"mode": "torch"},
    **{f"apex-{level}": {"mode": "apex", "opt_level": level} for level in ("O0", "O1", "O2", "O3")},
    "naive": {"mode": "naive"},
}
_BFLOAT16 = "-bfloat16"
AUTOCAST_CHOICES = "autocast_float16, autocast_bfloat16, torch and apex-O1"
MODE_CHOICES = f"{', '.join(_MODES)}, each also with {_BFLOAT16}"


def precision_of(name: str, rules: AutocastRules | None = None) -> Policy | Amp:
    """Returns the policy or the AMP mode of that name.

    Args:
      name: of a mode, "torch", "apex-O0" to "apex-O3" or "naive", in float16, or with "-bfloat16" after it; else
        what `get_policy` takes.
      rules: by which it autocasts; None for its own.

    Raises:
      ValueError: there is neither, and the message lists the choices; or there are rules, and it does not autocast; or
        it is a schedule's.

    Example:
      >>> precision_of("apex-O2-bfloat16").dtype.name, str(precision_of("mixed_float16"))
      ('bfloat16', 'p=full,c=f16,o=full')
    """
    precision = _precision_named(name)
    return precision if rules is None else _with_rules(precision, rules, name)


def _precision_named(name: str) -> Policy | Amp:
    if is_schedule(name):
        raise ValueError(f"{name!r} is a schedule of several precisions, and one is wanted here")
    options = _MODES.get(name.removesuffix(_BFLOAT16))
    if options is not None:
        dtype = jnp.bfloat16 if name.endswith(_BFLOAT16) else jnp.float16
        return amp_mode(**options, dtype=dtype)
    try:
        return get_policy(name)
    except ValueError as error:
        raise ValueError(f"{error}; or an AMP mode: {MODE_CHOICES}") from None


def _with_rules(precision: Policy | Amp, rules: AutocastRules, name: str) -> Policy | Amp:
    if not autocasts(precision):
        raise ValueError(f"{name} does not autocast, so that it has no rules; {AUTOCAST_CHOICES} do")
    if isinstance(precision, Amp):
        return dataclasses.replace(precision, options=dataclasses.replace(precision.options, rules=rules))
    return dataclasses.replace(precision, rules=rules)


def autocasts(precision: Policy | Amp) -> bool:
    """Returns whether each operation gets its precision by rules.

    Args:
      precision: see `precision_of`.

    Example:
      >>> [autocasts(precision_of(name)) for name in ("apex-O1", "apex-O2", "autocast_float16", "mixed_float16")]
      [True, False, True, False]
    """
    if isinstance(precision, Amp):
        return precision.precision.autocast_rules is not None
    return isinstance(precision, AutocastPolicy)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The pieces with which a task is trained and evaluated in a policy or a mode.

    Attributes:
      step: the train step.
      loss_scale: the one to begin with.
      create_state: `create_state(params, model_state, rng)`, the state before the first step, of float32
        parameters.
      predict: the task's, with its casts or its autocast.
      cast_shared: casts what all batches share, on the host if it is there, as the step would cast it each time.
    """

    step: TrainStep
    loss_scale: LossScales
    create_state: Callable[[Any, Any, jax.Array], TrainState]
    predict: Callable[[Any, Any, Any], jax.Array]
    cast_shared: Callable[[Any], Any]


def make_setup(
    task: Task,
    name: str,
    schedule: optax.Schedule,
    growth_interval: int | None = None,
    watch: Sequence[str] = (),
    rules: AutocastRules | None = None,
    few_bits: FewBits = DEFAULT_FEW_BITS,
) -> Setup:
    """Returns the pieces with which a task is trained under a name.

    Args:
      task: what to train.
      name: see `precision_of`.
      schedule: the learning rate.
      growth_interval: steps without overflow after which a dynamic loss scale grows; None for its own.
      watch: see `train_step`.
      rules: see `precision_of`.
      few_bits: what it keeps and computes in few bits.

    Raises:
      ValueError: there is no such name, or jax has no float64 and the policy has, or it has rules and does not
        autocast.
    """
    precision = precision_of(name, rules)
    if isinstance(precision, Amp):
        amp = _growing_after(precision, growth_interval)
        return _of_mode(task, amp, few_bits.inner_optimizer(task.optimizer(schedule)), watch)
    check_float64(precision, name)
    policy = few_bits.policy(precision, has_rules=rules is not None)
    loss_scale = loss_scale_for(policy, growth_interval)
    optimizer = with_loss_scale(few_bits.inner_optimizer(task.optimizer(schedule)), loss_scale)
    return _of_policy(task, policy, few_bits.outer_optimizer(optimizer), loss_scale, watch)


def _growing_after(amp: Amp, steps: int | None) -> Amp:
    """Returns a mode whose dynamic loss scale, if it has one, grows after so many steps without overflow."""
    if steps is None or not isinstance(amp.loss_scale, DynamicLossScale):
        return amp
    name = "scale_window" if isinstance(amp.options, ApexOptions) else "growth_interval"
    return dataclasses.replace(amp, options=dataclasses.replace(amp.options, **{name: steps}))


def _of_mode(task: Task, amp: Amp, inner: optax.GradientTransformation, watch: Sequence[str]) -> Setup:
    if amp.precision.keep_batchnorm_fp32:
        amp = dataclasses.replace(amp, batch_norms=task.batch_norms())
    model_dtype = amp.precision.model_dtype
    loss_fn, optimizer = amp.transform(task.loss_fn, inner)

    def create_state(params: Params, model_state: ModelState, rng: jax.Array) -> TrainState:
        return TrainState.create(
            params,
            optimizer,
            model_state=amp.cast_model_state(model_state),
            rng=rng,
            cast_params=amp.cast_params,
        )

    def cast_shared(shared: PyTree) -> Any:
        return shared if model_dtype is None else cast_floating(shared, model_dtype)

    return Setup(
        step=train_step(loss_fn, optimizer, accumulate_steps=task.options.accumulate_steps, watch=watch),
        loss_scale=amp.loss_scale,
        create_state=create_state,
        predict=amp.forward(task.predict),
        cast_shared=cast_shared,
    )


def _of_policy(
    task: Task, policy: Policy, optimizer: optax.GradientTransformation, loss_scale: LossScale, watch: Sequence[str]
) -> Setup:
    def create_state(params: Params, model_state: ModelState, rng: jax.Array) -> TrainState:
        params = policy.cast_to_param(params)
        return TrainState.create(params, optimizer, model_state=model_state, rng=rng)

    def predict(params: Params, model_state: ModelState, batch: Batch) -> jax.Array:
        own = own_state(model_state)
        apply = apply_policy(lambda params, batch: task.predict(params, own, batch), policy)
        return apply(params, batch)

    return Setup(
        step=train_step(
            task.loss_fn,
            optimizer,
            policy=policy,
            accumulate_steps=task.options.accumulate_steps,
            watch=watch,
        ),
        loss_scale=loss_scale,
        create_state=create_state,
        predict=predict,
        cast_shared=policy.cast_to_compute,
    )


def loss_scale_for(policy: Policy, growth_interval: int | None = None) -> LossScale:
    """Returns the loss scale that a policy needs: a dynamic one for float16, none for the others.

    It is torch's, but never falls below 1.

    Args:
      policy: the dtypes.
      growth_interval: steps without overflow after which it grows; None for torch's 2000.

    Example:
      >>> loss_scale_for(get_policy("mixed_bfloat16"))
      NoOpLossScale()
    """
    autocast_dtype = policy.autocast_dtype if isinstance(policy, AutocastPolicy) else None
    if jnp.float16 in (policy.param_dtype, policy.compute_dtype, autocast_dtype):
        return DynamicLossScale(2.0**16, period=growth_interval or 2000)
    return NoOpLossScale()


def check_float64(precision: Policy | Amp, name: str) -> None:
    """Raises ValueError if a policy has float64 and jax has not.

    Args:
      precision: what `precision_of` made of the name.
      name: of the policy.
    """
    if isinstance(precision, Amp):
        return
    fields = ("param_dtype", "compute_dtype", "output_dtype", "reduce_dtype")
    dtypes = [getattr(precision, field) for field in fields]
    if jnp.float64 in dtypes and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ValueError(f"policy {name!r} has float64, which needs JAX_ENABLE_X64=1")
