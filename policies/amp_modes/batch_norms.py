"""Batch norms of flax, equinox and haiku: finds them, and runs them in float32.

Half precision overflows in a batch norm's sums and rounds its statistics. So NVIDIA's Apex leaves
batch norms in float32 when it halves a model: they compute in float32 and return half precision. This module imports
no library: whoever passes a model has imported its library, so it is in `sys.modules`.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.typing import DTypeLike

from jmp_train.policies.autocasting import FlatCall, opaque_to_autocast
from jmp_train.policies.pytrees import (
    cast_leaf,
    change_nodes,
    flax_nnx,
    is_float_array,
    is_half,
    named_leaves,
    upcast_to_float32,
)
from jmp_train.policies.types import PyTree

Model = TypeVar("Model")
Function = Callable[..., Any]

# Part of the key of jax's caches. Otherwise nn.jit, nn.remat and scan would reuse, within an
# interceptor, a trace made without one, and the interceptor would see no call.
_interception = jax.make_user_context(default_value=None)


def batch_norm_paths(model: object, *args: object, **kwargs: object) -> tuple[str, ...]:
    """Returns the paths of a model's batch norms, found by type, subclasses included.

    Linen and haiku models are traced to find them: their `init` is called on shapes, and nothing is computed.

    Args:
      model: a flax linen or nnx module, a transformed haiku function, or a pytree with equinox
        modules.
      *args: for linen and haiku, the arguments of `model.init` after the random key: arrays of any shape
        and dtype or `jax.ShapeDtypeStruct`; others are passed on unchanged. Other models need none.
      **kwargs: the same by name, such as `train=False`.

    Returns:
      Sorted path names, as in linen's `variables["params"]`, `nnx.state(model, nnx.Param)`, the
      equinox model and haiku's parameters: each is the prefix of the norm's parameters ("" if the model
      is a batch norm itself). Norms without parameters are left out.

    Raises:
      TypeError: `model` is of another kind, or cannot be traced without example inputs.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> layers = [nn.Dense(3), nn.BatchNorm(use_running_average=False), nn.LayerNorm()]
      >>> batch_norm_paths(nn.Sequential(layers), jax.ShapeDtypeStruct((8, 2), jnp.float32))
      ('layers_1',)

    Reference: NVIDIA Apex e13873de, `keep_batchnorm_fp32`; apex/fp16_utils/fp16util.py,
    `convert_network` finds batch norms by type as well.
    """
    linen, nnx, haiku, equinox = map(sys.modules.get, ("flax.linen", "flax.nnx", "haiku", "equinox"))
    if linen and isinstance(model, linen.Module):
        norms, variables = _traced(model, FlatCall(args, kwargs), streams=("params", "dropout"))  # others use "params"
        found, params = ["/".join(norm.path) for norm in norms], variables.get("params", {})
    elif nnx and isinstance(model, nnx.Module):
        found = ["/".join(map(str, path)) for path, x in nnx.iter_modules(model) if isinstance(x, nnx.BatchNorm)]
        params = nnx.state(model, nnx.Param)
    elif haiku and isinstance(model, tuple) and {"init", "apply"} <= {*getattr(model, "_fields", ())}:
        norms, params = _traced(model, FlatCall(args, kwargs))
        names = [norm.module_name for norm in norms]
        # A transform lifted into another does not know the prefix of its modules' names there.
        found = [key for x in names for key in params if key == x or (x not in params and key.endswith(f"/{x}"))]
    elif equinox and _nodes(model, equinox.Module):
        found, params = _nodes(model, equinox.nn.BatchNorm), equinox.filter(model, equinox.is_inexact_array)
    else:
        raise TypeError(
            f"model is of type {type(model).__name__}; it must be a flax linen or nnx module, a "
            "transformed haiku function or a pytree with equinox modules. For another kind, give the paths of its "
            "BatchNorm modules, or () if it has none: dataclasses.replace(amp, batch_norms=(...))"
        )
    leaves = [name for name, _ in named_leaves(params)]
    return tuple(path for path in sorted(set(found)) if any(not path or leaf.startswith(f"{path}/") for leaf in leaves))


def with_batch_norms(model: Model, half: DTypeLike, *, in_float32: bool) -> Model:
    """Returns a model whose batch norms return half precision, and compute in float32 or higher precision if wanted.

    Paths, parameters and states are those of `model`, which does not change; arrays are shared.
    Keep the norms' parameters and running statistics in float32, because they are not cast.

    Args:
      model: nnx models are cloned, because their batch norms return the dtype of their statistics otherwise. In equinox
        models a subclass replaces each batch norm that computes in float32. Others are returned unchanged; use
        `batch_norms_called` for linen and haiku models.
      half: the dtype that nnx's batch norms return; equinox's return their input's dtype.
      in_float32: whether they compute in float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> norm = with_batch_norms(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), jnp.float16, in_float32=True)
      >>> with jax.numpy_dtype_promotion("standard"):  # flax asks for it
      ...     norm(jnp.full((4, 2), 300, jnp.float16)).dtype.name, norm.var.dtype.name
      ('float16', 'float32')

    Reference: NVIDIA Apex e13873de, apex/fp16_utils/fp16util.py, `convert_network`.
    """
    nnx, equinox = flax_nnx(), sys.modules.get("equinox")
    if nnx and isinstance(model, nnx.Module):
        clone: Any = nnx.clone(model)
        for _, module in nnx.iter_modules(clone):
            if isinstance(module, nnx.BatchNorm):
                # flax casts the input by the one, and the output by the other.
                promotion = {"promote_dtype": _upcast_arrays} if in_float32 else {}
                vars(module).update(dtype=half, **promotion)
        return clone
    if in_float32 and equinox and _nodes(model, equinox.nn.BatchNorm):
        return change_nodes(model, equinox.nn.BatchNorm, _float32_twin)
    return model


def float32_nnx_statistics(model_state: Model) -> Model:
    """Returns a model state with nnx's batch statistics in float32, because nnx refuses to cast new ones down.

    Args:
      model_state: any pytree; other leaves than `nnx.BatchStat` stay.
    """
    nnx = flax_nnx()
    return change_nodes(model_state, nnx.BatchStat, upcast_to_float32) if nnx else model_state


@contextlib.contextmanager
def batch_norms_called(run: Function) -> Iterator[None]:
    """Calls `run(call, args, kwargs, module)` within this context in place of each batch norm of linen and haiku.

    It affects calls and traces of a model, also within jit, grad and lifted transforms.
    If a subclass calls its superclass, both calls are replaced, one within the other.

    Args:
      run: `in_float32` or `as_torch`, or another function.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> norm = nn.BatchNorm(use_running_average=False)
      >>> variables = norm.init(jax.random.key(0), jnp.ones((4, 2)))
      >>> with batch_norms_called(in_float32):
      ...     x = jnp.full((4, 2), 300, jnp.float16)
      ...     y, updated = norm.apply(variables, x, mutable=["batch_stats"])
      >>> y.dtype.name, updated["batch_stats"]["var"].dtype.name
      ('float16', 'float32')
    """

    def intercept(batch_norm: type, call: Function, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, batch_norm) and context.method_name == "__call__":
            return run(call, args, kwargs, context.module)
        return call(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_interception(run))
        for library in filter(None, map(sys.modules.get, ("flax.linen", "haiku"))):
            stack.enter_context(library.intercept_methods(functools.partial(intercept, library.BatchNorm)))
        yield


def in_float32(call: Function, args: tuple[Any, ...], kwargs: dict[str, Any], module: object = None) -> Any:
    """Computes a batch norm in float32 or higher precision, and returns half precision for half inputs.

    Keep the norm's parameters and running statistics in float32, because they are not cast.

    Args:
      call: the batch norm.
      args: its arguments.
      kwargs: its keyword arguments.
      module: its module.

    Reference: NVIDIA Apex e13873de, apex/fp16_utils/fp16util.py, `convert_network`.
    """
    del module
    named = [kwargs[name] for name in ("x", "inputs") if name in kwargs]  # linen's and haiku's
    floats = [x for x in (*args, *named, *kwargs.values()) if is_float_array(x)]
    if not floats or not is_half(floats[0].dtype):
        return call(*args, **kwargs)
    result = call(*map(_upcast_floats, args), **{name: _upcast_floats(x) for name, x in kwargs.items()})
    if isinstance(result, tuple):  # from equinox, with the state second
        return cast_leaf(result[0], floats[0].dtype), *result[1:]
    return cast_leaf(result, floats[0].dtype)


def as_torch(call: Function, args: tuple[Any, ...], kwargs: dict[str, Any], module: object = None) -> Any:
    """Returns the result of a batch norm in an autocast region in the dtype of its input.

    torch's batch norms do so under autocast, because each is one operation, which takes half inputs and float32
    parameters. Written in jax, its float32 parameters would make the result float32, and so everything stored for it.

    Args:
      call: see `in_float32`.
      args: its arguments.
      kwargs: its keyword arguments.
      module: its module.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jmp_train.policies import autocast
      >>> model = nn.Sequential([nn.Dense(2), nn.BatchNorm(use_running_average=True)])
      >>> variables = model.init(jax.random.key(0), jnp.ones((4, 2)))
      >>> with batch_norms_called(as_torch):
      ...     autocast(model.apply)(variables, jnp.ones((4, 2))).dtype.name
      'float16'

    Reference: torch.nn.functional.batch_norm under torch.autocast.
    """
    del module
    x = next((x for x in (*args, *kwargs.values()) if is_float_array(x)), None)
    result = call(*args, **kwargs)
    return result if x is None else _like_input(result, x)


# Both are traced in float32; only the region knows their dtypes.
_like_input = opaque_to_autocast(lambda result, x: cast_leaf(result, x.dtype))


def _nodes(tree: PyTree, kind: type) -> list[str]:
    """Returns the path names of a tree's outermost nodes of a type."""
    return [path for path, x in named_leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]


def _traced(model: Any, call: FlatCall, *, streams: Sequence[str] = ()) -> tuple[list[Any], Any]:
    """Returns the batch norms that a model's `init` calls, and the shapes of its variables, without haiku's state."""
    called: list[Any] = []

    def record(call: Function, args: tuple[Any, ...], kwargs: dict[str, Any], module: object) -> Any:
        called.append(module)
        return call(*args, **kwargs)

    def run(*arrays: object) -> Any:
        args, kwargs = call.arguments(arrays)
        key = jax.random.key(0)
        made = model.init(dict.fromkeys(streams, key) or key, *args, **kwargs)
        return made[0] if isinstance(made, tuple) else made

    try:
        with batch_norms_called(record), jax.numpy_dtype_promotion("standard"):  # needed by the libraries
            return called, jax.eval_shape(run, *call.avals)
    except Exception as error:
        if call.avals:
            raise
        raise TypeError(
            f"model is a {type(model).__name__} whose init cannot be traced without example inputs; pass them as "
            "arrays or ShapeDtypeStructs: batch_norm_paths(model, x)"
        ) from error


def _upcast_floats(x: object) -> Any:
    return upcast_to_float32(x) if is_float_array(x) else x  # an equinox state stays the same object


def _upcast_arrays(arrays: tuple[Any, ...], **dtype: object) -> tuple[Any, ...]:
    return upcast_to_float32(arrays)


def _float32_twin(node: Any) -> Any:
    twin = object.__new__(_float32_class(type(node)))
    vars(twin).update(vars(node))  # the same arrays and StateIndex objects
    return twin


@functools.cache  # tree structures compare classes
def _float32_class(batch_norm: type) -> type:
    @functools.wraps(batch_norm.__call__)
    def call(self: object, *args: object, **kwargs: object) -> Any:
        return in_float32(functools.partial(batch_norm.__call__, self), args, kwargs)

    return type(batch_norm)(f"Float32{batch_norm.__name__}", (batch_norm,), {"__call__": call})
