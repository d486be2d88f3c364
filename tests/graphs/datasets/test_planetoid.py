import collections
import pickle
import warnings
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import scipy.sparse
from planetoid_files import pickled, pickled_matrix, write_planetoid
from reader_faults import fault_of

from jmp_train.graphs import NodeData, read_planetoid

pytestmark = pytest.mark.quick

REAL = Path(__file__).resolve().parents[4] / "shared/data/planetoid"

# 12 nodes, 3 classes: 0 to 2 to train on, 7 and 9 to 11 to test on; 8 is in neither allx nor tx.
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 0, 2, 0, 1])
FEATURES = np.random.default_rng(0).integers(0, 3, (12, 5)) * 0.5
NEIGHBORS = {node: [] for node in range(12)} | {0: [1, 4, 1], 1: [0], 2: [2, 11], 7: [9], 10: [3, 2], 11: [2]}
TEST = (10, 7, 11, 9)
SUFFIXES = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> Path:
    write_planetoid(tmp_path, FEATURES, LABELS, NEIGHBORS, 3, TEST, "citeseer")
    return tmp_path


def fault(folder: Path) -> str:
    """Returns the message without the folder and the files' prefix, which it starts with."""
    message = fault_of(read_planetoid, folder, "citeseer")
    assert message.startswith("ind.citeseer.")
    return message.removeprefix("ind.citeseer.")


def as_pickle_reads(path: Path) -> Any:
    """Returns what the standard library reads, with the names in today's places."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name == "_reconstruct":
                return lambda kind, shape, code: np.ndarray.__new__(kind, shape, code)
            return {
                "dtype": np.dtype,
                "ndarray": np.ndarray,
                "csr_matrix": scipy.sparse.csr_matrix,
                "defaultdict": collections.defaultdict,
                "list": list,
            }[name]

    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Unpickler(file, encoding="latin1").load()


def test_the_real_cora() -> None:
    if not REAL.is_dir():
        pytest.skip("../shared/data is not there: Cora's files are not in the project")
    data = read_planetoid(str(REAL))
    assert (data.num_nodes, data.num_edges, data.num_classes) == (2708, 10556, 7)
    assert (data.features.shape, data.features.dtype) == ((2708, 1433), np.float32)
    assert np.bincount(data.labels).tolist() == [351, 217, 418, 818, 426, 298, 180]
    assert np.bincount(data.labels[data.train]).tolist() == [20] * 7
    assert data.train.tolist() == list(range(140))
    assert data.validation.tolist() == list(range(140, 640))
    assert data.test.tolist() == list(range(1708, 2708))
    check_edges(data)
    assert not (data.senders == data.receivers).any()

    files = {suffix: REAL / f"ind.cora.{suffix}" for suffix in SUFFIXES}
    graph = networkx.from_dict_of_lists(as_pickle_reads(files["graph"])).to_directed()
    assert set(graph.edges) == set(zip(data.senders.tolist(), data.receivers.tolist(), strict=True))
    test = [int(line) for line in files["test.index"].read_text().split()]
    for prefix, rows in (("all", slice(1708)), ("", slice(140)), ("t", test)):
        np.testing.assert_array_equal(data.features[rows], as_pickle_reads(files[f"{prefix}x"]).toarray())
        np.testing.assert_array_equal(data.labels[rows], as_pickle_reads(files[f"{prefix}y"]).argmax(1))


def check_edges(data: NodeData) -> None:
    """Each edge is there in both directions and once, sorted by receiver, then sender."""
    keys = data.receivers.astype(np.int64) * data.num_nodes + data.senders
    assert (np.diff(keys) > 0).all()
    reversed_keys = data.senders.astype(np.int64) * data.num_nodes + data.receivers
    np.testing.assert_array_equal(np.sort(reversed_keys), keys)
    ids = (data.senders, data.receivers, data.labels, data.train, data.validation, data.test)
    assert {array.dtype.name for array in ids} == {"int32"}


def test_a_node_of_which_only_the_number_is_known(folder: Path) -> None:
    data = read_planetoid(folder, "citeseer")
    expected, features = LABELS.copy(), FEATURES.copy()
    expected[8], features[8] = -1, 0
    assert data.labels.tolist() == expected.tolist()
    np.testing.assert_array_equal(data.features, features)
    assert data.num_classes == 3
    assert data.train.tolist() == [0, 1, 2]
    assert data.validation.tolist() == [3, 4, 5, 6]
    assert data.test.tolist() == [7, 9, 10, 11]
    # 0-1 is there three times, 2-11 in both directions and 2-2 once: ten edges, sorted, with the self-loop.
    assert data.receivers.tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 7, 9, 10, 10, 11]
    assert data.senders.tolist() == [1, 4, 0, 2, 10, 11, 10, 0, 9, 7, 2, 3, 2]
    check_edges(data)


def test_isolated_nodes_may_be_the_last(tmp_path: Path) -> None:
    write_planetoid(tmp_path, FEATURES, LABELS, NEIGHBORS, 3, (9, 8), "pubmed")
    data = read_planetoid(tmp_path, "pubmed")
    assert data.labels.tolist() == [*LABELS[:10].tolist(), -1, -1]
    assert not data.features[10:].any()


def test_at_most_500_nodes_are_for_validation(tmp_path: Path) -> None:
    neighbors = {node: [] for node in range(700)}
    labels, test = np.arange(700) % 4, range(600, 700)
    write_planetoid(tmp_path, np.ones((700, 2)), labels, neighbors, 4, test)
    assert read_planetoid(tmp_path).validation.tolist() == list(range(4, 504))
    assert read_planetoid(tmp_path).num_edges == 0


@pytest.mark.parametrize("dtype", [">f8", "<f4", "|i1", "<i8", "|b1"])
def test_other_numbers_and_orders_are_read(folder: Path, dtype: str) -> None:
    indptr, indices = (np.array(ids, ">i4") for ids in ([0, 2, 2, 3], [1, 4, 0]))
    features = pickled_matrix((3, 5), indptr, indices, np.ones(3, dtype))
    (folder / "ind.citeseer.x").write_bytes(features)
    (folder / "ind.citeseer.allx").write_bytes(
        pickled_matrix((7, 5), np.r_[indptr, [3] * 4], indices, np.ones(3, dtype))
    )
    labels = np.asfortranarray(np.eye(3)[LABELS[:7]].astype(dtype))
    (folder / "ind.citeseer.ally").write_bytes(pickled(labels))
    data = read_planetoid(folder, "citeseer")
    assert data.labels[:7].tolist() == LABELS[:7].tolist()
    assert data.features.dtype == np.float32
    assert np.argwhere(data.features[:7]).tolist() == [[0, 1], [0, 4], [2, 0]]


def test_missing_files_are_named_with_their_address(folder: Path) -> None:
    address = "Planetoid's files are public in https://github.com/kimiyoung/planetoid/tree/master/data"
    for suffix in ("tx", "test.index"):
        (folder / f"ind.citeseer.{suffix}").unlink()
    found = fault_of(read_planetoid, folder, "citeseer", kind=FileNotFoundError)
    assert found == f"data_dir {folder} lacks ind.citeseer.tx, ind.citeseer.test.index; {address}"
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder; Planetoid's files are"):
        read_planetoid(folder / "nowhere")
    with pytest.raises(ValueError, match="name='core' must be one of 'cora', 'citeseer', 'pubmed'"):
        read_planetoid(folder, "Core")


@pytest.mark.parametrize(
    ("program", "asked"),
    [
        (b"cposix\nsystem\n(U\x0ctouch hackedtR.", "posix system"),
        (b"c__builtin__\neval\n(U\x04exittR.", "__builtin__ eval"),
        (b"cbuiltins\nlist\n.", "builtins list"),
        (b"cnumpy\nload\nU\x01x\x85R.", "numpy load"),
        (b"cnumpy._core.multiarray\n_reconstruct\n.", "numpy._core.multiarray _reconstruct"),
        (b"cnumpy\ndtype.type\n.", "numpy dtype.type"),
        (b"ccollections\nOrderedDict\n)R.", "collections OrderedDict"),
    ],
)
@pytest.mark.parametrize("suffix", ["x", "ally", "graph"])
def test_other_names_are_refused(folder: Path, program: bytes, asked: str, suffix: str) -> None:
    (folder / f"ind.citeseer.{suffix}").write_bytes(b"\x80\x02" + program)
    message = f"{suffix} asks for {asked!r}, which no file of this kind needs; it was not called"
    assert fault(folder) == message
    assert not Path("hacked").exists()


def test_pickles_of_today_are_refused(folder: Path) -> None:
    for protocol in (2, 4, 5):
        content = pickle.dumps(np.eye(7, 3, dtype=np.int32), protocol=protocol)
        (folder / "ind.citeseer.ally").write_bytes(content)
        assert fault(folder).startswith("ally ")


MATRIX, ARRAY = b"cscipy.sparse.csr\ncsr_matrix\n", b"cnumpy.core.multiarray\n_reconstruct\n"
DTYPE, NDARRAY = b"cnumpy\ndtype\n", b"cnumpy\nndarray\n"
INTS = DTYPE + b"U\x02i4K\x00K\x01\x87R(K\x03U\x01<NNNtb"


def array_of(shape: bytes, dtype: bytes = INTS, content: bytes = b"U\x04\0\0\0\0") -> bytes:
    made = ARRAY + NDARRAY + b"K\x00\x85U\x01b\x87R"
    return made + b"(K\x01" + shape + dtype + b"\x89" + content + b"tb"


@pytest.mark.parametrize(
    "program",
    [
        b"N",
        b"]",
        b"",
        b"((",
        b"a",
        b"t",
        b"K\x01K\x02",
        b"h\x07",
        b"K\x01r\xff\xff\xff\xff",  # pickle itself would make room for 2**32 objects
        b"\x8c\x04name",
        b"}(K\x01K\x02K\x03u",
        b"}" + b")\x85" * 3 + b"K\x01s",
        b"})" + b"q\x01h\x01\x86" * 60 + b"K\x01s",  # and would hash 2**60 tuples
        NDARRAY + b"K\x05\x85R",
        DTYPE + b"U\x01O\x85R",
        ARRAY + NDARRAY + b"\x85R",
        ARRAY + b"}U\x01aK\x01sb",
        MATRIX + b"N}U\x03dotK\x01s\x86b",  # and would set an attribute of scipy's class
        MATRIX + b")\x81",
        MATRIX + b")\x81}b",
        MATRIX + b")\x81}(U\x06formatU\x03cooub",
        array_of(b"K\x01\x85", INTS.replace(b"U\x02i4", b"U\x01O")),
        array_of(b"K\x01\x85", INTS.replace(b"i4", b"V4")),
        array_of(b"K\x01\x85", INTS.replace(b"i4", b"m8")),
        array_of(b"K\x01\x85", NDARRAY),
        array_of(b"J\xff\xff\xff\xff\x85"),
        array_of(b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"),
        array_of(b"\x8a\x09\0\0\0\0\0\0\0\0\x01\x85"),
        array_of(b"K\x01K\x01K\x01\x87"),
        array_of(b"U\x01x\x85"),
        array_of(b"K\x01\x85", content=b"X\x06\0\0\0\xe2\x82\xac\0\0\0"),
        array_of(b"K\x01\x85", INTS.replace(b"i4", b"f4"), b"U\x04\0\0\xc0\x7f"),
        array_of(b"K\x01\x85").replace(b"(K\x01", b"(K\x02"),  # of another version
        array_of(b"K\x01\x85").replace(b"\x89", b"K\x07"),  # no word on whether it is by columns
        array_of(b"K\x01\x85").replace(b"U\x01b\x87", b"U\x01c\x87"),
        array_of(b"K\x01\x85", INTS.replace(b"K\x00K\x01\x87", b"K\x00K\x05\x87")),
        array_of(b"K\x01\x85", INTS.replace(b"NNNt", b"NNK\x01t")),
        b"(q\x01K\x01\x85",  # the mark is kept as a value
        b"(\x85",
    ],
)
def test_programs_that_make_no_such_data(folder: Path, program: bytes) -> None:
    for suffix in ("x", "graph", "ty"):
        content = (folder / f"ind.citeseer.{suffix}").read_bytes()
        (folder / f"ind.citeseer.{suffix}").write_bytes(b"\x80\x02" + program + b".")
        assert fault(folder).startswith(f"{suffix} ")
        (folder / f"ind.citeseer.{suffix}").write_bytes(content)
    assert not hasattr(scipy.sparse.csr_matrix, "a")
    scipy.sparse.csr_matrix(np.eye(2)).dot(np.ones(2))


FLOATS = [1.0, 2.0]


@pytest.mark.parametrize(
    ("shape", "indptr", "indices", "data", "message"),
    [
        ((3, 5), [0, 1, 2], [0, 1], FLOATS, "a matrix of shape (3, 5) has indptr, indices and data of shapes (3,),"),
        ((3, 5), [0, 1, 1, 2], [0, 1], [1.0], "a matrix of shape (3, 5) has indptr, indices and data of shapes (4,),"),
        ((3, 5), [0, 2, 1, 2], [0, 1], FLOATS, "the row pointers of a sparse matrix do not fit its 2 values"),
        ((3, 5), [0, 1, 1, 3], [0, 1], FLOATS, "the row pointers of a sparse matrix do not fit its 2 values"),
        ((3, 5), [1, 1, 1, 2], [0, 1], FLOATS, "the row pointers of a sparse matrix do not fit its 2 values"),
        ((3, 5), [0, 1, 1, 2], [0, 5], FLOATS, "a column index of a sparse matrix is out of range for 5"),
        ((3, 5), [0, 1, 1, 2], [-1, 1], FLOATS, "a column index of a sparse matrix is out of range for 5"),
        ((3, 5), [0, 1, 1, 2], [0.0, 1.0], FLOATS, "the indices of a sparse matrix are not integers"),
        ((3, 5), [0, 1, 1, 2], [0, 1], [1.0, np.nan], "an array has numbers that are not finite"),
        ((3, -5), [0, 1, 1, 2], [0, 1], FLOATS, "the shape of an array must be one or two integers of at least 0"),
    ],
)  # fmt: skip
def test_matrices_that_are_none(folder: Path, shape: Any, indptr: Any, indices: Any, data: Any, message: str) -> None:
    arrays = map(np.asarray, (indptr, indices, data))
    (folder / "ind.citeseer.x").write_bytes(pickled_matrix(shape, *arrays))
    assert fault(folder).startswith(f"x is not a pickle of Python 2, or a damaged one: {message}")


def csr(array: Any) -> Any:
    return scipy.sparse.csr_matrix(np.asarray(array))


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("x", np.eye(3), "x must hold a sparse matrix of features"),
        ("x", csr(np.eye(4, 5)), "y must have shape (4, 3) to match x and ally, got (3, 3)"),
        ("x", csr(np.eye(3, 4)), "x has 4 columns, but allx has 5"),
        ("x", csr(np.zeros((3, 0))), "x: features must have at least one row, and 1 to "),
        ("tx", csr(np.ones((0, 5))), "tx: features must have at least one row, and 1 to "),
        ("x", csr(np.full((3, 5), 1e39)), "x has a feature too large for float32"),
        ("tx", csr(np.eye(5, 5)), "ty must have shape (5, 3) to match tx and ally, got (4, 3)"),
        ("ty", np.eye(4, 2), "ty: row 2 is not one-hot"),
        ("ty", np.eye(4, 4), "ty must have shape (4, 3) to match tx and ally, got (4, 4)"),
        ("ally", np.eye(7, 8), "y must have shape (3, 8) to match x and ally, got (3, 3)"),
        ("ally", np.full((7, 3), 0.5), "ally: row 0 is not one-hot"),
        ("y", np.array([0, 1, 2]), "y must hold an array of labels [rows, classes]"),
        ("y", csr(np.eye(3)), "y must hold an array of labels [rows, classes]"),
        ("graph", np.eye(3), "graph must hold a dictionary of the nodes' neighbors"),
        ("graph", {}, "graph must hold a dictionary of the nodes' neighbors"),
        ("graph", {0: [], 2: []}, "graph has 2 nodes, but node 1"),
        ("graph", {0: [], "x": []}, "graph has 2 nodes, but node 1"),
        ("graph", {0: [], 1: [2]}, "graph: the neighbors of node 1 are not a list of numbers from 0 to 1"),
        ("graph", {0: [], 1: [-1]}, "graph: the neighbors of node 1 are not a list of numbers from 0"),
        ("graph", {0: [[]], 1: []}, "graph: the neighbors of node 0 are not a list of numbers from 0"),
        ("graph", {0: 1, 1: []}, "graph: the neighbors of node 0 are not a list of numbers from 0 to 1"),
        ("graph", {n: [] for n in range(10)}, "test.index: row 0 must be from 7 to 9, got '10'"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(folder: Path, suffix: str, value: Any, message: str) -> None:
    (folder / f"ind.citeseer.{suffix}").write_bytes(pickled(value))
    assert fault(folder).startswith(message)


def test_lists_in_common_are_refused(folder: Path) -> None:
    """A few bytes a node would else be as many edges a node as the list is long."""
    first = b"K\x00](K\x01K\x02eq\x01"
    rest = b"".join(b"K" + bytes([node]) + b"h\x01" for node in range(1, 12))
    (folder / "ind.citeseer.graph").write_bytes(b"\x80\x02}(" + first + rest + b"u.")
    assert fault(folder) == "graph: several nodes share one list of neighbors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("10\n7\n11\n", "tx has 4 rows for 3 test nodes"),
        ("10\n7\n11\n6\n", "test.index: row 3 must be from 7 to 11, got '6'"),
        ("10\n7\n12\n9\n", "test.index: row 2 must be from 7 to 11, got '12'"),
        ("10\n-7\n11\n9\n", "test.index: row 1 must be from 7 to 11, got '-7'"),
        ("10\n7.0\n11\n9\n", "test.index: row 1 must be from 7 to 11, got '7.0'"),
        ("10\n7\n" + "9" * 5000, "test.index: row 2 must be from 7 to 11"),
        ("10\n\xe9\n11\n9\n", r"test.index: row 1 must be from 7 to 11, got '\\xc3\\xa9'"),
        ("10\n7\n11\n10\n", "test.index lists a test node twice"),
        ("", "test.index lists no test node"),
    ],
)
def test_faults_of_the_test_ids(folder: Path, content: str, message: str) -> None:
    (folder / "ind.citeseer.test.index").write_text(content, encoding="utf-8")
    assert fault(folder).startswith(message)


def test_more_rows_for_training_than_there_are(folder: Path) -> None:
    (folder / "ind.citeseer.x").write_bytes(pickled(csr(np.ones((8, 5)))))
    (folder / "ind.citeseer.y").write_bytes(pickled(np.eye(3)[np.arange(8) % 3]))
    assert fault(folder) == "x has 8 rows, but allx has only 7"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_files_are_named(folder: Path, suffix: str) -> None:
    path = folder / f"ind.citeseer.{suffix}"
    content = path.read_bytes()
    last = len(content) - (2 if suffix == "test.index" else 1)  # whose last line may lack its end
    for length in {0, 1, 2, len(content) // 3, len(content) // 2, last - 1, last}:
        path.write_bytes(content[:length])
        starts = (suffix, "tx has 4 rows for ") if suffix == "test.index" else suffix
        assert fault(folder).startswith(starts)


def test_the_files_written_here_are_pickles(folder: Path) -> None:
    """The standard library reads from them what was to be written."""
    np.testing.assert_array_equal(as_pickle_reads(folder / "ind.citeseer.tx").toarray(), FEATURES[list(TEST)])
    np.testing.assert_array_equal(as_pickle_reads(folder / "ind.citeseer.ally"), np.eye(3)[LABELS[:7]])
    graph = as_pickle_reads(folder / "ind.citeseer.graph")
    assert (graph, type(graph)) == (NEIGHBORS, collections.defaultdict)
