"""The options of the three families of mixed precision, under the names of their originals.

Each is a frozen dataclass whose fields are the keys of the tutorials' `fp16` dictionaries, with their
defaults, checked on creation; `precision` and `make_loss_scale` return their effects.
"""

import dataclasses
import enum
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import APEX_O1, TORCH_CUDA, AutocastRules
from jmp_train.policies.loss_scaling import (
    LossScale,
    LossScales,
    NoOpLossScale,
    PerLossScale,
    StaticLossScale,
    apex_loss_scale,
    check_range,
    check_scale,
    megatron_loss_scale,
    torch_loss_scale,
)
from jmp_train.policies.pytrees import check_choice, check_count, check_flag, dtype_name, is_integer

FLOAT32 = np.dtype(np.float32)


class AmpType(enum.StrEnum):
    """The families of mixed precision; each is equal to its name.

    Example:
      >>> AmpType("naive") is AmpType.NAIVE, AmpType.APEX == "apex"
      (True, True)

    Reference: ColossalAI's `AMP_TYPE`.
    """

    TORCH = "torch"
    APEX = "apex"
    NAIVE = "naive"


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a mode.

    Args:
      model_dtype: dtype of parameters, inputs and buffers; None leaves them unchanged.
      autocast_rules: rules for the precision of each operation; None for no autocast.
      keep_batchnorm_fp32: whether BatchNorms stay in float32 in a half-precision model.
      master_weights: whether the optimizer stores float32 master weights.
      output_dtype: dtype of the model's outputs; None leaves them unchanged.
    """

    model_dtype: np.dtype | None = None
    autocast_rules: AutocastRules | None = None
    keep_batchnorm_fp32: bool = False
    master_weights: bool = False
    output_dtype: np.dtype | None = None


class _Options:
    """The common options of all modes."""

    mode: ClassVar[AmpType]
    scaling: ClassVar[tuple[str, ...]]  # the options of a loss scale, which bfloat16 does not have
    enabled: bool = True
    verbosity: int = 0  # 0 logs nothing
    counts_zeros: bool = False
    rules: AutocastRules | None = None  # None for the mode's own

    def half_dtype(self, dtype: np.dtype) -> np.dtype:
        """Returns the half type, given the requested one."""
        return dtype

    def precision(self, half: np.dtype) -> Precision:
        """Returns the dtypes, given the half type."""
        raise NotImplementedError

    def make_loss_scale(self, half: np.dtype) -> LossScales:
        """Returns the initial loss scale, given the half type."""
        return self._dynamic_scale() if half == jnp.float16 else NoOpLossScale()

    def _dynamic_scale(self) -> LossScale:
        raise NotImplementedError

    def _scaling_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.scaling}


@dataclasses.dataclass(frozen=True)
class TorchOptions(_Options):
    """Mode "torch": autocast, float32 parameters and torch's `GradScaler`.

    Args:
      init_scale: see `torch_loss_scale`.
      growth_factor: see `torch_loss_scale`.
      backoff_factor: see `torch_loss_scale`.
      growth_interval: see `torch_loss_scale`.
      enabled: False computes as in float32.
      rules: autocast rules, or the path of a file of them; None for torch's, which has no such option.

    Example:
      >>> TorchOptions().growth_interval
      2000

    Reference: ColossalAI's AMP_TYPE.TORCH; torch.amp.
    """

    mode: ClassVar[AmpType] = AmpType.TORCH
    scaling: ClassVar[tuple[str, ...]] = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    rules: AutocastRules | None = dataclasses.field(default=None, repr=False)  # hundreds of entries

    def __post_init__(self) -> None:
        check_flag("enabled", self.enabled)
        self._dynamic_scale()

    def precision(self, half: np.dtype) -> Precision:
        """Returns autocast by the given rules, or by torch's."""
        del half
        return Precision(autocast_rules=self.rules or TORCH_CUDA)

    def _dynamic_scale(self) -> LossScale:
        return torch_loss_scale(**self._scaling_options())


@dataclasses.dataclass(frozen=True)
class NaiveOptions(_Options):
    """Mode "naive": the whole model in half precision, and float32 master weights.

    Args:
      log_num_zeros_in_grad: True to count zero gradients (metric `num_zeros_in_grad`).
      initial_scale: see `megatron_loss_scale`.
      min_scale: see `megatron_loss_scale`.
      max_scale: see `megatron_loss_scale`.
      growth_factor: see `megatron_loss_scale`.
      backoff_factor: see `megatron_loss_scale`.
      growth_interval: see `megatron_loss_scale`.
      hysteresis: see `megatron_loss_scale`.
      verbose: True to log the settings and the skipped steps.

    Example:
      >>> NaiveOptions().initial_scale == 2.0**32
      True

    Reference: ColossalAI's AMP_TYPE.NAIVE of 2022 (e79ea4424^).
    """

    mode: ClassVar[AmpType] = AmpType.NAIVE
    scaling: ClassVar[tuple[str, ...]] = (
        "initial_scale",
        "min_scale",
        "max_scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
    )

    log_num_zeros_in_grad: bool = False
    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    verbose: bool = False

    def __post_init__(self) -> None:
        check_flag("log_num_zeros_in_grad", self.log_num_zeros_in_grad)
        check_flag("verbose", self.verbose)
        self._dynamic_scale()

    @property
    def verbosity(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """1 if settings and skipped steps are logged."""
        return int(self.verbose)

    @property
    def counts_zeros(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if zero gradients are counted."""
        return self.log_num_zeros_in_grad

    def precision(self, half: np.dtype) -> Precision:
        """Returns half precision for everything except master weights and outputs."""
        return Precision(model_dtype=half, master_weights=True, output_dtype=FLOAT32)

    def _dynamic_scale(self) -> LossScale:
        return megatron_loss_scale(**self._scaling_options())


@dataclasses.dataclass(frozen=True)
class _Level:
    """The settings of one of Apex's levels, which options override."""

    cast_model_type: str | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str


_HALF = "half"  # the half type of the mode
_LEVELS = {
    "O0": _Level("float32", False, None, False, 1.0),
    "O1": _Level(None, True, None, None, "dynamic"),
    "O2": _Level(_HALF, False, True, True, "dynamic"),
    "O3": _Level(_HALF, False, False, False, 1.0),
}
_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ApexOptions(_Options):
    """Mode "apex": NVIDIA Apex's levels; an option that is not None overrides its level's.

    Args:
      enabled: False computes as in float32.
      opt_level: "O0" is float32, "O1" autocast, "O2" a half model with BatchNorms and master weights in float32 and
        a dynamic loss scale, "O3" only a half model.
      cast_model_type: dtype of the model, or its name; False for none.
      patch_torch_functions: True to choose each operation's precision by autocast; O1 only.
      keep_batchnorm_fp32: whether BatchNorms stay in float32; "True" and "False" are accepted too. Not for O1.
      master_weights: whether the optimizer stores float32 master weights of half parameters. Not for O1.
      loss_scale: a number, its text, or "dynamic".
      cast_model_outputs: dtype of the model's outputs; None for float32, or under O1 for no cast.
      num_losses: number of losses with their own scales; see `PerLossScale`.
      verbosity: 0 logs nothing, 1 settings and skipped steps.
      min_loss_scale: the lower bound of a dynamic scale; None for 1, 0 for none.
      max_loss_scale: its upper bound.
      scale_window: steps without overflow before it grows, as in Apex's `LossScaler`; its `initialize`
        has no such option.
      rules: autocast rules, or the path of a file of them; None for Apex's, which has no such option.
        O1 only.

    Example:
      >>> ApexOptions(opt_level="O2").max_loss_scale == 2.0**24
      True

    Reference: NVIDIA Apex e13873de, apex/amp/frontend.py.
    """

    mode: ClassVar[AmpType] = AmpType.APEX
    scaling: ClassVar[tuple[str, ...]] = ("min_loss_scale", "max_loss_scale", "scale_window")

    enabled: bool = True
    opt_level: str = "O1"
    cast_model_type: Any = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: bool | str | None = None
    master_weights: bool | None = None
    loss_scale: float | str | None = None
    cast_model_outputs: Any = None
    num_losses: int = 1
    verbosity: int = 1
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24
    scale_window: int = 2000
    rules: AutocastRules | None = dataclasses.field(default=None, repr=False)  # hundreds of entries

    def __post_init__(self) -> None:
        check_flag("enabled", self.enabled)
        _check_level(self.opt_level)
        for name in ("cast_model_type", "cast_model_outputs"):
            object.__setattr__(self, name, _dtype_option(name, getattr(self, name)))
        keep = {"True": True, "False": False}.get(str(self.keep_batchnorm_fp32))
        check_choice("keep_batchnorm_fp32", self.keep_batchnorm_fp32, (None, True, False, "True", "False"))
        object.__setattr__(self, "keep_batchnorm_fp32", keep)
        for name in ("patch_torch_functions", "master_weights"):
            check_choice(name, getattr(self, name), (None, True, False))
        object.__setattr__(self, "loss_scale", _scale_option(self.loss_scale))
        check_count("num_losses", self.num_losses)
        if not is_integer(self.verbosity) or self.verbosity < 0:
            raise ValueError(f"verbosity={self.verbosity!r} must be a whole number of at least 0")
        self._check_combinations()
        if self._level_or("loss_scale") == "dynamic":
            self._dynamic_scale()
        elif any(getattr(self, name) != getattr(ApexOptions, name) for name in self.scaling):
            warnings.warn(
                "min_loss_scale, max_loss_scale and scale_window are ignored: they are for loss_scale='dynamic', got "
                f"loss_scale={self._level_or('loss_scale')}",
                stacklevel=4,
            )

    def _check_combinations(self) -> None:
        if self.rules is not None and not self._level_or("patch_torch_functions"):
            given = "" if self.patch_torch_functions is None else " with patch_torch_functions=False"
            raise ValueError(
                f"rules: opt_level={self.opt_level!r}{given} does not autocast; leave them out, or choose "
                "opt_level='O1'"
            )
        if self.opt_level != "O1":
            if self.patch_torch_functions:
                raise ValueError(
                    "patch_torch_functions=True is for opt_level='O1', got opt_level="
                    f"{self.opt_level!r}; leave it out, or choose False or None"
                )
            return
        if self.cast_model_type not in (None, False, FLOAT32):
            raise ValueError(
                f"cast_model_type={self.cast_model_type.name!r}: opt_level='O1' leaves the model in "
                "float32; choose None, False or 'float32', or opt_level 'O2' or 'O3'"
            )
        for name in ("keep_batchnorm_fp32", "master_weights"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)}: opt_level='O1' keeps all parameters in float32; "
                    "leave it out, or choose opt_level 'O2' or 'O3'"
                )

    def _level_or(self, name: str) -> Any:
        """Returns an option, or the level's value if it is None."""
        value = getattr(self, name)
        return getattr(_LEVELS[self.opt_level], name) if value is None else value

    def half_dtype(self, dtype: np.dtype) -> np.dtype:
        """Returns `cast_model_type` if it is a half type, otherwise the requested one."""
        half = self.cast_model_type not in (None, False, FLOAT32)
        return self.cast_model_type if half else dtype

    def precision(self, half: np.dtype) -> Precision:
        """Returns the dtypes of the level and the options."""
        if self._level_or("patch_torch_functions"):
            return Precision(autocast_rules=self.rules or APEX_O1, output_dtype=self.cast_model_outputs)
        cast = self._level_or("cast_model_type")
        if not cast:
            return Precision(output_dtype=self.cast_model_outputs)
        model_dtype = half if cast == _HALF else np.dtype(cast)
        is_half = model_dtype != FLOAT32
        return Precision(
            model_dtype=model_dtype,
            keep_batchnorm_fp32=is_half and bool(self._level_or("keep_batchnorm_fp32")),
            master_weights=is_half and bool(self._level_or("master_weights")),
            output_dtype=self.cast_model_outputs or FLOAT32,
        )

    def make_loss_scale(self, half: np.dtype) -> LossScales:
        """Returns the initial loss scale, or one per loss."""
        scale = self._level_or("loss_scale")
        if scale != "dynamic":
            one = StaticLossScale(scale)
        elif self.loss_scale is None and half != jnp.float16:
            one = NoOpLossScale()
        else:
            one = self._dynamic_scale()
        return one if self.num_losses == 1 else PerLossScale((one,) * self.num_losses)

    def _dynamic_scale(self) -> LossScale:
        check_range("max_loss_scale", self.max_loss_scale)
        floor = self.min_loss_scale
        floor = min(1.0, self.max_loss_scale) if floor is None else floor
        return apex_loss_scale(scale_window=self.scale_window, min_loss_scale=floor, max_loss_scale=self.max_loss_scale)


def _check_level(level: object) -> None:
    if isinstance(level, str) and level in _LEVELS:
        return
    hint = "; the first character is the letter O" if str(level)[:1] == "0" else ""
    raise ValueError(f"opt_level={level!r} must be one of {', '.join(map(repr, _LEVELS))}{hint}")


def _dtype_option(name: str, value: object) -> Any:
    """Returns the dtype of an option, also for torch's names; None and False are unchanged."""
    if value is None or (value is False and name == "cast_model_type"):
        return value
    found = dtype_name(value.removeprefix("torch.") if isinstance(value, str) else value)
    if found not in _DTYPES:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, _DTYPES))}, or None")
    return jnp.dtype(found)


def _scale_option(value: float | str | None) -> float | str | None:
    if value is None or (isinstance(value, str) and value == "dynamic"):
        return value
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"loss_scale={value!r} must be 'dynamic', a number, or a number as text") from None
    check_scale("loss_scale", number)
    return float(number)


AmpOptions: TypeAlias = TorchOptions | ApexOptions | NaiveOptions

_OPTIONS: dict[AmpType, type[AmpOptions]] = {kind.mode: kind for kind in (TorchOptions, ApexOptions, NaiveOptions)}


def amp_options(mode: str, options: Mapping[str, Any]) -> AmpOptions:
    """Returns a mode's options; raises ValueError for an unknown mode or key.

    Args:
      mode: "torch", "apex" or "naive", or an `AmpType`.
      options: values by the names of the mode's options.
    """
    check_choice("mode", mode, tuple(kind.value for kind in AmpType))
    kind = _OPTIONS[AmpType(mode)]
    names = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in names:
            raise ValueError(f"{name!r} is not an option of mode {str(mode)!r}; choose from mode, {', '.join(names)}")
    if "rules" in options:
        options = {**options, "rules": _rules_option(options["rules"])}
    return kind(**options)


def _rules_option(value: object) -> AutocastRules | None:
    """Returns rules, read from a file if a path is given."""
    if value is None or isinstance(value, AutocastRules):
        return value
    if not isinstance(value, str | Path):
        raise ValueError(f"rules={value!r} must be AutocastRules, or the path of a rules file")
    try:
        return AutocastRules.load(value)
    except ValueError as error:
        raise ValueError(f"rules: {error}") from error
