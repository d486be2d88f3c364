"""The errors of all operations of a diagnosis as one SVG: in the order in which they run, on a logarithmic scale."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from jmp_train.policies.diagnosing.problems import Problem
from jmp_train.policies.diagnosing.rows import OperationNumerics
from jmp_train.policies.pages import svg

_HEIGHT = 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 990, 40, 290
_RADIUS = 8  # of a mark
_LEAST, _MOST = -8, 1  # exponents of ten between which errors are drawn; what is beyond is at the edge
_y = svg.logarithmic(_LEAST, _MOST, _BOTTOM, _TOP)


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
    nonfinite = [i for i, row in enumerate(rows) if row.nan or row.infinite]
    legend = {"inherited": "inherited error", "local": "local error", "nonfinite": "NaN or infinite"}
    parts = [
        *_passes(rows, width),
        *_grid(),
        svg.dashes("nonfinite", ((_LEFT + i * width, _TOP) for i in nonfinite), width, 6),
        svg.dashes("inherited", _places([row.inherited_error for row in rows], width), width, 2),
        svg.dashes("local", _places([row.local_error for row in rows], width), width, 2),
        *_marks(rows, problems, width),
        *svg.line_legend(legend, _LEFT, 140),
    ]
    label = "Local and inherited error of each operation, in the order in which they run"
    return svg.figure("errors", _HEIGHT, label, parts)


def _places(errors: Sequence[float], width: float) -> Iterator[tuple[float, float]]:
    return ((_LEFT + i * width, _y(error)) for i, error in enumerate(errors) if error > 0)  # not NaN


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
        yield svg.text(x + 4, _BOTTOM + 15, direction)


def _grid() -> Iterator[str]:
    for exponent in range(_LEAST, _MOST + 1):
        yield svg.level(_y(10.0**exponent), _LEFT, _RIGHT, "" if exponent % 2 else f"{10.0**exponent:.0e}")


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
            f'<a href="#problem-{number}">{svg.title(f"{problem.kind}: {problem.evidence}")}'
            f'<circle class="mark {escape(problem.severity)}" cx="{x:.1f}" cy="{y:.1f}" r="{_RADIUS}" '
            f'stroke-width="2"/>{svg.text(x, y + 4, str(number), "middle")}</a>'
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
