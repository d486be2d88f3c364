"""Training setups by name: policy or AMP mode, optimizer, loss scale, step.

The flow: name -> `precision_of` -> `Policy` or `Amp` -> `make_setup`, which returns the parts that the training
loop combines, the same for both. Each phase of a schedule has its own setup, see `make_setups`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.app.runs.precisions import autocasts, check_float64, loss_scale_for, phase_precisions, precision_of
from jmp_train.app.runs.run_settings import DEFAULT_SETTINGS, RunSettings
from jmp_train.app.runs.task_batches import batch_shapes, with_shared
from jmp_train.policies import Amp, Params, PyTree, apply_policy, with_state_dtypes
from jmp_train.policies.dtype_policies import Policy
from jmp_train.policies.loss_scaling import DynamicLossScale, LossScale, LossScales, NoOpLossScale
from jmp_train.policies.optimizers import scaled_states, with_loss_scale, with_master_weights
from jmp_train.policies.pytrees import cast_floating
from jmp_train.steps import TrainState, TrainStep, own_state, train_step
from jmp_train.task import Task
from jmp_train.types import Batch, ModelState

_SAMPLES = 10_000  # points of a schedule at which its largest value is searched


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
      cast_shared: casts the shared entries of all batches like the step, on the host if they are on it.
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


def make_setups(
    task: Task, name: str, made: RunOptimizer, settings: RunSettings = DEFAULT_SETTINGS, watch: Sequence[str] = ()
) -> tuple[Setup, ...]:
    """Returns the setup of each phase of a schedule; only one for a policy or mode.

    All setups create the same state. Its loss scale is that of the phases that need one; the others keep it.

    Args:
      task: the task.
      name: see `phases_named`.
      made: from `run_optimizer`.
      settings: the settings of the run. Rules apply to phases that autocast, and each phase takes the few bits that it
        can have.
      watch: see `train_step`.

    Raises:
      ValueError: see `make_setup` and `phase_precisions`; or there are rules, and no phase autocasts.
    """
    phases = phase_precisions(name)
    by_rules = [autocasts(phase.precision) for phase in phases]
    if settings.rules is not None and not any(by_rules):
        precision_of(phases[0].name, settings.rules.rules)  # raises the error
    setups = [
        make_setup(
            task,
            phase.name,
            made,
            dataclasses.replace(
                settings,
                rules=settings.rules if takes_rules else None,
                few_bits=settings.few_bits.for_precision(phase.precision),
            ),
            watch,
        )
        for phase, takes_rules in zip(phases, by_rules, strict=True)
    ]
    # Their optimizers differ only in the initial loss scale; a step uses that of its state.
    scaling = next((setup for setup in setups if not isinstance(setup.loss_scale, NoOpLossScale)), setups[0])
    return tuple(
        dataclasses.replace(setup, loss_scale=scaling.loss_scale, create_state=scaling.create_state) for setup in setups
    )


def setup_of(task: Task, name: str, settings: RunSettings = DEFAULT_SETTINGS, total: int = 100) -> Setup:
    """Returns the setup of a task without a run.

    Args:
      task: the task.
      name: see `precision_of`.
      settings: the settings of a run.
      total: steps of a run, on which schedules depend.
    """
    return make_setup(task, name, run_optimizer(task, shapes_of_init(task)[0], total, settings), settings)


def planned_step(
    task: Task, name: str, settings: RunSettings = DEFAULT_SETTINGS
) -> tuple[TrainStep, Any, Callable[[int | None], Any]]:
    """Returns the step of a task, its state and its batches by their size, as shapes.

    Args:
      task: the task.
      name: a policy or mode, see `precision_of`.
      settings: the settings of the run; only the number of parts is used.

    Raises:
      ValueError: there is no such policy or mode.
    """
    setup = setup_of(task, name, settings)
    state = jax.eval_shape(setup.create_state, *shapes_of_init(task), jax.eval_shape(jax.random.key, 0))
    shared = jax.eval_shape(setup.cast_shared, task.shared())

    @functools.cache  # because a user's loader may be slow
    def batches(size: int | None) -> Any:
        return with_shared(batch_shapes(task, size), shared)

    return setup.step, state, batches


def _growing_after(amp: Amp, steps: int | None) -> Amp:
    """Returns a mode whose dynamic loss scale, if any, grows after this many steps without overflow."""
    if steps is None or not isinstance(amp.loss_scale, DynamicLossScale):
        return amp
    name = "scale_window" if hasattr(amp.options, "scale_window") else "growth_interval"
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
