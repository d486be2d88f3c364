"""The axes of charts: their scales, and round numbers as their ticks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Axis:
    """The scale of one direction.

    Attributes:
      low: the value at the left or at the bottom.
      high: the value at the right or at the top.
      ticks: values with their labels.
      title: below the labels; only the horizontal axis shows one.
      is_log: True for a logarithmic scale. Values beyond the ends of such an axis, such as 0, are drawn at its ends.
      has_grid: True if a line crosses the chart at each tick.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    title: str = ""
    is_log: bool = False
    has_grid: bool = True

    def part(self, value: float) -> float:
        """Returns where a value is: 0 at the lower end, 1 at the upper end.

        Example:
          >>> Axis(0, 10).part(5), Axis(0.01, 100, is_log=True).part(1), Axis(0.01, 100, is_log=True).part(0)
          (0.5, 0.5, 0.0)
        """
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        return math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)


def linear_axis(
    low: float,
    high: float,
    label: Callable[[float], str] = "{:.3g}".format,
    *,
    title: str = "",
    has_grid: bool = True,
    least_step: float = 0,
) -> Axis:
    """Returns a linear axis with ticks at up to seven round numbers.

    Args:
      low: the lower end.
      high: the upper end. If it equals `low`, the axis extends by 1 to both sides.
      label: returns the label of a tick.
      title: the title of the axis.
      has_grid: True if a line crosses the chart at each tick.
      least_step: the minimum distance of ticks, such as 1 for counts.

    Example:
      >>> linear_axis(0, 16.9).ticks
      [(0.0, '0'), (5.0, '5'), (10.0, '10'), (15.0, '15')]
    """
    low, high = (low - 1, high + 1) if low == high else (low, high)
    least = max((high - low) / 6, least_step)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Axis(low, high, [(i * step, label(i * step)) for i in numbers], title, has_grid=has_grid)


def log_axis(
    values: Iterable[float], label: Callable[[float], str] = "{:.3g}".format, *, base: int = 10, title: str = ""
) -> Axis:
    """Returns a logarithmic axis around positive numbers, with ticks at powers of its base.

    With base 10, it begins and ends at 1, 2 or 5 times a power of ten; these are the ticks if there are no two powers.

    Args:
      values: at least one.
      label: returns the label of a tick.
      base: 10, or 2 for an axis of powers of two.
      title: the title of the axis.

    Example:
      >>> axis = log_axis([0.03, 3.0])
      >>> axis.low, axis.high, axis.ticks
      (0.02, 5.0, [(0.1, '0.1'), (1.0, '1')])
    """
    low, high = min(numbers := list(values)), max(numbers)
    exponents = range(math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 2)
    powers = [float(base) ** exponent for exponent in exponents]
    bounds = [factor * power for power in powers for factor in ((1, 2, 5) if base == 10 else (1,))]
    low = max(bound for bound in bounds if bound <= low * (1 + 1e-9))
    high = min(bound for bound in bounds if bound >= high * (1 - 1e-9) and bound > low)
    inside = [power for power in powers if low <= power <= high]
    inside = inside[:: len(inside) // 8 + 1]
    if len(inside) < 2:
        inside = [bound for bound in bounds if low <= bound <= high]
    return Axis(low, high, [(tick, label(tick)) for tick in inside], title, is_log=True)
