"""Mini-batches: their edges are the graph's, their shapes stay, and they estimate what the graph gives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import assert_refused

from jmp_train import graphs

pytestmark = pytest.mark.quick

COUNT = 300
PAPER, AUTHOR = "paper", "author"
WRITES, CITES = (AUTHOR, "writes", PAPER), (PAPER, "cites", PAPER)
WRITTEN = (PAPER, "written by", AUTHOR)


def heavy_tailed(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Edges whose senders and receivers are drawn by rank: hubs, and nodes without edges."""
    random = np.random.default_rng(seed)
    chances = 1 / np.arange(1, COUNT + 1)
    ends = random.choice(COUNT, (2, 3_000), p=chances / chances.sum())
    return ends[0], ends[1]


def typed_edges() -> dict[Any, graphs.HostEdges]:
    random = np.random.default_rng(4)
    by_type = {}
    for kind, counts in ((WRITES, (40, 90)), (CITES, (90, 90)), (WRITTEN, (90, 40))):
        senders, receivers = (random.integers(0, count, 400) for count in counts)
        by_type[kind] = graphs.host_edges(senders, receivers, *counts)
    return by_type


def check_layer(block: graphs.Block, ends: Any, sources: np.ndarray, targets: np.ndarray, fanout: int) -> None:
    """Asserts that a block has, of each target, as many edges of the graph as it is to have."""
    assert block.edge_ids is not None
    is_edge = np.asarray(block.edge_ids) >= 0
    ids = np.asarray(block.edge_ids)[is_edge]
    incidences = block.connections.senders, block.connections.receivers
    places = [np.asarray(jax.tree.map(jnp.asarray, x).ids) for x in incidences]
    np.testing.assert_array_equal(sources[places[0][is_edge]], ends[0][ids])
    np.testing.assert_array_equal(targets[places[1][is_edge]], ends[1][ids])
    assert (places[1][~is_edge] == block.num_targets).all()
    assert len(set(zip(ids, places[1][is_edge], strict=True))) == len(ids)  # none is drawn twice
    degrees = np.bincount(ends[1], minlength=COUNT)[targets]
    wanted = degrees if fanout == -1 else np.minimum(degrees, fanout)
    found = np.bincount(places[1][is_edge], minlength=block.num_targets)
    np.testing.assert_array_equal(found[: len(targets)], wanted)
    np.testing.assert_array_equal(block.in_degrees, found)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("fanouts", [(3, 2), (-1, 40), (5, -1)])
def test_blocks_hold_edges_of_the_graph(fanouts: tuple[int, int]) -> None:
    ends = heavy_tailed()
    edges = graphs.host_edges(*ends, COUNT, keep_edge_ids=True)
    sampler = graphs.neighbor_sampler(edges, fanouts, np.arange(COUNT), 16)
    random = np.random.default_rng(1)
    seeds = random.permutation(COUNT)[:13]
    batch = sampler.sample(seeds, random)
    np.testing.assert_array_equal(batch.seeds, [*seeds, -1, -1, -1])
    np.testing.assert_array_equal(batch.inputs[:13], seeds)
    first, last = batch.blocks
    assert (first.num_targets, last.num_targets) == (last.num_sources, 16)
    assert len(batch.inputs) == first.num_sources
    inputs = batch.inputs[batch.inputs >= 0]
    assert len(set(inputs)) == len(inputs)
    middle = np.asarray(last.whole_degrees[0])  # the last layer's sources are the first's targets
    used = int((np.asarray(last.out_degrees) > 0).nonzero()[0].max()) + 1
    np.testing.assert_array_equal(middle[:used], edges.out_degrees[inputs[:used]])
    check_layer(last, ends, inputs, seeds, fanouts[1])
    check_layer(first, ends, inputs, inputs[:used], fanouts[0])


def test_the_same_generator_gives_the_same_batch() -> None:
    edges = graphs.host_edges(*heavy_tailed(), COUNT)
    sampler = graphs.neighbor_sampler(edges, (3, 2), np.arange(COUNT), 16)
    batches = [sampler.sample(np.arange(16), np.random.default_rng(seed)) for seed in (0, 0, 1)]
    is_same = [jax.tree.map(np.array_equal, batches[0], other) for other in batches[1:]]
    assert [all(jax.tree.leaves(same)) for same in is_same] == [True, False]


def test_one_program_serves_all_batches() -> None:
    edges = graphs.host_edges(*heavy_tailed(), COUNT)
    sampler = graphs.neighbor_sampler(edges, (4, 3), np.arange(COUNT), 16)
    traces = []

    @jax.jit
    def step(batch: graphs.MiniBatch) -> jax.Array:
        traces.append(None)
        rows = jnp.ones((len(batch.inputs), 2))
        for block in batch.blocks:
            rows = graphs.graph_conv(block, rows, norm="right", allow_zero_in_degree=True)
        return rows

    random = np.random.default_rng(0)
    for _ in range(30):
        step(sampler.sample(random.permutation(COUNT)[:16], random))
    step(sampler.sample([5], random))
    assert len(traces) == 1


def test_a_batch_that_is_larger_than_those_on_trial_loses_nothing() -> None:
    # On trial, seeds have one neighbor each; then come seeds with 500.
    count = 2_000
    receivers = np.concatenate([np.arange(count), np.repeat(np.arange(4), 500)])
    senders = np.concatenate([np.arange(count), np.arange(count)])
    edges = graphs.host_edges(senders, receivers, count)
    sampler = graphs.neighbor_sampler(edges, (-1,), np.arange(10, count), 64)
    random = np.random.default_rng(0)
    small = sampler.sample(np.arange(10, 74), random).blocks[0]
    large = sampler.sample(np.arange(64), random).blocks[0]
    assert small.num_edges < 500
    assert int(np.asarray(large.in_degrees).sum()) == 64 + 2_000
    # No batch whatever exceeds the largest sizes.
    edges = graphs.host_edges(*heavy_tailed(), COUNT)
    sampler = graphs.neighbor_sampler(edges, (-1, -1), np.array([COUNT - 1]), COUNT, num_trials=1)
    batch = sampler.sample(np.arange(COUNT), random)
    assert int(np.asarray(batch.blocks[-1].in_degrees).sum()) == 3_000


@pytest.mark.full
@pytest.mark.parametrize("norm", ["both", "left", "right", "none"])
def test_sampled_convolutions_estimate_the_whole_graphs(norm: str) -> None:
    ends = heavy_tailed()
    graph = graphs.from_edges(*ends, COUNT)
    edges = graphs.host_edges(*ends, COUNT)
    sampler = graphs.neighbor_sampler(edges, (3,), np.arange(COUNT), 100)
    features = np.random.default_rng(2).uniform(1, 2, (COUNT, 1)).astype(np.float32)
    whole = graphs.graph_conv(graph, features, norm=norm, allow_zero_in_degree=True)
    seeds = np.tile(np.arange(10), 10)  # hubs, ten times
    conv = jax.jit(lambda block, x: graphs.graph_conv(block, x, norm=norm, allow_zero_in_degree=True))
    random, results = np.random.default_rng(3), []
    for _ in range(100):
        batch = sampler.sample(seeds, random)
        rows = graphs.take_rows(features, batch.inputs)
        results.append(np.asarray(conv(batch.blocks[0], rows))[:, 0].reshape(10, 10))
    found = np.concatenate(results)
    error = found.std(0) / np.sqrt(len(found))
    assert (np.abs(found.mean(0) - whole[:10, 0]) < 4.5 * error + 1e-5).all()


def test_fanouts_may_differ_by_type() -> None:
    edges = typed_edges()
    fanout = {WRITES: 1, CITES: 3, WRITTEN: 2}
    sampler = graphs.neighbor_sampler(edges, (fanout, fanout), np.arange(90), 8, seed_type=PAPER)
    batch = sampler.sample(np.arange(8), np.random.default_rng(0))
    for kind, block in batch.blocks[-1].items():
        most = 0 if kind == WRITTEN else fanout[kind]
        assert int(np.asarray(block.in_degrees).max(initial=0)) == most
    assert int(np.asarray(batch.blocks[0][WRITTEN].in_degrees).max()) == 2


def test_wrong_calls_are_refused() -> None:
    edges, some, random = graphs.host_edges([0, 1], [1, 0], 2), np.arange(2), np.random.default_rng(0)
    by_type, uneven = typed_edges(), {**typed_edges(), CITES: graphs.host_edges([0], [1], 50)}
    make = functools.partial(graphs.neighbor_sampler, edges)
    of_types = functools.partial(graphs.neighbor_sampler, by_type)
    sampler = make((1,), some, 2)
    refusals = {
        "fanout 0 must be a positive integer, or -1 for all": lambda: make((0,), some, 2),
        "fanouts is empty": lambda: make((), some, 2),
        "num_trials=0 must be at least 1": lambda: make((1,), some, 2, num_trials=0),
        "seeds is empty": lambda: make((1,), [], 2),
        "batch_size=0 must be at least 1": lambda: make((1,), some, 0),
        "seeds[1] = 2 is out of range for 2 nodes": lambda: make((1,), [0, 2], 2),
        "seeds must be at most 2 nodes, the batch size, got 3": lambda: sampler.sample([0, 1, 0], random),
        "seeds[.*] = 2 is out of range for 2 nodes": lambda: sampler.sample([0, 2], random),
        "TypeError: seeds must be integers, got float64": lambda: sampler.sample(np.array([0.5]), random),
        "seed_type is needed, one of 'author', 'paper'": lambda: of_types((1,), some, 2),
        "seed_type='book' must be one of": lambda: of_types((1,), some, 2, seed_type="book"),
        "fanouts lacks edge type ('paper', 'cites', 'paper')": lambda: of_types(
            ({WRITES: 1},), some, 2, seed_type=PAPER
        ),
        "has 50 nodes of type 'paper', but another edge type has 90": lambda: graphs.neighbor_sampler(
            uneven, (1,), some, 2, seed_type=PAPER
        ),
    }
    assert_refused(refusals)
