"""The errors of all operations of a diagnosis as one SVG: in the order in which they run, on a logarithmic scale."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from jmp_train.policies.diagnosing.problems import Problem
from jmp_train.policies.diagnosing.rows import OperationNumerics

_WIDTH, _HEIGHT = 1000, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 990, 40, 290
_RADIUS = 8  # of a mark
_LEAST, _MOST = -8, 1  # exponents of ten between which errors are drawn; what is beyond is at the edge


def picture(rows: Sequence[OperationNumerics], problems: Sequence[Problem]) -> str:
    """Returns a figure: a dash an operation for its inherited error, another for its local one, marks for problems.

    Errors of zero are left out. Operations whose results are NaN or infinite have a red tick at the top.

    Args:
      rows: in the order in which they run.
      problems: which are marked by their numbers, from 1.
    """
    if not rows:
        return ""
    width = (_RIGHT - _LEFT) / len(rows)
    parts = [
        *_passes(rows, width),
        *_grid(),
        _dashes("nonfinite", ((i, _TOP) for i, row in enumerate(rows) if row.nan or row.infinite), width, 6),
        _dashes("inherited", _heights([row.inherited_error for row in rows]), width, 2),
        _dashes("local", _heights([row.local_error for row in rows]), width, 2),
        *_marks(rows, problems, width),
        *_legend(),
    ]
    label = "Local and inherited error of each operation, in the order in which they run"
    return (
        f'<svg id="errors" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n'
        + "\n".join(part for part in parts if part)
        + "\n</svg>"
    )


def _y(error: float) -> float:
    exponent = _MOST if math.isinf(error) else math.log10(error)
    share = (min(max(exponent, _LEAST), _MOST) - _LEAST) / (_MOST - _LEAST)
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _heights(errors: Sequence[float]) -> Iterator[tuple[int, float]]:
    return ((i, _y(error)) for i, error in enumerate(errors) if error > 0)  # not NaN


def _dashes(name: str, places: Iterator[tuple[int, float]], width: float, stroke: int) -> str:
    """Returns one path of a dash for each (operation, height), of at least a pixel and a half."""
    length = max(width, 1.5)
    path = "".join(f"M{_LEFT + i * width:.1f} {y:.1f}h{length:.1f}" for i, y in places)
    return f'<path class="{name}" stroke-width="{stroke}" fill="none" d="{path}"/>' if path else ""


def _passes(rows: Sequence[OperationNumerics], width: float) -> Iterator[str]:
    """Yields a shade behind the operations of each pass, and its name below the longest part of it."""
    longest: dict[str, tuple[float, float]] = {}
    start = 0
    for direction, group in groupby(row.direction for row in rows):
        count = len(list(group))
        x, wide = _LEFT + start * width, count * width
        if direction != "forward":
            yield f'<rect class="{direction}" x="{x:.1f}" y="{_TOP}" width="{wide:.1f}" height="{_BOTTOM - _TOP}"/>'
        longest[direction] = max(longest.get(direction, (0.0, 0.0)), (wide, x))
        start += count
    for direction, (_, x) in longest.items():
        yield f'<text x="{x + 4:.1f}" y="{_BOTTOM + 15}">{direction}</text>'


def _grid() -> Iterator[str]:
    for exponent in range(_LEAST, _MOST + 1):
        y = _y(10.0**exponent)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>'
        if exponent % 2 == 0:
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:.0e}</text>'


def _legend() -> Iterator[str]:
    names = {"inherited": "inherited error", "local": "local error", "nonfinite": "NaN or infinite"}
    for number, (name, text) in enumerate(names.items()):
        x = _LEFT + 140 * number
        yield f'<path class="{name}" stroke-width="4" d="M{x} 12h18"/><text x="{x + 24}" y="16">{text}</text>'


def _marks(rows: Sequence[OperationNumerics], problems: Sequence[Problem], width: float) -> Iterator[str]:
    """Yields a mark for each problem, which leads to what is said of it; where there is one already, it is below."""
    placed: list[tuple[float, float]] = []
    for number, problem in enumerate(problems, 1):
        row = row_of_problem(rows, problem)
        if row is None:
            continue
        found = rows[row]
        error = max(found.local_error, found.inherited_error)
        y = _TOP if found.nan or found.infinite or not error > 0 else _y(error)
        x = _LEFT + (row + 0.5) * width
        while any(abs(x - left) < 2 * _RADIUS and abs(y - top) < 2 * _RADIUS for left, top in placed) and y < _BOTTOM:
            y += 2 * _RADIUS
        placed.append((x, y))
        yield (
            f'<a href="#problem-{number}"><title>{escape(f"{problem.kind}: {problem.evidence}")}</title>'
            f'<circle class="mark {escape(problem.severity)}" cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" '
            f'stroke-width="2"/><text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{number}</text></a>'
        )


def row_of_problem(rows: Sequence[OperationNumerics], problem: Problem) -> int | None:
    """Returns the number of the row that a problem is about: of those of its line the likeliest; None if there is none.

    Args:
      rows: of the diagnosis.
      problem: one of its problems.
    """

    def likeness(i: int) -> tuple[bool, bool, bool]:
        row = rows[i]
        return row.primitive == problem.primitive, row.path == problem.path, row.direction == problem.direction

    there = [i for i, row in enumerate(rows) if (row.file, row.line) == (problem.file, problem.line)]
    return max(there, key=likeness, default=None)
