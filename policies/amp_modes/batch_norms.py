"""Batch norms of flax, equinox and haiku: finds them, and runs them in float32.

Half precision overflows in a batch norm's sums and rounds its statistics. So NVIDIA's Apex leaves
batch norms in float32 when it halves a model: they compute in float32 and return half precision. This module imports
no library: whoever passes a model has imported its library, so it is in `sys.modules`.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.tree_util import keystr
from jax.typing import DTypeLike

from jmp_train.policies.autocasting import opaque_to_autocast
from jmp_train.policies.pytrees import (
    cast_leaf,
    change_nodes,
    flax_nnx,
    float_dtype,
    is_float_array,
    is_half,
    named_leaves,
    upcast_to_float32,
)
from jmp_train.policies.types import PyTree

Model = TypeVar("Model")
Found = tuple[list[str], Any]  # the batch norms' paths, and a tree of the model's parameters
Call = Callable[..., Any]
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)

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
    find = {"linen": _find_linen, "nnx": _find_nnx, "haiku": _find_haiku, "equinox": _find_equinox}
    found, params = find[_library_of(model)](model, args, kwargs)
    leaves = [name for name, _ in named_leaves(params)]
    return tuple(path for path in sorted(set(found)) if any(not path or leaf.startswith(f"{path}/") for leaf in leaves))


def float32_batch_norms(model: Model, dtype: DTypeLike) -> Model:
    """Returns a model whose batch norms compute in float32 or higher precision, and return half precision.

    Paths, parameters and states are those of `model`, which does not change; arrays are shared.
    Keep the norms' parameters and running statistics in float32, because they are not cast.

    Args:
      model: as in `batch_norm_paths`. nnx models are cloned; in equinox models a subclass replaces
        each batch norm. linen and haiku models are returned unchanged; use
        `float32_batch_norms_called` for them.
      dtype: the floating dtype that nnx's batch norms return; equinox's return their input's dtype.

    Raises:
      TypeError: `model` is of another kind.
      ValueError: `dtype` is not a floating dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> norm = float32_batch_norms(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), jnp.float16)
      >>> with jax.numpy_dtype_promotion("standard"):  # flax asks for it
      ...     norm(jnp.full((4, 2), 300, jnp.float16)).dtype.name, norm.var.dtype.name
      ('float16', 'float32')

    Reference: NVIDIA Apex e13873de, apex/fp16_utils/fp16util.py, `convert_network`.
    """
    output_dtype, library = float_dtype(dtype, "dtype"), _library_of(model)
    if library == "nnx":
        # flax casts the input by the one, and the output by the other.
        return _nnx_clone(model, promote_dtype=_upcast_arrays, dtype=output_dtype)
    return _float32_equinox(model) if library == "equinox" else model


def half_batch_norms(model: Model, dtype: DTypeLike) -> Model:
    """Returns a model whose batch norms return half precision, even if their statistics are float32.

    Only nnx needs it, because its batch norms otherwise return the statistics' dtype: nnx models are cloned, all
    others are returned unchanged.

    Args:
      model: any model.
      dtype: the half type.
    """
    nnx = flax_nnx()
    return _nnx_clone(model, dtype=dtype) if nnx and isinstance(model, nnx.Module) else model


def float32_nnx_statistics(model_state: Model) -> Model:
    """Returns a model state with nnx's batch statistics in float32, because nnx refuses to cast new ones down.

    Args:
      model_state: any pytree; other leaves than `nnx.BatchStat` stay.
    """
    nnx = flax_nnx()
    if nnx is None:
        return model_state
    return change_nodes(model_state, nnx.BatchStat, upcast_to_float32)


@contextlib.contextmanager
def float32_batch_norms_called() -> Iterator[None]:
    """Makes batch norms of linen and haiku within this context compute in float32 or higher, and return half precision.

    It affects calls and traces of a model, also within jit, grad and lifted transforms. The
    result has the dtype of the input; inputs in float32 or higher precision are unchanged. Keep the norms'
    parameters and running statistics in float32, because they are not cast.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> norm = nn.BatchNorm(use_running_average=False)
      >>> variables = norm.init(jax.random.key(0), jnp.ones((4, 2)))
      >>> with float32_batch_norms_called():
      ...     x = jnp.full((4, 2), 300, jnp.float16)
      ...     y, updated = norm.apply(variables, x, mutable=["batch_stats"])
      >>> y.dtype.name, updated["batch_stats"]["var"].dtype.name
      ('float16', 'float32')

    Reference: NVIDIA Apex e13873de, apex/fp16_utils/fp16util.py, `convert_network`.
    """
    with _all_batch_norms_called("float32 batch norms", _call_in_float32):
        yield


@contextlib.contextmanager
def torch_batch_norms_called() -> Iterator[None]:
    """Makes batch norms of linen and haiku in autocast regions within this context return the dtype of their input.

    torch's batch norms do so under autocast, because each is one operation, which takes half inputs and float32
    parameters. Written in jax, its float32 parameters would make the result float32, and so everything stored for it.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jmp_train.policies import autocast
      >>> model = nn.Sequential([nn.Dense(2), nn.BatchNorm(use_running_average=True)])
      >>> variables = model.init(jax.random.key(0), jnp.ones((4, 2)))
      >>> with torch_batch_norms_called():
      ...     autocast(model.apply)(variables, jnp.ones((4, 2))).dtype.name
      'float16'

    Reference: torch.nn.functional.batch_norm under torch.autocast.
    """
    with _all_batch_norms_called("torch's batch norms", _call_as_torch):
        yield


@contextlib.contextmanager
def _all_batch_norms_called(name: str, run: Call) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_interception(name))
        for library in filter(None, map(sys.modules.get, ("flax.linen", "haiku"))):
            stack.enter_context(_batch_norms_called(library, run))
        yield


def _library_of(model: object) -> str:
    linen, nnx, haiku, equinox = map(sys.modules.get, ("flax.linen", "flax.nnx", "haiku", "equinox"))
    if linen and isinstance(model, linen.Module):
        return "linen"
    if nnx and isinstance(model, nnx.Module):
        return "nnx"
    if haiku and isinstance(model, haiku.Transformed | haiku.TransformedWithState):
        return "haiku"
    if haiku and isinstance(model, haiku.MultiTransformed | haiku.MultiTransformedWithState):
        return "haiku"
    if equinox and _nodes(model, equinox.Module):
        return "equinox"
    raise TypeError(
        f"model is of type {type(model).__name__}; it must be a flax linen or nnx module, a "
        "transformed haiku function or a pytree with equinox modules"
    )


def _nodes(tree: PyTree, kind: type) -> list[str]:
    """Returns the path names of a tree's outermost nodes of a type."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kind))
    return [keystr(p, simple=True, separator="/") for p, x in nodes if isinstance(x, kind)]


def _find_linen(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    def init(*args: object, **kwargs: object) -> Any:
        rngs = {"params": jax.random.key(0), "dropout": jax.random.key(0)}  # other streams use "params"
        return model.init(rngs, *args, **kwargs).get("params", {})

    modules, params = _trace(model, sys.modules["flax.linen"], init, args, kwargs)
    return ["/".join(module.path) for module in modules], params


def _find_haiku(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    def init(*args: object, **kwargs: object) -> Any:
        made = model.init(jax.random.key(0), *args, **kwargs)
        return made[0] if isinstance(made, tuple) else made  # with or without a state

    found = []
    modules, params = _trace(model, sys.modules["haiku"], init, args, kwargs)
    for name in (module.module_name for module in modules):
        # A transform lifted into another does not know the prefix of its modules' names there.
        lifted = [key for key in params if key.endswith(f"/{name}")]
        found += [name] if name in params else lifted
    return found, params


def _find_nnx(model: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    nnx: Any = sys.modules["flax.nnx"]
    paths = [path for path, x in nnx.iter_modules(model) if isinstance(x, nnx.BatchNorm)]
    return ["/".join(map(str, path)) for path in paths], nnx.state(model, nnx.Param)


def _find_equinox(model: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    equinox: Any = sys.modules["equinox"]
    return _nodes(model, equinox.nn.BatchNorm), equinox.filter(model, equinox.is_inexact_array)


def _trace(
    model: object, library: ModuleType, init: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Any]:
    """Returns the batch norms that `init` calls, and the shapes that it returns."""
    called: list[Any] = []

    def record(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], module: object) -> Any:
        called.append(module)
        return call(*args, **kwargs)

    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [x if isinstance(x, _ARRAYS) else None for x in leaves]

    def run(arrays: list[Any]) -> Any:
        given = [x if array is None else array for x, array in zip(leaves, arrays, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, given)
        return init(*args, **kwargs)

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_batch_norms_called(library, record))
            stack.enter_context(_interception(object()))  # a new key: no trace is reused
            stack.enter_context(jax.numpy_dtype_promotion("standard"))  # needed by the libraries
            return called, jax.eval_shape(run, arrays)
    except Exception as error:
        if any(isinstance(x, _ARRAYS) for x in leaves):
            raise
        raise TypeError(
            f"model is a {type(model).__name__} whose init cannot be traced without example inputs; pass them as "
            "arrays or ShapeDtypeStructs: batch_norm_paths(model, x)"
        ) from error


def _batch_norms_called(library: ModuleType, run: Call) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which `run(call, args, kwargs, module)` replaces batch norms' calls.

    The interceptors of linen and haiku are alike. If a subclass calls its superclass, both calls
    are intercepted, one within the other.
    """

    def intercept(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        if isinstance(context.module, library.BatchNorm) and context.method_name == "__call__":
            return run(call, args, kwargs, context.module)
        return call(*args, **kwargs)

    return library.intercept_methods(intercept)


def _call_in_float32(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], module: object = None) -> Any:
    del module
    named = [kwargs[name] for name in ("x", "inputs") if name in kwargs]  # linen's and haiku's
    floats = [x for x in (*args, *named, *kwargs.values()) if is_float_array(x)]
    if not floats or not is_half(floats[0].dtype):
        return call(*args, **kwargs)
    result = call(*map(_upcast_floats, args), **{name: _upcast_floats(x) for name, x in kwargs.items()})
    if isinstance(result, tuple):  # from equinox, with the state second
        return cast_leaf(result[0], floats[0].dtype), *result[1:]
    return cast_leaf(result, floats[0].dtype)


def _call_as_torch(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], module: object = None) -> Any:
    del module
    x = next((x for x in (*args, *kwargs.values()) if is_float_array(x)), None)
    result = call(*args, **kwargs)
    return result if x is None else _like_input(result, x)


# Both are traced in float32; only the region knows their dtypes.
_like_input = opaque_to_autocast(lambda result, x: cast_leaf(result, x.dtype))


def _upcast_floats(x: object) -> Any:
    return upcast_to_float32(x) if is_float_array(x) else x  # an equinox state stays the same object


def _nnx_clone(model: object, **attributes: object) -> Any:
    """Returns a copy of an nnx model whose batch norms have the given attributes."""
    nnx: Any = sys.modules["flax.nnx"]
    clone = nnx.clone(model)
    for _, module in nnx.iter_modules(clone):
        if isinstance(module, nnx.BatchNorm):
            vars(module).update(attributes)
    return clone


def _upcast_arrays(arrays: tuple[Any, ...], **dtype: object) -> tuple[Any, ...]:
    return upcast_to_float32(arrays)


def _float32_equinox(model: object) -> Any:
    batch_norm = sys.modules["equinox"].nn.BatchNorm

    def in_float32(node: object) -> Any:
        twin = object.__new__(_float32_class(type(node)))
        vars(twin).update(vars(node))  # the same arrays and StateIndex objects
        return twin

    return change_nodes(model, batch_norm, in_float32)


@functools.cache  # tree structures compare classes
def _float32_class(batch_norm: type) -> type:
    @functools.wraps(batch_norm.__call__)
    def call(self: object, *args: object, **kwargs: object) -> Any:
        return _call_in_float32(functools.partial(batch_norm.__call__, self), args, kwargs)

    return type(batch_norm)(f"Float32{batch_norm.__name__}", (batch_norm,), {"__call__": call})
