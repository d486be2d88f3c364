"""Problems of values too small to have an effect: terms of sums, additions of a loop, updates of a state."""

from collections.abc import Iterable, Iterator

from jmp_train.policies.diagnosing.evidence import Evidence, StateLeaf
from jmp_train.policies.diagnosing.names import named
from jmp_train.policies.diagnosing.problems import Problem, problem_at
from jmp_train.policies.diagnosing.remedies import full_state, in_float32

_LOST_TERMS = 0.02  # share of a sum's terms
_ABSORBED = 0.1  # share of the additions of a loop
_UNCHANGED = 0.5  # share of a state leaf's elements that should change

Found = Iterator[tuple[int, Problem]]


def stagnating_sums(evidence: Evidence) -> Found:
    """Finds sums that lose a fraction of their terms."""
    for i, row in enumerate(evidence.rows):
        if row.lost_terms < _LOST_TERMS or row.overflowed or row.primitive in ("add", "sub", "add_any"):
            continue
        text = f"{row.lost_terms:.1%} of what {named(evidence, i)} adds up is lost"
        harmful = evidence.reaches(i, _LOST_TERMS / 2)
        yield problem_at(evidence, i, "stagnation", text, in_float32(evidence, i), harmful=harmful)


def accumulations(evidence: Evidence) -> Found:
    """Finds sums over a loop's iterations that most terms no longer change."""
    for i, row in enumerate(evidence.rows):
        if row.absorbed < _ABSORBED or row.primitive not in ("add", "sub") or not evidence.feeds_itself(i):
            continue
        text = f"{row.absorbed:.1%} of what {named(evidence, i)} adds in {row.runs} iterations changes nothing"
        harmful = evidence.reaches(i, _LOST_TERMS / 2)
        yield problem_at(evidence, i, "stagnation", text, in_float32(evidence, i), harmful=harmful)


def stagnating_state(evidence: Evidence) -> Found:
    """Finds leaves of the state that should change, but whose elements mostly stay the same."""
    for leaves in _by_line(evidence):
        share = sum(leaf.unchanged for leaf in leaves) / sum(leaf.changing for leaf in leaves)
        more = f" and of {len(leaves) - 1} more lea{'f' if len(leaves) == 2 else 'ves'}" if len(leaves) > 1 else ""
        first = leaves[0]
        text = f"{share:.1%} of {first.path!r}{more} stay the same {first.dtype} though they should change"
        row = max(first.rows)
        is_number = all(evidence.rows[max(leaf.rows)].shape == () for leaf in leaves)
        yield problem_at(evidence, row, "stagnation", text, full_state(first.dtype, is_number=is_number))


def _by_line(evidence: Evidence) -> Iterable[list[StateLeaf]]:
    """Returns the leaves of the state that stay the same, grouped by the line that updates them."""
    together: dict[str, list[StateLeaf]] = {}
    for leaf in evidence.state:
        if leaf.rows and leaf.unchanged > _UNCHANGED * leaf.changing:
            together.setdefault(evidence.sites[max(leaf.rows)].line, []).append(leaf)
    return together.values()
