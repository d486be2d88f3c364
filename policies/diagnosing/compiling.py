"""How the many small programs of a diagnosis are compiled: soon, rather than to run fast."""

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
    },
    "gpu": {"xla_gpu_autotune_level": 0},
}


@functools.cache
def compiler_options(platform: str) -> dict[str, bool | int]:
    """Returns the options of XLA for a platform, those that this version of it has.

    Args:
      platform: "cpu", "gpu" or "tpu".
    """
    return {
        name: value for name, value in {**_EVERYWHERE, **_SOON.get(platform, {})}.items() if _is_option(name, value)
    }


def _is_option(name: str, value: bool | int) -> bool:
    try:
        jax.jit(jnp.negative, compiler_options={name: value}).lower(jnp.float32(0)).compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True
