"""Half values whose gradients are float32: what operations on graphs store of float32 arrays.

The derivative of a cast to half rounds gradients to half. A node that 70,000 edges read has a gradient beyond float16,
even if it is added in float32. So a value remembers the float32 array that it was cast from: reads in float32 have
the half number's value, and the float32 array gets their gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.policies.autocasting.primitives import cast, saving

Arrays = Sequence[Any]


@jax.custom_jvp
def unrounded(half: jax.Array, source: jax.Array) -> jax.Array:
    """Returns a half array upcast; its gradient is that of the float32 array that it was cast from."""
    del source
    return cast(half, jnp.float32)


@unrounded.defjvp
def _tangent(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
    return unrounded(*primals), tangents[1]


def checkpointed(run: Callable[..., Any], arrays: Arrays, sources: Arrays, **options: Any) -> Any:
    """Returns `run(*arrays, sources=sources)` under `jax.checkpoint`, which stores the arrays and not their sources.

    Args:
      run: a function of arrays; without sources it gets none.
      arrays: its arrays.
      sources: for each array, the float32 array that it was cast from, or None.
      **options: options of `jax.checkpoint`.
    """
    if all(source is None for source in sources):
        return jax.checkpoint(run, **options)(*arrays)
    stored = [i for i, source in enumerate(sources) if source is not None]

    def with_sources(*operands: Any) -> Any:
        return run(*operands[: len(arrays)], sources=_placed(sources, stored, operands[len(arrays) :]))

    operands, saved = ([*arrays, *(each[i] for i in stored)] for each in (sources, arrays))
    return saving(with_sources, operands, saved, **options)


def called(run: Callable[..., Any], arrays: Arrays, sources: Arrays) -> list[Any]:
    """Returns the results of a function that is opaque to autocast; the gradient recomputes it, with float32 arrays.

    Args:
      run: a function of the arrays, differentiable in reverse mode.
      arrays: see `checkpointed`.
      sources: see `checkpointed`.
    """
    if all(source is None for source in sources):
        return jax.tree.leaves(run(*arrays))
    floats = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]

    @jax.custom_vjp
    def call(arrays: Arrays, sources: Arrays) -> list[Any]:
        del sources
        return jax.tree.leaves(run(*arrays))

    def forward(arrays: Arrays, sources: Arrays) -> tuple[list[Any], Arrays]:
        return call(arrays, sources), arrays

    def backward(arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        wanted = [i for i, x in enumerate(cotangents) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def of_floats(some: Arrays) -> Arrays:
            results = jax.tree.leaves(run(*_placed(arrays, floats, some)))
            return [results[i].astype(cotangents[i].dtype) for i in wanted]

        upcast = [arrays[i] if sources[i] is None else cast(arrays[i], jnp.float32) for i in floats]
        (found,) = jax.vjp(of_floats, upcast)[1]([cotangents[i] for i in wanted])
        gradients = _placed([None] * len(arrays), floats, found)
        pairs = list(zip(gradients, sources, strict=True))
        return [g if s is None else None for g, s in pairs], [None if s is None else g for g, s in pairs]

    call.defvjp(forward, backward)
    return call(arrays, sources)


def _placed(items: Arrays, places: Sequence[int], new: Arrays) -> list[Any]:
    """Returns the items, with new ones at some places."""
    items = list(items)
    for place, item in zip(places, new, strict=True):
        items[place] = item
    return items
