"""Synthetic graphs have what their docstrings promise: sizes, neighbors, and labels that neighbors tell."""

import itertools

import numpy as np
import pytest

from jmp_train.graphs import synthetic_proteins
from jmp_train.graphs.datasets.synthetic_graphs import heavy_tailed, synthetic_cora, synthetic_reddit

pytestmark = pytest.mark.quick


def test_papers_cite_earlier_ones_and_old_ones_more_often() -> None:
    data = synthetic_cora()
    is_cited = data.senders < data.receivers
    cited, citing = data.senders[is_cited], data.receivers[is_cited]
    is_same_class = data.labels[cited] == data.labels[citing]
    for pairs in (is_same_class, ~is_same_class):  # of the square of a uniform number the median is 1/4
        assert np.median(cited[pairs] / citing[pairs]) == pytest.approx(0.25, abs=0.03)


def test_neighbors_of_an_element_are_next_to_it_or_three_to_five_away() -> None:
    data = synthetic_proteins(200)
    is_forward = data.senders < data.receivers
    assert is_forward.sum() * 2 == len(data.senders)
    apart = (data.receivers - data.senders)[is_forward]
    assert set(apart.tolist()) == {1, 3, 4, 5}
    assert (apart == 1).sum() == (data.n_node - 1).sum()
    for number in (3, 4, 5):
        possible = np.maximum(data.n_node - number, 0).sum()
        assert (apart == number).sum() / possible == pytest.approx(0.3, abs=0.02)
    starts = np.repeat(data.node_starts[:-1], data.n_edge)  # nodes are numbered within their graph
    edges = set(zip((data.senders + starts).tolist(), (data.receivers + starts).tolist(), strict=True))
    assert edges == {(receiver, sender) for sender, receiver in edges} and len(edges) == len(data.senders)


def test_proteins_have_sizes_kinds_and_classes_as_their_docstring_says() -> None:
    data = synthetic_proteins()
    assert (len(data), data.num_classes) == (1113, 2)
    assert data.n_node.min() >= 4 and data.n_node.max() <= 620
    assert data.n_node.mean() == pytest.approx(39, abs=3)
    assert data.n_edge.sum() / data.n_node.sum() == pytest.approx(3.6, abs=0.05)
    kinds = data.nodes["label"]
    np.testing.assert_allclose(np.bincount(kinds) / len(kinds), 1 / 3, atol=0.02)
    # The kinds alone do not tell the classes apart; neighbors of one kind do.
    owners = np.repeat(np.arange(len(data)), data.n_node)
    shares = np.stack([np.bincount(owners, kinds == kind, len(data)) for kind in range(3)], 1) / data.n_node[:, None]
    assert np.abs(shares[data.labels == 0].mean(0) - shares[data.labels == 1].mean(0)).max() < 0.05
    starts = data.node_starts
    stays = np.array([(np.diff(kinds[a:b]) == 0).mean() for a, b in itertools.pairwise(starts)])
    assert data.labels.mean() == pytest.approx(0.4 * 0.95 + 0.6 * 0.05, abs=0.04)
    large = data.n_node > 40  # the class can be read from these, but for one label of 20
    assert ((stays < 0.56) == data.labels)[large].mean() == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize(("mean", "largest"), [(5.0, 50.0), (30.0, 400.0)])
def test_heavy_tailed_degrees_have_their_mean_and_fall_as_one_over_the_rank(mean: float, largest: float) -> None:
    degrees = heavy_tailed(1000, mean, largest)
    assert degrees.mean() == pytest.approx(mean) and degrees.max() < largest
    np.testing.assert_allclose(np.diff(1 / degrees), (1 / degrees[-1] - 1 / degrees[0]) / 999)
    assert 1 / degrees[0] - 1 / largest == pytest.approx(np.diff(1 / degrees)[0] / 2)  # half a rank


def test_the_synthetic_papers_have_coras_shapes() -> None:
    data = synthetic_cora()
    assert (data.features.shape, data.features.dtype) == ((2708, 1433), np.float32)
    assert set(np.unique(data.features)) == {0, 1}
    assert 16 < data.features.sum(axis=1).mean() < 20  # of Cora 18
    assert data.labels.dtype == data.senders.dtype == data.receivers.dtype == np.int32
    assert np.unique(data.labels).tolist() == list(range(data.num_classes)) == list(range(7))
    # No edge twice, no self-loops, and each in both directions.
    assert data.num_edges == pytest.approx(10556, rel=0.03)
    edges = set(zip(data.senders.tolist(), data.receivers.tolist(), strict=True))
    assert edges == {(receiver, sender) for sender, receiver in edges}
    assert len(edges) == data.num_edges
    assert not (data.senders == data.receivers).any()
    degrees = np.bincount(data.receivers, minlength=2708)
    assert degrees.min() == 1
    assert 50 < degrees.max() < 200  # of Cora 168
    assert (data.labels[data.senders] == data.labels[data.receivers]).mean() == pytest.approx(0.81, abs=0.02)
    split = np.concatenate([data.train, data.validation, data.test])
    assert len(np.unique(split)) == len(split)
    assert [len(data.train), len(data.validation), len(data.test)] == [140, 500, 1000]
    assert np.bincount(data.labels[data.train]).tolist() == [20] * 7


@pytest.mark.parametrize(("scale", "nodes", "edges", "classes"), [(0.001, 233, 6756, 4), (0.02, 4659, 2292318, 4)])
def test_the_synthetic_graph_has_reddits_counts(scale: float, nodes: int, edges: int, classes: int) -> None:
    data = synthetic_reddit(scale)
    assert (data.num_nodes, len(data.senders), len(data.receivers)) == (nodes, edges, edges)
    assert (data.features.shape, data.features.dtype) == ((nodes, 602), np.float32)
    assert data.senders.dtype == data.receivers.dtype == np.int32
    assert np.bincount(data.labels).min() >= nodes // classes
    assert data.labels.max() == classes - 1
    split = [data.train, data.validation, data.test]
    shares = [len(ids) / nodes for ids in split]
    np.testing.assert_allclose(shares, np.array([153_431, 23_831, 55_703]) / 232_965, atol=0.005)
    assert sorted(np.concatenate(split).tolist()) == list(range(nodes))
    assert all((np.diff(ids) > 0).all() for ids in split)
    # Sorted by receiver, then sender; no edge twice, no self-loops, and each in both directions.
    keys = data.receivers.astype(np.int64) * nodes + data.senders
    assert (np.diff(keys) > 0).all()
    assert not (data.senders == data.receivers).any()
    reversed_keys = data.senders.astype(np.int64) * nodes + data.receivers
    np.testing.assert_array_equal(np.sort(reversed_keys), keys)
    # Degrees fall slowly, neighbors mostly share the class, features have mean 0 and variance about 1.
    degrees = np.bincount(data.receivers, minlength=nodes)
    assert degrees.max() > 3 * degrees.mean() > 3.5 * np.median(degrees)
    assert degrees.min() > 0
    assert (data.labels[data.senders] == data.labels[data.receivers]).mean() > 0.6
    assert abs(data.features.mean()) < 0.01
    assert 0.8 < data.features.std() < 1.1


def test_scales_out_of_range_are_named() -> None:
    for scale in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"scale={scale} must be between 0"):
            synthetic_reddit(scale)
    with pytest.raises(ValueError, match=r"scale=0.0004 gives 93 of 232965 nodes; a graph needs at least 100"):
        synthetic_reddit(0.0004)


DATA = {"cora": synthetic_cora, "reddit": lambda seed: synthetic_reddit(0.001, seed)}


@pytest.mark.parametrize("name", DATA)
def test_the_seed_makes_the_data(name: str) -> None:
    one, same, other = (DATA[name](seed) for seed in (3, 3, 4))
    for field in ("senders", "receivers", "features", "labels", "train", "validation", "test"):
        arrays = [getattr(data, field) for data in (one, same, other)]
        np.testing.assert_array_equal(arrays[0], arrays[1])
        assert not np.array_equal(arrays[0], arrays[2])
