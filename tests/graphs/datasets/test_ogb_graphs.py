import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_faults import fault_of
from table_files import write_tables

from jmp_train.graphs import read_ogb_graphs

pytestmark = pytest.mark.quick

FILES = {
    "raw/edge": "0,1\n0,0\n2,1\n0,2\n",
    "raw/num-node-list": "2\n1\n3\n",
    "raw/num-edge-list": "1\n1\n2\n",
    "raw/node-feat": "6,0\n7,1\n6,4\n8,0\n6,0\n16777215,2\n",
    "raw/edge-feat": "0\n1\n2.5\n3\n",
    "raw/graph-label": "1\n0\n1.0\n",
    "split/scaffold/train": "2\n0\n",
    "split/scaffold/valid": "",
    "split/scaffold/test": "1\n",
}


def write(folder: Path, files: Mapping[str, str] = FILES) -> None:
    write_tables(folder, files)


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


def test_the_layout(folder: Path) -> None:
    data = read_ogb_graphs(str(folder), "scaffold")
    assert (data.n_node.tolist(), data.n_edge.tolist()) == ([2, 1, 3], [1, 1, 2])
    assert (data.senders.tolist(), data.receivers.tolist()) == ([0, 0, 2, 0], [1, 0, 1, 2])
    assert (data.labels.tolist(), data.labels.dtype, data.num_classes) == ([1, 0, 1], np.int32, 2)
    assert data.nodes["feat"].tolist() == [[6, 0], [7, 1], [6, 4], [8, 0], [6, 0], [16777215, 2]]
    assert data.nodes["feat"].dtype == np.int32
    assert data.edges["feat"].tolist() == [[0], [1], [2.5], [3]]
    assert data.edges["feat"].dtype == np.float32
    assert (data.train.tolist(), data.validation.tolist(), data.test.tolist()) == ([2, 0], [], [1])
    last = data.graph(2)
    assert (last.num_nodes, last.senders.tolist(), last.receivers.tolist()) == (3, [2, 0], [1, 2])


def test_edges_are_followed_by_their_inverse(folder: Path) -> None:
    data = read_ogb_graphs(folder, add_inverse_edge=True)
    assert data.n_edge.tolist() == [2, 2, 4]
    assert data.senders.tolist() == [0, 1, 0, 0, 2, 1, 0, 2]
    assert data.receivers.tolist() == [1, 0, 0, 0, 1, 2, 2, 0]
    assert data.edges["feat"].ravel().tolist() == [0, 0, 1, 1, 2.5, 2.5, 3, 3]
    assert data.graph(1).senders.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("1,nan\n0,1\nnan,0\n", [[1, np.nan], [0, 1], [np.nan, 0]]),  # several tasks
        ("0.5\n-1\n2\n", [[0.5], [-1], [2]]),  # a number to be predicted
        ("1\nnan\n0\n", [[1], [np.nan], [0]]),
        ("1\n65536\n0\n", [[1], [65536], [0]]),  # sizes no model
    ],
)
def test_labels_that_are_no_classes(folder: Path, text: str, labels: list[list[float]]) -> None:
    write(folder, {"raw/graph-label": text})
    data = read_ogb_graphs(folder)
    assert data.num_classes is None
    np.testing.assert_array_equal(data.labels, np.array(labels, np.float32))
    assert data.labels.dtype == np.float32


def test_features_need_not_be_there(folder: Path) -> None:
    for name in ("node-feat", "edge-feat"):
        (folder / f"raw/{name}.csv.gz").unlink()
    data = read_ogb_graphs(folder, add_inverse_edge=True)
    assert (data.nodes, data.edges, len(data)) == ({}, {}, 3)


def test_missing_files_are_named_with_their_address(folder: Path) -> None:
    (folder / "raw/graph-label.csv.gz").unlink()
    message = fault_of(read_ogb_graphs, folder, kind=FileNotFoundError)
    address = "OGB's data sets are public in https://ogb.stanford.edu/docs/graphprop"
    assert message == f"data_dir {folder}/raw lacks graph-label.csv.gz or graph-label.csv; {address}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raw/edge", "0,1\n0,1\n2,1\n0,2\n", ": row 1, column 1 is 1, but graph 1 has 1 nodes"),
        ("raw/edge", "0,1\n0,0\n-1,1\n0,2\n", ": row 2, column 0 is -1, but graph 2 has 3 nodes"),
        ("raw/edge", "0,1\n0,0\n", " has 2 rows, but num-edge-list.csv.gz gives 4"),
        ("raw/edge", "", " has 0 rows, but num-edge-list.csv.gz gives 4"),
        ("raw/edge", "0\n0\n0\n0\n", " must have 2 columns, got 1"),
        ("raw/num-node-list", "2\n1\n", " has 2 graphs, but num-edge-list has 3"),
        ("raw/num-node-list", "2\n-1\n3\n", " has a negative number, -1"),
        ("raw/num-node-list", "2,1\n1,1\n3,1\n", " must have 1 columns, got 2"),
        ("raw/num-edge-list", "1\n1\n2147483647\n", "raw/edge.csv.gz has 4 rows, but num-edge-list.csv.gz gives 2"),
        ("raw/node-feat", "1\n2\n", " has 2 rows, but num-node-list.csv.gz gives 6"),
        ("raw/node-feat", "1\n2\n3\nnan\n5\n6\n", ": row 3 is not finite"),
        ("raw/edge-feat", "1\n2\n3\n4\n5\n6\n", " has more than the 4 rows given by num-edge-list.csv.gz"),
        ("raw/graph-label", "1\n0\n", " has 2 rows, but num-node-list.csv.gz gives 3"),
        ("raw/graph-label", "nan\nnan\nnan\n", " has no label"),
        ("raw/graph-label", "1\ninf\n0\n", ": row 1 is infinite"),
        ("raw/graph-label", "1\nx\n0\n", ": row 1, column 0 is 'x', no number"),
        ("split/scaffold/train", "3\n", ": row 0, column 0 is 3, but there are 3 graphs"),
        ("split/scaffold/train", "0\n0\n", ": row 1 is 0, which is in the split twice"),
        ("split/scaffold/test", "2\n", ": row 0 is 2, which is in the split twice"),
        ("split/scaffold/test", "", " lists no graph"),
    ],
)  # fmt: skip
def test_faults_are_named(folder: Path, name: str, text: str, message: str) -> None:
    write(folder, {name: text})
    wanted = message if message.startswith("raw/") else f"{name}.csv.gz{message}"
    assert fault_of(read_ogb_graphs, folder).startswith(wanted)


@pytest.mark.parametrize("name", sorted(FILES))
def test_files_that_claim_much_are_refused(folder: Path, name: str) -> None:
    (folder / f"{name}.csv.gz").write_bytes(gzip.compress(b"1" * 2**22))
    with pytest.raises(ValueError, match=f"{name}.csv.gz has a line of more than 2097152 bytes"):
        read_ogb_graphs(folder)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_changed_bytes_never_make_graphs_of_other_shapes(tmp_path_factory: Any, data: Any) -> None:
    folder = tmp_path_factory.mktemp("files")
    write(folder)
    path = folder / f"{data.draw(st.sampled_from(sorted(FILES)))}.csv.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    for _ in range(data.draw(st.integers(1, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(gzip.compress(bytes(content)))
    try:
        read = read_ogb_graphs(folder)
    except ValueError as error:
        assert str(error).startswith(str(folder))
        assert "\n" not in str(error)
        return
    assert len(read) == len(read.n_edge) == len(read.labels)
    assert (read.n_node.sum(), read.n_edge.sum()) == (len(read.nodes["feat"]), len(read.edges["feat"]))
    largest = np.repeat(read.n_node, read.n_edge)
    for ids in (read.senders, read.receivers):
        assert ((ids >= 0) & (ids < largest)).all()
    chosen = np.concatenate([read.train, read.validation, read.test])
    assert len(set(chosen.tolist())) == len(chosen)
    assert set(chosen.tolist()) <= set(range(len(read)))
