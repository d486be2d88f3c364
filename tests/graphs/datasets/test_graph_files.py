import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from pytrees import assert_bitwise_equal

from jmp_train import graphs
from jmp_train.policies.files import DTYPES, SafetensorsFile, write_safetensors

pytestmark = pytest.mark.quick

PLAYS, LIKES = ("user", "plays", "game"), ("user", "likes", "user")


def batch() -> graphs.Graph:
    random = np.random.default_rng(0)

    def one(nodes: int, edges: int) -> graphs.Graph:
        of_nodes = {"h": random.normal(size=(nodes, 3)).astype(jnp.bfloat16), "n": np.arange(nodes, dtype=np.int8)}
        of_edges = {"a/b": random.normal(size=edges).astype(np.float16)}
        ends = random.integers(0, nodes, (2, edges))
        return graphs.from_edges(ends[0], ends[1], nodes, of_nodes, of_edges)

    return graphs.batch([one(3, 7), one(5, 4)], formats=("coo", "csr", "mailbox"))


def hetero() -> graphs.HeteroGraph:
    edges: Any = {PLAYS: ([0, 1, 1], [0, 0, 1]), LIKES: ([0], [1])}
    nodes = {"user": {"h": np.ones((2, 2), np.float16)}}
    return graphs.hetero_from_edges(edges, {"user": 2, "game": 3}, nodes, {PLAYS: {"w": np.ones(3, np.float32)}})


@pytest.fixture(name="file")
def fixture_file(tmp_path: Path) -> Path:
    graphs.save_graphs(tmp_path / "some.safetensors", [batch(), hetero()], {"y": np.array([1, 2], np.int64)})
    return tmp_path / "some.safetensors"


def test_graphs_come_back_bitwise(file: Path) -> None:
    (one, other), labels = graphs.load_graphs(str(file))
    assert_bitwise_equal(one, batch())
    assert_bitwise_equal(other, hetero())
    assert (labels["y"].tolist(), labels["y"].dtype) == ([1, 2], np.int64)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_belongs_to_graphs_and_sorted_edges_alone(tmp_path: Path) -> None:
    theirs = graphs.to_jraph(batch())._replace(globals={"y": jnp.ones((2, 4))})
    several = [graphs.from_jraph(theirs), graphs.from_edges([], [], 0), graphs.rand_graph(9, 40, formats=("csr",))]
    graphs.save_graphs(tmp_path / "some", several)
    found, labels = graphs.load_graphs(tmp_path / "some")
    assert_bitwise_equal(found[:2], several[:2])
    one, other = (cast(graphs.Graph, graph).connections for graph in (found[2], several[2]))
    assert one.ends is None
    assert one.neighbors is not None
    assert other.neighbors is not None
    assert_bitwise_equal(one.neighbors.by_target, other.neighbors.by_target)
    assert labels == {}


def test_some_of_the_graphs(file: Path) -> None:
    for indices in (1, [1], np.array([1])):
        (graph,), labels = graphs.load_graphs(file, indices)
        assert isinstance(graph, graphs.HeteroGraph)
        assert labels["y"].tolist() == [1, 2]
    twice, _ = graphs.load_graphs(file, [1, 0, 1])
    assert [type(graph).__name__ for graph in twice] == ["HeteroGraph", "Graph", "HeteroGraph"]
    with pytest.raises(ValueError, match="has 2 graphs; indices=2"):
        graphs.load_graphs(file, [2])
    with pytest.raises(ValueError, match="indices=-1 must be at least 0"):
        graphs.load_graphs(file, -1)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    graph, file = graphs.rand_graph(3, 4), tmp_path / "some"
    cases: list[tuple[type[Exception], Callable[[], Any], str]] = [
        (TypeError, lambda: graphs.to_jraph(graph), r"graphs\[0\] must be a Graph or a HeteroGraph, got GraphsTuple"),
        (ValueError, lambda: graphs.pad(graph, 5, 8), r"graphs\[0\] is padded: unpad it first"),
        (TypeError, lambda: graph.with_nodes(k=jax.random.split(jax.random.key(0), 3)), r"nodes\['k'\] is"),
        (
            TypeError,
            lambda: graph.with_nodes(**{"a\n": jnp.ones(3)}),
            r"nodes: names must be printable strings, got 'a",
        ),
    ]
    for kind, make, message in cases:
        with pytest.raises(kind, match=message):
            graphs.save_graphs(file, [make()])
    with pytest.raises(TypeError, match=r"graphs\[0\] is traced"):
        jax.jit(lambda graph: graphs.save_graphs(file, graph))(graph)
    with pytest.raises(TypeError, match=r"labels\['y'\] is <U1, which safetensors files cannot store"):
        graphs.save_graphs(file, graph, {"y": np.array(["a"])})
    assert not list(tmp_path.iterdir())


def test_float64_wants_its_switch(tmp_path: Path) -> None:
    file = tmp_path / "some"
    with jax.enable_x64(True):
        graph = graphs.from_edges([0], [1], 2, {"h": np.array([0.1, 0.2])})
        graphs.save_graphs(file, graph)
        assert_bitwise_equal(graphs.load_graphs(file)[0][0], graph)
    with pytest.raises(ValueError, match=r"some: graph 0: nodes\['h'\] is float64, which needs jax_enable_x64"):
        graphs.load_graphs(file)


def rewritten(file: Path, change: Callable[[dict[str, np.ndarray], list[Any]], object], **more: str) -> None:
    """Writes the file again with other arrays and metadata."""
    with safetensors.safe_open(file, framework="numpy") as old:
        metadata = old.metadata()
    arrays, known = safetensors.numpy.load_file(file), json.loads(metadata["graphs"])
    change(arrays, known)
    safetensors.numpy.save_file(arrays, file, {**metadata, "graphs": json.dumps(known), **more})


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, _: a.pop("0/senders"), "graph 0: the array 'senders' is missing"),
        (
            lambda a, _: a.update({"0/n_edge": ids(7, 4).astype(np.int64)}),
            "the array 'n_edge' must be int32 with one axis, got int64 (2,)",
        ),
        (
            lambda a, _: a.update({"0/n_node": ids(4, 5)}),
            "graph 0: nodes['h'] must have 9 rows, one for each of the nodes, got shape (8, 3)",
        ),
        (lambda a, _: a.update({"0/n_node": ids(-1, 9)}), "graph 0: n_node[0]=-1 must be at least 0"),
        (
            lambda a, _: a.update({"0/n_edge": ids(8, 4)}),
            "graph 0: n_edge must have (graphs, edges) = (2, 11), got (2, 12)",
        ),
        (lambda a, _: a.update({"0/n_edge": ids(6, 5)}), "belongs to graph 0 of the batch, but its edge to graph 1"),
        (lambda a, _: a["0/receivers"].__setitem__(3, 8), "graph 0: receivers[3] = 8 is out of range for 8 nodes"),
        (lambda a, _: a.update({"0/extra": ids(1)}), "graph 0: the array 'extra' is not part of the graph"),
        (lambda a, _: a.update({"2/senders": ids(1)}), "the array '2/senders' belongs to none of its 2"),
        (lambda a, _: a["1/senders/0"].__setitem__(0, -1), "senders[0] = -1 of ('user', 'likes', 'user') is negative"),
        (
            lambda _, k: k[1].update(n_node=[["user", 2], ["game", 2**31]]),
            "graph 1: n_node['game']=2147483648 must be at most",
        ),
        (
            lambda _, k: k[1].update(n_node=[["user", 2], ["game", 10**9]]),
            "graph 1: the indices of 1000000002 nodes would take 16000000032 bytes",
        ),
        (lambda _, k: k[1].update(n_node=[["user", 2], ["user", 2]]), "graph 1: the metadata name a type twice"),
        (lambda _, k: k[1].update(edge_types=[["user", "likes"]]), "graph 1: the metadata have no types of edges"),
        (
            lambda _, k: k[0].update(formats=["blob"]),
            "graph 0: formats has 'blob', which is not one of coo, csr, mailbox",
        ),
        (lambda _, k: k[0].update(formats="coo"), "graph 0: the metadata name no formats"),
        (lambda _, k: k[0].update(kind="tree"), "graph 0: the metadata name no kind of graph"),
        (lambda _, k: k.append({}), "graph 2: the metadata name no kind of graph"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(file: Path, change: Any, message: str) -> None:
    rewritten(file, change)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        graphs.load_graphs(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_files_of_others(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for more, message in (
        ({"graphs": "[" * 100_000}, "its metadata on graphs cannot be parsed"),
        ({"graphs": "{}"}, "its metadata on graphs is not a list"),
        ({"format_version": "2"}, "has format_version '2', but this version of jmp_train reads '1'"),
    ):
        file.write_bytes(content)
        rewritten(file, lambda *_: None, **more)
        with pytest.raises(ValueError, match=message):
            graphs.load_graphs(file)
    safetensors.numpy.save_file({"w": ids(1)}, file)
    with pytest.raises(ValueError, match="is not a file of graphs: its format is None, not"):
        graphs.load_graphs(file)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        graphs.load_graphs(tmp_path / "nowhere")


def test_the_format_is_that_of_its_own_package(file: Path) -> None:
    arrays = safetensors.numpy.load_file(file)
    np.testing.assert_array_equal(arrays["0/nodes/h"], batch().nodes["h"])
    every: dict[str, Any] = {stored: np.arange(6).reshape(2, 3).astype(name) for stored, name in DTYPES.items()}
    every |= {"scalar": np.array(2.5, np.float32), "none": np.zeros((0, 4), np.int16), "\N{SNOWMAN}": np.ones(1)}
    for write in (
        write_safetensors,
        lambda path, *arguments: safetensors.numpy.save_file(arguments[0], path, arguments[1]),
    ):
        write(file, every, {"a": "b"})
        assert_bitwise_equal(safetensors.numpy.load_file(file), every)
        with SafetensorsFile(file) as found:
            assert found.metadata == {"a": "b"}
            assert_bitwise_equal({name: found.read(name) for name in found.names}, every)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}, "the array 'a' has the unknown dtype 'F33'"),
        (
            {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
            "the array 'a' has no valid shape or data_offsets",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "has 4 bytes, which does not fit its shape"),
        (
            {"a": {"dtype": "F32", "shape": [2**61, 2**61], "data_offsets": [0, 4]}},
            "has 4 bytes, which does not fit its shape",
        ),
        (
            {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}},
            "its arrays end at byte 3, but the file at byte 4",
        ),
        ({n: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for n in "ab"}, "its arrays overlap"),
        ({"a": [0, 4]}, "the array 'a' has the unknown dtype 'None'"),
        ([], "its header is not a dictionary"),
        ({"__metadata__": {"a": 1}}, "its metadata must map names to texts"),
    ],
)
def test_a_header_that_does_not_fit(file: Path, header: Any, message: str) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0\0\1")
    with pytest.raises(ValueError, match=re.escape("is not a safetensors file, or a damaged one: ")) as caught:
        graphs.load_graphs(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "its header is truncated"),
        (b"\xff" * 64, "its header has 18446744073709551615 bytes, more than the limit of"),
        ((9).to_bytes(8, "little") + b"{}", "its header is truncated"),
        ((2).to_bytes(8, "little") + b"[[", "its header cannot be parsed"),
    ],
)
def test_a_file_of_something_else(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"is not a safetensors file, or a damaged one: {message}"):
        graphs.load_graphs(file)


def test_changed_bytes_are_read_or_refused_by_name(file: Path) -> None:
    """Whatever single byte of the header or of the ids changes, there is a graph whose ids fit, or one error."""
    content, random = file.read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        changed = bytearray(content)
        changed[random.integers(len(content))] = random.integers(256)
        file.write_bytes(changed)
        try:
            (one, _), _ = graphs.load_graphs(file, max_bytes=2**20)
        except ValueError as fault:
            assert str(fault).startswith(str(file))
            assert "\n" not in str(fault)
        else:
            assert isinstance(one, graphs.Graph)
            assert int(one.n_edge.sum()) == one.num_edges
            assert not one.num_edges or 0 <= int(one.senders.min()) <= int(one.senders.max()) < one.num_nodes
