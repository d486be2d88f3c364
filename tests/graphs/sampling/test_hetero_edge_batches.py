"""Mini-batches of edges of a graph of several types: reverse types, negatives of each type, one shape."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jmp_train import graphs
from jmp_train.data import neighbor_batches

pytestmark = pytest.mark.quick

USERS, ITEMS = 30, 20
BUYS, BOUGHT, KNOWS = ("user", "buys", "item"), ("item", "bought by", "user"), ("user", "knows", "user")
RANDOM = np.random.default_rng(0)
PAIRS = RANDOM.integers(0, USERS, 90), RANDOM.integers(0, ITEMS, 90)
FRIENDS = RANDOM.integers(0, USERS, (2, 40))
ENDS = {BUYS: PAIRS, BOUGHT: PAIRS[::-1], KNOWS: tuple(np.concatenate([FRIENDS, FRIENDS[::-1]], axis=1))}
COUNTS = {"user": USERS, "item": ITEMS}
REVERSE = {BUYS: BOUGHT, BOUGHT: BUYS}


@functools.cache
def host(keep_edge_ids: bool = True) -> dict[Any, graphs.HostEdges]:
    graph = graphs.hetero_from_edges(ENDS, COUNTS)
    return {
        kind: graphs.host_edges(
            graph.senders(kind), graph.receivers(kind), COUNTS[kind[0]], COUNTS[kind[2]], keep_edge_ids=keep_edge_ids
        )
        for kind in graph.edge_types
    }


def make(*kinds: Any, edges: Any = None, batch_size: int = 8, **options: Any) -> graphs.EdgeSampler:
    senders, receivers = ({kind: ENDS[kind][place] for kind in kinds} for place in (0, 1))
    edges = host() if edges is None else edges
    return graphs.edge_sampler(edges, (-1, -1), senders, receivers, batch_size, num_trials=2, **options)


def drawn_edges(block: graphs.Block) -> set[int]:
    ids = np.asarray(block.edge_ids)
    return set(ids[ids >= 0].tolist())


def in_edges(kind: Any, nodes: dict[str, np.ndarray], excluded: dict[Any, set[int]]) -> set[int]:
    return set(np.flatnonzero(np.isin(ENDS[kind][1], nodes[kind[2]])).tolist()) - excluded.get(kind, set())


@pytest.mark.parametrize("exclude", [None, "self", "reverse_types"])
def test_no_message_takes_the_edges_of_the_batch_or_their_reverse(exclude: str | None) -> None:
    """Expected values from sets; DGL's own loses the edges themselves where a batch has a type and its reverse."""
    reverse = REVERSE if exclude == "reverse_types" else None
    sampler = make(BUYS, BOUGHT, negatives=3, exclude=exclude, reverse_types=reverse)
    ids = {BUYS: np.array([5, 17, 3]), BOUGHT: np.array([40, 41])}
    batch = sampler.sample(ids, np.random.default_rng(1))
    own = {kind: set(some.tolist()) for kind, some in ids.items()}
    both = own[BUYS] | own[BOUGHT]
    excluded = {None: {}, "self": own, "reverse_types": {BUYS: both, BOUGHT: both}}[exclude]
    seeds = {name: rows[rows >= 0] for name, rows in batch.seeds.items()}
    assert all(len(np.unique(rows)) == len(rows) for rows in seeds.values())
    sources = dict(seeds)
    for kind, (senders, _) in ENDS.items():
        last = drawn_edges(batch.blocks[-1][kind])
        assert last == in_edges(kind, seeds, excluded)
        sources[kind[0]] = np.union1d(sources[kind[0]], senders[sorted(last)])
    for kind in ENDS:
        assert drawn_edges(batch.blocks[0][kind]) == in_edges(kind, sources, excluded)

    for kind, some in ids.items():
        assert batch.edge_ids[kind].tolist() == [*some.tolist(), *[-1] * (8 - len(some))]
        ends = batch.seeds[kind[0]][batch.senders[kind]], batch.seeds[kind[2]][batch.receivers[kind]]
        np.testing.assert_array_equal([end[: len(some)] for end in ends], [end[some] for end in ENDS[kind]])
        negatives = batch.seeds[kind[2]][batch.negative_receivers[kind][: len(some)]]
        assert negatives.shape == (len(some), 3) and 0 <= negatives.min() <= negatives.max() < COUNTS[kind[2]]


def test_reverse_edges_of_the_same_type_by_their_ids() -> None:
    reverse = np.concatenate([np.arange(40, 80), np.arange(40)])
    sampler = make(KNOWS, exclude="reverse", reverse_ids={KNOWS: reverse})
    batch = sampler.sample([7, 50], np.random.default_rng(0))  # of one type, an array will do
    nodes = {name: rows[rows >= 0] for name, rows in batch.seeds.items()} | {"item": np.array([])}
    assert drawn_edges(batch.blocks[-1][KNOWS]) == in_edges(KNOWS, nodes, {KNOWS: {7, 47, 50, 10}})


def test_one_trace_serves_an_epoch_of_mixed_batches() -> None:
    sampler = make(BUYS, KNOWS, negatives=2)
    traces, seen = [], {BUYS: [], KNOWS: []}

    @jax.jit
    def step(batch: graphs.EdgeMiniBatch) -> Any:
        traces.append(batch)
        return batch.edge_ids

    seeds = {BUYS: np.arange(90), KNOWS: np.arange(10, 80)}
    for batch in neighbor_batches(sampler, seeds, lambda batch: batch):
        for kind, ids in step(batch).items():
            seen[kind] += np.asarray(ids)[np.asarray(ids) >= 0].tolist()
    assert len(traces) == 1
    assert {kind: sorted(ids) for kind, ids in seen.items()} == {kind: ids.tolist() for kind, ids in seeds.items()}


def test_what_is_refused() -> None:
    sampler = make(BUYS, KNOWS)
    turned = {**host(), BOUGHT: graphs.host_edges(PAIRS[1][::-1], PAIRS[0][::-1], ITEMS, USERS, keep_edge_ids=True)}
    without_ids = {**host(), BOUGHT: host(keep_edge_ids=False)[BOUGHT]}
    by_type: dict[str, Any] = {"exclude": "reverse_types", "reverse_types": REVERSE}
    cases: list[tuple[Any, str]] = [
        (lambda: make(BUYS, exclude="reverse_types"), "reverse_types and exclude='reverse_types' need each other"),
        (lambda: make(KNOWS, **by_type), r"reverse_types lacks edge type \('user', 'knows', 'user'\)"),
        (
            lambda: make(BUYS, exclude="reverse_types", reverse_types={BUYS: KNOWS}),
            r"reverse_types\[\('user', 'buys', 'item'\)\] = \('user', 'knows', 'user'\) has 80 edges, but 90 edges",
        ),
        (
            lambda: make(BUYS, exclude="reverse_types", reverse_types={BUYS: ("a", "b", "c")}),
            r"reverse_types\[\('user', 'buys', 'item'\)\] = \('a', 'b', 'c'\) is not an edge type of edges",
        ),
        (lambda: make(BUYS, edges=turned, **by_type), "edge 0 is not the reverse of the edge at the same index"),
        (
            lambda: make(BUYS, edges=without_ids, **by_type),
            r"edges of \('item', 'bought by', 'user'\) must be made with",
        ),
        (
            lambda: make(BUYS, exclude="reverse", reverse_ids={}),
            r"reverse_ids lacks edge type \('user', 'buys', 'item'\)",
        ),
        (lambda: make(BUYS, edges={KNOWS: host()[KNOWS]}), r"senders has edge type \('user', 'buys', 'item'\), which"),
        (lambda: make(), "senders is empty: there are no edges to sample"),
        (
            lambda: sampler.sample([1], RANDOM),
            r"edge_ids must be a mapping from edge types: \('user', 'buys', 'item'\), \('user'",
        ),
        (
            lambda: sampler.sample({BOUGHT: [1]}, RANDOM),
            r"edge_ids has edge type \('item', 'bought by', 'user'\), which",
        ),
        (lambda: sampler.sample({BUYS: np.arange(5), KNOWS: np.arange(4)}, RANDOM), "edge_ids must be at most 8 edges"),
        (lambda: graphs.edge_sampler(host(), (1, 1), {BUYS: PAIRS[0]}, {}, 8), "receivers lacks edge type"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="senders must be a mapping from edge types, like edges, got ndarray"):
        graphs.edge_sampler(host(), (1,), PAIRS[0], PAIRS[1], 8)
