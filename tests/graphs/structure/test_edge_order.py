"""The order of edges is that of a stable sort, to the bit, and all that is built on it."""

import numpy as np
import pytest

from jmp_train import graphs
from jmp_train.graphs.structure import Adjacency, make_adjacency_checked
from jmp_train.graphs.structure.csr import CSR
from jmp_train.graphs.structure.incidence import BLOCK

pytestmark = pytest.mark.quick

NODES, OTHERS, EDGES = 300, 40, 20_000  # more edges than graphs of a fixed shape have


def ends(kind: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, OTHERS, EDGES), random.integers(0, NODES, EDGES)
    if kind == "hub":
        receivers = (NODES * random.random(EDGES) ** 6).astype(np.int64)
    if kind == "out of range":
        senders, receivers = random.integers(-2, OTHERS + 2, EDGES), random.integers(-3, NODES + 5, EDGES)
        receivers[7], senders[8] = 2**40, -(2**50)
    if kind == "sorted":
        receivers.sort()
    return senders, receivers


def check_csr(found: CSR, ids: np.ndarray, others: np.ndarray, count: int, num_others: int) -> None:
    order = np.argsort(ids, kind="stable")
    order = order[((ids >= 0) & (ids < count) & (others >= 0) & (others < num_others))[order]]
    assert found.edges is not None and found.slots is not None
    np.testing.assert_array_equal(found.edges, order)
    np.testing.assert_array_equal(found.others, others[order])
    np.testing.assert_array_equal(found.degrees, np.bincount(ids[order], minlength=count))
    places = np.concatenate([np.arange(n) for n in np.asarray(found.counts)])
    np.testing.assert_array_equal(np.repeat(found.starts, found.counts) + places, np.arange(len(order)))
    np.testing.assert_array_equal(np.repeat(found.nodes, found.counts), ids[order])
    slots = np.full(EDGES, -1)
    slots[order] = np.repeat(np.arange(found.num_blocks), found.counts) * found.width + places
    np.testing.assert_array_equal(found.slots, slots)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["plain", "hub", "out of range", "sorted"])
def test_edges_are_sorted_as_by_a_stable_sort(kind: str) -> None:
    senders, receivers = ends(kind)
    adjacency = make_adjacency_checked(senders, receivers, OTHERS, NODES, formats=("coo", "csr"))
    assert adjacency.neighbors is not None
    check_csr(adjacency.neighbors.by_target, receivers, senders, NODES, OTHERS)
    check_csr(adjacency.neighbors.by_source, senders, receivers, OTHERS, NODES)
    for incidence, ids, count in ((adjacency.senders, senders, OTHERS), (adjacency.receivers, receivers, NODES)):
        ids = np.clip(ids, -1, count)
        is_counted = (ids >= 0) & (ids < count)
        assert incidence.all_count == (kind != "out of range") == is_counted.all()
        np.testing.assert_array_equal(incidence.ids, np.where(is_counted, ids, count))
        places = np.empty(EDGES, int)
        places[np.argsort(ids, kind="stable")] = np.arange(EDGES)
        blocks = np.where(is_counted, ids + places // BLOCK, incidence.num_rows)
        np.testing.assert_array_equal(incidence.rows, blocks)


def test_zero_in_degrees_are_seen() -> None:
    def made(receivers: list[int], formats: tuple[str, ...]) -> Adjacency:
        return make_adjacency_checked(np.zeros(3, int), np.array(receivers), 1, 3, formats=formats)

    for formats in (("coo",), ("csr",), ("coo", "csr")):
        assert made([2, 0, 1], formats).has_zero_in_degree is False
        assert made([2, 0, 3], formats).has_zero_in_degree is True


def test_the_graph_keeps_its_edges_when_the_callers_arrays_change() -> None:
    senders, receivers = (x.astype(np.int32) for x in ends("sorted"))
    kept = senders.copy(), receivers.copy()
    graph = graphs.from_edges(senders, receivers, NODES, formats=("coo", "csr"))
    senders[:], receivers[:] = 1, 2
    np.testing.assert_array_equal(graph.senders, kept[0])
    np.testing.assert_array_equal(graph.receivers, kept[1])
    assert graph.connections.neighbors is not None
    np.testing.assert_array_equal(graph.connections.neighbors.by_target.others, kept[0])
