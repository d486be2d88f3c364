from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jmp_train as jt

pytestmark = [pytest.mark.quick, pytest.mark.newest]

FLOATS = [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.complex64]
arrays = hnp.arrays(np.float32, hnp.array_shapes(min_side=0, max_side=4), elements=st.floats(width=32))


# --- all_finite -------------------------------------------------------------------------------


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(st.lists(arrays, max_size=3))
def test_it_agrees_with_numpy(leaves: list[np.ndarray]) -> None:
    expected = all(np.isfinite(x).all() for x in leaves)
    assert bool(jt.all_finite(leaves)) == expected
    assert bool(jt.all_finite([jnp.asarray(x) for x in leaves])) == expected


def test_every_dtype_is_looked_at() -> None:
    good = {dtype.__name__: np.ones(3, dtype) for dtype in FLOATS}
    bads = [np.inf, -np.inf, np.nan]
    with np.errstate(invalid="ignore"):  # of float8, which has no infinity
        trees = [{**good, name: np.array([1, bad, 1]).astype(x.dtype)} for name, x in good.items() for bad in bads]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), good, *trees)
    assert jax.jit(jax.vmap(jt.all_finite))(stacked).tolist() == [True] + [False] * len(trees)
    assert bool(jt.all_finite(good))
    assert not bool(jt.all_finite(trees[0]))


def test_what_is_not_a_float_is_finite() -> None:
    tree = {
        "int": jnp.arange(2), "key": jax.random.key(0), "none": None, "fn": len, "str": "nan",
        "float0": np.zeros(2, jax.dtypes.float0), "python": 3,
    }  # fmt: skip
    for nothing in (tree, {}, None, [jnp.ones(0)]):
        result = jt.all_finite(nothing)
        assert isinstance(result, jax.Array) and result.dtype == bool and bool(result)
    assert not bool(jt.all_finite((1.0, float("nan"))))
    assert not bool(jt.all_finite(np.float32(np.inf)))


def over_devices(way: str, axes: dict[str, int]) -> Any:
    """Returns x [8] -> the answer of each of eight devices [8]."""
    names = tuple(axes)

    def answer(x: jax.Array) -> jax.Array:
        return jt.all_finite({"x": x, "w": jnp.ones(2)}, names)[None]

    if way == "pmap":
        return jax.pmap(answer, axis_name=names[0])
    if way == "vmap":
        return jax.jit(jax.vmap(answer, axis_name=names[0]))
    mesh, spec = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), names), P(names)
    varying = lambda x: jt.policies.pvary(answer(x), names)
    return jax.jit(jax.shard_map(varying, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=way == "vma"))


@pytest.mark.parametrize("way", ["vma", "no vma", "pmap", "vmap"])
def test_all_devices_get_the_same_answer(way: str) -> None:
    run = over_devices(way, {"data": 8})
    for bad in (None, 0, 7):
        x = jnp.ones(8) if bad is None else jnp.ones(8).at[bad].set(jnp.inf)
        assert np.asarray(run(x)).ravel().tolist() == [bad is None] * 8


@pytest.mark.parametrize("way", ["vma", "no vma"])
def test_agreement_over_a_mesh_of_three_axes(way: str) -> None:
    """Locally the devices of a 2 x 2 x 2 mesh would disagree."""
    run = over_devices(way, {"data": 2, "model": 2, "pipe": 2})
    assert run(jnp.ones(8).at[3].set(jnp.nan)).tolist() == [False] * 8
    assert run(jnp.ones(8)).tolist() == [True] * 8


# --- select_tree ------------------------------------------------------------------------------


def test_select_takes_whole_trees() -> None:
    a = {"w": jnp.ones(2), "n": jnp.int32(1), "key": jax.random.key(1), "fn": len, "none": None}
    b = {"w": jnp.zeros(2), "n": jnp.int32(2), "key": jax.random.key(2), "fn": len, "none": None}
    flags = [True, False, np.bool_(True), np.bool_(False), jnp.array(True), jnp.array(False)]
    for flag, expected in zip(flags, [a, b] * 3, strict=True):
        chosen = jt.select_tree(flag, a, b)
        assert chosen["fn"] is len
        np.testing.assert_array_equal(chosen["w"], expected["w"])
        assert int(chosen["n"]) == int(expected["n"])
        assert chosen["key"] == expected["key"]


def test_select_keeps_bits_and_does_not_mix() -> None:
    a, b = jnp.array([-0.0, jnp.nan]), jnp.array([jnp.inf, 1e-40])
    for flag, expected in ((True, a), (False, b)):
        assert np.asarray(jt.select_tree(flag, a, b)).tobytes() == np.asarray(expected).tobytes()


def test_select_errors_name_the_leaf() -> None:
    one = jnp.ones(2)
    with pytest.raises(TypeError, match=r"leaf 'a/b' is float32\[2\] in one tree and float16\[2\]"):
        jt.select_tree(True, {"a": {"b": one}}, {"a": {"b": one.astype(jnp.float16)}})
    with pytest.raises(TypeError, match=r"leaf '\(root\)' is float32\[2\] in one.*float32\[3\]"):
        jt.select_tree(True, one, jnp.ones(3))
    with pytest.raises(ValueError, match="dict"):
        jt.select_tree(True, {"a": one}, {"b": one})
    for pred in (jnp.ones(1, bool), jnp.float32(1), 1):
        with pytest.raises(AssertionError, match="expected boolean scalar"):
            jt.select_tree(pred, one, one)


# --- nonfinite_report -------------------------------------------------------------------------


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(arrays)
def test_the_report_counts_what_numpy_counts(x: np.ndarray) -> None:
    leaf = jax.jit(jt.nonfinite_report)({"a": {"b": jnp.asarray(x)}})["a/b"]
    assert int(leaf.nan) == np.isnan(x).sum()
    assert int(leaf.inf) == np.isinf(x).sum()
    assert int(leaf.size) == x.size
    normal = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)  # XLA flushes the others
    assert int(leaf.zero) == (normal == 0).sum()
    expected = np.abs(normal[np.isfinite(normal)]).max(initial=0)
    np.testing.assert_allclose(leaf.max_abs, expected, rtol=1e-6)


def test_the_report_of_half_and_complex_leaves() -> None:
    report = jt.nonfinite_report(
        {"half": jnp.array([60000.0, jnp.inf], jnp.float16), "int": jnp.arange(3),
         "complex": jnp.array([3 + 4j, complex(np.nan, 0)], jnp.complex64)}
    )  # fmt: skip
    assert set(report) == {"half", "complex"}
    assert (int(report["half"].inf), float(report["half"].max_abs)) == (1, 60000 // 32 * 32)
    assert (int(report["complex"].nan), float(report["complex"].max_abs)) == (1, 5.0)
