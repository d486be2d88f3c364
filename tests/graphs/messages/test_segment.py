import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest
from graph_helpers import HALVES, assert_within, reduction_magnitudes, softmax_sum
from hypothesis import given, settings
from hypothesis import strategies as st
from promotion import promoting
from pytrees import compiled_vjp

from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = pytest.mark.quick

OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "sum": graphs.segment_sum,
    "mean": graphs.segment_mean,
    "max": graphs.segment_max,
    "min": graphs.segment_min,
    "softmax": graphs.segment_softmax,
    "normalize": graphs.segment_normalize,
    "var": graphs.segment_var,
    "std": graphs.segment_std,
    "softmax_sum": graphs.segment_softmax_sum,
    "cumsum": graphs.segment_cumsum,
}
PEERS = {"sum": jraph.segment_sum, "max": jraph.segment_max, "min": jraph.segment_min}
OF_ROWS = ("softmax", "normalize", "cumsum")  # the others are of segments
SEGMENTS = 4  # the last of them without rows


def draw_rows(degree: int, kind: str, half: str, seed: int) -> tuple[jax.Array, np.ndarray]:
    """Returns half rows [.., 2] and their segments, of which one has `degree` rows."""
    random = np.random.default_rng(seed)
    ids = np.repeat(np.arange(3), [degree, 7, 40]).astype(np.int32)
    random.shuffle(ids)
    shape = (len(ids), 2)
    values = {
        "uniform": random.uniform(0, 1, shape),
        "normal": random.normal(size=shape),
        "equal": np.full(shape, 0.1),
        "of many sizes": random.normal(size=shape) * 2.0 ** random.integers(-12, 3, shape),
    }[kind]
    return jnp.asarray(values, half), ids


def in_float64(op: str, rows: Any, ids: np.ndarray) -> np.ndarray:
    """Returns the result in float64, by numpy."""
    rows = np.asarray(rows, np.float64)
    parts = [rows[ids == i] for i in range(SEGMENTS)]
    if op in ("sum", "mean"):
        sums = np.stack([part.sum(0) for part in parts])
        sizes = np.array([max(len(part), 1) for part in parts])[:, None]
        return sums if op == "sum" else sums / sizes
    if op in ("max", "min"):
        empty = -np.inf if op == "max" else np.inf
        return np.stack([getattr(part, op)(0, initial=empty) for part in parts])
    if op in ("var", "std", "softmax_sum"):
        reduce = softmax_sum if op == "softmax_sum" else lambda part: getattr(part, op)(0)
        return np.stack([reduce(part) if len(part) else np.zeros(rows.shape[1]) for part in parts])
    out = np.zeros_like(rows)
    for i, part in enumerate(parts):
        if op == "cumsum":
            out[ids == i] = part.cumsum(0)
        elif op == "softmax":
            part = np.exp(part - part.max(0, initial=-np.inf))
            out[ids == i] = part / part.sum(0)
        elif len(part):
            std = np.sqrt(np.maximum(part.var(0), 1e-8))
            out[ids == i] = (part - part.mean(0)) / std
    return out


kinds = st.sampled_from(["uniform", "normal", "equal", "of many sizes"])
degrees = st.sampled_from([1, 2, 300, 1_023, 1_025, 2_049, 13_161, 100_000])
seeds = st.integers(0, 99)


def checks(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, derandomize=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "var", "std", "softmax_sum", "cumsum"])
@checks(4)
@given(degree=degrees, kind=kinds, seed=seeds)
def test_reductions_are_exact(op: str, half: str, degree: int, kind: str, seed: int) -> None:
    rows, ids = draw_rows(degree, kind, half, seed)
    actual = jax.jit(OPERATIONS[op], static_argnums=2)(rows, ids, SEGMENTS)
    assert actual.dtype == half
    sizes = np.abs(np.asarray(rows, np.float64))
    if op in ("var", "std", "softmax_sum"):
        magnitudes = reduction_magnitudes(sizes, ids, SEGMENTS, op.removesuffix("_sum"))
    else:
        magnitudes = in_float64(op, sizes, ids)
    magnitudes = np.where(np.isfinite(magnitudes), np.abs(magnitudes), 0)
    assert_within(actual, in_float64(op, rows, ids), half, magnitudes, 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("half", HALVES)
@checks(3)
@given(degree=degrees, kind=kinds, seed=seeds)
def test_softmax_is_exact(half: str, degree: int, kind: str, seed: int) -> None:
    rows, ids = draw_rows(degree, kind, half, seed)
    given_grads, _ = draw_rows(degree, "normal", half, seed + 1)
    softmax = lambda x: graphs.segment_softmax(x, ids, SEGMENTS)
    actual, (actual_grads,) = compiled_vjp(softmax, given_grads, rows)
    exact = in_float64("softmax", rows, ids)
    assert_within(actual, exact, half, exact, 2)

    grads = np.asarray(given_grads, np.float64)
    products = exact * grads
    totals = in_float64("sum", products, ids)[ids]
    magnitudes = exact * (np.abs(grads) + in_float64("sum", np.abs(products), ids)[ids])
    assert_within(actual_grads, products - exact * totals, half, magnitudes, 2)


@pytest.mark.parametrize("rows", [8, 80], ids=["one block", "three blocks"])
@pytest.mark.parametrize("center", [-1000, 1000])
def test_softmax_of_logits_whose_powers_are_beyond_float32(rows: int, center: int) -> None:
    logits = np.float32(np.random.default_rng(0).normal(center, 1, rows))
    powers = np.exp(logits.astype(np.float64) - center)
    weights = jax.jit(graphs.segment_softmax, static_argnums=2)(logits, np.zeros(rows, np.int32), 1)
    np.testing.assert_allclose(weights, powers / powers.sum(), rtol=1e-5)


@pytest.mark.parametrize("half", HALVES)
def test_sums_means_and_gradients_of_gathers_are_rounded_once(half: str) -> None:
    large = [1024, *31 * [0.3]]  # a block, whose sum in half loses what the next one's leaves
    rows, ids = jnp.asarray([*large, -1024, *large[1:]], half), np.zeros(64, np.int32)
    exact = np.asarray(rows, np.float64).sum()

    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        many = jnp.full(64, 6e4, half)  # which add up to more than float16 has
        return graphs.gather(x, ids), graphs.segment_sum(rows, ids, 1), graphs.segment_mean(many, ids, 1)

    (_, total, mean), (grads,) = compiled_vjp(run, (rows, *2 * [np.zeros(1, half)]), np.ones(1, half))
    assert float(total[0]) == float(grads[0]) == float(np.asarray(exact, half))
    assert float(mean[0]) == float(jnp.asarray(6e4, half))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rows", [5, 3_000])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "softmax", "normalize"])
def test_equal_to_jraph_in_float32(name: str, rows: int) -> None:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, 3)), jnp.float32)
    ids = jnp.sort(jnp.asarray(random.integers(0, 4, rows), jnp.int32))
    expected = promoting(getattr(jraph, f"segment_{name}"))(x, ids, SEGMENTS)
    for is_sorted in (False, True):
        run = functools.partial(OPERATIONS[name], indices_are_sorted=is_sorted)
        actual = jax.jit(run, static_argnums=2)(x, ids, SEGMENTS)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [6, 2_006])
def test_rows_out_of_range_count_nowhere(rows: int) -> None:
    ids = np.concatenate([[-1, 4, 0, 1, 1, 99], np.full(rows - 6, 2)]).astype(np.int32)

    def results(x: jax.Array, nodes: jax.Array) -> dict[str, jax.Array]:
        return {
            "sum": graphs.segment_sum(x, ids, 4),
            "mean": graphs.segment_mean(x, ids, 4),
            "max": graphs.segment_max(x, ids, 4)[3],
            "softmax": graphs.segment_softmax(x, ids, 4)[:6],
            "gather": graphs.gather(nodes, ids)[:6],
            "gradient": jax.grad(lambda y: graphs.gather(y, ids).sum())(nodes),
        }

    found = jax.jit(results)(np.full(rows, 2.0, np.float16), np.ones(4, np.float16))
    assert {name: value.tolist() for name, value in found.items()} == {
        "sum": [2, 4, 2 * (rows - 6), 0],
        "mean": [2, 2, 2 * (rows > 6), 0],
        "max": -np.inf,
        "softmax": [0, 0, 1, 0.5, 0.5, 0],
        "gather": [0, 0, 1, 1, 1, 0],
        "gradient": [1, 2, rows - 6, 0],
    }


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["int32", "uint32", "float32", "complex64"])
def test_other_types_keep_theirs(dtype: str) -> None:
    x = jnp.asarray(np.arange(6), dtype)
    ids = np.array([0, 0, 1, 1, 1, 1], np.uint8)
    out, read = jax.jit(lambda x: (graphs.segment_sum(x, ids, 2), graphs.gather(x, np.array([3]))))(x)
    assert (out.dtype, out.tolist()) == (dtype, [1, 14])
    assert (read.dtype, read.tolist()) == (dtype, [3])


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATIONS)
def test_under_every_transform(name: str) -> None:
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 3, 1_500), jnp.int32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 1_500)), jnp.float32)

    def fn(x: jax.Array) -> jax.Array:
        return OPERATIONS[name](x, ids, 3)

    each = jnp.stack([jax.jit(fn)(row) for row in x])
    np.testing.assert_allclose(jax.jit(jax.vmap(fn))(x), each, rtol=1e-5, atol=1e-6)
    _, tangent = jax.jit(lambda x, t: jax.jvp(fn, (x,), (t,)))(x[0], x[1])
    _, (cotangent,) = compiled_vjp(fn, each[1], x[0])
    np.testing.assert_allclose(jnp.vdot(tangent, each[1]), jnp.vdot(cotangent, x[1]), rtol=1e-3)
    again = jax.jit(fn)(x[0])
    assert (again == jax.jit(fn)(x[0])).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_rows_and_no_segments(name: str) -> None:
    @jax.jit
    def run() -> list[jax.Array]:
        none = OPERATIONS[name](jnp.zeros((0, 2), jnp.float16), jnp.zeros(0, jnp.int32), 3)
        nowhere = graphs.segment_sum(jnp.zeros((2_000, 2)), jnp.zeros(2_000, jnp.int32), 0)
        return [none, nowhere, graphs.gather(jnp.zeros((0, 2)), jnp.zeros(3, jnp.int32))]

    none, nowhere, read = run()
    assert none.shape == ((0, 2) if name in OF_ROWS else (3, 2))
    assert nowhere.shape == (0, 2)
    assert read.tolist() == [[0, 0]] * 3


def test_wrong_arguments_are_named() -> None:
    x = jnp.ones((3, 2))
    with pytest.raises(TypeError, match="segment_ids must be integers, got float32"):
        graphs.segment_sum(x, jnp.ones(3), 2)
    with pytest.raises(
        ValueError, match=r"data and segment_ids must have the same number of rows, got shapes \(3, 2\) and \(4,\)"
    ):
        graphs.segment_mean(x, jnp.zeros(4, jnp.int32), 2)
    with pytest.raises(ValueError, match=r"segment_ids must have one axis, got shape \(3, 1\)"):
        graphs.segment_max(x, jnp.zeros((3, 1), jnp.int32), 2)
    with pytest.raises(TypeError, match=r"num_segments=2\.5 must be an integer"):
        graphs.segment_min(x, jnp.zeros(3, jnp.int32), 2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num_segments=-1 must be at least 0"):
        graphs.segment_softmax(x, jnp.zeros(3, jnp.int32), -1)
    with pytest.raises(TypeError, match="indices must be integers, got bool"):
        graphs.gather(x, jnp.zeros(3, bool))
    with pytest.raises(ValueError, match="data must have rows, got a scalar"):
        graphs.gather(jnp.float32(1), jnp.zeros(3, jnp.int32))


def test_gather_reads_by_indices_of_any_shape() -> None:
    data, read = np.arange(6, dtype="float16").reshape(3, 2), np.zeros((1_000, 5), np.int32)  # 5,000 reads of one row
    indices = (np.array([[2, 0], [-1, 2]]), 1, np.zeros((0, 4), np.int32))

    @jax.jit
    def run(data: jax.Array) -> Any:
        grads = jax.grad(lambda x: graphs.gather(x, read).sum(dtype="float32"))(jnp.ones((1, 2), "float16"))
        return [graphs.gather(data, each) for each in indices], grads

    (some, one, none), grads = run(data)
    np.testing.assert_array_equal(some, [[[4, 5], [0, 1]], [[0, 0], [4, 5]]])
    assert one.tolist() == [2, 3]
    assert none.shape == (0, 4, 2)
    assert (grads.dtype, grads.tolist()) == (jnp.float16, [[5_000, 5_000]])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "int32"])
def test_integers_do_not_overflow_and_their_means_are_floats(dtype: str) -> None:
    random = np.random.default_rng(0)
    rows = random.integers(0, 2 if dtype == "bool" else 100, (600, 2)).astype(dtype)
    ids = random.integers(0, 2, 600)
    parts = [rows[ids == segment].astype(np.float64) for segment in (0, 1)]
    operations = (*OPERATIONS.values(), lambda rows, *_: jnp.sum(rows))
    found = jax.jit(lambda rows: [operation(rows, ids, 2) for operation in operations])(rows)
    total, mean, largest, _, weights, scaled, _, std, summed, running, plain = found
    assert running.dtype == total.dtype
    np.testing.assert_array_equal(running[ids == 0], parts[0].cumsum(0))
    np.testing.assert_allclose(std, [part.std(0) for part in parts], rtol=1e-5)
    np.testing.assert_allclose(summed, [softmax_sum(part) for part in parts], rtol=1e-5)
    assert total.dtype == plain.dtype
    np.testing.assert_array_equal(total, [part.sum(0) for part in parts])
    np.testing.assert_allclose(mean, [part.mean(0) for part in parts], rtol=1e-6)
    powers = np.exp(rows - rows.max(0).astype(np.float64))
    sizes = np.stack([powers[ids == segment].sum(0) for segment in (0, 1)])
    np.testing.assert_allclose(weights, powers / sizes[ids], rtol=1e-5, atol=1e-7)
    wanted = np.concatenate([(part - part.mean(0)) / part.std(0) for part in parts])
    np.testing.assert_allclose(scaled[np.argsort(ids, kind="stable")], wanted, rtol=1e-3, atol=1e-5)
    assert {x.dtype.name for x in (mean, weights, scaled, std, summed)} == {"float32"}
    assert largest.dtype == dtype


@pytest.mark.full
def test_segments_without_rows_have_what_jraph_gives_them_and_nodes_without_messages_have_zeros() -> None:
    graph = graphs.from_edges([0, 0], [1, 1], 3)  # nothing enters nodes 0 and 2
    pair = graphs.batch([graph, graphs.from_edges([], [], 0)])
    ids, rows = jnp.array([1, 1]), {"float32": np.array([-2, -3], np.float32), "int32": np.array([-2, -3], np.int32)}
    names = ("sum", "mean", "max", "min", "var", "std", "softmax_sum")

    @jax.jit
    def of_segments(rows: dict[str, jax.Array]) -> Any:
        ours = {(name, op): OPERATIONS[op](x, ids, 3) for name, x in rows.items() for op in names}
        places = [find(rows["int32"], ids, 3) for find in (graphs.segment_argmax, graphs.segment_argmin)]
        moments = graphs.segment_moments(rows["float32"], ids, 3)
        peers = {(name, op): PEERS[op](x, ids, 3) for name, x in rows.items() for op in PEERS}
        return ours, [*moments], places, peers

    @jax.jit
    def of_nodes(rows: dict[str, jax.Array]) -> Any:
        reductions = [getattr(fn, name.replace("softmax_sum", "softmax"))("m", name) for name in names]
        found = {}
        for name, x in rows.items():
            passed = graphs.update_all(graph.with_edges(m=x), fn.copy_e("m", "m"), reductions)
            found |= {(name, op): passed.nodes[op] for op in names}
        most = [f(pair, x) for x in rows.values() for f in (graphs.max_edges, graphs.min_edges)]
        return found, most

    ours, moments, places, peers = of_segments(rows)
    for key, wanted in peers.items():
        np.testing.assert_array_equal(ours[key], wanted)
    limits = np.iinfo(np.int32)
    neutral = {
        ("float32", "max"): -np.inf, ("float32", "min"): np.inf,
        ("int32", "max"): limits.min, ("int32", "min"): limits.max,
    }  # fmt: skip
    for key, found in ours.items():
        assert (np.asarray(found)[[0, 2]] == neutral.get(key, 0)).all(), key
    assert all(not np.asarray(x)[[0, 2]].any() for x in moments)
    assert all((np.asarray(x)[[0, 2]] == -1).all() for x in places)
    of_messages, of_graphs = of_nodes(rows)
    for key, found in of_messages.items():
        assert not np.asarray(found)[[0, 2]].any(), key
        np.testing.assert_array_equal(found[1], ours[key][1])
    assert [x.tolist() for x in of_graphs] == [[-2, 0], [-3, 0]] * 2


STATISTICS = [graphs.segment_var, graphs.segment_std, graphs.segment_softmax, graphs.segment_softmax_sum]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("function", [graphs.segment_normalize, graphs.segment_sum, graphs.segment_max, *STATISTICS])
def test_what_is_in_no_segment_has_no_say(function: Callable[..., jax.Array]) -> None:
    data, ids = jnp.array([[1.0], [4.0], [jnp.nan], [jnp.inf]]), jnp.array([0, 0, -1, 2])

    def run(data: jax.Array, ids: jax.Array) -> jax.Array:
        return function(data, ids, 1)

    (found, (gradient,)), (wanted, (exact,)) = (
        compiled_vjp(
            lambda x, count=count: run(x, ids[:count])[:2] ** 2, jnp.ones_like(run(data, ids)[:2]), data[:count]
        )
        for count in (4, 2)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.concatenate([exact, np.zeros((2, 1))]), rtol=1e-6, atol=1e-6)
    assert not np.asarray(run(data, ids)[2:]).any()


def test_a_temperature_has_no_gradient_of_what_is_in_no_segment() -> None:
    data, ids = jnp.array([1.0, 4.0, jnp.nan]), jnp.array([0, 0, -1])
    slope = jax.grad(lambda t, count: graphs.segment_softmax_sum(data[:count], ids[:count], 1, t)[0])
    with_more, without = jax.jit(lambda t: [slope(t, count) for count in (3, 2)])(1.0)
    assert with_more == without


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "max_or_constant", "min_or_constant", "softmax"])
def test_the_number_of_segments_is_found_outside_of_jit_as_by_jraph(name: str) -> None:
    ours, theirs = (getattr(module, f"segment_{name}") for module in (graphs, jraph))
    data, ids = jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 3, 0])
    np.testing.assert_allclose(ours(data, ids), theirs(data, ids), rtol=1e-6)
    with pytest.raises(TypeError, match="segment_ids is traced: num_segments=None is for code outside of jit"):
        jax.jit(ours)(data, ids)


@pytest.mark.full
def test_extremes_of_no_rows_may_be_a_constant() -> None:
    data, ids = jnp.array([-3, -1, -2], jnp.float16), jnp.array([0, 3, 0])
    for name in ("max", "min"):
        ours, theirs = (getattr(module, f"segment_{name}_or_constant") for module in (graphs, jraph))
        found = ours(data, ids, 5, constant=7.0)
        assert found.dtype == "float16"
        assert found.tolist() == theirs(data, ids, 5, constant=7.0).tolist()
    slope = jax.grad(lambda x: (graphs.segment_max_or_constant(x, ids, 5) ** 2).sum())(data)
    assert slope.tolist() == [0, -2, -4]


@pytest.mark.full
def test_a_scalar_is_a_segment() -> None:
    for function in (graphs.segment_softmax, graphs.segment_normalize):
        assert function(jnp.float32(3), jnp.int32(0), 1).shape == ()
    assert graphs.segment_softmax(jnp.float32(3), jnp.int32(0), 1) == 1
    assert graphs.segment_sum(jnp.float32(3), jnp.int32(1), 2).tolist() == [0, 3]
