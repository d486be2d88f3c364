import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader_faults import fault_of

from jmp_train.graphs import GraphData, read_tu
from jmp_train.policies import CollapsedValuesWarning

pytestmark = pytest.mark.quick

# As the collection spells them: a blank after commas, numbers from 1, classes of any number.
FILES = {
    "A": "1, 2\n2, 1\n4, 5\n3, 3\n5, 4\n5, 6\n",
    "graph_indicator": "1\n1\n2\n3\n3\n3\n",
    "graph_labels": "2\n-1\n2\n",
    "node_labels": "4\n3\n3\n5\n5\n3\n",
    "node_attributes": "0.5, 1\n1, 2\n2, 4e-1\n-3, 0\n7, 7\n8, 9\n",
    "edge_labels": "0, 7\n1, 8\n2, 9\n0, 7\n0, 8\n1, 7\n",
    "edge_attributes": "1.5\n2.5\n3.5\n4.5\n5.5\n6.5\n",
    "graph_attributes": "10\n20\n30\n",
}


def write(folder: Path, files: Mapping[str, str] = FILES, name: str = "TINY") -> None:
    folder.mkdir(exist_ok=True)
    for kind, text in files.items():
        (folder / f"{name}_{kind}.txt").write_text(text)


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


fault = functools.partial(fault_of, read_tu)


def test_the_layout(folder: Path) -> None:
    data = read_tu(str(folder))
    assert (data.n_node.tolist(), data.n_edge.tolist(), len(data)) == ([2, 1, 3], [2, 1, 3], 3)
    # Row 2 belongs to graph 3, row 3 to graph 2: the graphs' edges come to stand together.
    assert (data.senders.tolist(), data.receivers.tolist()) == ([0, 1, 0, 0, 1, 1], [1, 0, 0, 1, 0, 2])
    assert (data.labels.tolist(), data.num_classes) == ([1, 0, 1], 2)
    assert data.nodes["label"].tolist() == [1, 0, 0, 2, 2, 0]
    np.testing.assert_array_equal(data.nodes["attr"][:3], np.array([[0.5, 1], [1, 2], [2, 0.4]], np.float32))
    assert data.edges["label"].tolist() == [[0, 0], [1, 1], [0, 0], [2, 2], [0, 1], [1, 0]]
    assert data.edges["attr"][:, 0].tolist() == [1.5, 2.5, 4.5, 3.5, 5.5, 6.5]
    assert data.graphs["attr"].tolist() == [[10], [20], [30]]
    ids = [data.n_node, data.n_edge, data.senders, data.receivers, data.labels, data.nodes["label"]]
    assert {x.dtype.name for x in [*ids, data.edges["label"]]} == {"int32"}
    assert data.nodes["attr"].dtype == data.edges["attr"].dtype == np.float32
    assert [len(part) for part in (data.train, data.validation, data.test)] == [0, 0, 0]


def test_one_of_the_graphs(folder: Path) -> None:
    data = read_tu(folder)
    graph = data.graph(np.int64(2), formats=("coo", "csr"))
    assert (graph.num_nodes, graph.senders.tolist(), graph.receivers.tolist()) == (3, [0, 1, 1], [1, 0, 2])
    assert graph.nodes["label"].tolist() == [2, 2, 0]
    assert graph.edges["attr"][:, 0].tolist() == [3.5, 5.5, 6.5]
    for place in (3, -1):
        with pytest.raises(IndexError, match=f"place={place} must be from 0 to 2"):
            data.graph(place)


def test_nodes_that_are_not_sorted_by_graph(folder: Path) -> None:
    """The same graphs, whose nodes come in another order; what is read tells no difference but in the order."""
    order = np.array([3, 0, 2, 4, 1, 5])  # keeps the order within each graph
    names = np.argsort(order) + 1
    rows = {kind: np.array(FILES[kind].splitlines()) for kind in ("graph_indicator", "node_labels", "node_attributes")}
    files = {kind: "\n".join(lines[order]) for kind, lines in rows.items()}
    ends = [[int(names[int(i) - 1]) for i in line.split(", ")] for line in FILES["A"].splitlines()]
    write(folder, files | {"A": "".join(f"{u}, {v}\n" for u, v in ends)})
    renamed = read_tu(folder)
    write(folder)
    assert_same(renamed, read_tu(folder))


def assert_same(a: GraphData, b: GraphData) -> None:
    for name in ("n_node", "n_edge", "senders", "receivers", "labels"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for known in ("nodes", "edges"):
        for name, rows in getattr(a, known).items():
            np.testing.assert_array_equal(rows, getattr(b, known)[name])


def test_the_data_set_is_chosen_by_name(tmp_path: Path) -> None:
    write(tmp_path / "TINY")
    assert len(read_tu(tmp_path)) == len(read_tu(tmp_path, "tiny")) == len(read_tu(tmp_path / "TINY", "TINY")) == 3
    write(tmp_path, {**FILES, "graph_labels": "1\n1\n1\n"}, "Other")
    assert read_tu(tmp_path, "OTHER").num_classes == 1
    assert fault(tmp_path) == f"name=None must be one of 'other', 'tiny', the data sets in {tmp_path}"
    public = "the data sets are public in https://chrsmrrs.github.io/datasets"
    missing = functools.partial(fault, tmp_path, kind=FileNotFoundError)
    assert missing(name="MUTAG") == f"data_dir {tmp_path} lacks MUTAG_graph_indicator.txt; {public}"
    (tmp_path / "TINY/TINY_A.txt").unlink()
    assert missing(name="TINY") == f"data_dir {tmp_path}/TINY lacks TINY_A.txt; {public}"
    with pytest.raises(FileNotFoundError, match=r"data_dir nowhere is not a folder; the data sets are public"):
        read_tu("nowhere")
    for name in ("../TINY", "", "*"):
        with pytest.raises(ValueError, match=re.escape(f"name={name!r} is not a valid data set name")):
            read_tu(tmp_path, name)
    wrong: Any
    for wrong in (3, b"TINY", ("TINY",)):
        with pytest.raises(TypeError, match=re.escape(f"name={wrong!r} must be the name of a data set, or None")):
            read_tu(tmp_path, wrong)


def test_without_labels_the_graphs_attributes_are_to_be_predicted(folder: Path) -> None:
    (folder / "TINY_graph_labels.txt").unlink()
    for kind in ("node_labels", "node_attributes", "edge_labels", "edge_attributes"):
        (folder / f"TINY_{kind}.txt").unlink()
    data = read_tu(folder)
    assert (data.labels.tolist(), data.labels.dtype, data.num_classes) == ([[10], [20], [30]], np.float32, None)
    assert (data.nodes, data.edges, data.graphs) == ({}, {}, {})
    write(folder, {"graph_attributes": "1\nnan\n2\n"})
    assert fault(folder) == "TINY_graph_attributes.txt: row 1 is not finite"


@pytest.mark.parametrize(
    ("kind", "text"), [("node_attributes", "0,1\n" * 5 + "0,1700000000123\n"), ("graph_attributes", "0\n5\n-2e9\n")]
)
def test_numbers_that_float32_rounds_are_named_with_their_file(folder: Path, kind: str, text: str) -> None:
    (folder / f"TINY_{kind}.txt").write_text(text)
    (folder / "TINY_graph_labels.txt").unlink()
    column = text.count(",") // text.count("\n")
    with pytest.warns(CollapsedValuesWarning, match=rf"TINY_{kind}.txt: column {column} has numbers up to .*e\+"):
        read_tu(folder)


def test_graphs_without_nodes_and_edges(folder: Path) -> None:
    write(folder, {"graph_labels": "0\n0\n1\n5\n"})
    (folder / "TINY_graph_attributes.txt").unlink()
    data = read_tu(folder)
    assert (data.n_node.tolist(), data.n_edge.tolist(), data.num_classes) == ([2, 1, 3, 0], [2, 1, 3, 0], 3)
    assert data.graph(3).num_nodes == 0
    write(folder, {"A": "", "edge_labels": "", "edge_attributes": ""})
    data = read_tu(folder)
    assert (len(data.senders), data.senders.dtype, data.n_edge.tolist()) == (0, np.int32, [0] * 4)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("A", "1, 2\n0, 1\n", "row 1, column 0 is 0, but the graph has 6 nodes, numbered from 1"),
        ("A", "1, 2\n1, 7\n", "row 1, column 1 is 7, but the graph has 6 nodes, numbered from 1"),
        ("A", "1, 2\n2, 3\n", "row 1 connects graph 1 with graph 2"),
        ("A", "1, 2, 3\n", "must have 2 columns, got 3"),
        ("A", "1, x\n", "row 0, column 1 is ' x', no whole number of int32"),
        ("graph_indicator", "1\n4\n", "row 1, column 0 is 4, but there are 3 graphs, numbered from 1"),
        ("graph_labels", "", "has no labels"),
        ("graph_labels", "1, 2\n", "must have 1 columns, got 2"),
        ("graph_labels", "1\n0.5\n", "row 1, column 0 is '0.5', no whole number of int32"),
        ("node_labels", "1\n" * 5, "has 5 rows, but TINY_graph_indicator.txt gives 6"),
        ("node_labels", "1\n" * 5 + "65537\n", "has labels with a range of 65536, more than the limit of 65535"),
        (
            "node_labels",
            "-2147483648\n" + "2147483647\n" * 5,
            "has labels with a range of 4294967295, more than the limit of 65535",
        ),
        ("node_attributes", "1\n" * 5 + "inf\n", "row 5 is not finite"),
        ("edge_attributes", "1\n" * 7, "has more than the 6 rows given by TINY_A.txt"),
        ("graph_attributes", "1\n", "has 1 rows, but TINY_graph_labels.txt gives 3"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(folder: Path, kind: str, text: str, message: str) -> None:
    write(folder, {kind: text})
    found = fault(folder).removeprefix(f"TINY_{kind}.txt")
    assert found.removeprefix(":").lstrip() == message


def test_the_memory_that_a_file_may_ask_for(folder: Path) -> None:
    assert fault(folder, max_bytes=8) == (
        "TINY_graph_labels.txt: the table would take 12 bytes, more than the limit of 8; raise it with max_bytes="
    )
