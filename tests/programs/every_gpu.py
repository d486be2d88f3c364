"""Compiles one program for every GPU of the table, in one process, as `compile_for_gpu` would: prints JSON by name.

Run with the Python of an environment that has the extra `[plan]`.
"""

import json

import jax
import jax.numpy as jnp
from gpu_builders import compile_here, target_mesh
from product_operands import products

from jmp_train.tools.aot import GPU, GPUS

SIZE = 256  # of the matrices
DTYPES = ("float16", "bfloat16", "float32")


def program(*pairs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    """Multiplies each pair, and returns the product's softmax over rows, summed over columns."""
    return tuple(jnp.sum(jax.nn.softmax(x @ y, axis=-1), axis=0) for x, y in pairs)


def compiled_for(gpu: GPU) -> dict[str, object]:
    """Returns bytes and dtypes of factors of the program for a GPU."""
    structs = (jax.ShapeDtypeStruct((SIZE, SIZE), dtype) for dtype in DTYPES)
    compiled = compile_here(program, tuple((struct, struct) for struct in structs), mesh=target_mesh(gpu))
    factors = [product.operands for product in products(compiled.hlo)]
    return {"argument_bytes": compiled.argument_bytes, "peak_bytes": compiled.peak_bytes, "factors": factors}


if __name__ == "__main__":
    print(json.dumps({name: compiled_for(gpu) for name, gpu in GPUS.items()}))
