"""The errors of all operations of a diagnosis as a chart: in the order in which they run, on a logarithmic scale."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from jmp_train.policies.diagnosing.problems import Problem
from jmp_train.policies.diagnosing.rows import OperationNumerics
from jmp_train.policies.documents import Axis, Box, Chart, Dot, Label, Mark, Path, Style

# Errors beyond these are drawn at the edge; every other power of ten has a label.
_ERRORS = Axis(1e-8, 10.0, [(10.0**e, "" if e % 2 else f"{10.0**e:.0e}") for e in range(-8, 2)], is_log=True)
_STYLES = {
    "backward": Style("shade"),
    "update": Style("tint"),
    "inherited": Style("first", "inherited error"),
    "local": Style("second", "local error"),
    "nonfinite": Style("bad", "NaN or infinite", width=6),
    "mark problem": Style("bad", is_hollow=True),
    "mark note": Style("soft", is_hollow=True),
}


def errors_chart(rows: Sequence[OperationNumerics], problems: Sequence[Problem]) -> Chart | None:
    """Returns a dash per operation for its inherited error, another for its local one, and marks for problems.

    Errors of zero are left out. Operations whose results are NaN or infinite have a red dash at the top.

    Args:
      rows: in the order in which they run; without any there is no chart.
      problems: which are marked by their numbers, from 1.
    """
    if not rows:
        return None
    dashes = {
        "nonfinite": [_ERRORS.high if row.nan or row.infinite else 0 for row in rows],
        "inherited": [row.inherited_error for row in rows],
        "local": [row.local_error for row in rows],
    }
    marks = [
        *_passes(rows),
        *(
            Path(name, [[(i, error), (i + 1, error)] for i, error in enumerate(errors) if error > 0])  # not NaN
            for name, errors in dashes.items()
        ),
        *_marks(rows, problems),
    ]
    label = "Local and inherited error of each operation, in the order in which they run"
    x = Axis(0, len(rows))
    return Chart("errors", label, x, _ERRORS, _STYLES, marks, size=(1000, 312), margins=(42, 10, 22, 40))


def _passes(rows: Sequence[OperationNumerics]) -> Iterator[Mark]:
    """Yields a shade behind the operations of each pass, and its name below the longest part of it."""
    longest: dict[str, tuple[int, int]] = {}
    start = 0
    for direction, group in groupby(row.direction for row in rows):
        count = len(list(group))
        if direction != "forward":
            yield Box(direction, start, start + count, _ERRORS.low, _ERRORS.high)
        longest[direction] = max(longest.get(direction, (0, 0)), (count, start))
        start += count
    for direction, (_, first) in longest.items():
        yield Label(direction, first, _ERRORS.low, shift=(4, 15))


def _marks(rows: Sequence[OperationNumerics], problems: Sequence[Problem]) -> Iterator[Mark]:
    """Yields a mark for each problem, which leads to what is said of it."""
    for number, problem in enumerate(problems, 1):
        place = row_of_problem(rows, problem)
        if place is None:
            continue
        row = rows[place]
        error = max(row.local_error, row.inherited_error)
        y = _ERRORS.high if row.nan or row.infinite or not error > 0 else error
        said = f"{problem.kind}: {problem.evidence}"
        yield Dot(f"mark {problem.severity}", place + 0.5, y, 8, said, str(number), f"#problem-{number}")


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
