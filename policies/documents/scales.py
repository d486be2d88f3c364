"""Axes that suit numbers: linear and logarithmic ones with round ticks."""

import math
from collections.abc import Callable, Iterable, Sequence

from jmp_train.policies.documents.charts import Axis


def place(axis: Axis, start: float, end: float) -> Callable[[float], float]:
    """Returns the function from a value to its pixel.

    Args:
      axis: the axis.
      start: the pixel of its low end.
      end: the pixel of its high end.

    Example:
      >>> linear, log = place(Axis(0, 10), 100, 200), place(Axis(0.01, 100, is_log=True), 0, 400)
      >>> linear(5), log(1), log(0), log(1e9)
      (150.0, 200.0, 0.0, 400.0)
    """
    if not axis.is_log:
        return lambda value: start + (value - axis.low) / (axis.high - axis.low) * (end - start)
    span = math.log(axis.high / axis.low)

    def on_log(value: float) -> float:
        inside = min(max(value, axis.low), axis.high)
        return start + math.log(inside / axis.low) / span * (end - start)

    return on_log


def round_ticks(high: float, most: int = 6) -> list[float]:
    """Returns round numbers from 0 to a limit.

    Args:
      high: the limit, above 0.
      most: how many steps at most.

    Example:
      >>> round_ticks(16.9)
      [0.0, 5.0, 10.0, 15.0]
    """
    power = 10.0 ** math.floor(math.log10(high / most))
    step = next(f * power for f in (1, 2, 5, 10) if high / (f * power) <= most)
    return [i * step for i in range(int(high / step + 1e-9) + 1)]


def even_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns numbers at equal distances, from `low` to `high`."""
    return [low + i * (high - low) / (count - 1) for i in range(count)]


def decades(values: Iterable[float], label: Callable[[float], str] = "{:.0e}".format) -> Axis:
    """Returns a logarithmic axis from power of ten to power of ten around numbers.

    Args:
      values: above 0.
      label: returns the label of a power of ten.

    Example:
      >>> axis = decades([3, 250])
      >>> axis.low, axis.high, axis.ticks[0]
      (1.0, 1000.0, (1.0, '1e+00'))
    """
    numbers = list(values)
    low, high = math.floor(math.log10(min(numbers))), math.ceil(math.log10(max(numbers)))
    powers = [10.0**exponent for exponent in range(low, max(high, low + 1) + 1)]
    return Axis(powers[0], powers[-1], [(power, label(power)) for power in powers], is_log=True)


def close_log(values: Sequence[float], base: float = 10) -> Axis:
    """Returns a logarithmic axis that numbers fill, with ticks at powers of `base`, or of 1, 2 and 5 times these.

    Args:
      values: above 0; any axis if there are none.
      base: 10 or 2.

    Example:
      >>> close_log([0.02, 3.0]).ticks
      [(0.1, '0.1'), (1, '1')]
      >>> [label for _, label in close_log([1.9, 6.0]).ticks]
      ['2', '5']
    """
    low, high = min(values, default=1.0), max(values, default=1.0)
    low, high = (low, high) if low < high else (low / base, high * base)
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    step = max(1, (last - first) // 6)
    powers = [base**exponent for exponent in range(first, last + 1, step)]
    inside = [x for x in powers if low <= x <= high]
    if len(inside) < 2:
        inside = [f * x for x in powers for f in (1, 2, 5) if low <= f * x <= high]
    if len(inside) < 2:
        inside = even_ticks(low, high, 3)
    return Axis(low, high, [(x, f"{x:.3g}" if x < 1e6 else f"{x:.0e}") for x in inside], is_log=True)
