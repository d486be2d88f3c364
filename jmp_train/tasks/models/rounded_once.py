"""Parts of a transformer that compute in float32 and round their half-precision results only once.

Written as separate operations, each would be rounded to half precision, under a policy as under autocast.
"""

import jax
import jax.numpy as jnp

from jmp_train.policies.autocasting import autocast_as, opaque_to_autocast
from jmp_train.tasks.models.token_chunks import product, upcast


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up; only the operands are stored for the gradient.

    Args:
      gate: floating [...].
      up: floating [...], in the same dtype.

    Example:
      >>> gated(jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.bfloat16))
      Array([0.730469], dtype=bfloat16)
    """
    return jax.checkpoint(opaque_to_autocast(_gated))(gate, up)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(upcast(gate)) * upcast(up)).astype(up.dtype)


def unrounded_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `x @ kernel` with unrounded sums, float32 for a half-precision kernel; the caller rounds later.

    Args:
      x: floating [batch, tokens, inputs]; rounded to the kernel's dtype.
      kernel: floating [inputs, outputs].

    Example:
      >>> unrounded_product(jnp.ones((1, 1, 1)), jnp.full((1, 1), 3, jnp.float16)).dtype.name
      'float32'
    """

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _product(upcast(x), kernel)

    return opaque_to_autocast(run, contract=((2,), (0,)))(x, as_operand(kernel))


@autocast_as("lower")
def as_operand(x: jax.Array) -> jax.Array:
    """Returns the array as an operation that autocast casts to half precision, like an operand of a matrix product."""
    return x * jnp.ones((), x.dtype)  # an operation for autocast to cast; XLA removes it


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return product("bti,io->bto", x.astype(kernel.dtype), kernel)


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel), (x.astype(kernel.dtype), kernel)


def _backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    cotangent = cotangent.astype(kernel.dtype)
    of_kernel = product("bti,bto->io", x, cotangent)
    return product("bto,io->bti", cotangent, kernel), of_kernel.astype(kernel.dtype)


_product.defvjp(_forward, _backward)
