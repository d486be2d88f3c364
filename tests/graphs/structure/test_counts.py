"""Numbers of nodes and edges beyond int32, or that are not integers: refused by name, before memory is taken."""

import builtins
import dataclasses
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest

from jmp_train import graphs
from jmp_train.graphs.structure.csr import from_degrees
from jmp_train.graphs.structure.edge_order import incidence_of

pytestmark = [pytest.mark.quick, pytest.mark.newest]

BEYOND = 2**31
KIND = ("a", "b", "a")
LITTLE = 2**20  # bytes: what refusing may take


def no_memory(call: Callable[[], Any]) -> int:
    """Returns how many bytes were allocated at the most while the call ran."""
    tracemalloc.start()
    try:
        call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def refused(call: Callable[[], Any], error: str) -> None:
    """Asserts that a call takes no memory and raises an error, "ValueError: n_node=-1 must be", which starts so."""
    kind, _, message = error.partition(": ")
    pattern = ".*".join(map(re.escape, message.split(".*")))

    def run() -> None:
        with pytest.raises(getattr(builtins, kind), match=f"^{pattern}"):
            call()

    assert no_memory(run) < LITTLE


def small_graph(nodes: int = 2) -> graphs.Graph:
    return graphs.from_edges([0], [0], nodes, formats=("coo",))


def claiming(num_nodes: int, num_edges: int) -> graphs.Graph:
    """Returns a graph that has so many nodes and edges, in arrays that take no memory."""
    graph = small_graph()
    zero = np.int32(0)
    receivers: Any = dataclasses.replace(
        graph.connections.receivers, rows=np.broadcast_to(zero, num_edges), degrees=np.broadcast_to(zero, num_nodes)
    )
    adjacency = dataclasses.replace(graph.connections, ends=(receivers, receivers))
    return dataclasses.replace(graph, connections=adjacency)


TAKERS: dict[str, Callable[[Any], Any]] = {
    "n_node": lambda n: graphs.from_edges([0], [0], n),
    "n_node=": lambda n: graphs.host_edges([0], [0], n),
    "n_receivers": lambda n: graphs.host_edges([0], [0], 1, n),
    "n_node['a']": lambda n: graphs.hetero_from_edges({KIND: ([0], [0])}, {"a": n}),
    "num_nodes": lambda n: graphs.rand_graph(n, 1),
    "num_edges": lambda n: graphs.rand_graph(1, n),
    "n_node =": lambda n: graphs.pad(small_graph(), n, 4),
    "n_edge": lambda n: graphs.pad(small_graph(), 4, n),
    "n_graph": lambda n: graphs.pad(small_graph(), 4, 4, n),
    "num_segments": lambda n: graphs.segment_sum(np.ones(2, np.float32), np.zeros(2, int), n),
    "batch_size ": lambda n: graphs.neighbor_sampler(graphs.host_edges([0], [0], 1), (1,), [0], batch_size=n),
    "num_trials": lambda n: graphs.neighbor_sampler(graphs.host_edges([0], [0], 1), (1,), [0], 1, num_trials=n),
    "batch_size": lambda n: graphs.layerwise_inference(
        [], graphs.host_edges([0], [0], 1), np.ones((1, 1)), batch_size=n
    ),
    "max_edges": lambda n: graphs.layerwise_inference([], graphs.host_edges([0], [0], 1), np.ones((1, 1)), max_edges=n),
}


LIMITS = ("batch_size", "max_edges")  # of inference: more than there are is all of them


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("name", TAKERS)
def test_counts_beyond_int32_and_what_is_no_count(name: str) -> None:
    take, argument = TAKERS[name], name.rstrip(" =")
    take(4)
    for count in () if name in LIMITS else (BEYOND, 2**40):
        refused(lambda n=count: take(n), f"ValueError: {argument}={count} must be at most 2147483647")
    refused(lambda: take(10**5000), f"ValueError: {argument}=<integer of 16610 bits> must be at most")
    least = 1 if argument in ("batch_size", "max_edges", "num_trials") else 0
    refused(lambda: take(-1), f"ValueError: {argument}=-1 must be at least {least}")
    for wrong in (True, np.True_, 4.0, "4", None, [4]):
        if wrong is not None or argument not in ("n_receivers", "n_graph", "num_segments"):
            refused(lambda n=wrong: take(n), f"TypeError: {argument}=.* must be an integer")


def test_long_values_are_not_echoed() -> None:
    with pytest.raises(TypeError, match=r"^n_node='999") as caught:
        graphs.from_edges([0], [0], "9" * 5000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.uint32])
def test_ids_beyond_int32_are_named_as_they_are(dtype: Any) -> None:
    largest = int(np.iinfo(dtype).max)
    ids = np.array([0, largest], dtype)
    for make in (graphs.from_edges, graphs.host_edges):
        with pytest.raises(ValueError, match=rf"^senders\[1\] = {largest} is out of range for 2 "):
            make(ids, [0, 1], 2)


def test_the_largest_number_of_nodes_is_a_type_of_its_own() -> None:
    """Node types without edges cost nothing, however many nodes they have."""
    graph = graphs.hetero_from_edges({KIND: ([0], [0])}, {"a": 1, "rest": BEYOND - 1})
    assert graph.num_nodes("rest") == BEYOND - 1


MOST = "more than int32's largest number, 2147483647"
MANY = np.broadcast_to(np.int32(0), BEYOND)
NEAR = np.broadcast_to(np.int32(1), 300_000_000)  # 300 million nodes with an edge each, in blocks of 8
REFUSALS: dict[str, Any] = {
    "ValueError: n_node[0]=-1 must be at least 0": lambda: from_jraph([-1, 4]),
    "ValueError: n_node[0]=4294967299 must be at most 2147483647": lambda: from_jraph([2**32 + 3]),
    "ValueError: n_node adds up to 2147483648, but there are 3": lambda: from_jraph([2**30] * 2),
    "ValueError: n_node adds up to 6442450941, but there are 3": lambda: from_jraph([2**31 - 1] * 3),
    "TypeError: n_node must be integers": lambda: from_jraph([3.0]),
    "TypeError: n_node must be integers,": lambda: from_jraph([True]),
    "TypeError: n_node must be integers, got": lambda: from_jraph(None),
    "ValueError: n_node must have one axis": lambda: from_jraph([[3]]),
    "ValueError: n_edge[0]=4294967297 must be at most 2147483647": lambda: from_jraph([3], [2**32 + 1]),
    f"ValueError: n_node adds up to 2147483648, {MOST}": lambda: from_jraph([2**30] * 2, nodes=None),
    f"ValueError: graphs have 2147483648 nodes together, {MOST}": lambda: graphs.batch([claiming(2**30, 1)] * 2),
    "ValueError: graphs have 2147483648 edges together": lambda: graphs.batch([claiming(2, 2**30)] * 2),
    f"ValueError: places of the sorted edges are 2400000000, {MOST}": lambda: from_degrees(
        NEAR, NEAR, NEAR, len(NEAR), is_fixed=True
    ),
    f"ValueError: senders has 2147483648 edges, {MOST}": lambda: graphs.from_edges(MANY, MANY, 1),
    "ValueError: senders has 2147483648 edges, more": lambda: graphs.host_edges(MANY, MANY, 1),
}


def from_jraph(n_node: Any, n_edge: Any = None, **changed: Any) -> graphs.Graph:
    ids, features = np.array([0]), {"h": np.ones((3, 1), np.float32)}
    n_edge = [1] + [0] * (np.size(n_node) - 1) if n_edge is None else n_edge
    counts = [x if x is None else np.asarray(x) for x in (n_node, n_edge)]
    made: Any = jraph.GraphsTuple(features, None, ids, ids, None, *counts)  # pyright: ignore[reportArgumentType]
    return graphs.from_jraph(made._replace(**changed))


@pytest.mark.parametrize("error", REFUSALS)
def test_counts_and_sums_beyond_int32(error: str) -> None:
    refused(REFUSALS[error], error)


@pytest.mark.parametrize("ids", [[True, False], [0.0, 1.0], ["0", "1"], [0, 2**70]])
def test_ids_and_counts_of_another_type(ids: Any) -> None:
    for make in (graphs.from_edges, graphs.host_edges):
        with pytest.raises(TypeError, match=r"^senders must be integers, got"):
            make(ids, [0, 1], 2)
    wrong: list[Any] = [3, ids, None, "a"]
    for n_node in wrong:
        with pytest.raises(TypeError, match=r"^n_node must be a mapping from node types to numbers, got"):
            graphs.hetero_from_edges({KIND: ([0], [0])}, n_node)


def test_blocks_of_edges_beyond_int32() -> None:
    shape = jax.ShapeDtypeStruct((2**26,), jnp.int32)
    with pytest.raises(ValueError, match=r"^blocks of edges are 2149580798, more than int32's largest number"):
        jax.eval_shape(lambda ids: incidence_of(ids, 2**31 - 1), shape)


def test_a_fanout_larger_than_all_degrees_takes_no_memory() -> None:
    edges = graphs.host_edges([1, 2, 0], [0, 0, 1], 3)
    few, many = (graphs.neighbor_sampler(edges, (fanout,), seeds=[0, 1], batch_size=2) for fanout in (2, 10**7))
    random = np.random.default_rng
    wanted = few.sample([0, 1], random(0))
    got: list[Any] = []
    peak = no_memory(lambda: got.append(many.sample([0, 1], random(0))))
    assert peak < LITTLE
    assert got[0].inputs[:3].tolist() == wanted.inputs[:3].tolist()
    with pytest.raises(ValueError, match=r"^fanout=2147483648 must be at most 2147483647"):
        graphs.neighbor_sampler(edges, (2**31,), seeds=[0], batch_size=2)
    for wrong in (True, 2.0, 0):
        with pytest.raises(ValueError, match=r"^fanout .* must be a positive integer"):
            graphs.neighbor_sampler(edges, (wrong,), seeds=[0], batch_size=2)  # type: ignore[arg-type]


def test_honest_numbers_of_any_integer_type() -> None:
    for count in (2, np.int8(2), np.uint64(2), np.array(2), jnp.int32(2)):
        assert graphs.from_edges([0], [1], count).num_nodes == 2  # type: ignore[arg-type]
