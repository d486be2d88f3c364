"""The parts of a diagram as SVG: boxes of text, arrows, frames.

Text stays text, and colors are light or dark as the page around is, also where the file is shown as an image.
"""

from collections.abc import Iterable, Sequence
from html import escape

LINE = 19  # from one line of text to the next
_STYLE = """\
svg:root { color-scheme: light dark; }
.diagram { font: 14px system-ui, sans-serif; color: light-dark(#202124, #e8eaed); }
.diagram text { fill: currentColor; }
.diagram .code { font: 13px ui-monospace, monospace; white-space: pre; }
.diagram .soft { fill: light-dark(#5f6368, #a8adb4); }
.diagram .strong { font-weight: 600; }
.diagram rect { fill: light-dark(#f1f3f4, #2a2d31); stroke: light-dark(#80868b, #80868b); }
.diagram .float32 { fill: light-dark(#e3edfd, #1c2f4d); stroke: light-dark(#1a73e8, #8ab4f8); }
.diagram .half { fill: light-dark(#fdeedd, #452d14); stroke: light-dark(#c25e00, #fcad70); }
.diagram .good { fill: light-dark(#e2f3e6, #1b3a24); stroke: light-dark(#188038, #81c995); }
.diagram .bad { fill: light-dark(#fce4e2, #4a2320); stroke: light-dark(#d93025, #f28b82); }
.diagram .frame { fill: none; stroke-dasharray: 5 4; }
.diagram .arrow { fill: none; stroke: light-dark(#5f6368, #a8adb4); stroke-width: 1.5; }
.diagram .head { fill: light-dark(#5f6368, #a8adb4); }"""


def diagram(width: int, height: int, alt: str, parts: Iterable[str]) -> str:
    """Returns a picture.

    Args:
      width: in pixels, where there is room for it.
      height: in the same unit.
      alt: what it shows, in words; it is escaped here.
      parts: SVG.
    """
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="diagram" {size} role="img" aria-label="{escape(alt)}">'
    return "\n".join([head, f"<style>\n{_STYLE}\n</style>", *parts, "</svg>"]) + "\n"


def text(x: float, y: float, line: str, name: str = "", anchor: str = "start") -> str:
    """Returns a line of text; classes are "code", "soft" and "strong"; the anchor is "start", "middle" or "end"."""
    named = f' class="{name}"' if name else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(line, quote=False)}</text>'


def box(x: float, y: float, width: float, lines: Sequence[str], kind: str = "") -> str:
    """Returns a box with centered lines of text, the first a bold one; `box_height` of them high.

    Args:
      x: of its left side.
      y: of its upper side.
      width: wide enough for the lines.
      lines: of text.
      kind: "float32", "half", "good", "bad" or nothing.
    """
    named = f' class="{kind}"' if kind else ""
    rect = f'<rect{named} x="{x:g}" y="{y:g}" width="{width:g}" height="{box_height(lines):g}" rx="5"/>'
    middle = x + width / 2
    names = ["strong"] + [""] * (len(lines) - 1)
    rows = [text(middle, y + 22 + LINE * i, line, names[i], "middle") for i, line in enumerate(lines)]
    return "\n".join([rect, *rows])


def box_height(lines: Sequence[str]) -> int:
    """Returns how high a box of lines is."""
    return 14 + LINE * len(lines)


def frame(x: float, y: float, width: float, height: float) -> str:
    """Returns a dashed frame."""
    return f'<rect class="frame" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>'


def arrow(*points: tuple[float, float]) -> str:
    """Returns an arrow through points, each right above, below or beside the one before."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    line = " ".join(f"{a:g},{b:g}" for a, b in [*points[:-1], (x - 6 * dx, y - 6 * dy)])
    back = (x - 8 * dx, y - 8 * dy)
    corners = [(x, y), (back[0] + 4 * dy, back[1] + 4 * dx), (back[0] - 4 * dy, back[1] - 4 * dx)]
    head = " ".join(f"{a:g},{b:g}" for a, b in corners)
    return f'<polyline class="arrow" points="{line}"/>\n<polygon class="head" points="{head}"/>'


def key(x: float, y: float, names: Sequence[tuple[str, str]]) -> str:
    """Returns what kinds of boxes mean, in a row.

    Args:
      x: where it starts.
      y: of its upper side.
      names: a kind and what it means, each.
    """
    found = []
    for kind, said in names:
        found += [f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="16" height="16" rx="3"/>']
        found += [text(x + 23, y + 13, said, "soft")]
        x += 23 + 8 * len(said) + 20
    return "\n".join(found)
