"""Training setups by name: policy or AMP mode, optimizer, loss scale, step.

The flow: name -> `precision_of` -> `Policy` or `Amp` -> `make_setup`, which returns the parts that the training
loop combines, the same for both. Each phase of a schedule has its own setup, see `make_setups`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.policies import AutocastRules, Params, PyTree
from jmp_train.policies.amp_modes import Amp, ApexOptions, amp_mode
from jmp_train.policies.dtype_policies import AutocastPolicy, Policy, apply_policy, get_policy
from jmp_train.policies.loss_scaling import DynamicLossScale, LossScale, LossScales, NoOpLossScale
from jmp_train.policies.optimizers import scaled_states, with_loss_scale, with_master_weights, with_state_dtypes
from jmp_train.policies.pytrees import cast_floating
from jmp_train.runs.phase_names import is_schedule
from jmp_train.runs.run_settings import DEFAULT_SETTINGS, RunSettings
from jmp_train.steps import TrainState, TrainStep, own_state, train_step
from jmp_train.task import Task
from jmp_train.types import Batch, ModelState

_MODES: dict[str, dict[str, Any]] = {
    "torch": {"mode": "torch"},
    **{f"apex-{level}": {"mode": "apex", "opt_level": level} for level in ("O0", "O1", "O2", "O3")},
    "naive": {"mode": "naive"},
}
_BFLOAT16 = "-bfloat16"
AUTOCAST_CHOICES = "autocast_float16, autocast_bfloat16, torch and apex-O1"
_SAMPLES = 10_000  # points of a schedule at which its largest value is searched
MODE_CHOICES = f"{', '.join(_MODES)}, each also with {_BFLOAT16}"


def precision_of(name: str, rules: AutocastRules | None = None) -> Policy | Amp:
    """Returns the policy or the AMP mode of a name.

    Args:
      name: a mode, "torch", "apex-O0" to "apex-O3" or "naive", in float16, or with "-bfloat16" after it; otherwise
        a name for `get_policy`.
      rules: autocast rules; None for its own.

    Raises:
      ValueError: the name is unknown, and the message lists the choices; or there are rules, and it does not autocast;
        or it names a schedule.

    Example:
      >>> precision_of("apex-O2-bfloat16").dtype.name, str(precision_of("mixed_float16"))
      ('bfloat16', 'p=full,c=f16,o=full')
    """
    if is_schedule(name):
        raise ValueError(f"{name!r} is a schedule; a single policy or mode is needed here")
    options = _MODES.get(name.removesuffix(_BFLOAT16))
    if options is not None:
        precision = amp_mode(**options, dtype=jnp.bfloat16 if name.endswith(_BFLOAT16) else jnp.float16)
    else:
        try:
            precision = get_policy(name)
        except ValueError as error:
            raise ValueError(f"{error}; or an AMP mode: {MODE_CHOICES}") from None
    if rules is None:
        return precision
    if not autocasts(precision):
        raise ValueError(f"{name} does not autocast, so it has no rules; use {AUTOCAST_CHOICES}")
    if isinstance(precision, Amp):
        return dataclasses.replace(precision, options=dataclasses.replace(precision.options, rules=rules))
    return dataclasses.replace(precision, rules=rules)


def autocasts(precision: Policy | Amp) -> bool:
    """Returns whether a precision chooses the dtype of each operation by rules.

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
    """The parts with which a task is trained and evaluated in a policy or a mode.

    Attributes:
      step: the train step.
      loss_scale: the initial loss scale of the policy or mode.
      keeps_loss_scale: True if the task's optimizer has its own loss scale, which replaces `loss_scale`.
      create_state: `create_state(params, model_state, rng)` returns the state before the first step, given float32
        parameters.
      forward: `forward(fn)` returns `fn(params, model_state, batch)` under the policy or mode, for evaluation.
      cast_params: returns the parameters that the task's `evaluate` gets.
      cast_shared: casts the shared entries of all batches, on the host if they are there, as the step would cast them.
    """

    step: TrainStep
    loss_scale: LossScales
    keeps_loss_scale: bool
    create_state: Callable[[Any, Any, jax.Array], TrainState]
    forward: Callable[[Callable[..., Any]], Callable[..., Any]]
    cast_params: Callable[[Any], Any]
    cast_shared: Callable[[Any], Any]


class RunOptimizer(NamedTuple):
    """The optimizer of a run, before a policy or mode wraps it.

    Attributes:
      optimizer: the task's optimizer, with learning rate and dtypes of its state as in the settings.
      has_loss_scale: True if it has its own loss scale.
      schedule: the learning rate; None if the task does not define it.
    """

    optimizer: optax.GradientTransformation
    has_loss_scale: bool
    schedule: optax.Schedule | None


def run_optimizer(task: Task, params: Params, total: int | None, settings: RunSettings) -> RunOptimizer:
    """Returns the optimizer of a run.

    Args:
      task: the task.
      params: the parameters, or their shapes.
      total: steps of the run; None if it is unknown.
      settings: the settings of the run.

    Raises:
      ValueError: the settings have a learning rate and the task does not define its own, or the optimizer's state has
        no field of a name in `state_dtypes`.
    """
    optimizer, schedule = task.optimizer_for(total), task.schedule_for(total)
    has_loss_scale = bool(scaled_states(jax.eval_shape(optimizer.init, params)))
    if settings.learning_rate is not None:
        if schedule is None:
            raise ValueError(
                "learning_rate needs the task's own learning rate, to scale the updates; pass "
                "jt.Task(learning_rate=...), or add a field learning_rate to the task's options"
            )
        own, factor = schedule, settings.learning_rate / _peak(schedule, total)
        optimizer, schedule = optax.chain(optimizer, optax.scale(factor)), lambda step: own(step) * factor
    if state_dtypes := settings.few_bits.state_dtypes:
        optimizer = with_state_dtypes(optimizer, dict(text.rsplit("=", 1) for text in state_dtypes))
        try:
            jax.eval_shape(optimizer.init, params)
        except ValueError as error:
            raise ValueError(f"--state-dtypes {' '.join(state_dtypes)}: {error}") from error
    return RunOptimizer(optimizer, has_loss_scale, schedule)


def _peak(schedule: optax.Schedule, total: int | None) -> float:
    """Returns the largest learning rate of a run."""
    if total is None:
        return np.asarray(schedule(0)).item()
    steps = np.unique(np.linspace(0, total - 1, min(total, _SAMPLES)).astype(np.int32))
    return max(np.asarray(schedule(step)).item() for step in steps)


def shapes_of_init(task: Task) -> tuple[Any, Any]:
    """Returns the shapes of a task's parameters and model state; if jax cannot trace `init`, it is called.

    Args:
      task: the task.
    """
    key = jax.random.key(0)
    try:
        return jax.eval_shape(task.initial, key)
    except (TypeError, jax.errors.JAXTypeError):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), task.initial(key))


def make_setup(
    task: Task, name: str, made: RunOptimizer, settings: RunSettings = DEFAULT_SETTINGS, watch: Sequence[str] = ()
) -> Setup:
    """Returns the parts with which a task is trained under a name.

    Args:
      task: the task.
      name: see `precision_of`.
      made: from `run_optimizer`.
      settings: the settings of the run.
      watch: see `train_step`.

    Raises:
      ValueError: the name is unknown, the policy has float64 and jax has it disabled, or there are rules and the
        precision does not autocast.
    """
    rules = None if settings.rules is None else settings.rules.rules
    precision = precision_of(name, rules)
    parts = settings.accumulate_steps
    if isinstance(precision, Amp):
        return _of_mode(task, _growing_after(precision, settings.growth_interval), made, parts, watch)
    check_float64(precision, name)
    policy = settings.few_bits.policy(precision, has_rules=rules is not None)
    loss_scale = loss_scale_for(policy, settings.growth_interval)
    optimizer = made.optimizer if made.has_loss_scale else with_loss_scale(made.optimizer, loss_scale)
    made = made._replace(optimizer=settings.few_bits.outer_optimizer(optimizer))
    return _of_policy(task, policy, made, loss_scale, parts, watch)


def setup_of(task: Task, name: str, settings: RunSettings = DEFAULT_SETTINGS, total: int = 100) -> Setup:
    """Returns the setup of a task without a run.

    Args:
      task: the task.
      name: see `precision_of`.
      settings: the settings of a run.
      total: steps of a run, on which schedules depend.
    """
    return make_setup(task, name, run_optimizer(task, shapes_of_init(task)[0], total, settings), settings)


def _growing_after(amp: Amp, steps: int | None) -> Amp:
    """Returns a mode whose dynamic loss scale, if any, grows after this many steps without overflow."""
    if steps is None or not isinstance(amp.loss_scale, DynamicLossScale):
        return amp
    name = "scale_window" if isinstance(amp.options, ApexOptions) else "growth_interval"
    return dataclasses.replace(amp, options=dataclasses.replace(amp.options, **{name: steps}))


def _of_mode(task: Task, amp: Amp, made: RunOptimizer, parts: int, watch: Sequence[str]) -> Setup:
    if amp.precision.keep_batchnorm_fp32:
        amp = dataclasses.replace(amp, batch_norms=task.batch_norms())
    model_dtype = amp.precision.model_dtype
    loss_fn, optimizer = amp.transform(task.loss_fn, made.optimizer)
    if made.has_loss_scale:
        optimizer = with_master_weights(made.optimizer) if amp.precision.master_weights else made.optimizer

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
        step=train_step(loss_fn, optimizer, accumulate_steps=parts, watch=watch),
        loss_scale=amp.loss_scale,
        keeps_loss_scale=made.has_loss_scale,
        create_state=create_state,
        forward=amp.forward,
        cast_params=lambda params: params,
        cast_shared=cast_shared,
    )


def _of_policy(
    task: Task, policy: Policy, made: RunOptimizer, loss_scale: LossScale, parts: int, watch: Sequence[str]
) -> Setup:
    def create_state(params: Params, model_state: ModelState, rng: jax.Array) -> TrainState:
        params = policy.cast_to_param(params)
        return TrainState.create(params, made.optimizer, model_state=model_state, rng=rng)

    # Sums over a batch would overflow in half precision.
    is_double = policy.output_dtype == jnp.float64
    summing = dataclasses.replace(policy, output_dtype=jnp.float64 if is_double else jnp.float32)

    def forward(fn: Callable[..., Any]) -> Callable[..., Any]:
        def in_policy(params: Params, model_state: ModelState, batch: Batch) -> Any:
            own = own_state(model_state)
            return apply_policy(lambda params, batch: fn(params, own, batch), summing)(params, batch)

        return in_policy

    return Setup(
        step=train_step(task.loss_fn, made.optimizer, policy=policy, accumulate_steps=parts, watch=watch),
        loss_scale=loss_scale,
        keeps_loss_scale=made.has_loss_scale,
        create_state=create_state,
        forward=forward,
        cast_params=policy.cast_to_compute,
        cast_shared=policy.cast_to_compute,
    )


def loss_scale_for(policy: Policy, growth_interval: int | None = None) -> LossScale:
    """Returns the loss scale that a policy needs: a dynamic one for float16, none for the others.

    It is torch's loss scale, with a minimum of 1.

    Args:
      policy: the policy.
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
    """Raises ValueError if a policy has float64 and jax has it disabled.

    Args:
      precision: from `precision_of`.
      name: the name of the policy.
    """
    if isinstance(precision, Amp):
        return
    dtypes = (precision.param_dtype, precision.compute_dtype, precision.output_dtype, precision.reduce_dtype)
    if jnp.float64 in dtypes and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise ValueError(f"policy {name!r} has float64, which needs JAX_ENABLE_X64=1")
