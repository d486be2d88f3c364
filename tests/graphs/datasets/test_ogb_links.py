import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader_faults import fault_of
from torch_file_bytes import in_a_row, with_tensors, zipped

from jmp_train.graphs import read_ogb_links

pytestmark = pytest.mark.quick

TABLES = {
    "edge": "0,1\n1,2\n3,0\n",
    "num-node-list": "4\n",
    "num-edge-list": "3\n",
    "node-feat": "1,2\n3,4\n5,6\n7,8\n",
    "node_year": "2001\n2002\n2003\n2004\n",
    "edge_weight": "1\n2\n1\n",
    "edge_year": "2010\n2011\n2012\n",
}
PAIRS = {
    "train": {"edge": np.array([[0, 1], [1, 2]]), "weight": np.array([1, 2]), "year": np.array([2010, 2011])},
    "valid": {"edge": np.array([[2, 3]]), "weight": np.array([3]), "edge_neg": np.array([[0, 3], [3, 1], [2, 2]])},
    "test": {"edge": np.array([[3, 3]]), "edge_neg": np.zeros((0, 2), np.int64)},
}
OF_EACH = {"source_node": np.array([3, 1]), "target_node": np.array([0, 2]), "target_node_neg": np.array([[1], [3]])}


def write(folder: Path, made: Callable[[Any], bytes] = zipped) -> None:
    for part in ("raw", "split/time"):
        (folder / part).mkdir(parents=True)
    for name, text in TABLES.items():
        (folder / f"raw/{name}.csv").write_text(text)
    for name, arrays in PAIRS.items():
        (folder / f"split/time/{name}.pt").write_bytes(made(arrays))


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


fault = functools.partial(fault_of, read_ogb_links)


@pytest.mark.parametrize("made", [zipped, in_a_row, with_tensors])
def test_the_layout_of_pairs(tmp_path: Path, made: Callable[[Any], bytes]) -> None:
    write(tmp_path, made)
    data = read_ogb_links(str(tmp_path), "time")
    assert (data.senders.tolist(), data.receivers.tolist(), data.num_nodes) == ([0, 1, 3], [1, 2, 0], 4)
    assert data.nodes["feat"].tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert data.nodes["year"].tolist() == [[2001], [2002], [2003], [2004]]
    assert data.edges["weight"].tolist() == [[1], [2], [1]]
    assert data.edges["year"].tolist() == [[2010], [2011], [2012]]
    train, valid, test = data.train, data.validation, data.test
    assert (train.senders.tolist(), train.receivers.tolist(), len(train.negative_senders)) == ([0, 1], [1, 2], 0)
    assert {name: values.tolist() for name, values in train.values.items()} == {"weight": [1, 2], "year": [2010, 2011]}
    assert (valid.negative_senders.tolist(), valid.negative_receivers.tolist()) == ([0, 3, 2], [3, 1, 2])
    assert (test.senders.tolist(), test.negative_receivers.shape) == ([3], (0,))
    ids = [data.senders, train.senders, train.receivers, valid.negative_senders, valid.negative_receivers]
    assert {array.dtype.name for array in ids} == {"int32"}


def test_the_layout_of_negatives_for_each_link(folder: Path) -> None:
    (folder / "split/time/test.pt").write_bytes(zipped(OF_EACH))
    test = read_ogb_links(folder, add_inverse_edge=True).test
    assert (test.senders.tolist(), test.receivers.tolist()) == ([3, 1], [0, 2])
    assert (test.negative_senders.tolist(), test.negative_receivers.tolist()) == ([[3], [1]], [[1], [3]])


def test_edges_are_followed_by_their_inverse(folder: Path) -> None:
    data = read_ogb_links(folder, add_inverse_edge=True)
    assert (data.senders.tolist(), data.receivers.tolist()) == ([0, 1, 1, 2, 3, 0], [1, 0, 2, 1, 0, 3])
    assert data.edges["weight"].ravel().tolist() == [1, 1, 2, 2, 1, 1]
    assert len(data.train) == 2  # the split is as in the file


def test_missing_files_are_named_with_their_address(folder: Path) -> None:
    address = "OGB's data sets are public in https://ogb.stanford.edu/docs/linkprop"
    (folder / "split/time/valid.pt").unlink()
    assert fault(folder, kind=FileNotFoundError) == f"data_dir {folder}/split/time lacks valid.pt; {address}"
    (folder / "raw/edge.csv").unlink()
    assert "raw lacks edge.csv.gz or edge.csv" in fault(folder, kind=FileNotFoundError)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"head": np.arange(2)}, " must have edge, or source_node and target_node; it has head"),
        ({}, " must have edge, or source_node and target_node; it has nothing"),
        ({"edge": np.array([[0, 4]])}, ": edge has 4, but the graph has 4 nodes"),
        ({"edge": np.array([[0, -1]])}, ": edge has -1, but the graph has 4 nodes"),
        ({"edge": np.array([[0, 2**40]])}, ": edge has 1099511627776, but the graph has 4 nodes"),
        ({"edge": np.array([0, 1])}, ": edge must be integers with 2 axes, got int64 (2,)"),
        ({"edge": np.array([[0.0, 1]])}, ": edge must be integers with 2 axes, got float64 (1, 2)"),
        ({"edge": np.array([[0, 1, 2]])}, ": edge must be pairs of nodes, got shape (1, 3)"),
        ({"edge": np.array([[0, 1]]), "edge_neg": np.array([[9, 0]])}, ": edge_neg has 9, but the graph has 4"),
        ({"edge": np.array([[0, 1]]), "weight": np.ones(2)}, ": weight has shape (2,), but there are 1 links"),
        ({**OF_EACH, "target_node": np.array([1])}, ": target_node has 1 nodes, but source_node has 2"),
        ({**OF_EACH, "target_node_neg": np.array([[1]])}, ": target_node_neg has 1 rows, but source_node has 2"),
        ({"edge": [[0, 1]]}, " holds 'edge', which is not an array"),
        ({"edge": np.array([[0, 1]]), "name": "x"}, " holds 'name', which is not an array"),
        ({"edge": np.array([[0, np.nan]])}, " is not a torch file, or a damaged one: an array has numbers that are"),
        ([1], " is not a torch file, or a damaged one: it must hold a dictionary of arrays"),
        ({"edge": np.array(["a"])}, " is not a torch file, or a damaged one: the dtype of an array is not created"),
        ({"edge": np.zeros((1, 1, 2), np.int64)}, " is not a torch file, or a damaged one: the shape of an array"),
        ({"edges": np.array([[0, 1]])}, " must have edge, or source_node and target_node; it has edges"),
    ],
)  # fmt: skip
def test_splits_that_are_not_of_links_are_named(folder: Path, arrays: Any, message: str) -> None:
    for made in (zipped, in_a_row):
        (folder / "split/time/test.pt").write_bytes(made(arrays))
        assert fault(folder).startswith(f"split/time/test.pt{message}")


def test_large_files_want_an_option(folder: Path) -> None:
    os.truncate(folder / "split/time/test.pt", 2**40)  # with holes
    assert fault(folder).startswith("split/time/test.pt: the file would take")
    assert re.search(r"node-list.csv: the text would take .* more than the limit of 1", fault(folder, max_bytes=1))
    with pytest.raises(ValueError, match="max_bytes=-1 must be at least 0"):
        read_ogb_links(folder, max_bytes=-1)
