"""Axes that suit numbers: where values are in pixels, and round ticks."""

import math
from collections.abc import Callable, Iterable

from jmp_train.policies.documents.charts import Axis


def place(axis: Axis, start: float, end: float) -> Callable[[float], float]:
    """Returns the function from a value to its pixel, where the axis goes from pixel `start` to pixel `end`.

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
    """Returns round numbers from 0 to a limit above 0, with `most` steps at most.

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


def log_axis(values: Iterable[float], label: Callable[[float], str] = "{:.3g}".format, base: int = 10) -> Axis:
    """Returns a logarithmic axis around numbers above 0, with ticks at powers of its base.

    It begins and ends at 1, 2 or 5 times a power of ten, and these have ticks where there are not two powers.

    Args:
      values: at least one.
      label: returns the label of a tick.
      base: 10, or 2 for an axis of powers of two.

    Example:
      >>> axis = log_axis([0.03, 3.0])
      >>> axis.low, axis.high, axis.ticks
      (0.02, 5.0, [(0.1, '0.1'), (1.0, '1')])
    """
    low, high = min(numbers := list(values)), max(numbers)
    exponents = range(math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 2)
    powers = [float(base) ** exponent for exponent in exponents]
    bounds = [f * power for power in powers for f in ((1, 2, 5) if base == 10 else (1,))]
    low = max(bound for bound in bounds if bound <= low * (1 + 1e-9))
    high = min(bound for bound in bounds if bound >= high * (1 - 1e-9) and bound > low)
    inside = [power for power in powers if low <= power <= high]
    inside = inside[:: len(inside) // 8 + 1]
    if len(inside) < 2:
        inside = [bound for bound in bounds if low <= bound <= high]
    return Axis(low, high, [(tick, label(tick)) for tick in inside], is_log=True)
