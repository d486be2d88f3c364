from typing import Any

import jax
import numpy as np
import pytest
from refusals import assert_refused

from jmp_train import graphs
from jmp_train.data import neighbor_batches

pytestmark = pytest.mark.quick

NODES = 40
RANDOM = np.random.default_rng(0)
ONE_WAY = RANDOM.integers(0, NODES, (2, 150))
SENDERS, RECEIVERS = np.concatenate([ONE_WAY, ONE_WAY[::-1]], axis=1)
REVERSE = np.concatenate([np.arange(150, 300), np.arange(150)])


def make(batch_size: int = 8, **options: Any) -> graphs.EdgeSampler:
    edges = graphs.host_edges(SENDERS, RECEIVERS, NODES, keep_edge_ids=True)
    return graphs.edge_sampler(edges, (-1, -1), SENDERS, RECEIVERS, batch_size, num_trials=2, **options)


def test_no_message_takes_the_edges_of_the_batch_or_their_reverse() -> None:
    """As of several types, see test_hetero_edge_batches.py, in arrays."""
    sampler, ids = make(negatives=3, exclude="reverse", reverse_ids=REVERSE), np.array([5, 17, 200, 44, 3])
    batch = sampler.sample(ids, np.random.default_rng(1))
    kept = np.isin(RECEIVERS, batch.seeds[batch.seeds >= 0])
    kept[[*ids, *REVERSE[ids]]] = False
    drawn = np.asarray(batch.blocks[-1].edge_ids)
    np.testing.assert_array_equal(np.sort(drawn[drawn >= 0]), np.flatnonzero(kept))
    assert batch.edge_ids.tolist() == [*ids.tolist(), -1, -1, -1]
    np.testing.assert_array_equal(batch.seeds[batch.senders[:5]], SENDERS[ids])
    np.testing.assert_array_equal(batch.seeds[batch.receivers[:5]], RECEIVERS[ids])
    assert batch.negative_receivers.shape == (8, 3)
    assert set(batch.seeds[batch.negative_receivers[:5]].ravel().tolist()) <= set(range(NODES))


def test_a_node_whose_only_edge_is_left_out_gets_nothing() -> None:
    edges = graphs.host_edges([0, 1], [1, 0], 2, keep_edge_ids=True)
    sampler = graphs.edge_sampler(edges, (2,), [0, 1], [1, 0], 1, exclude="reverse", reverse_ids=[1, 0])
    batch = sampler.sample([0], np.random.default_rng(0))
    (block,) = batch.blocks
    assert block.in_degrees.tolist() == [0, 0]
    rows = graphs.sage_conv(block, np.ones((block.num_sources, 1), np.float32), np.ones((1, 1)), np.ones((1, 1)))
    assert rows[batch.receivers].tolist() == [[1.0]]
    assert block.connections.has_zero_in_degree is None


def test_batches_of_a_loop_have_one_shape_and_fresh_negatives() -> None:
    sampler = make(negatives=2)
    shapes, negatives, seen = set(), set(), []
    for batch in neighbor_batches(sampler, np.arange(300), lambda batch: batch, epochs=1):
        shapes.add(tuple(x.shape for x in jax.tree.leaves(batch)))
        negatives.add(tuple(np.asarray(batch.seeds)[np.asarray(batch.negative_receivers)].ravel().tolist()))
        seen += np.asarray(batch.edge_ids).tolist()
    assert len(shapes) == 1
    assert len(negatives) == 38
    assert sorted(seen)[-300:] == list(range(300))


def test_layers_are_little_larger_than_batches_need() -> None:
    """Most edges enter few nodes, so that a batch has far fewer ends than its edges and negatives have."""
    random = np.random.default_rng(2)
    senders, receivers = random.integers(0, 4000, 12_000), (4000 * random.random(12_000) ** 4).astype(int)
    edges = graphs.host_edges(senders, receivers, 4000, keep_edge_ids=True)
    sampler = graphs.edge_sampler(edges, (5, 5), senders, receivers, 256, negatives=1)
    shapes, real = set(), []
    for start in range(0, 12_000, 256):
        batch = sampler.sample(np.arange(start, min(start + 256, 12_000)), random)
        shapes.add(tuple(block.num_edges for block in batch.blocks))
        real.append([int(np.sum(block.in_degrees)) / block.num_edges for block in batch.blocks])
    assert len(shapes) == 1
    assert np.mean(real[:-1]) > 0.8


def test_what_is_refused() -> None:
    edges = graphs.host_edges(SENDERS, RECEIVERS, NODES, keep_edge_ids=True)
    refusals = {
        "exclude='both' must be one of 'self', 'reverse', 'reverse_types'": lambda: make(exclude="both"),
        "reverse_ids and exclude='reverse' need each other": lambda: make(exclude="reverse"),
        "reverse_ids must have 300 rows, one for each of the edges, got 299": lambda: make(
            exclude="reverse", reverse_ids=REVERSE[1:]
        ),
        "reverse_ids[.*] = 300 is out of range for 300 edges": lambda: make(exclude="reverse", reverse_ids=REVERSE + 1),
        "senders has 299 edges, but edges has": lambda: graphs.edge_sampler(edges, (1,), SENDERS[1:], RECEIVERS[1:], 8),
        "batch_size=0 must be at least 1": lambda: make(batch_size=0),
        "edge_ids[0] = 300 is out of range for 300 edges": lambda: make().sample([300], RANDOM),
        "edge_ids must be at most 8 edges, the batch size, got 9": lambda: make().sample(np.arange(9), RANDOM),
        "edges must be made with keep_edge_ids=True": lambda: graphs.edge_sampler(
            graphs.host_edges(SENDERS, RECEIVERS, NODES), (1,), SENDERS, RECEIVERS, 8
        ),
        "TypeError: edge_ids must be integers, got float64": lambda: make().sample(np.array([0.5]), RANDOM),
        "TypeError: edges must be a result of host_edges, or a mapping from edge types to such .*, got list": lambda: (
            graphs.edge_sampler([edges], (1,), SENDERS, RECEIVERS, 8)  # pyright: ignore[reportArgumentType]
        ),
    }
    assert_refused(refusals)
