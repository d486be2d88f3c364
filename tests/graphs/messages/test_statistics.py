"""Variances, softmax aggregation, places and running sums: what half gets wrong by hand, and where nothing varies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from graph_helpers import ONE_HALF, reduce_in_jax
from pytrees import compiled_vjp
from refusals import assert_refused

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = pytest.mark.quick

COPY = fn.copy_u("h", "m")


def hub(half: str, edges: int = 5_000) -> tuple[graphs.Graph, np.ndarray]:
    """Returns a star into node 0 of numbers about 30 with a standard deviation of 0.2, and these."""
    h = jnp.asarray(np.random.default_rng(0).normal(30, 0.2, (edges + 1, 1)), half)
    return graphs.from_edges(np.arange(1, edges + 1), np.zeros(edges, int), edges + 1, {"h": h}), np.asarray(h, float)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
@pytest.mark.parametrize("half", ONE_HALF)
def test_the_std_that_cancels_by_hand(half: str, implementation: str) -> None:
    graph, h = hub(half)
    reductions = (*fn.moments("m", "mean", "var"), fn.std("m", "std"))
    run = jax.jit(lambda graph: graphs.update_all(graph, COPY, reductions, implementation=implementation).nodes)
    found, eps = run(graph), float(jnp.finfo(half).eps)
    for name in ("mean", "var", "std"):
        assert float(found[name][0, 0]) == pytest.approx(getattr(h[1:], name)(), rel=eps)
    squares = jax.jit(lambda rows: graphs.segment_mean(rows**2, graph.receivers, 1))(graph.nodes["h"][1:])
    assert abs(float(squares[0, 0] - found["mean"][0, 0] ** 2) - h[1:].var()) > 0.03  # of a variance of 0.04


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_no_edge_a_single_one_and_equal_ones(implementation: str) -> None:
    senders, receivers = [0, 0, 1, 2, 0, 1], [1, 2, 2, 2, 3, 3]  # of node 3 equal, of node 2 not
    graph = graphs.from_edges(senders, receivers, 4)
    reductions = [fn.var("m", "var"), fn.std("m", "std"), fn.softmax("m", "softmax"), fn.mean("m", "mean")]

    def run(h: jax.Array) -> dict[str, jax.Array]:
        nodes = graphs.update_all(graph.with_nodes(h=h), COPY, reductions, implementation=implementation).nodes
        return {name: nodes[name] for name in ("var", "std", "softmax", "mean")}

    cotangent = {name: jnp.array([1, 1, 0, 1], jnp.float16) for name in ("var", "std", "softmax", "mean")}
    result, (grads,) = compiled_vjp(run, cotangent, jnp.array([3, 3, 7, 9], jnp.float16))
    assert result["var"].tolist() == [0, 0, pytest.approx(32 / 9, rel=1e-3), 0]
    assert result["std"].tolist() == [0, 0, pytest.approx(32**0.5 / 3, rel=1e-3), 0]
    assert result["softmax"].tolist() == [0, 3, pytest.approx((6 + 7 * np.e**4) / (2 + np.e**4), rel=1e-3), 3]
    assert grads.tolist() == [3, 1, 0, 0]  # of the mean and of softmax aggregation, and nothing of the std


def test_infinities_and_padding_reach_no_other_node() -> None:
    graph = graphs.from_edges([0, 1, 1], [1, 2, 2], 3, nodes={"h": jnp.array([jnp.inf, 2, 5])})
    reductions = [fn.std("m", "std"), fn.softmax("m", "x"), fn.argmax("m", "edge")]
    for formats, implementation in ((("coo",), None), (("csr",), "chunked")):
        some = reductions[: 3 if implementation is None else 2]
        padded = graphs.pad(graph, 8, 16, formats=formats)
        run = functools.partial(graphs.update_all, message=COPY, reduce=some, implementation=implementation)
        found = jax.jit(run)(padded).nodes
        assert np.isnan(found["std"][1]) and found["std"][2:].tolist() == [0] * 6
        assert found["x"][2:].tolist() == [2, *[0] * 5]
        if implementation is None:
            assert found["edge"].tolist() == [-1, 0, 1, *[-1] * 5]


@pytest.mark.full
def test_several_reductions_of_own_messages_and_of_some_edges() -> None:
    graph = graphs.from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
    wanted = {"most": [2, 0, 1], "edge": [2, -1, 1], "std": [0, 0, 0.5]}
    reductions = [fn.max("m", "most"), fn.argmax("m", "edge"), fn.std("m", "std")]
    for message in (COPY, lambda edges: {"m": edges.src["h"]}):
        found = graphs.update_all(graph, message, reductions)
        assert {name: found.nodes[name].tolist() for name in wanted} == wanted
        pulled = graphs.pull(graph, [2], message, reductions)
        assert pulled.nodes["edge"].tolist() == [0, 0, 1]
    two = graphs.update_all(
        graph,
        lambda edges: {"m": edges.src["h"], "n": -edges.src["h"]},
        [fn.sum("m", "x"), fn.min("n", "y"), fn.argmin("n", "z")],
    )
    assert (two.nodes["x"].tolist(), two.nodes["y"].tolist()) == ([2, 0, 1], [-2, 0, -1])
    assert two.nodes["z"].tolist() == [2, -1, 1]


def test_over_edge_types() -> None:
    follows, plays = ("user", "follows", "user"), ("game", "played", "user")
    graph = graphs.hetero_from_edges(
        {follows: ([0, 1], [1, 1]), plays: ([0, 0, 1], [0, 1, 1])},
        {"user": 2, "game": 2},
        nodes={"user": {"h": jnp.array([-1.0, -21.0])}, "game": {"h": jnp.array([-7.0, 8.0])}},
    )
    both = [fn.std("m", "std"), fn.max("m", "most")]
    found = graphs.multi_update_all(graph, {follows: (COPY, both), plays: (COPY, both)}, "max").nodes["user"]
    assert (found["std"].tolist(), found["most"].tolist()) == ([0, 10], [-7, 8])
    with pytest.raises(ValueError, match="built-in messages with sum, max or min"):
        graphs.update_all(graph, COPY, fn.std("m", "x"))


@pytest.mark.parametrize("half", ONE_HALF)
def test_running_sums_do_not_stagnate_and_neither_do_their_gradients(half: str) -> None:
    ids = jnp.asarray(np.random.default_rng(0).permutation(np.repeat([0, 1, 5], [6_000, 3, 9])))
    ones = jnp.ones((len(ids), 1), half)
    eps = float(jnp.finfo(half).eps)
    found, (grads,) = compiled_vjp(lambda rows: graphs.segment_cumsum(rows, ids, 2), ones, ones)
    for segment, count in ((0, 6_000), (1, 3)):
        exact = np.arange(1, count + 1)
        for array, wanted in ((found, exact), (grads, exact[::-1])):
            array = np.asarray(array[ids == segment, 0], float)
            np.testing.assert_allclose(array, wanted, rtol=eps)
    assert not np.asarray(found[ids == 5]).any() and not np.asarray(grads[ids == 5]).any()


def test_running_sums_in_both_directions_with_and_without_the_row() -> None:
    rows, ids = jnp.array([1, 2, 4, 8, 16], jnp.int8), jnp.array([0, 1, 0, 7, 0])
    ways = [(reverse, exclusive) for reverse in (False, True) for exclusive in (False, True)]

    @jax.jit
    def run(rows: jax.Array) -> list[jax.Array]:
        return [graphs.segment_cumsum(rows, ids, 2, reverse=back, exclusive=without) for back, without in ways]

    assert dict(zip(ways, (found.tolist() for found in run(rows)), strict=True)) == {
        (False, False): [1, 2, 5, 0, 21],
        (False, True): [0, 0, 1, 0, 5],
        (True, False): [21, 2, 20, 0, 16],
        (True, True): [20, 0, 16, 0, 0],
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "bool"])
def test_places_are_those_of_numpy(dtype: str) -> None:
    random = np.random.default_rng(0)
    rows, ids = random.integers(0, 2 if dtype == "bool" else 5, (60, 3)).astype(dtype), random.integers(-1, 6, 60)
    if dtype.startswith("float"):
        rows[4] = np.nan

    @jax.jit
    def run(rows: jax.Array) -> list[jax.Array]:
        most, least = (f(rows, ids, 7) for f in (graphs.segment_argmax, graphs.segment_argmin))
        return [most, least, graphs.gather(rows, most[:, 0])]

    most, least, read = run(rows)
    assert most.dtype == least.dtype == "int32"
    for segment in range(6):
        mine = np.flatnonzero(ids == segment)
        np.testing.assert_array_equal(most[segment], mine[rows[mine].argmax(0)])
        np.testing.assert_array_equal(least[segment], mine[rows[mine].argmin(0)])
    assert most[6].tolist() == least[6].tolist() == [-1] * 3
    assert read[6].tolist() == [0] * 3  # what no row is reads as 0


def test_a_temperature_has_a_gradient_and_is_checked() -> None:
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        rows, ids = jnp.asarray(random.normal(size=(80, 3))), jnp.asarray(random.integers(0, 4, 80))

        def ours(temperature: jax.Array) -> jax.Array:
            return graphs.segment_softmax_sum(rows, ids, 4, temperature)

        def plain(temperature: jax.Array) -> jax.Array:
            powers = jnp.exp(rows * temperature)
            return reduce_in_jax(powers * rows, ids, 4, "sum") / reduce_in_jax(powers, ids, 4, "sum")

        temperature, cotangent = jnp.array([0.1, 1.0, -3.0]), jnp.asarray(random.normal(size=(4, 3)))
        wanted, found = (compiled_vjp(f, cotangent, temperature) for f in (plain, ours))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9), found, wanted)
    with pytest.raises(TypeError, match=r"temperature must be a number, got '2'"):
        fn.softmax("m", "x", "2")  # pyright: ignore[reportArgumentType]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("implementation", ["xla", "chunked"])
def test_autocast_stores_in_half_and_computes_in_float32(implementation: str) -> None:
    graph, h = hub("float16")
    reductions: list[Any] = [fn.std("m", "x"), fn.softmax("m", "y"), fn.argmax("m", "z")]
    reductions = reductions[: 2 if implementation == "chunked" else 3]

    @jax.jit
    @jt.autocast
    def run(h: jax.Array) -> list[jax.Array]:
        nodes = graphs.update_all(graph.with_nodes(h=h), COPY, reductions, implementation=implementation).nodes
        return [nodes[reduce.out] for reduce in reductions]

    std, mixed, *places = run(jnp.asarray(h, jnp.float32))
    assert std.dtype == mixed.dtype == "float16" and all(x.dtype == "int32" for x in places)
    assert float(std[0, 0]) == pytest.approx(h[1:].std(), rel=1e-3)


def test_wrong_reductions_are_named() -> None:
    graph, _ = hub("float16", 3)
    whole_numbers = graph.with_nodes(h=jnp.arange(graph.num_nodes))
    reduced = functools.partial(graphs.update_all, graph, COPY)
    x, wrong = fn.sum("m", "x"), "results of reduce must have different names, got"
    refusals = {
        f"ValueError: {wrong} ['x', 'x']": lambda: reduced([x, fn.std("m", "x")]),
        f"ValueError: {wrong} []": lambda: reduced([]),
        "TypeError: reduce[1] must be a reduction": lambda: reduced([x, fn.std]),  # pyright: ignore[reportArgumentType]
        "ValueError: returns the message 'm', but std needs 'n'": lambda: reduced([x, fn.std("n", "y")]),
        "ValueError: std needs the message 'n'; there are: 'm'": lambda: graphs.update_all(
            graph, lambda edges: {"m": edges.src["h"]}, [fn.std("n", "y")]
        ),
        "ValueError: reduces messages of floats of one precision; these are others": lambda: graphs.update_all(
            whole_numbers, COPY, fn.argmax("m", "x"), implementation="chunked"
        ),
    }
    assert_refused(refusals)
