import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from reader_faults import fault_of

from jmp_train.graphs import read_reddit

pytestmark = pytest.mark.quick

SENDERS, RECEIVERS = [0, 1, 1, 3, 2], [1, 0, 3, 1, 2]


def write_graph(path: Path, **changed: Any) -> None:
    """Writes the file as scipy does, then with other arrays in place of its own."""
    graph = scipy.sparse.coo_matrix((np.ones(5), (SENDERS, RECEIVERS)), shape=(4, 4))
    scipy.sparse.save_npz(path, graph)
    if changed:
        with np.load(path) as archive:
            np.savez(path, **{**archive, **changed})


def write_data(folder: Path, **changed: Any) -> None:
    features = np.arange(4 * 602.0).reshape(4, 602)
    arrays = {"feature": features, "label": [3, 40, 0, 7], "node_types": [1, 3, 2, 1]} | changed
    np.savez(folder / "reddit_data.npz", **{name: array for name, array in arrays.items() if array is not None})


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    """Files in the layout of the public ones, of 4 nodes."""
    write_graph(tmp_path / "reddit_graph.npz")
    write_data(tmp_path)
    return tmp_path


def fault(folder: Path, **options: Any) -> str:
    return fault_of(read_reddit, folder, **options)


@pytest.mark.parametrize("name", ["reddit_graph.npz", "reddit_self_loop_graph.npz"])
def test_the_files_of_either_archive(folder: Path, name: str) -> None:
    (folder / "reddit_graph.npz").rename(folder / name)
    data = read_reddit(folder)
    assert data.num_nodes == 4
    assert (data.senders.tolist(), data.receivers.tolist()) == (SENDERS, RECEIVERS)
    assert data.labels.tolist() == [3, 40, 0, 7]
    assert (data.train.tolist(), data.validation.tolist()) == ([0, 3], [2])
    assert (data.test.tolist(), data.num_classes) == ([1], 41)
    np.testing.assert_array_equal(data.features, np.arange(4 * 602.0).reshape(4, 602))
    ids = (data.senders, data.receivers, data.labels, data.train, data.validation, data.test)
    assert {x.dtype.name for x in ids} == {"int32"}
    assert data.features.dtype == np.float32


def test_missing_files_are_named_with_their_address(folder: Path) -> None:
    address = "Reddit's two files are public in https://data.dgl.ai/dataset/reddit.zip"
    (folder / "reddit_data.npz").unlink()
    assert fault(folder, kind=FileNotFoundError) == f"data_dir {folder} lacks reddit_data.npz; {address}"
    (folder / "reddit_graph.npz").unlink()
    names = "reddit_graph.npz or reddit_self_loop_graph.npz, reddit_data.npz"
    assert fault(folder, kind=FileNotFoundError) == f"data_dir {folder} lacks {names}; {address}"
    message = fault(folder / "nowhere", kind=FileNotFoundError)
    assert "nowhere is not a folder; Reddit's two files are" in message


@pytest.mark.parametrize("name", ["reddit_graph.npz", "reddit_data.npz"])
def test_damaged_files_are_named(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"<html>no such file</html>"):
        (folder / name).write_bytes(damaged)
        assert fault(folder) == f"{name} is not an npz file, or an incomplete one"
    # A byte of an array is another one: the zip's check sum is wrong.
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        wrong = "col.npy" if name == "reddit_graph.npz" else "label.npy"
        info = archive.getinfo(wrong)
    middle = info.header_offset + 30 + len(wrong) + info.compress_size // 2
    (folder / name).write_bytes(content[:middle] + b"?!?!" + content[middle + 4 :])
    assert fault(folder).startswith(f"{name}: '{wrong[:-4]}' cannot be read: ")


def test_all_nodes_may_have_one_label(folder: Path) -> None:
    write_data(folder, label=[2, 2, 2, 2])
    assert read_reddit(folder).labels.tolist() == [2, 2, 2, 2]


def test_objects_are_not_unpickled(folder: Path) -> None:
    write_data(folder, label=np.array([3, 40, 0, None]))
    assert fault(folder).startswith("reddit_data.npz: 'label' cannot be read: Object arrays cannot")


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        ("data", {"label": None}, " has no 'label', only feature, node_types"),
        ("data", {"label": [1, 2, 3]}, ": 'label' must have shape (4,) for the 4 nodes of reddit_graph.npz, got (3,)"),
        (
            "data",
            {"feature": np.ones((4, 601))},
            ": 'feature' must have shape (4, 602) for the 4 nodes of reddit_graph.npz, got (4, 601)",
        ),
        ("data", {"feature": np.ones((4, 602), int)}, ": 'feature' must be floating, got int64"),
        ("data", {"feature": np.full((4, 602), [[1], [1], [np.nan], [1]])}, ": 'feature' is not finite in row 2"),
        ("data", {"feature": np.full((4, 602), 1e39)}, ": 'feature' is not finite in row 0"),
        ("data", {"label": [0.0, 1.0, 2.0, 3.0]}, ": 'label' must be integers, got float64"),
        ("data", {"label": [0, 41, 2, 3]}, ": 'label': row 1 must be from 0 to 40, got 41"),
        ("data", {"node_types": [1, 2, 3, 0]}, ": 'node_types': row 3 must be from 1 to 3, got 0"),
        ("data", {"node_types": [3, 2, 3, 3]}, ": 'node_types' has no 1 for the train nodes"),
        ("data", {"node_types": [1, 2, 1, 1]}, ": 'node_types' has no 3 for the test nodes"),
        ("graph", {"row": [0, 1, 4, 3, 2]}, ": 'row': row 2 must be from 0 to 3, got 4"),
        ("graph", {"col": [1, -1, 3, 1, 2]}, ": 'col': row 1 must be from 0 to 3, got -1"),
        ("graph", {"row": [0, 1]}, ": 'row' and 'col' must both be [edges], got shapes (2,) and (5,)"),
        ("graph", {"row": np.array(SENDERS, float)}, ": 'row' must be integers, got float64"),
        ("graph", {"shape": [5]}, ": 'shape' must be [nodes, nodes], got [5]"),
        ("graph", {"shape": [4.0, 4.0]}, ": 'shape' must be [nodes, nodes], got [4.0, 4.0]"),
    ],
)
def test_faults_of_the_arrays_are_named(folder: Path, file: str, changed: Any, message: str) -> None:
    if file == "graph":
        write_graph(folder / "reddit_graph.npz", **changed)
    else:
        write_data(folder, **changed)
    assert fault(folder) == f"reddit_{file}.npz{message}"


def test_other_matrices_are_refused(folder: Path) -> None:
    path = folder / "reddit_graph.npz"
    scipy.sparse.save_npz(path, scipy.sparse.csr_matrix(np.eye(4)))
    assert fault(folder) == "reddit_graph.npz has no 'row', only indices, indptr, format, shape, data"
    scipy.sparse.save_npz(path, scipy.sparse.coo_matrix(np.eye(4, 5)))
    assert fault(folder) == "reddit_graph.npz: 'shape' must be [nodes, nodes], got [4, 5]"
