"""Synthetic graphs have what their docstrings promise: sizes, neighbors, and labels that neighbors tell."""

import itertools

import numpy as np
import pytest

from jmp_train.graphs import synthetic_proteins
from jmp_train.graphs.datasets.synthetic_graphs import heavy_tailed, synthetic_cora

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
