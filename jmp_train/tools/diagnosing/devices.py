"""Compiles the parts of a diagnosis for one device or for those of a `shard_map`, each with its own values.

Such values are stacked along a first axis, which is sharded over the devices.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

LARGE = 2**19  # elements of an array, with which compiling longer is made up for by running faster
# What a program rounds has to be rounded here too.
_EVERYWHERE = {"xla_allow_excess_precision": False}
_SOON = {
    "cpu": {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,  # or small programs take twice as long
    },
    "gpu": {"xla_gpu_autotune_level": 0},
}
_LARGE = {"cpu": {"xla_backend_optimization_level": 1}}


@contextlib.contextmanager
def nonfinite_allowed() -> Iterator[None]:
    """Lets programs return NaN and infinities, which are measured, even under `jax_debug_nans` and `jax_debug_infs`."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


@functools.lru_cache(maxsize=512)  # each is a part of a process' memory maps, of which there is a limit
def compiled(run: Callable[..., Any], mesh: Any, axes: frozenset[str], large: int = LARGE) -> Callable[..., Any]:
    """Compiles a function; each device of a mesh gets its part of stacked values.

    Args:
      run: the function.
      mesh: the devices; None for one device.
      axes: the mapped axes of the mesh.
      large: number of elements of an array above which it is compiled to run faster.
    """
    if mesh is None:
        soon, fast = _jitted(run)
        return lambda *args: (fast if _holds(large, args) else soon)(*args)

    def unstacked(stacked: Any, same: Any) -> Any:
        own = jax.tree.map(lambda x, y: y if x is None else x[0], stacked, same, is_leaf=lambda x: x is None)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], run(*own))

    each = each_device(mesh, axes)
    soon, fast = _jitted(mapped(unstacked, mesh, axes, (each, P()), each))
    return lambda *args: (fast if _holds(large, args) else soon)(*_parted(args))


def _jitted(run: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Returns a function compiled quickly, and compiled to run faster."""
    platform = jax.default_backend()
    return [jax.jit(run, compiler_options=compiler_options(platform, large)) for large in (False, True)]


def _holds(elements: int, args: Any) -> bool:
    """Returns whether an argument's array has at least a number of elements."""
    return any(np.size(x) >= elements for x in jax.tree.leaves(args))


@functools.lru_cache(maxsize=256)
def stacking(mesh: Any, axes: frozenset[str], spec: P) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns a function that stacks values of devices along a first axis, and its inverse."""
    each = each_device(mesh, axes)
    stack = jax.jit(mapped(lambda x: x[None], mesh, axes, spec, each))
    return stack, jax.jit(mapped(lambda x: x[0], mesh, axes, each, spec))


def each_device(mesh: Any, axes: frozenset[str]) -> P:
    """Returns the spec of values stacked over the devices."""
    return P(tuple(name for name in mesh.axis_names if name in axes))


def mapped(run: Callable[..., Any], mesh: Any, axes: frozenset[str], in_specs: Any, out_specs: Any) -> Any:
    """Returns a function as each device runs it, in a `shard_map` without checks of varying values."""
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def _parted(tree: Any) -> tuple[Any, Any]:
    """Returns the arrays of a tree that are stacked over devices, and the replicated ones."""
    stacked = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, tree)
    return stacked, jax.tree.map(lambda x: None if isinstance(x, jax.Array) else x, tree)


@functools.cache
def compiler_options(platform: str, large: bool) -> dict[str, bool | int]:
    """Returns the options of XLA for a platform that this version has.

    Args:
      platform: "cpu", "gpu" or "tpu".
      large: True if the programs have large arrays, for which longer compilation pays off.
    """
    options = _EVERYWHERE | _SOON.get(platform, {}) | (_LARGE.get(platform, {}) if large else {})
    return {name: value for name, value in options.items() if _is_option(name, value)}


@functools.cache
def _is_option(name: str, value: bool | int) -> bool:
    try:
        jax.jit(jnp.negative, compiler_options={name: value}).lower(jnp.float32(0)).compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True
