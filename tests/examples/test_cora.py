"""The models of `cora.py` are the papers' formulas, and its data sets are chosen and checked."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cora import make_task
from example_tasks import load_task
from planetoid_files import write_planetoid

from jmp_train.graphs import NodeData, SparseFeatures
from jmp_train.policies.pytrees.paths import named_leaves

pytestmark = pytest.mark.quick


@pytest.fixture(name="small", scope="module")
def fixture_small() -> NodeData:
    """Six nodes in a ring and one in its middle, with 5 words and 3 classes."""
    ring = np.arange(6, dtype=np.int32)
    ends = np.concatenate([ring, ring]), np.concatenate([np.roll(ring, 1), np.full(6, 6, np.int32)])
    senders, receivers = np.concatenate(ends), np.concatenate(ends[::-1])
    features = np.random.default_rng(0).integers(0, 2, (7, 5)).astype(np.float32)
    features[3] = 0
    ids = np.arange(7, dtype=np.int32)
    return NodeData(senders, receivers, features, ids % 3, 3, ids[:3], ids[3:5], ids[5:])


def dense_logits(model: str, data: NodeData, params: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the logits of all nodes by the papers' formulas, with matrices, in float64."""
    adjacency = np.eye(data.num_nodes)
    adjacency[data.receivers, data.senders] = 1
    sums = data.features.sum(axis=1, keepdims=True, dtype=np.float64)
    x = np.divide(data.features, sums, out=np.zeros_like(data.features, np.float64), where=sums > 0)
    degrees = adjacency.sum(axis=1)
    if model == "gcn":
        norm = adjacency / np.sqrt(np.outer(degrees, degrees))
        return norm @ np.maximum(norm @ x @ params["first/weight"], 0) @ params["second/weight"]
    if model == "sage":
        mean = (adjacency + np.eye(len(adjacency))) / (degrees + 1)[:, None]
        x = np.maximum(mean @ x @ params["first/weight"] + params["first/bias"], 0)
        return mean @ x @ params["second/weight"] + params["second/bias"]
    for layer, heads in (("layers/0", 8), ("layers/1", 1)):
        z = (x @ params[f"{layer}/weight"]).reshape(len(x), heads, -1)
        left, right = ((z * params[f"{layer}/{end}"]).sum(-1) for end in ("left", "right"))
        logits = right[:, None] + left[None]  # receiver, sender, head
        logits = np.where(logits > 0, logits, 0.2 * logits)
        weights = np.exp(logits) * adjacency[:, :, None]
        weights /= weights.sum(axis=1, keepdims=True)
        x = np.einsum("vuh,uhd->vhd", weights, z).reshape(len(x), -1) + params[f"{layer}/bias"]
        x = np.where(x > 0, x, np.expm1(x)) if layer == "layers/0" else x
    return x


@pytest.mark.full
@pytest.mark.parametrize("model", ["gcn", "gat", "sage"])
def test_predictions_are_the_papers_formulas_and_drop_nothing(model: str, small: NodeData) -> None:
    task = make_task(small, model)
    params, _ = jax.jit(task.init)(jax.random.key(1))
    exact = {path: np.asarray(x, np.float64) for path, x in named_leaves(params)}
    logits = dense_logits(model, small, exact)
    batch: Any = task.test | task.shared()
    found = jax.jit(task.metrics.predict)(params, None, batch)
    np.testing.assert_allclose(found, logits[small.test], rtol=1e-4, atol=1e-5)

    batch, loss_fn = task.train | task.shared(), jax.jit(task.loss_fn)
    losses = [float(loss_fn(params, None, batch, key)[0]) for key in (None, *map(jax.random.key, (0, 0, 1)))]
    shifted = logits - logits.max(axis=1, keepdims=True)
    likely = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    expected = -likely[small.train, small.labels[small.train]].mean()
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    assert losses[1] == losses[2]  # the key decides what is dropped
    assert len(set(losses)) == 3


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    features, neighbors = np.eye(12, 5) + np.eye(12, 5, -6), {node: [(node + 1) % 12] for node in range(12)}
    write_planetoid(tmp_path, features, np.arange(12) % 3, neighbors, 3, (10, 7, 11, 9, 8))
    for path in tmp_path.glob("ind.*"):
        path.rename(path.with_name(path.name.replace("cora", "citeseer")))
    return tmp_path


def test_a_data_set_is_chosen_in_any_case(folder: Path) -> None:
    task = load_task("cora", sparse=True, data_dir=folder, dataset="CiteSeer")
    assert (task.batch_size, len(task.train["label"])) == (None, 3)
    assert isinstance(task.shared()["features"], SparseFeatures)
    with pytest.raises(FileNotFoundError, match=r"lacks ind.pubmed.x"):
        load_task("cora", sparse=True, data_dir=folder, dataset="pubmed")
    for options, message in (
        ({"data_dir": folder, "dataset": "reddit"}, "dataset='reddit' must be one of cora, citeseer, pubmed"),
        ({"synthetic": True, "dataset": "pubmed"}, "dataset='pubmed' has no synthetic data; only cora does"),
        ({"synthetic": True, "data_dir": folder}, "--data-dir and --synthetic exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task("cora", sparse=True, **options)


@pytest.mark.full
def test_sparse_words_train_as_those_with_zeros_do() -> None:
    """The first gradient is the same, without dropout, whose draws differ."""
    results = []
    for sparse in (False, True):
        task = load_task("cora", synthetic=True, sparse=sparse)
        params, _ = task.init(jax.random.key(0))
        batch = task.prepare(task.train) | task.shared()
        loss, gradient = jax.jit(jax.value_and_grad(lambda p, b, f=task.loss_fn: f(p, None, b, None)[0]))(params, batch)
        results.append((loss, jax.tree.leaves(gradient)))
    (loss, gradient), (wanted, wanted_gradient) = results
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for one, other in zip(gradient, wanted_gradient, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
