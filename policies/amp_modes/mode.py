"""AMP modes: one value that switches a training script between three families of mixed precision.

The flow: options -> `Amp` -> `transform`, which adds casts or autocast to the loss function,
and loss scale and master weights to the optimizer; `cast_params` casts the parameters to their storage dtypes.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from jmp_train.policies.amp_modes.batch_norms import (
    as_torch,
    batch_norm_paths,
    batch_norms_called,
    float32_nnx_statistics,
    in_float32,
    with_batch_norms,
)
from jmp_train.policies.amp_modes.mode_options import (
    FLOAT32,
    AmpType,
    Precision,
    amp_options,
    loss_scale_of,
    precision_of,
)
from jmp_train.policies.autocasting import autocast
from jmp_train.policies.dtype_policies import FirstTrace, Policy, with_float32_sums
from jmp_train.policies.files import read_toml
from jmp_train.policies.loss_scaling import (
    AUTOCASTS_BY_AMP,
    CASTS_BY_AMP,
    DynamicLossScale,
    LossScales,
    check_takes_state,
    unpack_loss,
)
from jmp_train.policies.optimizers import SkipRule, count_zero_gradients, with_loss_scale, with_master_weights
from jmp_train.policies.pytrees import (
    cast_floating,
    cast_leaf,
    cast_like,
    check_half,
    find_nodes,
    is_float_array,
    is_half,
    named_leaves,
    path_name,
)
from jmp_train.policies.types import Params, PyTree

_LOGGER = logging.getLogger("jmp_train.amp")


@dataclasses.dataclass(frozen=True)
class Amp:
    """An AMP mode, from `amp_mode`: its options and their effects; hashable.

    Args:
      options: the options of the mode.
      dtype: the half type.
      batch_norms: the paths of the model's BatchNorms, from `batch_norm_paths`; None if they are
        not known. `for_model` sets it.

    Example:
      >>> from jmp_train.policies import amp_mode
      >>> amp = amp_mode("apex", opt_level="O2")
      >>> print(amp)
      apex: model float16, BatchNorm float32, master weights float32, outputs float32, loss scale 65536
    """

    options: Any
    dtype: np.dtype
    batch_norms: tuple[str, ...] | None = None

    @property
    def mode(self) -> AmpType:
        """The mode."""
        return self.options.mode

    @property
    def enabled(self) -> bool:
        """True if the mode is active; otherwise everything is computed in float32."""
        return getattr(self.options, "enabled", True)

    @property
    def precision(self) -> Precision:
        """The dtypes of the mode."""
        return precision_of(self.options, self.dtype)

    @property
    def loss_scale(self) -> LossScales:
        """The initial loss scale."""
        return loss_scale_of(self.options, self.dtype)

    def __str__(self) -> str:
        if not self.enabled:
            return f"{self.mode.value}: not enabled"
        precision = self.precision
        dtypes = {
            "model": precision.model_dtype,
            "autocast": self.dtype if precision.autocast_rules else None,
            "BatchNorm": FLOAT32 if precision.keep_batchnorm_fp32 else None,
            "master weights": FLOAT32 if precision.master_weights else None,
            "outputs": precision.output_dtype,
        }
        parts = [f"{name} {dtype}" for name, dtype in dtypes.items() if dtype is not None]
        scales = ", ".join(f"{scale:.10g}" for scale in np.ravel(self.loss_scale.loss_scale))
        return f"{self.mode.value}: {', '.join([*parts, f'loss scale {scales}'])}"

    @property
    def _is_verbose(self) -> bool:
        return bool(getattr(self.options, "verbosity", 0) or getattr(self.options, "verbose", False))

    def for_model(self, model: object, *args: object, **kwargs: object) -> tuple["Amp", Any]:
        """Returns this mode with the model's BatchNorms known to it, and the model to train.

        With `keep_batchnorm_fp32`, BatchNorms compute in float32 and return half precision; if the whole model is in
        half precision, nnx's return it too. nnx and equinox modules hold their dtypes, so for them the result is
        another model; split or partition it in place of the old one. Other modes return both unchanged.

        Args:
          model: a linen module, nnx module, equinox module or haiku transform.
          *args: arguments of linen's and haiku's `init` after the key, arrays or their shapes.
          **kwargs: see `args`.

        Raises:
          TypeError: `model` is of another kind; for others see `batch_norms`.
        """
        precision = self.precision
        if precision.model_dtype in (None, FLOAT32):
            return self, model
        keep, known = precision.keep_batchnorm_fp32, self
        if keep:
            known = dataclasses.replace(self, batch_norms=batch_norm_paths(model, *args, **kwargs))
        return known, with_batch_norms(model, self.dtype, in_float32=keep)

    def cast_params(self, params: Params) -> Any:
        """Returns parameters in the dtypes in which the mode stores them.

        Args:
          params: pytree of float32 parameters; mode "naive" also takes half ones.

        Raises:
          ValueError: parameters are in half precision already (the message lists them), or the mode keeps
            BatchNorms in float32 and does not know them.
        """
        if not self.enabled:
            return params
        if self.mode is not AmpType.NAIVE:
            _check_dtypes(params, _float32_dtypes(params), f"must be in float32; mode {self.mode.value!r} casts them")
        stored = self._stored_dtypes(params)
        return jax.tree_util.tree_map_with_path(
            lambda path, x: cast_leaf(x, stored.get(path_name(path), FLOAT32)), params
        )

    def cast_model_state(self, model_state: PyTree) -> Any:
        """Returns batch statistics in the dtypes of the mode: half precision if the whole model is in half precision.

        Args:
          model_state: pytree, or None.
        """
        precision = self.precision
        if precision.model_dtype is None or precision.keep_batchnorm_fp32:
            return model_state
        return cast_floating(model_state, precision.model_dtype)

    def cast_outputs(self, outputs: object) -> Any:
        """Returns a model's outputs in the output dtype of the mode; for use inside a loss function.

        Args:
          outputs: pytree, such as logits.
        """
        dtype = self.precision.output_dtype
        return outputs if dtype is None else cast_floating(outputs, dtype)

    def transform(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        *,
        skip: SkipRule[Any] | None = None,
    ) -> tuple[Callable[..., Any], Any]:
        """Returns a loss function and an optimizer that train in this mode.

        Args:
          loss_fn: a loss function for `train_step`, `loss_fn(params, model_state, batch, rng) -> (loss, (model_state,
            aux))`; `stateless` adapts a plain `loss_fn(params, batch)`. The floats of the batch are cast
            with the model. With `num_losses` above 1, `loss` is a tuple.
          optimizer: any optax optimizer without a loss scale.
          skip: a rule that also skips steps with finite gradients; see `with_loss_scale`.

        Returns:
          Both, for `train_step` without a policy or for a user-defined train step. If the mode is not enabled,
          they are returned unchanged.

        Raises:
          TypeError: `loss_fn` takes other arguments or, when called, returns something else.
          ValueError: when called, parameters have other dtypes than from `cast_params`; the message names them.

        Warns:
          Float32ProductsWarning: when first traced, if the mode casts the model and its products stay float32.
        """
        check_takes_state(loss_fn)
        if not self.enabled:
            return loss_fn, optimizer
        precision = self.precision
        if self._is_verbose:
            _log(f"AMP mode {self}; {self.options}")
        run = self._running()

        @functools.wraps(loss_fn)
        def with_amp(params: Params, model_state: PyTree, batch: PyTree, rng: jax.Array | None) -> Any:
            result = run(lambda params, state, batch: loss_fn(params, state, batch, rng), params, model_state, batch)
            loss, (new_state, aux) = unpack_loss(result)
            # train_step checks other differences in the model state.
            return loss, (cast_like(new_state, model_state), self.cast_outputs(aux))

        setattr(with_amp, CASTS_BY_AMP, precision.model_dtype is not None)
        setattr(with_amp, AUTOCASTS_BY_AMP, self.dtype if precision.autocast_rules else None)
        if getattr(self.options, "log_num_zeros_in_grad", False):
            optimizer = count_zero_gradients(optimizer)
        optimizer = with_loss_scale(optimizer, self.loss_scale, skip=skip)
        return with_amp, with_master_weights(optimizer) if precision.master_weights else optimizer

    def forward(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a model's function as it runs in this mode, for evaluation.

        Args:
          fn: `fn(params, model_state, batch) -> outputs`.
        """
        if not self.enabled:
            return fn
        run = self._running()

        @functools.wraps(fn)
        def with_amp(params: Params, model_state: PyTree, batch: PyTree) -> Any:
            return self.cast_outputs(run(fn, params, model_state, batch))

        return with_amp

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Logs skipped steps if the options are verbose; waits for the step.

        The logger is "jmp_train.amp" and the level is INFO; only the first of several processes logs.

        Args:
          metrics: metrics of `train_step`, outside of jit.
        """
        if not (self.enabled and self._is_verbose):
            return
        count = int(np.max(metrics["skipped_steps"]))
        if np.any(np.equal(metrics.get("skip_reason", 0), 2)):
            _log(f"gradient spike: step skipped, {count} so far")
        if not np.all(metrics["grads_finite"]):
            scales = ", ".join(f"{scale:g}" for scale in np.ravel(metrics["loss_scale"]))
            _log(f"gradient overflow: step skipped, {count} so far; the loss scale is now {scales}")

    def _running(self) -> Callable[..., Any]:
        """Returns a function that calls `fn(params, model_state, batch)` in this mode, and warns in its first trace."""
        first_trace, precision = FirstTrace(), self.precision
        dtype, rules, keep = precision.model_dtype, precision.autocast_rules, precision.keep_batchnorm_fp32

        def run_in_mode(fn: Callable[..., Any], params: Params, model_state: PyTree, batch: PyTree) -> Any:
            stored = self._stored_dtypes(params)
            _check_dtypes(params, stored, f"must be in the dtypes of mode {self.mode.value!r}; call amp.cast_params")
            state = float32_nnx_statistics(self.cast_model_state(model_state))

            def run(params: Params, batch: PyTree) -> Any:
                # Rebuilt here, because nnx lets variables change only in the trace that made them.
                return fn(params, jax.tree_util.tree_map(lambda x: x, state), batch)

            if rules is not None:
                with batch_norms_called(as_torch):
                    return autocast(run, self.dtype, rules=rules)(params, batch)
            if dtype is None:
                return run(params, batch)
            batch = cast_floating(batch, dtype)
            look = first_trace.look(run, Policy(dtype, dtype, dtype), (params, batch), {}, mode=str(self.mode))
            with batch_norms_called(in_float32) if keep else contextlib.nullcontext(), look:
                try:
                    return with_float32_sums(run)(params, batch)
                except (TypeError, ValueError, NotImplementedError) as error:
                    if dtype.name in str(error):
                        error.add_note(
                            f"AMP mode {self.mode.value} runs the model in {dtype}. For operations that have no half "
                            "version, as an fft, cast the operand with x.astype(jnp.float32), or use mode 'torch'"
                        )
                    raise

        return run_in_mode

    def _stored_dtypes(self, params: Params) -> dict[str, np.dtype]:
        """Returns the dtypes in which the mode stores the floating parameters, by path."""
        dtypes, precision, norms = _float32_dtypes(params), self.precision, ()
        if precision.keep_batchnorm_fp32:
            norms = self.batch_norms
            if norms is None:
                raise ValueError(
                    "keep_batchnorm_fp32=True needs the paths of the BatchNorms, () for none: call amp, model = "
                    "amp.for_model(model, *inputs), or dataclasses.replace(amp, batch_norms=(...))"
                )
            if unmatched := [norm for norm in norms if not any(_is_under(norm, path) for path in dtypes)]:
                raise ValueError(
                    f"batch_norms: {', '.join(map(repr, unmatched))} match no floating parameter; set them with "
                    "dataclasses.replace(amp, batch_norms=(...)). The paths are:\n  " + "\n  ".join(dtypes)
                )
        if precision.model_dtype is None:
            return dtypes
        return {path: FLOAT32 if any(_is_under(x, path) for x in norms) else precision.model_dtype for path in dtypes}


def _float32_dtypes(params: Params) -> dict[str, np.dtype]:
    floats = [(path, x.dtype) for path, x in named_leaves(params) if is_float_array(x)]
    return {path: FLOAT32 if dtype.itemsize < 4 else dtype for path, dtype in floats}


def _check_dtypes(params: Params, wanted: dict[str, np.dtype], message: str) -> None:
    leaves = [(path, x.dtype) for path, x in named_leaves(params) if path in wanted]
    if wrong := [f"{path!r} is {x.name}, not {wanted[path].name}" for path, x in leaves if x != wanted[path]]:
        raise ValueError("\n  ".join([f"params {message}:", *wrong]))


def _is_under(module: str, path: str) -> bool:
    """Returns whether a parameter belongs to a module; the paths may begin with linen's "params"."""
    return module == "" or path.startswith((f"{module}/", f"params/{module}/"))


def _log(text: str) -> None:
    # Asking for the process before `initialize` would start jax too early.
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        _LOGGER.info(text)


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
