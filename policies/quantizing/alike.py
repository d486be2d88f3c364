"""One loop over arrays of the same shape, instead of one copy of a program per array.

A compiler's work grows with a program's length. The blocks of a model have arrays of the same shapes. A loop over
their stack is compiled once for all of them, and needs the temporary memory of one.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ELEMENTS = 2**24  # of a stack, unless one array has more


class Item(NamedTuple):
    """The arguments of one call.

    Attributes:
      kind: passed on unchanged; only items of equal kinds share a loop.
      numbers: Python numbers, of equal types in all items; each call gets its own as scalar arrays.
      arrays: pytree of arrays.
    """

    kind: Hashable
    numbers: tuple[int, ...]
    arrays: Any


def map_alike(function: Callable[..., Any], items: Sequence[Item], shared: Any = None) -> list[Any]:
    """Returns `function(*item, shared)` for each item, compiled once for all with equal kinds and shapes.

    The arrays of one loop are stacked, and so are its results. A stack has at most 16.8 million elements, or as many as
    the largest array of all items.

    Args:
      function: a pure function at module level, not one created for the call, so that its compiled program is reused.
      items: arguments of the calls.
      shared: pytree of arrays passed to all calls.

    Example:
      >>> import jax.numpy as jnp
      >>> def scaled(kind, numbers, x, shared):
      ...     return numbers[0].astype(x.dtype) * x + shared
      >>> items = [Item("", (2,), jnp.ones(2)), Item("", (3,), jnp.ones(2)), Item("", (4,), jnp.ones(1))]
      >>> [x.tolist() for x in map_alike(scaled, items, jnp.float32(1))]
      [[3.0, 3.0], [4.0, 4.0], [5.0]]
    """
    sizes = [sum(x.size for x in jax.tree_util.tree_leaves(item.arrays)) for item in items]
    limit = max([_ELEMENTS, *sizes])
    groups: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        leaves, structure = jax.tree_util.tree_flatten(item.arrays)
        groups.setdefault((item.kind, structure, tuple((x.shape, x.dtype) for x in leaves)), []).append(place)
    results: list[Any] = [None] * len(items)
    for places in groups.values():
        count = max(1, limit // max(1, sizes[places[0]]))
        for start in range(0, len(places), count):
            chosen = [items[place] for place in places[start : start + count]]
            numbers = tuple(np.array(each) for each in zip(*(item.numbers for item in chosen), strict=True))
            found = _mapped(function, chosen[0].kind, numbers, [item.arrays for item in chosen], shared)
            for place, result in zip(places[start : start + count], found, strict=True):
                results[place] = result
    return results


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mapped(
    function: Callable[..., Any], kind: Hashable, numbers: tuple[jax.Array, ...], arrays: list[Any], shared: Any
) -> list[Any]:
    if len(arrays) == 1:
        return [function(kind, tuple(x[0] for x in numbers), arrays[0], shared)]
    stacked = jax.tree_util.tree_map(lambda *each: lax.concatenate([x[None] for x in each], 0), *arrays)

    def call(place: jax.Array, each: tuple[Any, Any]) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        return place + np.uint32(1), (place, function(kind, *each, shared))

    _, (places, results) = lax.scan(call, jnp.uint32(0), (numbers, stacked))
    return [_at(places, number, results) for number in range(len(arrays))]


def _at(places: jax.Array, number: int, stacked: Any) -> Any:
    """Returns one of stacked results, at a place that the compiler does not know.

    The compiler would compile each slice with a known start, but compiles only one for all with unknown starts.

    Args:
      places: 0, 1, 2, ..., from a loop.
      number: index of the place.
      stacked: pytree of arrays.
    """
    chosen = lax.select(np.arange(len(places)) == number, places, np.zeros(len(places), np.uint32))
    place = lax.reduce_max(chosen, (0,))
    zero = np.uint32(0)

    def one(x: jax.Array) -> jax.Array:
        return lax.dynamic_slice(x, (place, *[zero] * (x.ndim - 1)), (1, *x.shape[1:])).reshape(x.shape[1:])

    return jax.tree_util.tree_map(one, stacked)
