"""The order of an epoch: grain's own, for any number of examples, seed and epoch."""

import grain
import numpy as np
import pytest

from jmp_train.data.graph_batching import shuffled_order

pytestmark = pytest.mark.quick


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("seed", [0, 1, 2**31 + 12345, 2**32 - 1])
@pytest.mark.parametrize("count", [1, 2, 188, 40_000, 2**16, 2**16 + 1, 2**16 + 2, 2**18 + 1, 300_000])
def test_it_is_that_of_grain(count: int, seed: int) -> None:
    data = grain.MapDataset.range(count).shuffle(seed=seed)
    places = sorted({0, 1 % count, count // 3, count // 2, count - 1})
    for epoch in (0, 3):
        found = shuffled_order(count, (seed + epoch) % 2**32)
        assert found[places].tolist() == [data[place + epoch * count] for place in places]
    if count not in (2**16 + 1, 2**18 + 1):  # of which grain has one number twice
        assert np.array_equal(np.sort(found), np.arange(count))


def test_what_it_keeps_cannot_be_changed() -> None:
    order = shuffled_order(10, 5)
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 0
    assert shuffled_order(10, 5) is order
