"""The dynamic code: 256 numbers in [-1, 1] or [0, 1] whose relative distances stay small over seven decades.

Reference: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861, and
`bitsandbytes.functional.create_dynamic_map`, whose tables these are.
"""

import functools

import numpy as np

_DECADES = 7


@functools.lru_cache
def dynamic_code(signed: bool) -> np.ndarray:
    """Returns the numbers that the codes 0 to 255 stand for, float32[256], in ascending order.

    Each decade from 1e-7 to 1 has twice as many numbers as the one below, equally far apart: the middles of so many
    parts of it. Zero and 1 complete them; the signed code has no -1, its lowest number is -0.993.

    Args:
      signed: whether half of the codes are for negative numbers.

    Example:
      >>> dynamic_code(signed=False)[[0, 1, 254, 255]].tolist()  # doctest: +ELLIPSIS
      [0.0, 3.25...e-07, 0.996..., 1.0]
    """
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
        numbers += [*middles, *(-middles if signed else [])]
    return np.sort(np.array(numbers)).astype(np.float32)


@functools.lru_cache
def upper_ends(signed: bool) -> np.ndarray:
    """Returns the largest float32 that each code but the last is nearest to, float32[255]; ties go to the lower code.

    Args:
      signed: see `dynamic_code`.
    """
    numbers = dynamic_code(signed).astype(np.float64)
    middles = (numbers[:-1] + numbers[1:]) / 2
    ends = middles.astype(np.float32)
    return np.where(ends > middles, np.nextafter(ends, np.float32(-np.inf)), ends)
