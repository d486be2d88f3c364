"""A comparison as SVG: the distribution of differences, and how far operations are apart in the order they run."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from jmp_train.policies.comparing.differences import EDGES, Differences
from jmp_train.policies.comparing.operations import Operations

_WIDTH, _HEIGHT = 1000, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 990, 30, 215
_LEAST, _MOST = -8, 0  # exponents of ten between which differences of operations are drawn
STYLE = """\
.bar, .key-bar { fill: $first; }
.difference { stroke: $first; }
.error { stroke: $second; }
.first { stroke: $bad; }"""
"""Of the colors, in the words of `document`."""

_COLORS = {"first": "#1a73e8", "second": "#e8710a", "bad": "#d93025"}


def distribution(differences: Differences) -> str:
    """Returns a figure: a bar for each range of |log p_train - log p_infer|, half a power of ten wide.

    Args:
      differences: of the tokens.
    """
    return _svg("distribution", "How many tokens differ by how much", _bars(differences))


def operations_picture(operations: Operations) -> str:
    """Returns a figure: how far the operations of inference are from those of training, and from float32.

    Args:
      operations: of both functions.
    """
    return _svg("operations", "How far the operations of inference are from those of training", _dashes(operations))


def standalone(differences: Differences, operations: Operations | None) -> str:
    """Returns both figures as one file, in light colors.

    Args:
      differences: of the tokens.
      operations: of both functions, if they are known.
    """
    parts = ["\n".join(_bars(differences))]
    if operations is not None:
        parts.append(f'<g transform="translate(0 {_HEIGHT})">\n' + "\n".join(_dashes(operations)) + "\n</g>")
    style = STYLE
    for name, color in _COLORS.items():
        style = style.replace(f"${name}", color)
    height = _HEIGHT * len(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11" role="img" '
        'aria-label="Distribution of differences, and of operations">\n'
        f"<style>text {{ fill: #5f6368; }} .grid {{ stroke: #dadce0; }} {' '.join(style.split())}</style>\n"
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _svg(name: str, label: str, parts: Iterator[str]) -> str:
    inside = "\n".join(parts)
    return f'<svg id="{name}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n{inside}\n</svg>'


def _bars(differences: Differences) -> Iterator[str]:
    counts = differences.histogram
    width = (_RIGHT - _LEFT) / len(counts)
    most = max(max(counts), 1)
    yield _text(_LEFT, 16, f"|log p_train - log p_infer| of {differences.n_tokens} tokens", "start")
    for number, count in enumerate(counts):
        x, height = _LEFT + number * width, (_BOTTOM - _TOP) * count / most
        low, high = ("0", *(f"{edge:.1e}" for edge in EDGES))[number], (*(f"{e:.1e}" for e in EDGES), "more")[number]
        if count:
            yield (
                f'<rect class="bar" x="{x + 1:.1f}" y="{_BOTTOM - height:.1f}" width="{width - 2:.1f}" '
                f'height="{height:.1f}"><title>{low} to {high}: {count}</title></rect>'
            )
            yield _text(x + width / 2, _BOTTOM - height - 4, str(count), "middle")
        if number % 2 and number <= len(EDGES):
            yield _text(x, _BOTTOM + 16, f"{EDGES[number - 1]:.0e}", "middle")
    yield f'<path class="grid" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>'


def _dashes(operations: Operations) -> Iterator[str]:
    rows = operations.infer
    width = (_RIGHT - _LEFT) / max(len(rows), 1)
    for exponent in range(_LEAST, _MOST + 1, 2):
        y = _y(10.0**exponent)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>'
        yield _text(_LEFT - 6, y + 4, f"{10.0**exponent:.0e}", "end")
    for name, values in (("error", [r.error for r in rows]), ("difference", [r.difference for r in rows])):
        path = "".join(f"M{_LEFT + i * width:.1f} {_y(x):.1f}h{max(width, 1.5):.1f}" for i, x in _positive(values))
        yield f'<path class="{name}" stroke-width="2" fill="none" d="{path}"/>'
    legend = {"difference": "operations of inference, off from those of training", "error": "off from float32"}
    for number, (name, text) in enumerate(legend.items()):
        x = _LEFT + 330 * number
        yield f'<path class="{name}" stroke-width="4" d="M{x} 12h18"/>{_text(x + 24, 16, text, "start")}'
    first = operations.first and operations.first.infer
    if first:
        x = _LEFT + (rows.index(first) + 0.5) * width
        yield f'<path class="first" stroke-width="1.5" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>'
        anchor = "end" if x > _WIDTH / 2 else "start"
        yield _text(x, _BOTTOM + 16, f"first difference: {first.primitive}", anchor)


def _positive(values: Sequence[float]) -> Iterator[tuple[int, float]]:
    return ((i, x) for i, x in enumerate(values) if x > 0)  # not NaN


def _y(value: float) -> float:
    exponent = min(max(math.log10(value), _LEAST), _MOST) if math.isfinite(value) else _MOST
    return _BOTTOM - (exponent - _LEAST) / (_MOST - _LEAST) * (_BOTTOM - _TOP)


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
