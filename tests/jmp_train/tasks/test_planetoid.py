from pathlib import Path

import jax
import numpy as np
import pytest
from planetoid_files import write_planetoid

from jmp_train.graphs import SparseFeatures
from jmp_train.tasks import load_task

pytestmark = pytest.mark.quick


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    features, neighbors = np.eye(12, 5) + np.eye(12, 5, -6), {node: [(node + 1) % 12] for node in range(12)}
    write_planetoid(tmp_path, features, np.arange(12) % 3, neighbors, 3, (10, 7, 11, 9, 8))
    for path in tmp_path.glob("ind.*"):
        path.rename(path.with_name(path.name.replace("cora", "citeseer")))
    return tmp_path


def test_a_data_set_is_chosen_in_any_case(folder: Path) -> None:
    task = load_task("planetoid", data_dir=folder, dataset="CiteSeer")
    assert (task.batch_size, len(task.train["label"])) == (None, 3)
    assert isinstance(task.shared()["features"], SparseFeatures)
    with pytest.raises(FileNotFoundError, match=r"lacks ind.pubmed.x"):
        load_task("planetoid", data_dir=folder, dataset="pubmed")
    with pytest.raises(ValueError, match="dataset='reddit' must be one of cora, citeseer, pubmed"):
        load_task("planetoid", data_dir=folder, dataset="reddit")


def test_sparse_words_train_as_those_with_zeros_do() -> None:
    """The first gradient is that of task cora; without dropout, whose draws differ."""
    results = []
    for name in ("cora", "planetoid"):
        task = load_task(name, synthetic=True)
        params, _ = task.init(jax.random.key(0))
        batch = task.prepare(task.train) | task.shared()
        loss, gradient = jax.jit(jax.value_and_grad(lambda p, b, f=task.loss_fn: f(p, None, b, None)[0]))(params, batch)
        results.append((loss, jax.tree.leaves(gradient)))
    (loss, gradient), (wanted, wanted_gradient) = results
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for one, other in zip(gradient, wanted_gradient, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
