"""Eight virtual devices, strict dtypes, and no skip that is not on the committed list."""

import os

# Before jax starts: with fewer threads than this, eight virtual devices on few cores deadlock.
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
