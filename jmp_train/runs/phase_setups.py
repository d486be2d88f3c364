"""The setups of a schedule's phases, which all create the same state."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jmp_train.policies import Amp, Policy
from jmp_train.policies.loss_scaling import LossScales, NoOpLossScale
from jmp_train.policies.pytrees import is_half
from jmp_train.runs.phase_names import phases_named
from jmp_train.runs.run_settings import DEFAULT_SETTINGS, RunSettings
from jmp_train.runs.setups import RunOptimizer, Setup, autocasts, loss_scale_for, make_setup, precision_of
from jmp_train.task import Task


class PhasePrecision(NamedTuple):
    """A phase of a schedule.

    Attributes:
      share: fraction of the run's steps before it begins.
      name: the name of its policy or mode.
      precision: the policy or the mode.
    """

    share: float
    name: str
    precision: Policy | Amp


def phase_precisions(name: str) -> tuple[PhasePrecision, ...]:
    """Returns the phases of a schedule; only one for a policy or mode.

    Args:
      name: see `phases_named`.

    Raises:
      ValueError: the name is invalid, or two phases have different states; the message names them and the difference.

    Example:
      >>> [(share, str(policy)) for share, _, policy in phase_precisions("mixed_float16,0.9:float32")]
      [(0.0, 'p=full,c=f16,o=full'), (0.9, 'p=full,c=full,o=full')]
    """
    phases = tuple(PhasePrecision(share, part, precision_of(part)) for share, part in phases_named(name))
    kept = {_kept(phase.precision): phase.name for phase in phases}
    if len(kept) > 1:
        said = ", ".join(f"{part} keeps {what}" for what, part in kept.items())
        raise ValueError(f"{name!r}: all phases must store parameters in the same dtypes, but {said}")
    scaling = [phase for phase in phases if not isinstance(_loss_scale(phase.precision), NoOpLossScale)]
    for phase in scaling[1:]:
        if _loss_scale(phase.precision) != _loss_scale(scaling[0].precision):
            raise ValueError(
                f"{name!r}: all phases must have the same loss scale, but {scaling[0].name} and {phase.name} differ"
            )
    return phases


def _kept(precision: Policy | Amp) -> str:
    """Returns the properties that decide a state's dtypes and structure, except for the loss scale."""
    if isinstance(precision, Policy):
        return f"parameters in {jnp.dtype(precision.param_dtype)}"
    kept = precision.precision
    dtype = kept.model_dtype or jnp.dtype(jnp.float32)
    others = {
        "BatchNorms in float32": kept.keep_batchnorm_fp32,
        f"batch statistics in {dtype}": is_half(dtype) and not kept.keep_batchnorm_fp32,
        "master weights in float32": kept.master_weights,
    }
    return " and ".join([f"parameters in {dtype}", *(text for text, there in others.items() if there)])


def _loss_scale(precision: Policy | Amp) -> LossScales:
    return precision.loss_scale if isinstance(precision, Amp) else loss_scale_for(precision)


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
