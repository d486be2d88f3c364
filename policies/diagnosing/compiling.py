"""Compiler options of a diagnosis: its many programs compile quickly and run slowly, unless arrays are large."""

import functools

import jax
import jax.numpy as jnp

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
