"""AMP modes from configuration: the tutorials' dictionaries, and TOML files."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.policies.amp_modes.mode import Amp, amp_mode
from jmp_train.policies.amp_modes.mode_options import AmpType


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
        where, folder, config = str(config), Path(config).parent, _read(Path(config))
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a dictionary or a TOML file's path, got {config!r}")
    options = config.get("fp16")
    if options is None:
        return amp_mode(AmpType.TORCH, dtype=dtype, enabled=False)
    if not isinstance(options, Mapping):
        raise TypeError(f"{where}: fp16 must be a dictionary of options, got {options!r}")
    options = dict(options)
    try:
        unnamed = [key for key in options if not isinstance(key, str)]
        if unnamed:
            raise ValueError(f"{unnamed[0]!r} is not an option; names of options are strings")
        if "mode" not in options:
            choices = ", ".join(repr(kind.value) for kind in AmpType)
            raise ValueError(f"mode is missing; choose from {choices}")
        if isinstance(options.get("rules"), str | Path):
            options["rules"] = folder / options["rules"]
        return amp_mode(**{"dtype": dtype, **options})
    except ValueError as error:
        raise ValueError(f"{where}: fp16: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
