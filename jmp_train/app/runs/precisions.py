"""Policies, AMP modes and schedules by name: `mixed_float16,0.9:float32` is float32 for the last tenth of a run."""

import dataclasses
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.policies import Amp, AutocastPolicy, AutocastRules, amp_mode, get_policy
from jmp_train.policies.dtype_policies import Policy, check_shares, first_steps
from jmp_train.policies.loss_scaling import DynamicLossScale, LossScale, LossScales, NoOpLossScale
from jmp_train.policies.pytrees import is_half

_MODES: dict[str, dict[str, Any]] = {
    "torch": {"mode": "torch"},
    **{f"apex-{level}": {"mode": "apex", "opt_level": level} for level in ("O0", "O1", "O2", "O3")},
    "naive": {"mode": "naive"},
}
_BFLOAT16 = "-bfloat16"
AUTOCAST_CHOICES = "autocast_float16, autocast_bfloat16, torch and apex-O1"
MODE_CHOICES = f"{', '.join(_MODES)}, each also with {_BFLOAT16}"
SCHEDULE_FORM = "NAME,FRACTION:NAME"
_BETWEEN = re.compile(r",(?=[^,:]*:)")  # policies have commas too, but no colons
_SHARE = re.compile(r"(\d+\.?\d*|\.\d+)(e-\d+)?", re.ASCII)


class NamedPhase(NamedTuple):
    """The precision of a part of a run.

    Attributes:
      share: fraction of the run's steps before it begins.
      name: a policy or AMP mode, see `precision_of`.
    """

    share: float
    name: str


def phases_named(name: str) -> tuple[NamedPhase, ...]:
    """Returns the phases of a name; only one if it names a policy or AMP mode.

    Args:
      name: a precision, or several with the fractions of the run at which they begin; the first fraction, 0, may be
        left out.

    Raises:
      ValueError: a fraction is invalid, or the fractions do not increase from 0.

    Example:
      >>> phases_named("params=float32,compute=float16,0.9:float32")
      (NamedPhase(share=0.0, name='params=float32,compute=float16'), NamedPhase(share=0.9, name='float32'))
      >>> phases_named("float32")
      (NamedPhase(share=0.0, name='float32'),)
    """
    phases = []
    for part in _BETWEEN.split(name):
        share, colon, precision = part.rpartition(":")
        if colon and not _SHARE.fullmatch(share):
            raise ValueError(f"{share!r} in {name!r} is not a fraction of the run; write a schedule as {SCHEDULE_FORM}")
        phases.append(NamedPhase(float(share) if colon else 0.0, precision))
    try:
        check_shares([phase.share for phase in phases])
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    return tuple(phases)


def phase_bounds(name: str, total: int) -> tuple[tuple[int, int], ...]:
    """Returns for each phase the number of steps before it and by its end.

    Args:
      name: see `phases_named`.
      total: number of steps of the run.

    Raises:
      ValueError: the run is so short that a phase has no steps.

    Example:
      >>> phase_bounds("mixed_float16,0.9:float32", 330)
      ((0, 297), (297, 330))
    """
    try:
        firsts = first_steps([phase.share for phase in phases_named(name)], total)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    return tuple(itertools.pairwise((*firsts, total)))


def schedule_name(name: str) -> str:
    """Returns a name in the form used by checkpoints and reports, which is unique for each schedule.

    Args:
      name: see `phases_named`.

    Example:
      >>> schedule_name("0:mixed_float16,.90:float32")
      'mixed_float16,0.9:float32'
    """
    first, *others = phases_named(name)
    return ",".join([first.name, *(f"{phase.share}:{phase.name}" for phase in others)])


def is_schedule(name: str) -> bool:
    """Returns whether a name is that of a schedule of several precisions.

    Args:
      name: see `phases_named`.
    """
    return len(phases_named(name)) > 1


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


def stores_in_half(precision: Policy | Amp) -> bool:
    """Returns whether a precision is a policy that stores parameters in half precision; modes handle theirs themselves.

    Args:
      precision: see `precision_of`.
    """
    return isinstance(precision, Policy) and is_half(precision.param_dtype)


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
