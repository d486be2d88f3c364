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

_ELEMENTS = 2**24  # most elements of a stack, unless one array has more


class CallArguments(NamedTuple):
    """The arguments of one call.

    Attributes:
      kind: passed on unchanged; only items of equal kinds share a loop.
      numbers: Python numbers, of equal types in all items; each call gets its own as scalar arrays.
      arrays: pytree of arrays.
      old: another pytree of arrays, or None.
    """

    kind: Hashable
    numbers: tuple[int, ...]
    arrays: Any
    old: Any = None


def map_alike(function: Callable[..., Any], items: Sequence[CallArguments], shared: Any = None) -> list[Any]:
    """Returns `function(*item, shared)` for each item, compiled once for all with equal kinds and shapes.

    The arrays and the results of one loop are stacked. A stack has at most 16.8 million elements, or as many as the
    largest array of all items.

    Args:
      function: a pure function at module level, not one created for the call, so that its compiled program is reused.
      items: arguments of the calls.
      shared: pytree of arrays passed to all calls.

    Example:
      >>> import jax.numpy as jnp
      >>> def scaled(kind, numbers, x, old, shared):
      ...     return numbers[0].astype(x.dtype) * x + shared
      >>> items = [CallArguments("", (n,), jnp.ones(width)) for n, width in ((2, 2), (3, 2), (4, 1))]
      >>> [x.tolist() for x in map_alike(scaled, items, jnp.float32(1))]
      [[3.0, 3.0], [4.0, 4.0], [5.0]]
    """
    sizes = [sum(x.size for x in jax.tree_util.tree_leaves((item.arrays, item.old))) for item in items]
    limit = max([_ELEMENTS, *sizes])
    groups: dict[Hashable, list[int]] = {}
    for place, item in enumerate(items):
        leaves, structure = jax.tree_util.tree_flatten((item.arrays, item.old))
        groups.setdefault((item.kind, structure, tuple((x.shape, x.dtype) for x in leaves)), []).append(place)
    results: list[Any] = [None] * len(items)
    if not items:
        return results
    unknown = _counted(len(items))
    for places in groups.values():
        count = max(1, limit // max(1, sizes[places[0]]))
        for start in range(0, len(places), count):
            chosen = [items[place] for place in places[start : start + count]]
            numbers = tuple(np.array(each) for each in zip(*(item.numbers for item in chosen), strict=True))
            arrays, old = [item.arrays for item in chosen], [item.old for item in chosen]
            found = _mapped(function, chosen[0].kind, numbers, arrays, old, unknown, shared)
            for place, result in zip(places[start : start + count], found, strict=True):
                results[place] = result
    return results


@functools.partial(jax.jit, static_argnums=(0, 1))
def _mapped(
    function: Callable[..., Any],
    kind: Hashable,
    numbers: tuple[jax.Array, ...],
    arrays: list[Any],
    old: list[Any],
    unknown: jax.Array,
    shared: Any,
) -> list[Any]:
    count = len(arrays)
    if count == 1:
        return [function(kind, tuple(x[0] for x in numbers), arrays[0], old[0], shared)]
    given, before = (numbers, _stacked(arrays)), _stacked(old)

    def result_of(place: Any, before: Any) -> Any:
        return function(kind, *_at(given, place), _at(before, place), shared)

    def call(place: jax.Array, results: Any) -> Any:
        result = result_of(place, before)
        return jax.tree_util.tree_map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, place, 0), results, result)

    one = jax.eval_shape(result_of, np.uint32(0), before)
    results = jax.tree_util.tree_map(lambda x: lax.empty((count, *x.shape), x.dtype), one)
    results = _counting(count, call, results)
    return [_at(results, _one_of(unknown, number)) for number in range(count)]


def _counting(count: int, call: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """Returns a value after the loop `value = call(i, value)` for i = 0, 1, ..., count - 1."""
    one = np.uint32(1)
    _, result = lax.while_loop(
        lambda carry: carry[0] < np.uint32(count), lambda carry: (carry[0] + one, call(*carry)), (jnp.uint32(0), start)
    )
    return result


def _stacked(trees: list[Any]) -> Any:
    return jax.tree_util.tree_map(lambda *each: lax.concatenate([x[None] for x in each], 0), *trees)


def _at(stacked: Any, place: Any) -> Any:
    return jax.tree_util.tree_map(lambda x: lax.dynamic_index_in_dim(x, place, 0, keepdims=False), stacked)


def _counted(count: int) -> jax.Array:
    """Returns the numbers 0, 1, 2, ... as values that the compiler does not know.

    It compiles each slice with a known start on its own, but only one for all slices with unknown starts.
    """
    start = jnp.zeros(count, jnp.uint32)
    return _counting(count, lambda place, x: lax.dynamic_update_index_in_dim(x, place, place, 0), start)


def _one_of(unknown: jax.Array, number: int) -> jax.Array:
    """Returns an element of `_counted`, as a value that the compiler does not know."""
    is_it = np.arange(len(unknown)) == number
    return lax.reduce_max(lax.select(is_it, unknown, np.zeros(len(unknown), np.uint32)), (0,))
