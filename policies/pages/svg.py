"""The parts of pictures as SVG: scales, lines, text, legends; classes give them the colors of their page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

WIDTH = 1000

Scale = Callable[[float], float]


def figure(name: str, height: float, label: str, parts: Iterable[str]) -> str:
    """Returns an SVG as wide as the page, which scrolls where the screen is narrow.

    Args:
      name: its id.
      height: in the units of which `WIDTH` is the width.
      label: what it shows, in words; it is escaped here.
      parts: SVG; empty ones are left out.
    """
    inside = "\n".join(part for part in parts if part)
    size = f"0 0 {WIDTH} {height:g}"
    image = f'<svg id="{name}" viewBox="{size}" role="img" aria-label="{escape(label)}">\n{inside}\n</svg>'
    return f'<div class="figure">{image}</div>'


def text(x: float, y: float, content: str, anchor: str = "start", name: str = "") -> str:
    """Returns a line of text.

    Args:
      x: where it starts, ends or has its middle, as `anchor` says.
      y: its baseline.
      content: it is escaped here.
      anchor: "start", "middle" or "end".
      name: its class; none if it is empty.
    """
    named = f' class="{name}"' if name else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def title(content: str) -> str:
    """Returns what a browser shows of the part that the mouse is on.

    Args:
      content: it is escaped here.
    """
    return f"<title>{escape(content)}</title>"


def level(y: float, left: float, right: float, label: str = "") -> str:
    """Returns a line of the grid from left to right.

    Args:
      y: its height.
      left: where it starts.
      right: where it ends.
      label: what is written left of it.
    """
    line = f'<path class="grid" d="M{left} {y:.1f}H{right}"/>'
    return f"{line}\n{text(left - 6, y + 4, label, 'end')}" if label else line


def dashes(name: str, places: Iterable[tuple[float, float]], width: float, stroke: int) -> str:
    """Returns one path of horizontal dashes; nothing if there are none.

    Args:
      name: its class.
      places: where each starts, x and y.
      width: of each; drawn at least a pixel and a half wide.
      stroke: how thick they are.
    """
    path = "".join(f"M{x:.1f} {y:.1f}h{max(width, 1.5):.1f}" for x, y in places)
    return f'<path class="{name}" stroke-width="{stroke}" fill="none" d="{path}"/>' if path else ""


def line_legend(names: Mapping[str, str], left: float, step: float) -> Iterable[str]:
    """Yields what the lines mean, in the top row of a picture.

    Args:
      names: text by class.
      left: where the first starts.
      step: from the start of one to the start of the next.
    """
    for number, (name, said) in enumerate(names.items()):
        x = left + step * number
        yield f'<path class="{name}" stroke-width="4" d="M{x} 12h18"/>{text(x + 24, 16, said)}'


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Returns a scale on which `low` is at `start` and `high` at `end`.

    Example:
      >>> linear(0, 10, 100, 200)(5)
      150.0
    """
    return lambda value: start + (value - low) / (high - low) * (end - start)


def logarithmic(low: int, high: int, start: float, end: float) -> Scale:
    """Returns a scale from `10**low` to `10**high`; what is beyond, as 0 and infinity are, is at its end.

    Example:
      >>> scale = logarithmic(-2, 2, 0, 400)
      >>> scale(1), scale(0), scale(1e9)
      (200.0, 0.0, 400.0)
    """
    scale = linear(low, high, start, end)
    return lambda value: scale(min(max(math.log10(value), low), high) if value > 0 else low)


def ticks(high: float, most: int = 6) -> list[float]:
    """Returns round numbers from 0 to a limit.

    Args:
      high: the limit, above 0.
      most: how many steps at most.

    Example:
      >>> ticks(16.9)
      [0.0, 5.0, 10.0, 15.0]
    """
    power = 10.0 ** math.floor(math.log10(high / most))
    step = next(f * power for f in (1, 2, 5, 10) if high / (f * power) <= most)
    return [i * step for i in range(int(high / step + 1e-9) + 1)]


def decades(values: Sequence[float]) -> tuple[int, int]:
    """Returns the exponents of the powers of ten around numbers, two that differ.

    Args:
      values: above 0.

    Example:
      >>> decades([3, 250]), decades([10])
      ((0, 3), (1, 2))
    """
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)
