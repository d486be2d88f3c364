"""Where the parts of a chart are, in pixels: marks, grid, labels, title and legend; and axes with round ticks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

from jmp_train.policies.documents.charts import Axis, Box, Chart, Dot, Label, Mark, Path


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


LINE_HEIGHT = 18  # of the title and of each row of the legend
_CHARACTER = 6.2  # mean width
_SHORTEST = 1.5  # of a dash


def placed(chart: Chart, *, has_legend: bool = True) -> tuple[list[Mark], float]:
    """Returns all marks of a chart in pixels, y downwards, with or without the legend, and the height of the whole.

    Example:
      >>> from jmp_train.policies.documents.charts import Axis, Style
      >>> axis = Axis(0, 1)
      >>> chart = Chart("a", "a line", axis, axis, {"l": Style()}, [Path("l", [[(0, 0), (1, 1)]])])
      >>> marks, height = placed(chart)
      >>> marks, height
      ([Path(style='l', runs=[[(60.0, 237.0), (975.0, 12.0)]], title='', width=0)], 282)
    """
    width, height = chart.size
    legend, rows = _legend(chart) if has_legend else ([], 0)
    above = LINE_HEIGHT * (rows + bool(chart.title))
    left, right, top, bottom = chart.margins
    area = _Area(chart, left, width - right, above + top, above + height - bottom)
    title = [Label(chart.title, 0, 14, style="title")] if chart.title else []
    return [*title, *legend, *area.axes(), *area.marks()], above + height


def _legend(chart: Chart) -> tuple[list[Mark], int]:
    """Returns the keys of a chart with their texts, and how many rows they take."""
    marks: list[Mark] = []
    left, start = chart.margins[0], LINE_HEIGHT * bool(chart.title)
    x, row = left, 0
    for name, style in chart.styles.items():
        if not style.legend:
            continue
        needed = 24 + _CHARACTER * len(style.legend)
        if x > left and x + needed > chart.size[0]:
            x, row = left, row + 1
        y = start + LINE_HEIGHT * row
        marks += [Path(name, [[(x, y + 12), (x + 18, y + 12)]], width=4), Label(style.legend, x + 24, y + 16)]
        x += needed + 20
    return marks, row + 1 if marks else 0


class _Area:
    """The rectangle between the axes of a chart."""

    def __init__(self, chart: Chart, left: float, right: float, top: float, bottom: float) -> None:
        self.chart = chart
        self.left, self.right, self.top, self.bottom = left, right, top, bottom
        self.x, self.y = place(chart.x, left, right), place(chart.y, bottom, top)

    def axes(self) -> Iterator[Mark]:
        """Yields the grid and the labels."""
        for value, text in self.chart.y.ticks:
            y = self.y(value)
            yield from [Path("grid", [[(self.left, y), (self.right, y)]])] * self.chart.y.has_grid
            yield Label(text, self.left - 6, y + 4, "end")
        for value, text in self.chart.x.ticks:
            x = self.x(value)
            yield from [Path("grid", [[(x, self.top), (x, self.bottom)]])] * self.chart.x.has_grid
            yield Label(text, x, self.bottom + 16, "middle")
        if self.chart.x.title:
            yield Label(self.chart.x.title, (self.left + self.right) / 2, self.bottom + 36, "middle")

    def marks(self) -> Iterator[Mark]:
        """Yields the marks; a dot with text is moved down from one that is there already."""
        texts: list[tuple[float, float]] = []
        for mark in self.chart.marks:
            match mark:
                case Path():
                    runs = [_seen([(self.x(x), self.y(y)) for x, y in run]) for run in mark.runs]
                    yield dataclasses.replace(mark, runs=runs)
                case Box():
                    edges = {"left": self.x(mark.left), "right": self.x(mark.right)}
                    yield dataclasses.replace(mark, **edges, bottom=self.y(mark.bottom), top=self.y(mark.top))
                case Label():
                    x, y = self.x(mark.x) + mark.shift[0], self.y(mark.y) + mark.shift[1]
                    yield dataclasses.replace(mark, x=x, y=y, shift=(0, 0))
                case Dot():
                    x, y, r = self.x(mark.x), self.y(mark.y), mark.radius
                    if mark.text:
                        y = self._free(x, y, 2 * r, texts)
                        texts.append((x, y))
                    lines = [[(x - r, y - r), (x + r, y + r)], [(x - r, y + r), (x + r, y - r)]]
                    is_cross = mark.is_cross
                    yield Path(mark.style, lines, mark.title) if is_cross else dataclasses.replace(mark, x=x, y=y)

    def _free(self, x: float, y: float, size: float, taken: list[tuple[float, float]]) -> float:
        """Returns a height at which nothing of this size is yet, at `y` or below."""
        while any(abs(x - left) < size and abs(y - top) < size for left, top in taken) and y < self.bottom:
            y += size
        return y


def _seen(run: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points of a line, a dash at least as long as can be seen."""
    if len(run) == 2 and run[0][1] == run[1][1] and 0 <= run[1][0] - run[0][0] < _SHORTEST:
        return [run[0], (run[0][0] + _SHORTEST, run[0][1])]
    return run
