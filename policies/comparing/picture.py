"""A comparison as SVG: the distribution of differences, and how far operations are apart in the order they run."""

from collections.abc import Iterator

from jmp_train.policies.comparing.differences import EDGES, Differences
from jmp_train.policies.comparing.parted import Operations
from jmp_train.policies.pages import svg

_HEIGHT = 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 990, 30, 215
_LEAST, _MOST = -8, 0  # exponents of ten between which differences of operations are drawn
_y = svg.logarithmic(_LEAST, _MOST, _BOTTOM, _TOP)
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
    return svg.figure("distribution", _HEIGHT, "How many tokens differ by how much", _bars(differences))


def operations_picture(operations: Operations) -> str:
    """Returns a figure: how far the operations of inference are from those of training, and from float32.

    Args:
      operations: of both functions.
    """
    return svg.figure(
        "operations", _HEIGHT, "How far the operations of inference are from those of training", _dashes(operations)
    )


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
    size = f'viewBox="0 0 {svg.WIDTH} {height}" width="{svg.WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="11" role="img" '
        'aria-label="Distribution of differences, and of operations">\n'
        f"<style>text {{ fill: #5f6368; }} .grid {{ stroke: #dadce0; }} {' '.join(style.split())}</style>\n"
        f'<rect width="{svg.WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _bars(differences: Differences) -> Iterator[str]:
    counts = differences.histogram
    width = (_RIGHT - _LEFT) / len(counts)
    most = max(max(counts), 1)
    yield svg.text(_LEFT, 16, f"|log p_train - log p_infer| of {differences.n_tokens} tokens")
    for number, count in enumerate(counts):
        x, height = _LEFT + number * width, (_BOTTOM - _TOP) * count / most
        low, high = ("0", *(f"{edge:.1e}" for edge in EDGES))[number], (*(f"{e:.1e}" for e in EDGES), "more")[number]
        if count:
            yield (
                f'<rect class="bar" x="{x + 1:.1f}" y="{_BOTTOM - height:.1f}" width="{width - 2:.1f}" '
                f'height="{height:.1f}">{svg.title(f"{low} to {high}: {count}")}</rect>'
            )
            yield svg.text(x + width / 2, _BOTTOM - height - 4, str(count), "middle")
        if number % 2 and number <= len(EDGES):
            yield svg.text(x, _BOTTOM + 16, f"{EDGES[number - 1]:.0e}", "middle")
    yield svg.level(_BOTTOM, _LEFT, _RIGHT)


def _dashes(operations: Operations) -> Iterator[str]:
    rows = operations.infer
    width = (_RIGHT - _LEFT) / max(len(rows), 1)
    for exponent in range(_LEAST, _MOST + 1, 2):
        yield svg.level(_y(10.0**exponent), _LEFT, _RIGHT, f"{10.0**exponent:.0e}")
    for name, values in (("error", [r.error for r in rows]), ("difference", [r.difference for r in rows])):
        yield svg.dashes(name, ((_LEFT + i * width, _y(x)) for i, x in enumerate(values) if x > 0), width, 2)  # not NaN
    legend = {"difference": "operations of inference, off from those of training", "error": "off from float32"}
    yield from svg.line_legend(legend, _LEFT, 330)
    first = operations.first and operations.first.infer
    if first:
        x = _LEFT + (rows.index(first) + 0.5) * width
        yield f'<path class="first" stroke-width="1.5" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>'
        anchor = "end" if x > svg.WIDTH / 2 else "start"
        yield svg.text(x, _BOTTOM + 16, f"first difference: {first.primitive}", anchor)
