"""Batches of any size as shapes, and the search for the largest that fits, by as few compilations as possible."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax

from jmp_train.policies.pytrees import named_leaves
from jmp_train.tools.aot import is_shape, shapes_of

Batches = Callable[[int], Any]
"""Returns the batch of a number of examples, as a tree of arrays or shapes."""

_MOST = 2**31 - 1  # examples: what grows no further by then does not grow
_TILE = 8  # multiples of it need no padding where matrix units compute, and so less memory than their neighbors


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


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits.

    Attributes:
      size: examples; 0 if not even the smallest batch fits.
      bytes: memory of a step with it; None if `size` is 0.
      next_bytes: memory of a step with the next larger batch, which does not fit.
      tried: bytes by size, for all compiled sizes.

    Example:
      >>> LargestBatch(16, 160, 250, {8: 80, 16: 160, 17: 250, 24: 240}).is_monotonic  # 17 is padded
      True
    """

    size: int
    bytes: int | None
    next_bytes: int
    tried: Mapping[int, int]

    @property
    def is_monotonic(self) -> bool:
        """True if larger batches took at least as many bytes, among the compiled multiples of 8."""
        sizes = [size for size in sorted(self.tried) if size % _TILE == 0]
        return all(self.tried[a] <= self.tried[b] for a, b in pairwise(sizes))


def largest_batch(bytes_of: Callable[[int], int], limit: int, start: int, multiple: int = 1) -> LargestBatch | None:
    """Finds a batch that fits into a limit, while the next larger one does not.

    Memory is nearly linear in the batch. So the search alternates between the size where the line through the two
    nearest sizes meets the limit, and their middle. It first tries only multiples of 8, because matrix units pad other
    sizes in half precision, which takes more memory.

    Args:
      bytes_of: returns the memory of a step with a batch size.
      limit: the available bytes.
      start: the first size, a multiple of `multiple`.
      multiple: sizes are multiples of this.

    Returns:
      The largest batch, or None if the memory does not grow with the batch.

    Example:
      >>> found = largest_batch(lambda size: 1000 + 7 * size, limit=2000, start=8)
      >>> found.size, found.bytes, found.next_bytes, sorted(found.tried)
      (142, 1994, 2001, [8, 16, 136, 137, 142, 143, 144])
    """
    tried: dict[int, int] = {}

    def needed(size: int) -> int:
        if size not in tried:
            tried[size] = bytes_of(size)
        return tried[size]

    tile = math.lcm(_TILE, multiple)
    low, high = _bracket(needed, limit, start, tile)
    if high is None:
        return None
    low, high = _narrowed(needed, limit, low, high, tile)
    if tile != multiple and (low == 0 or needed(low + multiple) <= limit):
        low, high = _narrowed(needed, limit, low + multiple if low else 0, high, multiple)
    else:
        high = low + multiple
    return LargestBatch(low, tried.get(low), needed(high), dict(sorted(tried.items())))


def _bracket(needed: Callable[[int], int], limit: int, start: int, tile: int) -> tuple[int, int | None]:
    """Returns a multiple of `tile` that fits, 0 if none was found, and one that does not; None if all do."""
    low = -(-start // tile) * tile
    if needed(low) > limit:
        return 0, low
    high = 2 * low
    while needed(high) <= limit:
        growth = needed(high) - needed(low)
        if growth <= 0 and high > 1024 * start:
            return high, None
        guess = 2 * high if growth <= 0 else high + (limit - needed(high)) * (high - low) // growth
        low, high = high, min(max(guess // tile, high // tile + 1), 64 * high // tile) * tile
        if high > _MOST:
            return low, None
    return low, high


def _narrowed(needed: Callable[[int], int], limit: int, low: int, high: int, unit: int) -> tuple[int, int]:
    """Returns two neighboring sizes between two others: the first one fits, the second one does not."""
    by_line = True
    while high - low > unit:
        middle = (low + high) // 2
        if by_line and low:
            share = (limit - needed(low)) / (needed(high) - needed(low))
            middle = low + int(share * (high - low))
        middle = min(max(middle // unit * unit, low + unit), high - unit)
        low, high = (middle, high) if needed(middle) <= limit else (low, middle)
        by_line = not by_line
    return low, high
