"""The search leaves items of which each is needed, whatever the test of a set."""

from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest

from jmp_train.tools.tuning.choice_trials import needed, smallest_list

pytestmark = pytest.mark.quick

COUNT = 24
SETS = st.frozensets(st.integers(0, COUNT - 1), max_size=5)


Suffices = Callable[[frozenset[int]], bool]


def any_of(alternatives: list[frozenset[int]]) -> Suffices:
    return lambda items: any(wanted <= items for wanted in alternatives)


def is_minimal(found: list[int], suffices: Suffices) -> bool:
    kept = frozenset(found)
    return suffices(kept) and not any(suffices(kept - {item}) for item in kept)


@hypothesis.given(alternatives=st.lists(SETS, min_size=1, max_size=4), ranking=st.permutations(range(COUNT)))
def test_each_item_is_needed(alternatives: list[frozenset[int]], ranking: list[int]) -> None:
    suffices = any_of(alternatives)
    found = smallest_list(ranking, lambda i: i % 3 == 0, lambda i: i // 4, suffices)
    assert is_minimal(found, suffices)
    assert frozenset(found) in alternatives


@hypothesis.given(alternatives=st.lists(SETS, min_size=1, max_size=4), ranking=st.permutations(range(COUNT)))
def test_costly_items_are_avoided(alternatives: list[frozenset[int]], ranking: list[int]) -> None:
    found = smallest_list(ranking, lambda i: i < 12, lambda i: i, any_of(alternatives))
    if any(all(i >= 12 for i in wanted) for wanted in alternatives):
        assert all(i >= 12 for i in found)


@hypothesis.given(seed=st.integers(0, 2**16), ranking=st.permutations(range(COUNT)))
def test_a_test_that_is_not_monotone_leaves_a_list_that_suffices(seed: int, ranking: list[int]) -> None:
    def suffices(items: frozenset[int]) -> bool:
        return len(items) == COUNT or hash((seed, items)) % 7 == 0

    found = smallest_list(ranking, lambda i: i % 2 == 0, lambda i: i // 4, suffices)
    assert is_minimal(found, suffices)


def test_a_good_ranking_needs_few_trials() -> None:
    tried: set[frozenset[int]] = set()

    def suffices(items: frozenset[int]) -> bool:
        tried.add(items)
        return {0, 1, 3} <= items

    assert sorted(smallest_list(range(1000), lambda i: False, lambda i: i, suffices)) == [0, 1, 3]
    assert len(tried) < 15


def test_nothing_is_needed_where_nothing_fails() -> None:
    assert smallest_list(range(4), lambda i: False, lambda i: i, lambda items: True) == []
    assert needed([1, 2, 3], lambda items: True) == []
