"""What the pictures of a plan have in common: scales, ticks, colors, numbers with units."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

WIDTH = 1000

Scale = Callable[[float], float]

# Light and dark, of hues that stay apart; policies have them in this order.
_SERIES = (
    ("#1a73e8", "#8ab4f8"),
    ("#e8710a", "#fcad70"),
    ("#188038", "#81c995"),
    ("#9334e6", "#c58af9"),
    ("#d01884", "#ff8bcb"),
    ("#00838f", "#78d9ec"),
    ("#a57c00", "#fdd663"),
    ("#5f6368", "#bdc1c6"),
)
# The state, what the batch brings, what the step makes; then what is not in use.
_KINDS = {
    "parameters": ("#1a73e8", "#8ab4f8"),
    "optimizer state": ("#174ea6", "#4f7fd6"),
    "model state": ("#00838f", "#78d9ec"),
    "batch": ("#80868b", "#bdc1c6"),
    "other arguments": ("#3c4043", "#9aa0a6"),
    "constants": ("#795548", "#bcaaa4"),
    "copies of parameters": ("#9334e6", "#c58af9"),
    "activations saved for the backward pass": ("#e8710a", "#fcad70"),
    "gradients": ("#188038", "#81c995"),
    "temporaries": ("#f9ab00", "#fdd663"),
    "workspaces": ("#d01884", "#ff8bcb"),
    "results": ("#5bb974", "#b7e1c1"),
    "kept for other moments": ("#dadce0", "#4a4e54"),
    "padding": ("#c58b6b", "#8a6a58"),
}
_OTHER_KIND = ("#202124", "#e8eaed")


def _rules(prefix: str, colors: Iterable[tuple[str, str]]) -> str:
    return "\n".join(
        f".{prefix}{i} {{ --color: light-dark({light}, {dark}); }}" for i, (light, dark) in enumerate(colors)
    )


STYLE = f"""\
{_rules("series", _SERIES)}
{_rules("kind", (*_KINDS.values(), _OTHER_KIND))}
[class^="series"], [class^="kind"] {{ fill: var(--color); stroke: var(--color); }}
rect[class^="kind"] {{ stroke: $paper; stroke-width: 0.5; }}
.figure {{ overflow-x: auto; }}
.figure svg {{ min-width: 46rem; }}
.key {{ display: inline-block; width: 0.75em; height: 0.75em; background: var(--color); }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: 0.85rem; }}"""
"""Of the colors; in light and in dark surroundings."""


def kind_order(kind: str) -> int:
    """Returns where a kind of memory comes in bars and which color it has.

    Args:
      kind: as that of `Buffer`.
    """
    return list(_KINDS).index(kind) if kind in _KINDS else len(_KINDS)


def kind_class(kind: str) -> str:
    """Returns the class of a kind of memory, which gives it its color.

    Args:
      kind: as that of `Buffer`.
    """
    return f"kind{kind_order(kind)}"


def series_classes(names: Iterable[str]) -> dict[str, str]:
    """Returns the classes of policies, which give them their colors.

    Args:
      names: of the policies, each as often as it comes.

    Example:
      >>> series_classes(["float32", "mixed_float16", "float32"])
      {'float32': 'series0', 'mixed_float16': 'series1'}
    """
    return {name: f"series{i % len(_SERIES)}" for i, name in enumerate(dict.fromkeys(names))}


def legend(classes: dict[str, str]) -> str:
    """Returns what the colors mean, as HTML.

    Args:
      classes: by name.
    """
    keys = (f'<span><span class="{name} key"></span> {escape(text)}</span>' for text, name in classes.items())
    return f'<p class="legend">{"".join(keys)}</p>'


def figure(name: str, height: float, label: str, parts: Iterable[str]) -> str:
    """Returns an SVG, which scrolls where the screen is narrow.

    Args:
      name: its id.
      height: the width is `WIDTH`.
      label: what it shows, in words; it is escaped here.
      parts: SVG.
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


def linear(low: float, high: float, start: float, end: float) -> Scale:
    """Returns a scale on which `low` is at `start` and `high` at `end`."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def logarithmic(low: int, high: int, start: float, end: float) -> Scale:
    """Returns a scale from `10**low` to `10**high`."""
    scale = linear(low, high, start, end)
    return lambda value: scale(math.log10(value))


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


def with_unit(value: float, unit: str) -> str:
    """Returns a number with three digits and a decimal prefix.

    Example:
      >>> with_unit(312e12, "flop/s"), with_unit(0, "B"), with_unit(1536, "B")
      ('312 Tflop/s', '0 B', '1.54 kB')
    """
    power = min(max(int(math.log10(value) // 3), 0), 6) if value > 0 else 0
    if value > 0 and float(f"{value / 1000**power:.3g}") >= 1000 and power < 6:
        power += 1
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}{unit}"
