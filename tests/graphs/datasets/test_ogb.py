import functools
import gzip
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reader_faults import fault_of
from table_files import write_tables

from jmp_train.graphs import read_ogb
from jmp_train.graphs.file_formats import csv_tables
from jmp_train.graphs.file_formats.csv_tables import read_csv_table

pytestmark = pytest.mark.quick

EDGES = [[0, 1], [4, 2], [2, 2], [1, 0]]
FILES = {
    "raw/edge": "0,1\n4,2\n2,2\n1,0\n",
    "raw/num-node-list": "5\n",
    "raw/num-edge-list": "4\n",
    "raw/node-feat": "0.5,-1\n1e-3,2\n0,4\n7,8\n9,10\n",
    "raw/node-label": "2\n0\nnan\n0\n3.0\n",
    "raw/edge-feat": "1,2,3\n4,5,6\n7,8,9\n0.5,0,0\n",
    "raw/node_year": "2013\n2014\n2015\n2016\n2017\n",
    "split/time/train": "4\n0\n",
    "split/time/valid": "1\n",
    "split/time/test": "3\n",
}


def write(folder: Path, zipped: bool = True, files: Mapping[str, str] = FILES) -> None:
    write_tables(folder, files, ".csv.gz" if zipped else ".csv")


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    write(tmp_path)
    return tmp_path


fault = functools.partial(fault_of, read_ogb)


@pytest.mark.parametrize("zipped", [True, False])
def test_the_layout(tmp_path: Path, zipped: bool) -> None:
    write(tmp_path, zipped)
    data = read_ogb(str(tmp_path))
    assert np.stack([data.senders, data.receivers], 1).tolist() == EDGES
    features = np.array([[0.5, -1], [1e-3, 2], [0, 4], [7, 8], [9, 10]], np.float32)
    np.testing.assert_array_equal(data.features, features)
    assert (data.labels.tolist(), data.num_classes) == ([2, 0, -1, 0, 3], 4)
    assert (data.train.tolist(), data.validation.tolist()) == ([4, 0], [1])
    assert data.test.tolist() == [3]
    assert data.nodes["year"].tolist() == [2013, 2014, 2015, 2016, 2017]
    assert data.edges["feat"].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [0.5, 0, 0]]
    ids = [data.senders, data.receivers, data.labels, data.train, data.validation, data.test]
    assert {x.dtype.name for x in [*ids, data.nodes["year"]]} == {"int32"}
    assert {x.dtype.name for x in (data.features, data.edges["feat"])} == {"float32"}
    assert all(x.flags.c_contiguous for x in ids)


def test_edges_are_followed_by_their_inverse(folder: Path) -> None:
    data = read_ogb(folder, add_inverse_edge=True)
    # As ogb/io/read_graph_raw.py does it.
    edge = np.array(EDGES).T
    duplicated = np.repeat(edge, 2, axis=1)
    duplicated[0, 1::2] = duplicated[1, 0::2]
    duplicated[1, 1::2] = edge[0]
    np.testing.assert_array_equal(np.stack([data.senders, data.receivers]), duplicated)
    assert data.num_edges == 8
    assert data.edges["feat"][:, 0].tolist() == [1, 1, 4, 4, 7, 7, 0.5, 0.5]


def test_files_that_need_not_be_there(folder: Path) -> None:
    for name in ("edge-feat", "node_year"):
        (folder / f"raw/{name}.csv.gz").unlink()
    data = read_ogb(folder)
    assert (data.nodes, data.edges) == ({}, {})
    write(folder, files={"raw/edge": "", "raw/num-edge-list": "0\n", "split/time/valid": ""})
    data = read_ogb(folder, add_inverse_edge=True)
    assert (data.num_edges, data.senders.dtype, len(data.validation)) == (0, np.int32, 0)


def test_the_split_is_chosen_by_name(folder: Path) -> None:
    (folder / "split/notes.txt").write_text("no folder")
    assert read_ogb(folder, "time").train.tolist() == [4, 0]
    parts = {"train": "1\n", "valid": "0\n", "test": "4\n3\n"}
    write(folder, False, {f"split/random/{name}": ids for name, ids in parts.items()})
    assert read_ogb(folder, "random").test.tolist() == [4, 3]
    are_there = f"must be one of 'random', 'time', the splits in {folder}/split"
    assert fault(folder) == f"split=None {are_there}"
    for other in ("public", "", "../split/time", "notes.txt"):
        assert fault(folder, split=other) == f"split={other!r} {are_there}"


def test_missing_files_are_named_with_their_address(folder: Path) -> None:
    missing = functools.partial(fault, kind=FileNotFoundError)
    address = "OGB's data sets are public in https://ogb.stanford.edu/docs/nodeprop"
    (folder / "split/time/valid.csv.gz").unlink()
    assert missing(folder) == f"data_dir {folder}/split/time lacks valid.csv.gz or valid.csv; {address}"
    shutil.rmtree(folder / "split/time")
    assert missing(folder) == f"split has no split folder; {address}"
    (folder / "raw/edge.csv.gz").unlink()
    (folder / "raw/node-feat.csv.gz").unlink()
    names = "edge.csv.gz or edge.csv, node-feat.csv.gz or node-feat.csv"
    assert missing(folder) == f"data_dir {folder}/raw lacks {names}; {address}"
    assert "nowhere/raw is not a folder; OGB's data sets are" in missing(folder / "nowhere")


def test_the_binary_layout_is_refused(folder: Path) -> None:
    (folder / "raw/data.npz").write_bytes(b"")
    assert fault(folder) == "raw/data.npz is in OGB's binary format (ogbn-papers100M), which is not supported"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raw/edge", "0,1\n4,x\n2,2\n1,0\n", ": row 1, column 1 is 'x', no whole number of int32"),
        ("raw/edge", "0,2147483647\n4,2.5\n2,2\n", ": row 1, column 1 is '2.5', no whole number of int32"),
        ("raw/edge", "0,1\n\n4,2.0\n", ": row 1, column 1 is '2.0', no whole number of int32"),
        ("raw/edge", "0,1\n4,99999999999\n", ": row 1, column 1 is '99999999999', no whole number"),
        ("raw/edge", "0,\x1e1\n4,x\n2,2\n", ": row 1, column 1 is 'x', no whole number of int32"),
        ("raw/edge", "0,1\n4,\n2,2\n1,0\n", ": row 1, column 1 is '', no whole number of int32"),
        ("raw/edge", "0,1\n4,2\n2\n1,0\n", ": row 2 has 1 columns, where those before have 2"),
        ("raw/edge", "0,1\n4,2,2\n1,0\n", ": row 1 has 3 columns, where those before have 2"),
        ("raw/edge", "head,tail\n0,1\n", ": row 0, column 0 is 'head', no whole number of int32"),
        ("raw/edge", "0,1\n4,2\n2,5\n1,0\n", ": row 2, column 1 is 5, but the graph has 5 nodes"),
        ("raw/edge", "0,1\n4,2\n2,2\n-1,0\n", ": row 3, column 0 is -1, but the graph has 5 nodes"),
        ("raw/edge", "0,1\n4,2\n2,2\n", " has 3 rows, but num-edge-list.csv.gz gives 4"),
        ("raw/edge", "", " has 0 rows, but num-edge-list.csv.gz gives 4"),
        ("raw/edge", "0\n4\n2\n1\n", " must have 2 columns, got 1"),
        ("raw/num-node-list", "5\n5\n", " must have one number, that of a single graph, got 2"),
        ("raw/num-node-list", "", " must have one number, that of a single graph, got 0"),
        ("raw/num-node-list", "-5\n", " has a negative number, -5"),
        ("raw/num-edge-list", "x\n", ": row 0, column 0 is 'x', no whole number of int32"),
        ("raw/node-feat", "1\n2\n3\n4\n", " has 4 rows, but num-node-list.csv.gz gives 5"),
        ("raw/node-feat", "1\n2\n3\nnan\n5\n", ": row 3 is not finite"),
        ("raw/node-feat", "1\n2\n1e39\n4\n5\n", ": row 2 is not finite"),
        ("raw/node-feat", "1,2\n3\n", ": row 1 has 1 columns, where those before have 2"),
        ("raw/node-feat", "1\n2 3\n", ": row 1, column 0 is '2 3', no number"),
        ("raw/edge-feat", "1\n2\n3\n", " has 3 rows, but num-edge-list.csv.gz gives 4"),
        ("raw/node-label", "0\n1\n2\n", " has 3 rows, but num-node-list.csv.gz gives 5"),
        ("raw/node-label", "0,1\n" * 5, " has 2 columns: only one label per node is supported"),
        ("raw/node-label", "0\n1\n-1\n0\n3\n", ": row 2 is -1, but must be a whole number from 0 to"),
        ("raw/node-label", "0\n1.5\nnan\n0\n3\n", ": row 1 is 1.5, but must be a whole number from 0 to"),
        ("raw/node-label", "0\n1\n0\ninf\n3\n", ": row 3 is inf, but must be a whole number from 0 to"),
        ("raw/node-label", "0\n1\n0\n1\n3e9\n", ": row 4 is 3e+09, but must be a whole number from 0 to"),
        ("raw/node-label", "nan\n" * 5, " has no label"),
        ("raw/node_year", "2013\n" * 4, " has 4 rows, but num-node-list.csv.gz gives 5"),
        ("raw/node_year", "2013,1\n" * 5, " must have 1 columns, got 2"),
        ("raw/node_year", "2013\nnan\n" * 2 + "0\n", ": row 1 is nan, but must be a whole number from 0 to"),
        ("split/time/train", "4\n5\n", ": row 1, column 0 is 5, but the graph has 5 nodes"),
        ("split/time/train", "4\n0\n4\n", ": row 2 is 4, which is in the split twice"),
        ("split/time/train", "4\n2\n", ": row 1 is 2, which has no label"),
        ("split/time/train", "4,0\n", " must have 1 columns, got 2"),
        ("split/time/train", "", " lists no node"),
        ("split/time/test", "3\n1\n", ": row 1 is 1, which is in the split twice"),
    ],
)  # fmt: skip
def test_faults_are_named(folder: Path, name: str, text: str, message: str) -> None:
    write(folder, files={name: text})
    assert fault(folder).startswith(f"{name}.csv.gz{message}")


@pytest.mark.parametrize("name", FILES)
def test_truncated_files_are_named(folder: Path, name: str) -> None:
    path = folder / f"{name}.csv.gz"
    content = path.read_bytes()
    for length in (1, 5, 10, len(content) // 2, len(content) - 8, len(content) - 1):
        path.write_bytes(content[:length])
        assert fault(folder).startswith(f"{name}.csv.gz is not a gzip file, or a damaged one: ")
    path.write_bytes(b"")  # which gzip reads as nothing
    if name != "split/time/valid":
        assert fault(folder).startswith(f"{name}.csv.gz ")
    path.write_bytes(FILES[name].encode())
    assert fault(folder).startswith(f"{name}.csv.gz is not a gzip file, or a damaged one: Not a gzip")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.float64])
def test_tables_are_read_as_numpy_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, is_named: bool
) -> None:
    """Over more rows than are read at once; also where memory has no name, as but on Linux."""
    if not is_named:
        monkeypatch.setattr(csv_tables, "_memory_file", lambda: None)
    table = (np.random.default_rng(0).normal(size=(60_000, 3)) * 1e6).astype(dtype)
    np.savetxt(tmp_path / "table.csv", table, "%d" if dtype is np.int32 else "%.17g", delimiter=",")
    text = (tmp_path / "table.csv").read_bytes()
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(text, 1))
    for name, rows in (("table.csv", None), ("table.csv", 60_000), ("table.csv.gz", 60_001)):
        read = read_csv_table(tmp_path / name, dtype, rows=rows)
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, table)


def test_rows_are_counted_over_blocks(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for wrong, message in (("1,x", "row 900001, column 1 is 'x', no whole"), ("1", "row 900001 has 1 c")):
        path.write_text("0,1\n\n" * 900_000 + f"1,2\n{wrong}\n")
        with pytest.raises(ValueError, match=f"table.csv: {message}"):
            read_csv_table(path, np.int32)
    path.write_text("0,1\n" * 600_000 + "1,2,3\n" * 10)
    with pytest.raises(ValueError, match=r"table.csv: row 600000 has 3 columns, where those before h"):
        read_csv_table(path, np.int32)


@pytest.mark.parametrize("field", ["1_0", "0x1", '"1"', "1 # one", "1\0", "\u0661", "1;2", "+-1"])
def test_what_only_looks_like_a_number_is_none(tmp_path: Path, field: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"1,2\n3,{field}\n", encoding="utf-8")
    for dtype in (np.int32, np.float64):
        with pytest.raises(ValueError, match=r"table.csv: row 1, column 1 is .*, no .*number"):
            read_csv_table(path, dtype)


def test_ends_of_lines_and_blanks_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(b" 1, -2\r\n\r\n+3,4")
    assert read_csv_table(tmp_path / "table.csv", np.int32).tolist() == [[1, -2], [3, 4]]
