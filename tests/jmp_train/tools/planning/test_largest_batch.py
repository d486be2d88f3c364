"""The largest batch that fits, over made-up memories: along lines, in steps, with padding, or not growing."""

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jmp_train.tools.planning import LargestBatch
from jmp_train.tools.planning.batches import largest_batch

pytestmark = pytest.mark.quick

COUNTS = st.integers(0, 10**6)
LIMITS = st.integers(0, 10**10)
STARTS = st.integers(1, 300)
MULTIPLES = st.sampled_from([1, 2, 3, 8, 12, 16, 40])


def padded(fixed: int, a_example: int, padding: int) -> Callable[[int], int]:
    """Memory as where matrix units compute: sizes that are no multiples of 8 are padded and copied."""
    return lambda size: fixed + a_example * size + (padding * a_example * size if size % 8 else 0)


def assert_is_the_largest(found: LargestBatch, bytes_of: Callable[[int], int], limit: int, multiple: int) -> None:
    assert found.size % multiple == 0
    assert found.next_bytes == bytes_of(found.size + multiple) > limit
    assert found.bytes == (bytes_of(found.size) if found.size else None)
    assert found.bytes is None or found.bytes <= limit
    assert list(found.tried) == sorted(found.tried)
    assert all(found.tried[size] == bytes_of(size) for size in found.tried)
    assert all(size % multiple == 0 and size > 0 for size in found.tried)


@given(fixed=COUNTS, a_example=st.integers(1, 10**6), limit=LIMITS, start=STARTS, multiple=MULTIPLES)
@example(fixed=0, a_example=1, limit=0, start=1, multiple=1)
def test_along_a_line_it_is_found_with_few_compilations(
    fixed: int, a_example: int, limit: int, start: int, multiple: int
) -> None:
    bytes_of, start = padded(fixed, a_example, 0), start * multiple
    found = largest_batch(bytes_of, limit, start, multiple)
    if found is None:  # the limit is beyond any batch
        assert bytes_of(2**31 - 1) <= limit * 64
        return
    assert_is_the_largest(found, bytes_of, limit, multiple)
    assert found.size == max(0, (limit - fixed) // a_example // multiple * multiple)
    assert len(found.tried) <= 20
    assert found.is_monotonic


@given(
    fixed=COUNTS,
    a_example=st.integers(1, 10**6),
    padding=st.integers(0, 3),
    limit=st.integers(0, 10**9),  # reached by a batch of less than 2**31 examples, beyond which none is tried
    start=STARTS,
)
@example(fixed=0, a_example=1, padding=0, limit=10**9, start=1)
def test_padding_off_the_multiples_of_8_does_not_mislead(
    fixed: int, a_example: int, padding: int, limit: int, start: int
) -> None:
    bytes_of = padded(fixed, a_example, padding)
    found = largest_batch(bytes_of, limit, start)
    assert found is not None
    assert_is_the_largest(found, bytes_of, limit, 1)
    best = max(0, (limit - fixed) // a_example // 8 * 8)
    assert found.size >= best, "a multiple of 8 fits that is larger"
    assert found.is_monotonic


@given(
    tiles=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    a_example=st.integers(1, 100),
    limit=st.integers(0, 10**5),
    start=STARTS,
    multiple=MULTIPLES,
)
@settings(max_examples=200)
def test_where_memory_grows_in_steps_the_next_batch_does_not_fit(
    tiles: list[int], a_example: int, limit: int, start: int, multiple: int
) -> None:
    def bytes_of(size: int) -> int:
        return a_example * size + sum(tiles[: size // 8])

    found = largest_batch(bytes_of, limit, start * multiple, multiple)
    assert found is not None
    assert_is_the_largest(found, bytes_of, limit, multiple)


@given(n_bytes=COUNTS, start=STARTS, multiple=MULTIPLES)
def test_what_does_not_grow_has_no_largest_batch(n_bytes: int, start: int, multiple: int) -> None:
    tried = []

    def bytes_of(size: int) -> int:
        tried.append(size)
        return n_bytes

    assert largest_batch(bytes_of, n_bytes, start * multiple, multiple) is None
    assert len(tried) == len(set(tried)) <= 20, "each size is compiled once"


def test_what_never_fits_has_the_size_0() -> None:
    found = largest_batch(lambda size: 10**9 + size, limit=10**6, start=64)
    assert found is not None
    assert (found.size, found.bytes, found.next_bytes) == (0, None, 10**9 + 1)


def test_a_start_that_does_not_fit_is_halved_down_to_what_does() -> None:
    found = largest_batch(lambda size: 100 * size, limit=4400, start=4096, multiple=4)
    assert found is not None
    assert (found.size, found.next_bytes) == (44, 4800)


def test_monotonic_looks_at_multiples_of_8_alone() -> None:
    assert LargestBatch(16, 160, 300, {8: 80, 9: 200, 16: 160}).is_monotonic
    assert not LargestBatch(16, 160, 300, {8: 180, 16: 160}).is_monotonic
