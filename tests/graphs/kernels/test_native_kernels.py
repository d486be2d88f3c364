"""Kernels in C++ beside the chunked ones and float64: values, gradients of both orders, transforms, errors."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.kernels import native_calls

pytestmark = [pytest.mark.quick, pytest.mark.newest]

NODES, EDGES, HEADS = 60, 6_000, 2
ROUNDINGS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.fixture(scope="module", name="native")
def fixture_native() -> Callable[[Any], Any]:
    """Returns what runs a function with the native kernels, under jit."""
    with pytest.MonkeyPatch.context() as patch:
        # Kept from run to run, beside the programs that jax compiles.
        patch.setenv("JMP_TRAIN_CACHE", str(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).with_name("native_kernels")))
        native_calls.register_kernels()

    def run(function: Any) -> Any:
        with graphs.native_kernels():
            program = jax.jit(function).lower().compile()
        assert 'custom_call_target="jmp_' in (program.as_text() or "")
        return program()

    return run


def hub_graph() -> graphs.Graph:
    """Returns a graph with a node of 2,000 edges and nodes without any, in no order."""
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, NODES, (2, EDGES))
    receivers[:2_000], senders[2_000:4_000] = 7, 9
    receivers[receivers == 3] = 4
    return graphs.from_edges(senders, receivers, NODES)


def features(graph: graphs.Graph, width: int, dtype: str) -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    shapes = {"x": (NODES, HEADS, width), "y": (NODES, HEADS, width)}
    shapes |= {"w": (graph.num_edges, HEADS, 1), "left": (NODES, HEADS), "right": (NODES, HEADS)}
    return {name: jnp.asarray(random.normal(size=shape), dtype) for name, shape in shapes.items()}


def copy_sum(graph: graphs.Graph, x: jax.Array) -> jax.Array:
    return graphs.update_all(
        graph.with_nodes(x=x), fn.copy_u("x", "m"), fn.mean("m", "r"), implementation="chunked"
    ).nodes["r"]


def weighted_sum(graph: graphs.Graph, x: jax.Array, w: jax.Array) -> jax.Array:
    graph = graph.with_nodes(x=x).with_edges(w=w)
    return graphs.update_all(graph, fn.u_mul_e("x", "w", "m"), fn.sum("m", "r"), implementation="chunked").nodes["r"]


def dot(graph: graphs.Graph, x: jax.Array, y: jax.Array) -> jax.Array:
    graph = graph.with_nodes(x=x, y=y)
    return graphs.apply_edges(graph, fn.u_dot_v("x", "y", "r"), implementation="chunked").edges["r"]


def attention(graph: graphs.Graph, x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
    return graphs.gat_attention(graph, x, left, right, implementation="chunked")


OPERATIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "copy": (copy_sum, ("x",)),
    "weighted": (weighted_sum, ("x", "w")),
    "dot": (dot, ("x", "y")),
    "gat": (attention, ("x", "left", "right")),
}


def value_and_gradients(name: str, graph: graphs.Graph, given: dict[str, jax.Array]) -> Any:
    """Returns the result, and the gradient of the sum of its squares, so that results' own gradients differ."""
    operation, names = OPERATIONS[name]

    def loss(*arguments: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = operation(graph, *arguments)
        return (result.astype("float32") ** 2).mean(), result

    arguments = [given[x] for x in names]
    gradients, result = jax.grad(loss, tuple(range(len(names))), has_aux=True)(*arguments)
    return [result, *gradients]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("width", "dtype"), [(16, "float32"), (7, "float32"), (40, "float16"), (16, "bfloat16")])
def test_results_are_those_of_float64(native: Any, name: str, width: int, dtype: str) -> None:
    graph = hub_graph()
    given = features(graph, width, dtype)
    found = native(lambda: value_and_gradients(name, graph, given))
    with jax.enable_x64(True):
        exact = {key: jnp.asarray(np.asarray(x, "float64")) for key, x in given.items()}
        wanted = jax.jit(lambda: value_and_gradients(name, hub_graph(), exact))()
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == dtype
        x, y = np.asarray(x, "float64"), np.asarray(y)
        assert np.linalg.norm(x - y) <= ROUNDINGS[dtype] * np.linalg.norm(y)


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATIONS)
def test_dropped_edges_do_not_count(native: Any, name: str) -> None:
    graph = graphs.drop_edges(hub_graph(), 0.5, jax.random.key(0))
    given = features(graph, 16, "float32")
    found = native(lambda: value_and_gradients(name, graph, given))
    wanted = jax.jit(lambda: value_and_gradients(name, graph, given))()
    for x, y in zip(found, wanted, strict=True):
        assert np.linalg.norm(x - y) <= 2 * ROUNDINGS["float32"] * np.linalg.norm(y)


def test_sums_do_not_stagnate(native: Any) -> None:
    many = np.zeros(100_000, int)
    graph = graphs.from_edges(many, many, 2)
    found = native(lambda: copy_sum(graph, jnp.full((2, 1, 16), 0.1, "float32")))
    np.testing.assert_allclose(found[0], 0.1, rtol=2e-6)
    assert not found[1].any()


@pytest.mark.full
def test_nan_and_infinities_stay_what_they_are(native: Any) -> None:
    graph = graphs.from_edges([0, 1, 2, 3], [0, 0, 1, 2], 4)
    x = jnp.ones((4, 1, 16))
    left = jnp.array([[0.0], [jnp.nan], [-jnp.inf], [100.0]])
    found = native(lambda: attention(graph, x, left, jnp.zeros((4, 1))))
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1:, 0, 0], [0, 1, 0])


@pytest.mark.full
def test_second_derivatives_are_those_of_the_chunked_kernels(native: Any) -> None:
    graph = hub_graph()
    given = features(graph, 8, "float32")

    def curvature() -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            return (attention(graph, x, given["left"], given["right"]) ** 3).sum()

        return jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(given["x"])

    np.testing.assert_allclose(native(curvature), jax.jit(curvature)(), rtol=2e-3, atol=1e-4)


@pytest.mark.full
def test_vmap_and_shard_map(native: Any) -> None:
    graph = hub_graph()
    given = features(graph, 16, "float32")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.stack([given["x"], given["y"]])

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: (copy_sum(graph, x) ** 2).sum())(x)

    def of_each(x: jax.Array) -> jax.Array:
        return gradient(x[0])[None]

    wanted = np.stack([jax.jit(gradient)(row) for row in x])
    np.testing.assert_allclose(native(lambda: jax.vmap(gradient)(x)), wanted, rtol=1e-5, atol=1e-6)
    sharded = jax.shard_map(of_each, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(native(lambda: sharded(x)), wanted, rtol=1e-5, atol=1e-6)


def test_a_function_under_jit_is_traced_anew_within_and_outside(native: Any) -> None:
    graph = hub_graph()
    summed = jax.jit(lambda x: copy_sum(graph, x))
    x = features(graph, 16, "float32")["x"]
    assert "jmp_weighted_sum" not in summed.lower(x).as_text()
    with graphs.native_kernels():
        assert "jmp_weighted_sum" in summed.lower(x).as_text()
    assert "jmp_weighted_sum" not in summed.lower(x).as_text()


@pytest.mark.full
@pytest.mark.timeout(400)
def test_graphs_whose_index_leaves_were_edited_are_refused_or_computed(native: Any) -> None:
    cache = native_calls.built_library().parent
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[2] / "programs" / "edited_graphs.py"), "5", "120"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JMP_TRAIN_CACHE": str(cache)},
        check=False,
    )
    assert done.returncode == 0, done.stderr  # -11 is a segmentation fault
    outcomes = json.loads(done.stdout)
    assert set(outcomes) == {"sum", "dot", "gat"}
    assert all(found["refused"] > 10 and found["computed"] > 10 for found in outcomes.values())


@pytest.mark.parametrize(
    ("leaf", "edit", "message"),
    [
        ("others", lambda x: x * 2, "an edge ends at none of the 60 nodes"),
        ("others", lambda x: x - 1, "an edge ends at none of the 60 nodes"),
        ("degrees", lambda x: x + 1, "degrees add up to 6060 of 6000 edges"),
        ("degrees", lambda x: -x, "a degree is -"),
    ],
)
def test_an_edited_graph_is_refused_by_what_is_wrong(native: Any, leaf: str, edit: Any, message: str) -> None:
    graph = hub_graph()
    neighbors = graph.connections.neighbors
    assert neighbors is not None
    by_target = dataclasses.replace(neighbors.by_target, **{leaf: edit(getattr(neighbors.by_target, leaf))})
    adjacency = dataclasses.replace(graph.connections, neighbors=dataclasses.replace(neighbors, by_target=by_target))
    x = features(graph, 16, "float32")["x"]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"index arrays are not those .* with: {message}"):
        jax.block_until_ready(native(lambda: copy_sum(dataclasses.replace(graph, connections=adjacency), x)))


def test_a_graph_without_sorted_edges_is_named() -> None:
    graph = graphs.from_edges([0], [1], 2, formats=("coo",))
    with graphs.native_kernels(), pytest.warns(UserWarning, match="native_kernels.. need sorted edges: make the graph"):
        graphs.gat_attention(graph, jnp.ones((2, 1, 4)), jnp.ones((2, 1)), jnp.ones((2, 1)))


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JMP_TRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(RuntimeError, match=r"is not a program: native kernels need a C\+\+ compiler"):
        native_calls.built_library()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="native kernels cannot be compiled: false -O3"):
        native_calls.built_library()
    assert not list(tmp_path.iterdir())
