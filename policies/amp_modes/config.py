"""`amp_mode` and `amp_from_config`: AMP modes by name, from the tutorials' dictionaries, and from TOML files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.policies.amp_modes.mode import Amp
from jmp_train.policies.amp_modes.mode_options import AmpType, amp_options
from jmp_train.policies.files import read_toml
from jmp_train.policies.loss_scaling import DynamicLossScale
from jmp_train.policies.pytrees import check_half, find_nodes, is_half


def amp_mode(mode: str, *, dtype: DTypeLike = jnp.float16, **options: object) -> Amp:
    """Returns the mixed precision of a mode, with the options of its original.

    | mode | parameters | computation | BatchNorm | outputs | loss scale | the optimizer steps on |
    | --- | --- | --- | --- | --- | --- | --- |
    | torch | float32 | by autocast | float32 parameters | as they come | dynamic, 2**16 | parameters |
    | apex, O0 | float32 | float32 | float32 | float32 | 1 | parameters |
    | apex, O1 | float32 | by autocast | float32 parameters | as they come | dynamic, 2**16 | parameters |
    | apex, O2 | half | half | float32 | float32 | dynamic, 2**16 | float32 master weights |
    | apex, O3 | half | half | half | float32 | 1 | parameters |
    | naive | half | half | half | float32 | dynamic, 2**32, hysteresis 2 | float32 master weights |

    Args:
      mode: "torch", "apex" or "naive", or an `AmpType`.
      dtype: the half type, float16 or bfloat16. bfloat16 has no loss scale, but still skips non-finite steps.
      **options: by name; see below. An option of Apex that is not None overrides its level's.

    Options of "torch" are the arguments of `torch_loss_scale`, and those of "naive" the arguments of
    `megatron_loss_scale`, with a `max_scale` of 2**32. "apex" has the arguments of `apex_loss_scale`, with a
    `min_loss_scale` of 1. Further options:

    - `enabled` (torch, apex): False computes as in float32.
    - `rules` (torch, apex O1): autocast rules, or the path of a file of them.
    - `log_num_zeros_in_grad` (naive): True to count zero gradients (metric `num_zeros_in_grad`).
    - `verbose` (naive), `verbosity` (apex): whether to log the settings and the skipped steps.
    - `opt_level` (apex, as all that follow): "O0" to "O3".
    - `cast_model_type`: dtype of the model, or its name; False for none. Half types are not for O1.
    - `patch_torch_functions`: True to choose each operation's precision by autocast; O1 only.
    - `keep_batchnorm_fp32`: whether BatchNorms stay in float32. Not for O1.
    - `master_weights`: whether the optimizer stores float32 master weights of half parameters. Not for O1.
    - `loss_scale`: a number, its text, or "dynamic".
    - `cast_model_outputs`: dtype of the model's outputs; None for float32, or under O1 for no cast.
    - `num_losses`: number of losses with their own scales; see `PerLossScale`.

    Returns:
      An `Amp`.

    Raises:
      ValueError: the mode or an option is unknown, an option is invalid, or two exclude each other; the
        message names them and the choices.
      TypeError: `rules` is neither `AutocastRules` nor a path.
      OSError: a file of rules is missing or cannot be read.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> loss_fn = jt.stateless(lambda w, x: ((x @ w).astype(jnp.float32) ** 2).mean())
      >>> amp = jt.amp_mode("naive", initial_scale=2.0**10)
      >>> loss_fn, optimizer = amp.transform(loss_fn, optax.sgd(0.1))
      >>> step = jax.jit(jt.train_step(loss_fn, optimizer))
      >>> state = jt.TrainState.create(jnp.ones((2, 1)), optimizer, cast_params=amp.cast_params)
      >>> state, metrics = step(state, jnp.full((4, 2), 0.25))
      >>> state.params.dtype.name, jt.get_master_weights(state.opt_state).dtype.name
      ('float16', 'float32')

    Reference: torch.amp; NVIDIA Apex e13873de; ColossalAI e79ea4424^, colossalai/amp.
    """
    half = check_half(dtype, "dtype")
    chosen = amp_options(mode, options)
    cast = getattr(chosen, "cast_model_type", None)
    amp = Amp(chosen, cast if cast and is_half(cast) else half)
    unused = [name for name in options if name in chosen.scaling]
    if unused and amp.enabled and not find_nodes(amp.loss_scale, DynamicLossScale):
        raise ValueError(f"{unused[0]} is for a dynamic loss scale, got {amp.loss_scale}")
    return amp


def amp_from_config(config: Mapping[str, Any] | str | Path, *, dtype: DTypeLike = jnp.float16) -> Amp:
    """Returns the mode of a configuration's entry `fp16`.

    Args:
      config: a dictionary such as `{"fp16": {"mode": "torch", "init_scale": 2.0**10}}`, or the path of a TOML
        file with a table `[fp16]`. Other entries belong to the script; if `fp16` is missing or None,
        the mode is disabled. In a TOML file, the path of a file of `rules` is relative to its folder.
      dtype: see `amp_mode`; a `dtype` in `fp16` takes precedence.

    Returns:
      The result of `amp_mode`.

    Raises:
      TypeError: `config` or `fp16` is of another type.
      ValueError: the file is not TOML, or a key of `fp16` is wrong; the message names it and the choices.
      FileNotFoundError: the file, or that of `rules`, does not exist.

    Example:
      >>> config = {"batch_size": 128, "fp16": {"mode": AmpType.APEX, "opt_level": "O2"}}
      >>> amp = amp_from_config(config)
      >>> amp.options.opt_level, amp.precision.master_weights
      ('O2', True)

    Reference: ColossalAI's configuration files, https://colossalai.org/docs/features/mixed_precision_training.
    """
    where, folder = "config", Path()
    if isinstance(config, str | Path):
        where, folder, config = str(config), Path(config).parent, read_toml(Path(config))
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a dictionary or a TOML file's path, got {config!r}")
    options = config.get("fp16")
    if options is None:
        return amp_mode(AmpType.TORCH, dtype=dtype, enabled=False)
    if not isinstance(options, Mapping):
        raise TypeError(f"{where}: fp16 must be a dictionary of options, got {options!r}")
    try:
        if "mode" not in options:
            raise ValueError(f"mode is missing; choose from {', '.join(repr(kind.value) for kind in AmpType)}")
        rules = options.get("rules")
        relative = {"rules": folder / rules} if isinstance(rules, str | Path) else {}
        return amp_mode(**{"dtype": dtype, **options, **relative})
    except ValueError as error:
        raise ValueError(f"{where}: fp16: {error}") from error
