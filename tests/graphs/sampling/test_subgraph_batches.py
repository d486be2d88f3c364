from typing import Any

import jax
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_graphs import ODD, Ends, edges

from jmp_train import graphs
from jmp_train.graphs.sampling import subgraph_batches
from jmp_train.graphs.sampling.subgraph_batches import MODES

pytestmark = pytest.mark.quick

RARE = 1e-5


def some_graph() -> Ends:
    """Returns a directed graph of 30 nodes with a hub, self-loops and parallel edges; each node sends and receives."""
    random = np.random.default_rng(0)
    ends = random.integers(0, 30, (2, 90))
    ends[1, :20] = 4
    cycle = np.arange(30)
    return np.append(ends[0], cycle), np.append(ends[1], np.roll(cycle, 1)), 30


def check_subgraph(ends: Ends, mode: str, batch_size: int) -> None:
    """Asserts that a batch has all edges between its nodes, with their factors."""
    index = graphs.host_edges(*ends, keep_edge_ids=True)
    sampler = graphs.saint_sampler(index, mode, batch_size=batch_size, length=2, num_trials=3)
    random = np.random.default_rng(1)
    batch = sampler.sample(random.permutation(ends[2])[:batch_size], random)
    nodes = batch.nodes[batch.nodes >= 0]
    assert len(set(nodes.tolist())) == len(nodes)
    wanted = np.flatnonzero(np.isin(ends[0], nodes) & np.isin(ends[1], nodes))
    ids = batch.edge_ids[batch.edge_ids >= 0]
    assert sorted(ids.tolist()) == wanted.tolist()
    senders, receivers = (np.asarray(x)[: len(ids)] for x in (batch.graph.senders, batch.graph.receivers))
    np.testing.assert_array_equal(nodes[senders], ends[0][ids])
    np.testing.assert_array_equal(nodes[receivers], ends[1][ids])
    np.testing.assert_array_equal(
        batch.node_norm, np.append(sampler.node_norm[nodes], np.zeros((batch.nodes < 0).sum()))
    )
    assert index.edge_ids is not None
    of_edges = dict(zip(index.edge_ids.tolist(), sampler.edge_norm.tolist(), strict=True))
    assert batch.graph.edges["norm"][: len(ids)].tolist() == [of_edges[edge] for edge in ids.tolist()]
    assert np.asarray(graphs.node_mask(batch.graph)).tolist() == (batch.nodes >= 0).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_batches_have_all_edges_between_their_nodes(mode: str) -> None:
    check_subgraph(some_graph(), mode, 4)
    check_subgraph(ODD["hub"], mode, 3)
    for name in ("isolated", "one node", "self-loops"):
        if mode != "edge" or len(ODD[name][0]):
            check_subgraph(ODD[name], mode, 1)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(edges(), st.integers(1, 3))
def test_batches_of_random_graphs_have_all_edges(ends: Ends, batch_size: int) -> None:
    for mode in MODES:
        if ends[2] and (mode != "edge" or len(ends[0])):
            check_subgraph(ends, mode, batch_size)


def probabilities(mode: str) -> np.ndarray:
    """Returns the probability of each node to be in a batch of three draws, by the definitions."""
    senders, receivers, count = some_graph()
    leave, enter = np.bincount(senders, minlength=count), np.bincount(receivers, minlength=count)
    if mode == "node":
        return 1 - (1 - leave / leave.sum()) ** 3
    if mode == "edge":
        weights = 1 / enter[senders] + 1 / leave[receivers]
        found = [weights[(senders == node) | (receivers == node)].sum() for node in range(count)]
        return 1 - (1 - np.array(found) / weights.sum()) ** 3
    steps = np.zeros((count, count))
    np.add.at(steps, (senders, receivers), 1)
    steps /= steps.sum(1, keepdims=True)
    missed = np.empty(
        (count, count)
    )  # the probability that a walk of two steps from the row's node misses the column's
    for node in range(count):
        avoiding = steps * (np.arange(count) != node)
        missed[:, node] = (np.arange(count) != node) * (avoiding @ avoiding).sum(1)
    found = np.empty(count)
    for node in range(count):  # of three different starts, by elementary symmetric polynomials
        power = [(missed[:, node] ** i).sum() for i in (1, 2, 3)]
        triples = (power[0] ** 3 - 3 * power[0] * power[1] + 2 * power[2]) / 6
        found[node] = 1 - triples / (count * (count - 1) * (count - 2) / 6)
    return found


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
def test_nodes_are_drawn_by_the_definitions(mode: str, seed: int) -> None:
    index, trials = graphs.host_edges(*some_graph()), 4_000
    sampler = graphs.saint_sampler(index, mode, batch_size=3, length=2, num_trials=trials, seed=seed)
    wanted = probabilities(mode)
    found = trials / (sampler.node_norm.astype(np.float64) * 30 * trials)  # the share of batches with each node
    deviations = (found - wanted) / np.sqrt(wanted * (1 - wanted) / trials)
    for deviation in deviations:
        assert 2 * scipy.stats.norm.sf(abs(deviation)) > RARE


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_losses_and_messages_are_unbiased(mode: str) -> None:
    ends = some_graph()
    index = graphs.host_edges(*ends)
    sampler = graphs.saint_sampler(index, mode, batch_size=6, length=2, num_trials=4_000)
    random = np.random.default_rng(7)
    losses, x = random.uniform(1, 2, 30), random.uniform(1, 2, 30)
    means, messages = [], [[] for _ in range(30)]
    for _ in range(150):
        batch = sampler.sample(random.permutation(30)[:6], random)
        nodes = batch.nodes[batch.nodes >= 0]
        means.append((losses[nodes] * batch.node_norm[: len(nodes)]).sum())
        senders, receivers, norm = (
            np.asarray(a) for a in (batch.graph.senders, batch.graph.receivers, batch.graph.edges["norm"])
        )
        is_edge = senders < len(batch.nodes)
        sums = np.zeros(len(batch.nodes))
        np.add.at(sums, receivers[is_edge], norm[is_edge] * x[batch.nodes[senders[is_edge]]])
        for node, total in zip(nodes.tolist(), sums, strict=False):
            messages[node].append(total)
    assert abs(np.mean(means) - losses.mean()) < 5 * np.std(means) / len(means) ** 0.5
    whole = np.zeros(30)
    np.add.at(whole, ends[1], x[ends[0]])
    for mine, wanted in zip(messages, whole, strict=True):
        if len(mine) > 30:
            assert abs(np.mean(mine) - wanted) < 5 * np.std(mine) / len(mine) ** 0.5 + 0.05 * wanted


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_the_default_is_unbiased_for_small_batches_of_a_large_graph(mode: str) -> None:
    random = np.random.default_rng(3)
    senders = random.integers(0, 2_000, 40_000)
    index = graphs.host_edges(senders, np.arange(40_000) % 2_000, 2_000)  # each node has 20 edges
    sampler = graphs.saint_sampler(index, mode, batch_size=60, length=2)
    factors, sums = [], []
    for _ in range(300):
        batch = sampler.sample(random.permutation(2_000)[:60], random)
        factors.append(batch.node_norm.sum(dtype=np.float64))
        sums.append(np.asarray(batch.graph.edges["norm"]).sum() / (batch.nodes >= 0).sum())
    for found, wanted, bias in ((factors, 1, 0.01), (sums, 20, 0.4)):
        assert abs(np.mean(found) - wanted) < 5 * np.std(found) / 300**0.5 + bias


def test_trials_that_end_early_say_how_biased_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subgraph_batches, "MOST_READS", 1)
    index = graphs.host_edges(np.arange(40_000) * 7 % 1_999, np.arange(40_000) % 2_000, 2_000)
    with pytest.warns(UserWarning, match="% of the edges were in none of 100 trial batches, so sums of messages come"):
        graphs.saint_sampler(index, "walk", batch_size=10)


def test_batches_share_one_program() -> None:
    sampler = graphs.saint_sampler(graphs.host_edges(*some_graph()), "walk", batch_size=4)
    traces, random = [], np.random.default_rng(0)

    @jax.jit
    def means(graph: graphs.Graph) -> jax.Array:
        traces.append(None)
        return graphs.graph_conv(graph, graph.in_degrees[:, None].astype("float16"), allow_zero_in_degree=True)

    for part in sampler.sample_several([random.permutation(30)[:4] for _ in range(3)], random):
        means(part.graph)
    assert len(traces) == 1
    assert sampler.sizes[-1] == (31, 120)


def test_what_saint_samplers_refuse() -> None:
    index = graphs.host_edges(*some_graph())
    cases: list[tuple[Any, str, dict[str, int], type[Exception], str]] = [
        (3, "node", {}, TypeError, "edges must be a result of host_edges, got int"),
        (index, "rows", {}, ValueError, "mode='rows' must be one of 'node', 'edge', 'walk'"),
        (index, "node", {"batch_size": 0}, ValueError, "batch_size=0 must be at least 1"),
        (index, "node", {"num_trials": 0}, ValueError, "num_trials=0 must be at least 1"),
        (graphs.host_edges([], [], 3), "edge", {}, ValueError, "edges must be between the same nodes, and some, got 0"),
        (graphs.host_edges([0], [0], 1, 2), "node", {}, ValueError, "edges must be between the same nodes"),
    ]
    for edges_, mode, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            graphs.saint_sampler(edges_, mode, **{"batch_size": 2} | options)
    with pytest.raises(ValueError, match="seeds must be at most 2, the batch size, got 3"):
        graphs.saint_sampler(index, "node", batch_size=2).sample([0, 1, 2], np.random.default_rng(0))
