"""Batches of any size, as shapes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from jmp_train.aot import is_shape, shapes_of
from jmp_train.policies.pytrees import named_leaves

Batches = Callable[[int], Any]
"""Returns the batch of a number of examples, as a tree of arrays or shapes."""


def batches_of(batch: Any, batch_size: int | None, *, grows: bool = True) -> tuple[Batches, int]:
    """Returns the batches by size, and the first size.

    Args:
      batch: a tree whose arrays have the examples along their first axes, or a function of the number of examples.
      batch_size: the first size; None for that of the tree.
      grows: True if other sizes are needed. Otherwise a tree without a common first axis, such as a graph, counts as
        one example.

    Raises:
      TypeError: `batch` is a function, and there is no `batch_size`.
      ValueError: `batch_size` is below 1, or first axes are of several lengths; the message names the leaf.
    """
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"batch_size={batch_size!r} must be an integer of at least 1")
    if callable(batch):
        if batch_size is None:
            raise TypeError("batch is a function of the number of examples, and so batch_size must be given")
        return batch, batch_size
    shapes = shapes_of(batch)
    if not grows and batch_size is None and len({x.shape[0] for _, x in _with_axes(shapes)}) != 1:
        return lambda count: shapes, 1
    size = _first_axis(shapes)

    def of_size(count: int) -> Any:
        def grown(x: Any) -> Any:
            if not is_shape(x) or not x.shape:
                return x
            return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, weak_type=x.weak_type)

        return jax.tree.map(grown, shapes)

    return of_size, batch_size or size


def _first_axis(shapes: Any) -> int:
    lengths = {name: x.shape[0] for name, x in _with_axes(shapes)}
    if not lengths:
        raise ValueError("batch has no array with a first axis: give a function of the number of examples")
    common = Counter(lengths.values()).most_common(1)[0][0]
    for name, length in lengths.items():
        if length != common:
            raise ValueError(
                f"batch {name!r} has a first axis of {length}, others of {common}: where the examples are not along "
                "all first axes, give a function of the number of examples and batch_size, or find_largest=False"
            )
    return common


def _with_axes(shapes: Any) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    return [(name, x) for name, x in named_leaves(shapes) if is_shape(x) and x.shape]
