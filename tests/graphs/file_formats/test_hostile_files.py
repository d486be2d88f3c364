"""Files of graphs that claim far more than they hold: refused by name, before memory is taken."""

import gzip
import io
import os
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from planetoid_files import pickled, pickled_matrix, write_planetoid
from reader_faults import fault_of
from table_files import write_tables

from jmp_train.graphs import read_ogb, read_planetoid, read_reddit
from jmp_train.graphs.file_formats.file_limits import most_bytes

pytestmark = pytest.mark.quick

LITTLE = 2**26  # bytes: what refusing may take

OGB = {
    "raw/edge": "0,1\n1,2\n",
    "raw/num-node-list": "3\n",
    "raw/num-edge-list": "2\n",
    "raw/node-feat": "0.5,1\n1,2\n2,4\n",
    "raw/node-label": "1\n0\nnan\n",
    "split/time/train": "0\n",
    "split/time/valid": "",
    "split/time/test": "1\n",
}


def write_cora(folder: Path) -> None:
    features, neighbors = np.ones((12, 5)), {node: [] for node in range(12)}
    write_planetoid(folder, features, np.arange(12) % 3, neighbors, 3, (10, 7, 11, 9))


def write_ogb(folder: Path) -> None:
    write_tables(folder, OGB)


def write_reddit(folder: Path, save: Callable[..., None] = np.savez, **arrays: Any) -> None:
    graph = scipy.sparse.coo_matrix((np.ones(2), ([0, 1], [1, 0])), shape=(3, 3))
    scipy.sparse.save_npz(folder / "reddit_graph.npz", graph)
    of_nodes = {"feature": np.ones((3, 602)), "label": [3, 40, 0], "node_types": [1, 2, 3]}
    save(folder / "reddit_data.npz", **{**of_nodes, **arrays})


READERS: dict[str, tuple[Any, Any]] = {
    "planetoid": (write_cora, read_planetoid),
    "ogb": (write_ogb, read_ogb),
    "reddit": (write_reddit, read_reddit),
}


@pytest.fixture(name="folders")
def fixture_folders(tmp_path: Path) -> dict[str, Path]:
    for name, (write, _) in READERS.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    return {name: tmp_path / name for name in READERS}


def refused(folder: Path, **options: Any) -> str:
    """Returns the message, and checks that little memory was taken."""
    tracemalloc.start()
    try:
        message = fault_of(READERS[folder.name][1], folder, **options)
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()
    return message


def test_planetoids_matrices_larger_than_their_file(folders: dict[str, Path]) -> None:
    """8,000 nodes of 65,536 features would take 2 GB; the files have 0.1 MB."""
    folder, nodes, width = folders["planetoid"], 8_000, 2**16
    known, one = nodes - 4, np.ones(1, np.int8)
    for name, rows in (("x", 3), ("allx", known), ("tx", 4)):
        indptr = np.append(np.zeros(rows, np.int8), one)
        matrix = pickled_matrix((rows, width), indptr, np.zeros(1, np.int8), one)
        (folder / f"ind.cora.{name}").write_bytes(matrix)
    labels = np.eye(3, dtype=np.int8)[np.arange(known) % 3]
    (folder / "ind.cora.ally").write_bytes(pickled(labels))
    (folder / "ind.cora.graph").write_bytes(pickled({node: [] for node in range(nodes)}))
    (folder / "ind.cora.test.index").write_text("".join(f"{known + n}\n" for n in range(4)))
    takes = "ind.cora.allx: 8000 rows of 65536 columns would take 2097152000 bytes, more than the "
    assert refused(folder) == f"{takes}limit of 268435456; raise it with max_bytes="
    assert refused(folder, max_bytes=10**9).startswith(f"{takes}limit of 1000000000")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        ("test.index", b"1000000000\n7\n11\n9\n", "row 0 must be from 7 to 11, got '1000000000'"),
        ("test.index", b"7\n" * 10_000, "is too large: it has 20000 bytes, more than the limit of 13312"),
        ("graph", b"\x80\x02}K\x00]sJ\x00\xca\x9a;]s.", "has 2 nodes, but node 1 is missing"),
        (
            "graph",
            b"\x80\x02" + b"]" * 200_000 + b".",
            "is not a pickle of Python 2, or a damaged one: its stack has more",
        ),
        ("x", b"\x80\x02T\xff\xff\xff\x7f", "is not a pickle of Python 2, or a damaged one: expected 21474"),
        ("y", b"\x80\x02I" + b"9" * 10**6 + b"\n.", "is not a pickle of Python 2, or a damaged one: "),
    ],
)
def test_planetoids_files_that_claim_much(folders: dict[str, Path], suffix: str, content: bytes, message: str) -> None:
    (folders["planetoid"] / f"ind.cora.{suffix}").write_bytes(content)
    assert refused(folders["planetoid"]).removeprefix(f"ind.cora.{suffix}").lstrip(": ").startswith(message)


def bomb(line: bytes, size: int = 2**24) -> bytes:
    content = io.BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", mtime=0) as file:
        for _ in range(size // 2**20):
            file.write(line * (2**20 // len(line)))
    return content.getvalue()


TOO_LONG = " has a line of more than 2097152 bytes"


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("raw/node-feat", b"0,", TOO_LONG),
        ("raw/edge", b"1", TOO_LONG),
        ("raw/num-edge-list", b"\0", TOO_LONG),
        ("raw/node-label", b"0\n", ": the table would take 8388608 bytes, more than the limit of 4194304"),
        ("raw/edge", b"0,1\n", ": the table would take 4194304 bytes"),
        ("split/time/valid", b"\n", ": the text would take 6291456 bytes, more than the limit of 4194304"),
    ],
)
def test_gzip_bombs(folders: dict[str, Path], name: str, line: bytes, message: str) -> None:
    """20 KB of gzip, 16 MiB of text, where 4 MiB are allowed."""
    path = folders["ogb"] / f"{name}.csv.gz"
    path.write_bytes(bomb(line))
    assert path.stat().st_size < 20_000
    allowed = 2**22 - 1 if "4194304 bytes" in message else 2**22
    assert refused(folders["ogb"], max_bytes=allowed).startswith(f"{name}.csv.gz{message}")


@pytest.mark.parametrize(
    ("name", "text", "times", "message"),
    [
        # Reading ends with the rows that are expected.
        ("node-label", "0\n", 2**23, "node-label.csv.gz has more than the 3 rows given by num-node-list.csv.gz"),
        ("edge-feat", "0\n", 2**23, "edge-feat.csv.gz has more than the 2 rows given by num-edge-list.csv.gz"),
        ("num-node-list", "2000000000\n", 1, "node-feat.csv.gz has 3 rows, but num-node-list.csv.gz gives 2"),
        ("num-edge-list", "2000000000\n", 1, "edge.csv.gz has 2 rows, but num-edge-list.csv.gz gives 2000"),
        ("num-node-list", "9", 5000, "num-node-list.csv.gz: row 0, column 0 is '9999999999999999999999"),
        ("node-label", "1\n2000000000\n0\n", 1, "node-label.csv.gz: row 1 is 2e+09, but must be a whole number from 0"),
    ],
)
def test_ogbs_files_that_claim_much(folders: dict[str, Path], name: str, text: str, times: int, message: str) -> None:
    (folders["ogb"] / f"raw/{name}.csv.gz").write_bytes(gzip.compress((text * times).encode()))
    assert refused(folders["ogb"]).startswith(f"raw/{message}")


def test_a_gzip_file_of_several_members(folders: dict[str, Path]) -> None:
    path = folders["ogb"] / "raw/node-feat.csv.gz"
    parts = [gzip.compress(part) for part in (b"0.5,", b"", b"1\n1,2\n", b"2,4\n")]
    path.write_bytes(b"".join(parts) + b"\0" * 2**18)
    assert read_ogb(folders["ogb"]).features.tolist() == [[0.5, 1], [1, 2], [2, 4]]
    path.write_bytes(b"".join(parts) + b"more")
    assert refused(folders["ogb"]).startswith("raw/node-feat.csv.gz is not a gzip file, or a damaged ")


def npy(shape: str, descr: str = "'<f4'", order: str = "False", content: int = 64) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 13) % 64) + b"\n"
    return b"\x93NUMPY\x02\0" + len(text).to_bytes(4, "little") + text + b"\0" * content


def with_member(folder: Path, name: str, content: bytes, method: int = zipfile.ZIP_DEFLATED) -> None:
    """Replaces an array of `reddit_data.npz`."""
    path = folder / "reddit_data.npz"
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    members[f"{name}.npy"] = content
    with zipfile.ZipFile(path, "w") as archive:
        for member, array in members.items():
            archive.writestr(member, array, method)


WOULD = "'feature' of shape (1000000000000, 602) would take 2408000000000000 bytes, more than the "
READ = "'feature' cannot be read: "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy("(1000000000000, 602)"), WOULD),
        (npy("(100000, 602)"), READ + "its header gives float32 (100000, 602), 240800000 bytes, but it has"),
        (npy("(3, 602)", content=2**25), READ + "its header gives float32 (3, 602), 7224 bytes, but it has"),
        (npy("(" + "9" * 10**5 + ",)"), READ + "EOF: reading array header, expected "),
        (npy("(" + "9" * 5000 + ",)"), READ),
        (npy("(" + "4294967296, " * 9 + ")"), READ + "its header has an invalid shape"),
        (npy("(-1, 602)"), READ + "its header has an invalid shape"),
        (npy("(18446744073709551616,)"), READ + "its header has an invalid shape"),
        (npy("(1,)", "'|V2147483647'"), "'feature' of shape (1,) would take 2147483647 bytes, more than"),
        (npy("(3, 602)", "'|O'"), READ + "Object arrays cannot be read: they are pickles"),
        (npy("(1,)", "[('a', '<f4'), ('b', 'O')]"), READ + "Object arrays cannot be read: they are pickl"),
        (npy("(1,)").replace(b"NUMPY\x02", b"NUMPY\x03"), READ + "version (3, 0) of its format is unknown"),
        (b"\x93NUMPY\x02\0\xff\xff\xff\x7f" + b" " * 2**25, READ + "EOF: reading array header, expected "),
        (b"", READ),
    ],
)
def test_npz_files_that_claim_much(folders: dict[str, Path], content: bytes, message: str) -> None:
    with_member(folders["reddit"], "feature", content)
    assert refused(folders["reddit"]).startswith(f"reddit_data.npz: {message}")


def test_zip_bombs(folders: dict[str, Path]) -> None:
    content = npy("(2000, 602)", content=2000 * 602 * 4)
    with_member(folders["reddit"], "feature", content)
    assert (folders["reddit"] / "reddit_data.npz").stat().st_size < 15_000
    message = "'feature' of shape (2000, 602) would take 4816000 bytes, more than the "
    assert message in refused(folders["reddit"], max_bytes=2**20)
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):  # which Python inflates without a bound
        with_member(folders["reddit"], "feature", content, method)
        message = f"reddit_data.npz: {READ}it uses a compression method that numpy does not write"
        assert refused(folders["reddit"]) == message


def test_arrays_that_honest_programs_write(tmp_path: Path) -> None:
    """By columns, in other numbers, compressed or not, as Python 2 did."""
    (tmp_path / "reddit").mkdir()
    features = np.arange(3 * 602.0).reshape(3, 602)
    for save in (np.savez, np.savez_compressed):
        for dtype in (np.float64, np.float16, ">f4"):
            write_reddit(tmp_path / "reddit", save, feature=np.asfortranarray(features.astype(dtype)))
            read = read_reddit(tmp_path / "reddit").features
            np.testing.assert_array_equal(read, features.astype(dtype))
    content = npy("(3L, 602L)", content=3 * 602 * 4)
    with_member(tmp_path / "reddit", "feature", content)
    assert read_reddit(tmp_path / "reddit").features.tolist() == np.zeros((3, 602)).tolist()


def test_long_names_and_values_are_not_echoed(folders: dict[str, Path]) -> None:
    folder = folders["reddit"]
    with zipfile.ZipFile(folder / "reddit_graph.npz", "w") as archive:
        for number in range(1000):
            archive.writestr(f"{number}\n{'x' * 99}.npy", npy("(1,)"))
    assert len(refused(folder)) < 300
    arrays = {"row": [0], "col": [0], "shape": [3, 3]}
    for changed in ({"format": "x" * 10**5}, {"shape": np.arange(10**5)}, {"shape": [2**40] * 2}):
        np.savez(folder / "reddit_graph.npz", **{"format": "coo", **arrays, **changed})
        assert len(refused(folder)) < 200


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_missing(folders: dict[str, Path], kind: str, make: Any) -> None:
    folder = folders[kind]
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file()]:
        content = path.read_bytes()
        path.unlink()
        make(path)
        with pytest.raises(FileNotFoundError, match=f"lacks .*{path.name.split('.')[0]}"):
            READERS[kind][1](folder)
        path.rmdir() if make is os.mkdir else path.unlink()
        path.write_bytes(content)


@pytest.mark.skipif(sys.platform != "linux", reason="a file that cannot be read is in /proc")
def test_faults_of_the_system_name_the_file(folders: dict[str, Path]) -> None:
    """/proc/self/mem is a file whose first bytes cannot be read."""
    path = folders["planetoid"] / "ind.cora.test.index"
    path.unlink()
    path.symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=f"^.Errno 5. Input/output error: '{path}'$"):
        read_planetoid(folders["planetoid"])


@pytest.mark.parametrize("kind", READERS)
def test_the_option_is_checked(folders: dict[str, Path], kind: str) -> None:
    read = READERS[kind][1]
    assert read(folders[kind], max_bytes=2**40).num_nodes == read(folders[kind]).num_nodes
    assert "bytes, more than the limit of" in refused(folders[kind], max_bytes=1)
    with pytest.raises(ValueError, match="max_bytes=-1 must be at least 0"):
        read(folders[kind], max_bytes=-1)
    for wrong in (1e9, "1", True):
        with pytest.raises(TypeError, match=r"max_bytes=.* must be an integer"):
            read(folders[kind], max_bytes=wrong)


MB = 10**6


@pytest.mark.parametrize(
    ("name", "needed", "file"),
    [
        # Bytes that arrays take, of public numbers; and of the file, as it is or less than it can be: of
        # numbers without pattern, half of what they take.
        ("cora", 2708 * 1433 * 4, 427_000),
        ("citeseer", 3327 * 3703 * 4, 3327 * 32 * 8),
        ("pubmed", 19_717 * 500 * 4, 19_717 * 50 * 8),
        ("arxiv's features, as text", 169_343 * 128 * 11, 80 * MB),
        ("arxiv's edges, as text", 1_166_243 * 14, 5 * MB),
        ("products' features, as text", 2_449_029 * 100 * 12, 400 * MB),
        ("products' edges, as text", 61_859_140 * 16, 100 * MB),
        ("products' labels, as numbers", 2_449_029 * 8, 0),
        ("products' years, all the same, as text", 2_449_029 * 5, 0),
        ("reddit's features, float64", 232_965 * 602 * 8, 280 * MB),
        ("reddit's edges, int64", 114_615_892 * 2 * 8, 230 * MB),
    ],
)
def test_public_data_sets_are_far_below(tmp_path: Path, name: str, needed: int, file: int) -> None:
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, file)
    assert needed * 4 < most_bytes(None, path), name


def test_sorted_ids_that_compress_far_are_read(tmp_path: Path) -> None:
    """The rows of Reddit's edges ascend: a 500th of them is left; the archive is judged as a whole."""
    rows = np.repeat(np.arange(400, dtype=np.int32), 500)
    path = tmp_path / "rows.npz"
    np.savez_compressed(path, row=rows)
    assert path.stat().st_size * 100 < rows.nbytes
    columns = np.random.default_rng(0).integers(0, 400, len(rows), np.int32)
    np.savez_compressed(path, row=rows, col=columns)
    assert path.stat().st_size * 100 > 10 * (rows.nbytes + columns.nbytes)
