"""Operations on graphs within a user-defined `shard_map`, each device with a graph and features of its own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import MESSAGES, REDUCERS, make_message
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jmp_train import graphs
from jmp_train.graphs import fn
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS
from jmp_train.policies import pvary

pytestmark = [pytest.mark.quick, pytest.mark.newest]

DEVICES, NODES, EDGES, HEADS, WIDTH = 2, 16, 64, 2, 3
DROPPED = {"dropout_rate": 0.4, "dropout_key": jax.random.key(1)}
Operation = Callable[..., jax.Array]


def two_graphs() -> graphs.GraphStack:
    random = np.random.default_rng(0)
    parts = []
    for count in (9, 13):
        ends = random.integers(0, count, (2, 3 * count))
        graph = graphs.from_edges(ends[0], ends[1], count)
        parts.append(graphs.pad(graph, NODES, EDGES, formats=("coo", "csr")))
    return graphs.stack(parts)


def passed(graph: graphs.Graph, message: Any, reduce: Any, **options: Any) -> jax.Array:
    return graphs.update_all(graph, message, reduce, **options).nodes["x"]


def mean_by_weights(graph: graphs.Graph, h: Any, w: Any, **options: Any) -> jax.Array:
    graph = graph.with_nodes(h=h).with_edges(w=w)
    return passed(graph, fn.u_mul_e("h", "w", "m"), fn.mean("m", "x"), **options)


def copied(graph: graphs.Graph, h: Any, **options: Any) -> jax.Array:
    return passed(graph.with_nodes(h=h), fn.copy_u("h", "m"), fn.sum("m", "x"), **options)


def dot(graph: graphs.Graph, h: Any, g: Any, **options: Any) -> jax.Array:
    graph = graph.with_nodes(h=h, g=g)
    return graphs.apply_edges(graph, fn.u_dot_v("h", "g", "m"), **options).edges["m"]


def gat(graph: graphs.Graph, h: Any, left: Any, w: Any, **options: Any) -> jax.Array:
    return graphs.gat_attention(graph, h, left, -left, edge_weight=w, **DROPPED, **options)


def gatv2(graph: graphs.Graph, h: Any, attention: Any, **options: Any) -> jax.Array:
    return graphs.gatv2_attention(graph, h, 2 * h, attention, **options)


def relational(graph: graphs.Graph, h: Any, bases: Any, coefficients: Any, w: Any, **options: Any) -> jax.Array:
    return graphs.rel_graph_conv(graph, h, TYPES, bases, coefficients, edge_weight=w, **options)


def transformer(graph: graphs.Graph, h: Any, *weights: Any, **options: Any) -> jax.Array:
    return graphs.transformer_conv(graph, h, *weights, num_heads=HEADS, **options)


def per_edge(graph: graphs.Graph, h: Any, w: Any, kernel: Any, **options: Any) -> jax.Array:
    message = graphs.per_edge(lambda edge: {"m": jnp.tanh((edge.src["h"] * edge.data["w"] - edge.dst["h"]) @ kernel)})
    graph = graph.with_nodes(h=h).with_edges(w=w)
    reduce = [fn.sum("m", "x"), fn.max("m", "y"), fn.std("m", "z")]
    nodes = graphs.update_all(graph, message, reduce, **options).nodes
    return nodes["x"] + nodes["y"] + nodes["z"]


TYPES = np.arange(EDGES) % 3
ROWS = (NODES, HEADS, WIDTH)
# Of each, its operation and the shapes of its arrays: the first is a device's own, the others all have.
CASES: dict[str, tuple[Operation, list[tuple[int, ...]]]] = {
    "copy_u": (copied, [ROWS]),
    "u_mul_e": (mean_by_weights, [ROWS, (EDGES, HEADS, 1)]),
    "u_dot_v": (dot, [ROWS, ROWS]),
    "gat": (gat, [ROWS, (NODES, HEADS), (EDGES,)]),
    "gatv2": (gatv2, [ROWS, (HEADS, WIDTH)]),
    "relational": (relational, [(NODES, WIDTH), (2, WIDTH, 4), (3, 2), (EDGES,)]),
    "per_edge": (per_edge, [(NODES, WIDTH), (EDGES, WIDTH), (WIDTH, 4)]),
    "transformer": (transformer, [(NODES, WIDTH), *[(WIDTH, HEADS * 4)] * 3]),
}


def inputs() -> dict[str, tuple[jax.Array, list[jax.Array]]]:
    random = np.random.default_rng(1)
    return {
        name: (
            jnp.asarray(random.normal(size=(DEVICES, *shapes[0])), jnp.float32),
            [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes[1:]],
        )
        for name, (_, shapes) in CASES.items()
    }


def results_and_gradients(graph: graphs.Graph, arrays: Any, implementation: str) -> Any:
    """Returns of each case what comes out, and the gradients of a sum over all of it."""
    found = {}
    for name, (operation, _) in CASES.items():
        run = functools.partial(operation, graph, implementation=implementation)
        own, shared = arrays[name]
        result, pullback = jax.vjp(run, own, *shared)
        of_own, *of_shared = pullback(jnp.sin(result))
        found[name] = (result, of_own), of_shared
    return found


def on_devices(run: Callable[..., Any], in_specs: Any, out_specs: Any, check_vma: bool) -> Any:
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@pytest.mark.full
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_and_gradients_are_those_of_one_device(implementation: str) -> None:
    stacked, arrays = two_graphs(), inputs()
    alone = jax.jit(functools.partial(results_and_gradients, implementation=implementation))

    def on_each(check_vma: bool, stacked: Any, arrays: Any) -> Any:
        own = {name: (rows[0], shared) for name, (rows, shared) in arrays.items()}
        found = results_and_gradients(stacked[0], own, implementation)
        mine = {name: jax.tree.map(lambda x: x[None], x) for name, (x, _) in found.items()}
        total = {name: x for name, (_, x) in found.items()}  # jax adds them up if it checks
        return mine, total if check_vma else jax.lax.psum(total, "data")

    specs = {name: (P("data"), P()) for name in CASES}

    def whole(check_vma: bool) -> Any:
        run = functools.partial(on_each, check_vma)
        return on_devices(run, (P("data"), specs), (P("data"), P()), check_vma)

    jax.eval_shape(whole(check_vma=False), stacked, arrays)
    mine, total = jax.jit(whole(check_vma=True))(stacked, arrays)
    each = [
        alone(stacked[i], {name: (rows[i], shared) for name, (rows, shared) in arrays.items()}) for i in range(DEVICES)
    ]
    for name in CASES:
        wanted = jax.tree.map(lambda *x: np.stack(x), *(part[name][0] for part in each))
        sums = jax.tree.map(lambda *x: sum(x), *(part[name][1] for part in each))
        for found, exact in zip(
            jax.tree.leaves((mine[name], total[name])), jax.tree.leaves((wanted, sums)), strict=True
        ):
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_what_is_the_same_everywhere_stays_so(check_vma: bool, implementation: str) -> None:
    graph = two_graphs()[0]
    arrays = {name: (rows[0], shared) for name, (rows, shared) in inputs().items()}
    run = functools.partial(results_and_gradients, implementation=implementation)
    jax.eval_shape(on_devices(run, P(), P(), check_vma), graph, arrays)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_in_chunks_are_those_of_one_device(name: str) -> None:
    stacked, (own, shared) = two_graphs(), inputs()[name]
    random = np.random.default_rng(2)
    directions = [jnp.asarray(random.normal(size=x.shape), jnp.float32) for x in shared]

    def product(graph: graphs.Graph, rows: jax.Array, shared: list[jax.Array]) -> jax.Array:
        """Returns the derivative by own rows of the gradient's product with some directions."""

        def loss(rows: jax.Array, *shared: jax.Array) -> jax.Array:
            return (CASES[name][0](graph, rows, *shared, implementation="chunked") ** 2).sum()

        def along(rows: jax.Array) -> jax.Array:
            of_rows, *of_shared = jax.grad(loss, argnums=range(1 + len(shared)))(rows, *shared)
            return sum(map(jnp.vdot, of_shared, directions), jnp.vdot(of_rows, jnp.cos(rows)))

        return jax.grad(along)(rows)

    def on_each(stacked: Any, own: jax.Array) -> jax.Array:
        return product(stacked[0], own[0], pvary(shared, ("data",)))[None]

    found = jax.jit(on_devices(on_each, P("data"), P("data"), check_vma=True))(stacked, own)
    one = jax.jit(product)
    for device in range(DEVICES):
        wanted = one(stacked[device], own[device], shared)
        bound = 1e-5 * np.abs(wanted).max()
        np.testing.assert_allclose(found[device], wanted, rtol=1e-5, atol=bound)


def every_operation(graph: graphs.Graph, h: jax.Array) -> list[jax.Array]:
    """Returns what all other operations make of numbers for nodes and edges, by "xla"."""
    w = graphs.gather(h, graph.receivers)
    graph = graph.with_nodes(l=h, r=h).with_edges(l=w, r=w)
    sums = [passed(graph, make_message(message), fn.sum("m", "x"), implementation="xla") for message in MESSAGES]
    kinds = [passed(graph, fn.copy_u("l", "m"), reduce("m", "x")) for reduce in REDUCERS]
    names = ("sum", "mean", "max", "min", "softmax", "normalize")
    segments = [getattr(graphs, f"segment_{name}")(w, graph.receivers, NODES) for name in names]
    pulled = graphs.pull(graph, [0, 1], fn.copy_u("l", "m"), fn.sum("m", "x")).nodes["x"]
    pushed = graphs.push(graph, [0, 1], fn.copy_u("l", "m"), fn.max("m", "x")).nodes["x"]
    return [*sums, *kinds, *segments, pulled, pushed, graphs.edge_softmax(graph, w)]


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_operation_goes_through_shard_map(check_vma: bool) -> None:
    def on_each(stacked: graphs.GraphStack, rows: jax.Array) -> jax.Array:
        def total(h: jax.Array) -> jax.Array:
            return sum(x.sum() for x in every_operation(stacked[0], h))  # pyright: ignore[reportReturnType]

        return jax.grad(total)(rows[0])[None]

    run = on_devices(on_each, P("data"), P("data"), check_vma)
    rows = jnp.ones((DEVICES, NODES, 2))
    assert jax.eval_shape(run, two_graphs(), rows).shape == rows.shape
