from typing import Any

import numpy as np
import pytest

from jmp_train import graphs

pytestmark = pytest.mark.quick


def pairs(senders: np.ndarray, receivers: np.ndarray) -> set[tuple[int, int]]:
    return set(zip(np.asarray(senders).tolist(), np.asarray(receivers).tolist(), strict=True))


@pytest.mark.parametrize("is_undirected", [False, True])
def test_links_are_disjoint_and_messages_do_not_tell_them(is_undirected: bool) -> None:
    random = np.random.default_rng(0)
    ends = np.unique(random.integers(0, 30, (2, 120)), axis=1)
    ends = ends[:, ends[0] < ends[1]]
    if is_undirected:
        ends = np.concatenate([ends, ends[::-1]], axis=1)
    ids = np.arange(ends.shape[1], dtype=np.int32)
    graph = graphs.from_edges(ends[0], ends[1], 30, edges={"id": ids})
    parts = graphs.random_link_split(graph, random, num_val=0.2, num_test=10, is_undirected=is_undirected)
    train, val, test = ((x.senders[x.labels == 1], x.receivers[x.labels == 1]) for x in parts)
    links = ends.shape[1] // (1 + is_undirected)
    assert [len(x[0]) for x in (train, val, test)] == [links - int(0.2 * links) - 10, int(0.2 * links), 10]
    every = [pairs(*x) for x in (train, val, test)]
    if is_undirected:
        every = [x | {(b, a) for a, b in x} for x in every]
    assert len(set().union(*every)) == sum(map(len, every)) == ends.shape[1]
    for part, wanted in zip(parts, (every[0], every[0], every[0] | every[1]), strict=True):
        found = np.asarray(part.graph.senders), np.asarray(part.graph.receivers)
        assert pairs(*found) == wanted
        np.testing.assert_array_equal(ends[:, part.graph.edges["id"]], found)
    others = [(x.senders[x.labels == 0], x.receivers[x.labels == 0]) for x in parts]
    assert [len(x[0]) for x in others] == [len(x[0]) for x in (train, val, test)]
    found = [pair for x in others for pair in pairs(*x)]
    assert len(set(found)) == len(found) == links
    assert not pairs(ends[0], ends[1]) & set(found)


def test_what_is_refused() -> None:
    graph, random = graphs.from_edges([0, 1], [1, 2], 3), np.random.default_rng(0)
    with pytest.raises(ValueError, match="edge 0 has no reverse edge, but is_undirected=True"):
        graphs.random_link_split(graph, random, is_undirected=True)
    for name in ("num_val", "num_test", "negatives_per_link"):
        for number, fault in ((np.nan, "nan must be a finite number"), (-1, "-1 must be at least 0")):
            options: dict[str, Any] = {name: number}
            with pytest.raises(ValueError, match=f"^{name}={fault}"):
                graphs.random_link_split(graph, random, **options)
    with pytest.raises(ValueError, match="num_val=2 and num_test=1 are more than the 2 links"):
        graphs.random_link_split(graph, random, num_val=2, num_test=1)
