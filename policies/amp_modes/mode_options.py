"""The options of the AMP modes under the names of their originals, and the table of the modes."""

import contextlib
import dataclasses
import enum
import inspect
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import APEX_O1, TORCH_CUDA, AutocastRules
from jmp_train.policies.loss_scaling import (
    LossScales,
    NoOpLossScale,
    PerLossScale,
    apex_loss_scale,
    megatron_loss_scale,
    torch_loss_scale,
)
from jmp_train.policies.pytrees import check_choice, check_count, check_flag, checked_path, dtype_name, shown

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
    """A row of the table of modes, and the precision of a mode with the options that override its row.

    Args:
      model_dtype: dtype of parameters, inputs and buffers; None leaves them unchanged.
      autocast_rules: rules for the precision of each operation; None for no autocast.
      keep_batchnorm_fp32: whether BatchNorms stay in float32 in a half-precision model.
      master_weights: whether the optimizer stores float32 master weights.
      output_dtype: dtype of the model's outputs; None leaves them unchanged.
      loss_scale: a number, or "dynamic" for the preset of the mode.
    """

    model_dtype: Any = None
    autocast_rules: AutocastRules | None = dataclasses.field(default=None, repr=False)  # hundreds of entries
    keep_batchnorm_fp32: bool = False
    master_weights: bool = False
    output_dtype: np.dtype | None = None
    loss_scale: float | str = 1.0


_HALF = "half"  # the half type of the mode
_TABLE = {
    "torch": Precision(None, TORCH_CUDA, False, False, None, "dynamic"),
    "O0": Precision(FLOAT32, None, False, False, FLOAT32, 1.0),
    "O1": Precision(None, APEX_O1, False, False, None, "dynamic"),
    "O2": Precision(_HALF, None, True, True, FLOAT32, "dynamic"),
    "O3": Precision(_HALF, None, False, False, FLOAT32, 1.0),
    "naive": Precision(_HALF, None, False, True, FLOAT32, "dynamic"),
}
_PRESETS = {"torch": torch_loss_scale, "apex": apex_loss_scale, "naive": megatron_loss_scale}
_ARGUMENTS = {
    mode: {name: argument.default for name, argument in inspect.signature(preset).parameters.items()}
    for mode, preset in _PRESETS.items()
}
_APEX_OR_NONE = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "torch": {**_ARGUMENTS["torch"], "rules": None},
    "apex": {
        "enabled": True,
        "opt_level": "O1",
        **_ARGUMENTS["apex"],
        **dict.fromkeys((*_APEX_OR_NONE, "cast_model_outputs", "rules")),
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": 1.0,
    },
    "naive": {"log_num_zeros_in_grad": False, **_ARGUMENTS["naive"], "max_scale": 2.0**32, "verbose": False},
}
_OPTIONS: dict[str, Any] = {
    mode: dataclasses.make_dataclass(
        f"{mode.title()}Options",
        # Rules have hundreds of entries.
        [(name, Any, dataclasses.field(default=value, repr=name != "rules")) for name, value in defaults.items()],
        namespace={
            "__module__": __name__,
            "mode": AmpType(mode),
            "scaling": _ARGUMENTS[mode].keys() - {"enabled", "loss_scale"},
        },
        frozen=True,
    )
    for mode, defaults in _DEFAULTS.items()
}
TorchOptions, ApexOptions, NaiveOptions = _OPTIONS.values()  # where pickle finds them
_FLAGS = ("enabled", "log_num_zeros_in_grad", "verbose")
_CHOICES = {
    "opt_level": ("O0", "O1", "O2", "O3"),
    **dict.fromkeys(("keep_batchnorm_fp32", "patch_torch_functions", "master_weights"), (None, True, False)),
}
_COUNTS = {"num_losses": 1, "verbosity": 0}  # and the least of each
_DTYPES = ("float32", "float16", "bfloat16")
# Per option, the values that all levels take, and the levels that take others.
_LEVELS: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "cast_model_type": ((None, False, FLOAT32), ("O0", "O2", "O3")),
    "keep_batchnorm_fp32": ((None,), ("O0", "O2", "O3")),
    "master_weights": ((None,), ("O0", "O2", "O3")),
    "patch_torch_functions": ((None, False), ("O1",)),
    "rules": ((None,), ("O1",)),
}


def amp_options(mode: str, given: Mapping[str, Any]) -> Any:
    """Returns a mode's options; raises ValueError if one is unknown or invalid, or two exclude each other.

    Args:
      mode: "torch", "apex" or "naive", or an `AmpType`.
      given: values by the names of the mode's options.
    """
    check_choice("mode", mode, tuple(kind.value for kind in AmpType))
    names = _DEFAULTS[mode]
    for name in given:
        if name not in names:
            raise ValueError(f"{name!r} is not an option of mode {str(mode)!r}; choose from mode, {', '.join(names)}")
    options = _OPTIONS[mode](**{name: _checked(name, value) for name, value in given.items()})
    for name, (values, levels) in _LEVELS.items() if mode == "apex" else ():
        if options.opt_level not in levels and (value := getattr(options, name)) not in values:
            raise ValueError(
                f"{name}={shown(value)} is for opt_level {', '.join(map(repr, levels))}, got opt_level="
                f"{options.opt_level!r}; leave it out, or choose another level"
            )
    loss_scale_of(options, FLOAT32)
    return options


def precision_of(options: Any, half: np.dtype) -> Precision:
    """Returns the row of a mode or level, with the options that override it.

    Args:
      options: the options of a mode.
      half: the half type.
    """
    if not getattr(options, "enabled", True):
        return Precision()
    row = _TABLE[getattr(options, "opt_level", options.mode)]
    given = {name: x for name, x in vars(options).items() if x is not None and hasattr(row, name)}
    row = dataclasses.replace(row, **given)
    cast, output = (getattr(options, name, None) for name in ("cast_model_type", "cast_model_outputs"))
    if row.autocast_rules and getattr(options, "patch_torch_functions", None) is not False:
        return dataclasses.replace(row, autocast_rules=options.rules or row.autocast_rules, output_dtype=output)
    dtype = row.model_dtype if cast is None else cast or None
    dtype = half if dtype == _HALF else dtype
    keep, masters = (dtype not in (None, FLOAT32) and x for x in (row.keep_batchnorm_fp32, row.master_weights))
    return Precision(dtype, None, keep, masters, output or (dtype and FLOAT32), row.loss_scale)


def loss_scale_of(options: Any, half: np.dtype) -> LossScales:
    """Returns the initial loss scale of a mode, or one per loss; its preset checks the options.

    Args:
      options: the options of the mode.
      half: the half type.
    """
    scale = precision_of(options, half).loss_scale
    arguments = {name: x for name, x in vars(options).items() if name in _ARGUMENTS[options.mode]}
    if "loss_scale" in arguments:
        arguments["loss_scale"] = scale
    one = _PRESETS[options.mode](**arguments)
    is_chosen = scale != "dynamic" or getattr(options, "loss_scale", None) is not None
    if not getattr(options, "enabled", True) or (half != jnp.float16 and not is_chosen):
        return NoOpLossScale()
    count = getattr(options, "num_losses", 1)
    return one if count == 1 else PerLossScale((one,) * count)


def _checked(name: str, value: Any) -> Any:
    """Returns the value of an option; the loss scale checks its own."""
    if name in _FLAGS:
        check_flag(name, value)
    elif name in _CHOICES:
        check_choice(name, value, _CHOICES[name])
    elif name in _COUNTS:
        check_count(name, value, _COUNTS[name])
    elif name == "rules" and value is not None and not isinstance(value, AutocastRules):
        return AutocastRules.load(checked_path(name, value))
    elif name in ("cast_model_type", "cast_model_outputs") and value is not None:
        if (found := dtype_name(value)) in _DTYPES:
            return jnp.dtype(found)
        if value is not False or name == "cast_model_outputs":
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, _DTYPES))}, or None")
    elif name == "loss_scale" and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value
