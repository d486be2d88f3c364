"""AMP modes: one value that switches a training script between three families of mixed precision.

The flow: options -> `Amp` -> `transform`, which adds casts or autocast to the loss function,
and loss scale and master weights to the optimizer; `cast_params` casts the parameters to their storage dtypes.
"""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jmp_train.policies.amp_modes.batch_norms import (
    batch_norm_paths,
    float32_batch_norms,
    float32_batch_norms_called,
    float32_nnx_statistics,
    half_batch_norms,
    torch_batch_norms_called,
)
from jmp_train.policies.amp_modes.mode_options import FLOAT32, AmpOptions, AmpType, Precision, amp_options
from jmp_train.policies.autocasting import autocast
from jmp_train.policies.dtype_policies import FirstTrace, Policy, with_float32_sums
from jmp_train.policies.loss_scaling import (
    AUTOCASTS_BY_AMP,
    CASTS_BY_AMP,
    LossScales,
    NoOpLossScale,
    check_takes_state,
    unpack_loss,
)
from jmp_train.policies.optimizers import (
    SkipRule,
    as_transformation,
    count_zero_gradients,
    with_loss_scale,
    with_master_weights,
)
from jmp_train.policies.pytrees import (
    cast_floating,
    cast_leaf,
    cast_like,
    check_half,
    is_float_array,
    is_half,
    named_leaves,
    path_name,
)
from jmp_train.policies.types import Params, PyTree

_LOGGER = logging.getLogger("jmp_train.amp")


def amp_mode(mode: str, *, dtype: DTypeLike = jnp.float16, **options: object) -> "Amp":
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
      **options: those of `TorchOptions`, `ApexOptions` or `NaiveOptions`, by name.

    Returns:
      An `Amp`.

    Raises:
      ValueError: the mode or an option is unknown, an option is invalid, or two exclude each other; the
        message names them and the choices.
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
    amp = Amp(chosen, chosen.half_dtype(half))
    unused = [name for name in chosen.scaling if name in options]
    if unused and amp.enabled and isinstance(amp.loss_scale, NoOpLossScale):
        raise ValueError(f"{unused[0]} is for float16: {amp.dtype} has float32's range and needs no loss scale")
    return amp


@dataclasses.dataclass(frozen=True)
class Amp:
    """An AMP mode, from `amp_mode`: its options and their effects; hashable.

    Args:
      options: the options of the mode.
      dtype: the half type.
      batch_norms: the paths of the model's BatchNorms, from `batch_norm_paths`; None if they are
        not known. `for_model` sets it.

    Example:
      >>> print(amp_mode("apex", opt_level="O2"))
      apex: model float16, BatchNorm float32, master weights float32, outputs float32, loss scale 65536
    """

    options: AmpOptions
    dtype: np.dtype
    batch_norms: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batch_norms, str):
            raise TypeError(f"batch_norms={self.batch_norms!r} must be a tuple of paths")

    @property
    def mode(self) -> AmpType:
        """The mode."""
        return self.options.mode

    @property
    def enabled(self) -> bool:
        """True if the mode is active; otherwise everything is computed in float32."""
        return self.options.enabled

    @property
    def precision(self) -> Precision:
        """The dtypes of the mode."""
        return self.options.precision(self.dtype) if self.enabled else Precision()

    @property
    def loss_scale(self) -> LossScales:
        """The initial loss scale."""
        return self.options.make_loss_scale(self.dtype) if self.enabled else NoOpLossScale()

    def __str__(self) -> str:
        if not self.enabled:
            return f"{self.mode}: not enabled"
        precision = self.precision
        model = f"model {precision.model_dtype or 'as it is'}"
        scales = ", ".join(f"{scale:g}" for scale in np.ravel(self.loss_scale.loss_scale))
        by = " by the rules given" if self.options.rules else ""
        parts = (
            f"autocast {self.dtype}{by}" if precision.autocast_rules else model,
            "BatchNorm float32" if precision.keep_batchnorm_fp32 else "",
            "master weights float32" if precision.master_weights else "",
            f"outputs {precision.output_dtype or 'as they come'}",
            f"loss scale {scales}",
        )
        return f"{self.mode}: {', '.join(filter(None, parts))}"

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
        if precision.keep_batchnorm_fp32:
            try:
                paths = batch_norm_paths(model, *args, **kwargs)
            except TypeError as error:
                raise TypeError(
                    f"{error}; for another kind of model, give the paths of its BatchNorm modules, or () if it has "
                    "none: dataclasses.replace(amp, batch_norms=(...))"
                ) from error
            known = dataclasses.replace(self, batch_norms=paths)
            return known, float32_batch_norms(model, self.dtype)
        if precision.model_dtype is not None and is_half(precision.model_dtype):
            return self, half_batch_norms(model, self.dtype)
        return self, model

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
            self._refuse_half(params)
        if self.precision.model_dtype is None:
            return params

        self._check_batch_norms(params)

        def cast(path: KeyPath, x: object) -> Any:
            return cast_leaf(x, self._stored_dtype(path_name(path)))

        return jax.tree_util.tree_map_with_path(cast, params)

    def cast_model_state(self, model_state: PyTree) -> Any:
        """Returns batch statistics in the dtypes of the mode: half precision if the whole model is in half precision.

        Args:
          model_state: pytree, or None.
        """
        precision = self.precision
        if precision.model_dtype is None or precision.keep_batchnorm_fp32:
            return model_state
        return cast_floating(model_state, precision.model_dtype)

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
        first_trace = FirstTrace()
        if self.options.verbosity:
            _log(f"AMP mode {self}; {self.options}")

        @functools.wraps(loss_fn)
        def with_amp(params: Params, model_state: PyTree, batch: PyTree, rng: jax.Array | None) -> Any:
            def model(params: Params, state: object, batch: PyTree) -> Any:
                return loss_fn(params, state, batch, rng)

            result = self._run(model, params, model_state, batch, first_trace)
            loss, (new_state, aux) = unpack_loss(result)
            # train_step checks other differences in the model state.
            return loss, (cast_like(new_state, model_state), self.cast_outputs(aux))

        setattr(with_amp, CASTS_BY_AMP, self.precision.model_dtype is not None)
        setattr(with_amp, AUTOCASTS_BY_AMP, self.dtype if self.precision.autocast_rules else None)
        return with_amp, self._optimizer(optimizer, skip)

    def forward(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a model's function as it runs in this mode, for evaluation.

        Args:
          fn: `fn(params, model_state, batch) -> outputs`.
        """
        if not self.enabled:
            return fn
        first_trace = FirstTrace()

        @functools.wraps(fn)
        def with_amp(params: Params, model_state: PyTree, batch: PyTree) -> Any:
            return self.cast_outputs(self._run(fn, params, model_state, batch, first_trace))

        return with_amp

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Logs skipped steps if the options are verbose; waits for the step.

        The logger is "jmp_train.amp" and the level is INFO; only the first of several processes logs.

        Args:
          metrics: metrics of `train_step`, outside of jit.
        """
        if not (self.enabled and self.options.verbosity):
            return
        if np.any(np.equal(metrics.get("skip_reason", 0), 2)):
            _log(f"gradient spike: step skipped, {int(np.max(metrics['skipped_steps']))} so far")
        if not np.all(metrics["grads_finite"]):
            scales = ", ".join(f"{scale:g}" for scale in np.ravel(metrics["loss_scale"]))
            count = int(np.max(metrics["skipped_steps"]))
            _log(f"gradient overflow: step skipped, {count} so far; the loss scale is now {scales}")

    def _run(
        self, fn: Callable[..., Any], params: Params, model_state: PyTree, batch: PyTree, first_trace: FirstTrace
    ) -> Any:
        """Returns the result of a function of parameters, model state and batch in this mode."""
        self._check_params(params)
        precision = self.precision
        state = float32_nnx_statistics(self.cast_model_state(model_state))

        def run(params: Params, batch: PyTree) -> Any:
            # Rebuilt here, because nnx lets variables change only in the trace that made them.
            return fn(params, jax.tree_util.tree_map(lambda x: x, state), batch)

        if precision.autocast_rules is not None:
            with torch_batch_norms_called():
                return autocast(run, self.dtype, rules=precision.autocast_rules)(params, batch)
        if precision.model_dtype is not None:
            batch = cast_floating(batch, precision.model_dtype)
        keep = precision.keep_batchnorm_fp32
        with float32_batch_norms_called() if keep else contextlib.nullcontext():
            if precision.model_dtype is not None:
                stored = Policy(*(precision.model_dtype,) * 3)
                first_trace.look(run, stored, (params, batch), {}, mode=str(self.mode))
            try:
                return (run if precision.model_dtype is None else with_float32_sums(run))(params, batch)
            except (TypeError, ValueError, NotImplementedError) as error:
                if re.search(rf"\b{self.dtype.name}\b", str(error)):  # "float16" is in "bfloat16"
                    error.add_note(
                        f"AMP mode {self} runs the model in {self.dtype}. For operations without a half-precision "
                        "version, such as an fft or a decomposition, cast the operand with x.astype(jnp.float32), or "
                        "use mode 'torch', which casts it"
                    )
                raise

    def cast_outputs(self, outputs: object) -> Any:
        """Returns a model's outputs in the output dtype of the mode; for use inside a loss function.

        Args:
          outputs: pytree, such as logits.
        """
        dtype = self.precision.output_dtype
        return outputs if dtype is None else cast_floating(outputs, dtype)

    def _optimizer(self, optimizer: object, skip: SkipRule[Any] | None) -> Any:
        optimizer = as_transformation(optimizer)
        if self.options.counts_zeros:
            optimizer = count_zero_gradients(optimizer)
        optimizer = with_loss_scale(optimizer, self.loss_scale, skip=skip)
        return with_master_weights(optimizer) if self.precision.master_weights else optimizer

    def _stored_dtype(self, path: str) -> np.dtype:
        """Returns the dtype of the parameter at a path in a mode that casts the model."""
        precision = self.precision
        assert precision.model_dtype is not None
        if not precision.keep_batchnorm_fp32:
            return precision.model_dtype
        if self.batch_norms is None:
            raise ValueError(
                "keep_batchnorm_fp32=True needs to know the BatchNorm parameters; call amp, model = "
                "amp.for_model(model, *inputs), or give the paths of the BatchNorm modules, () if there are none: "
                "dataclasses.replace(amp, batch_norms=(...))"
            )
        is_norm = any(_is_under(norm, path) for norm in self.batch_norms)
        return FLOAT32 if is_norm else precision.model_dtype

    def _check_batch_norms(self, params: Params) -> None:
        if not self.precision.keep_batchnorm_fp32:
            return
        paths = [path for path, x in named_leaves(params) if is_float_array(x)]
        unmatched = [norm for norm in self.batch_norms or () if not any(_is_under(norm, path) for path in paths)]
        if unmatched:
            raise ValueError(
                f"batch_norms: {', '.join(map(repr, unmatched))} match no floating parameter; set them with "
                "dataclasses.replace(amp, batch_norms=(...)). The paths are:\n  " + "\n  ".join(paths)
            )

    def _check_params(self, params: Params) -> None:
        if self.precision.model_dtype is None:
            self._refuse_half(params)
            return
        self._check_batch_norms(params)
        wrong = [
            f"{path!r} is {x.dtype.name}, not {wanted.name}"
            for path, x in named_leaves(params)
            if is_float_array(x) and x.dtype != (wanted := self._stored_dtype(path))
        ]
        if wrong:
            raise ValueError(
                f"params are not in the dtypes of mode {str(self.mode)!r}; call amp.cast_params(params) before the "
                "first step:\n  " + "\n  ".join(wrong)
            )

    def _refuse_half(self, params: Params) -> None:
        half = [
            f"{path!r} is {x.dtype.name}" for path, x in named_leaves(params) if is_float_array(x) and is_half(x.dtype)
        ]
        if half:
            raise ValueError(
                f"params must be in float32; mode {str(self.mode)!r} casts them itself:\n  " + "\n  ".join(half)
            )


def _is_under(module: str, path: str) -> bool:
    """Returns whether a parameter belongs to a module; the paths may begin with linen's "params"."""
    return module == "" or path.startswith((f"{module}/", f"params/{module}/"))


def _log(text: str) -> None:
    # Asking for the process before `initialize` would start jax too early.
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        _LOGGER.info(text)
