"""Weights come back bit by bit, other programs read them, and what does not fit is named."""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from flax import linen, nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from promotion import promoting
from pytrees import assert_bitwise_equal
from safetensors import safe_open

import jmp_train as jt

pytestmark = pytest.mark.quick

NAME = "weights.safetensors"
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float16", "bfloat16", "float32", "float64", "complex64")  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64")
HALF_SPECIALS = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 6e-8, 6.5e4, 1.0]


@st.composite
def arrays(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> np.ndarray:
    """Draws the bits, so that all NaNs are among the values."""
    dtype = jnp.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    if dtype == bool:
        return draw(hnp.arrays(bool, shape))
    size = dtype.itemsize * int(np.prod(shape))
    bits = draw(st.binary(min_size=size, max_size=size))
    return np.frombuffer(bits, dtype).reshape(shape)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text("abc.é ", min_size=1, max_size=3)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, max_size=3), st.lists(inner, max_size=2), st.tuples(inner, st.none())
        ),
        max_leaves=5,
    )


fast = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# --- there and back ---------------------------------------------------------------------------


@fast
@given(trees(arrays()))
def test_what_is_written_comes_back_bit_by_bit(tmp_path: Path, tree: Any) -> None:
    jt.save_weights(tmp_path / NAME, tree)
    assert_bitwise_equal(jt.load_weights(tmp_path / NAME, tree), tree)


def test_half_specials_come_back_through_jax_arrays(tmp_path: Path) -> None:
    of_dtype = {dtype: [jnp.array(HALF_SPECIALS, dtype), jnp.array(-0.0, dtype)] for dtype in ("float16", "bfloat16")}
    params = {**of_dtype, "empty": jnp.zeros((0, 3), jnp.float16)}
    jt.save_weights(tmp_path / NAME, params)
    loaded = jt.load_weights(str(tmp_path / NAME), params)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(loaded))
    assert_bitwise_equal(loaded, params)


@fast
@given(arrays(FLOATS), st.sampled_from(["float16", "bfloat16", "float32"]))
def test_casts_round_as_numpy_does_and_never_lose_a_value_to_inf(tmp_path: Path, x: np.ndarray, dtype: str) -> None:
    with np.errstate(all="ignore"):  # NaNs that signal
        expected = x.astype(dtype)
        overflows = np.isinf(expected) & np.isfinite(x)
        values = expected.astype(np.float64)
    if overflows.any():
        with pytest.raises(ValueError, match=rf"do not fit into {dtype}:\n  'w': {overflows.sum()} of {x.size} v"):
            jt.save_weights(tmp_path / NAME, {"w": x}, dtype=dtype)
        return
    jt.save_weights(tmp_path / NAME, {"w": x}, dtype=dtype)
    assert safetensors.numpy.load_file(tmp_path / NAME)["w"].dtype == dtype
    got = jt.load_weights(tmp_path / NAME, {"w": np.zeros(x.shape, np.float64)})["w"]
    np.testing.assert_array_equal(got, values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(values[numbers]))


def test_only_floats_are_cast(tmp_path: Path) -> None:
    params = {
        "w": jnp.ones(2), "step": jnp.array(70_000), "on": jnp.array([True]),
        "phase": jnp.array([70_000j]),
    }  # fmt: skip
    jt.save_weights(tmp_path / NAME, params, dtype=jnp.float16)
    stored = safetensors.numpy.load_file(tmp_path / NAME)
    assert {name: str(x.dtype) for name, x in stored.items()} == {
        "w": "float16", "step": "int32", "on": "bool", "phase": "complex64",
    }  # fmt: skip
    assert_bitwise_equal(jt.load_weights(tmp_path / NAME, params), params)


def test_layouts_and_byte_orders_do_not_matter(tmp_path: Path) -> None:
    grid = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    params = {"turned": grid.T, "every_other": grid[:, ::2], "swapped": grid.astype(">f4")}
    jt.save_weights(tmp_path / NAME, params)
    native = jax.tree.map(lambda x: np.ascontiguousarray(x, np.float32), params)
    assert_bitwise_equal(jt.load_weights(tmp_path / NAME, native), native)


# --- models of four libraries, arrays on many devices -----------------------------------------


def linen_params() -> Any:
    model = linen.Sequential([linen.Dense(3), linen.LayerNorm()])
    return jax.eval_shape(promoting(model.init), jax.random.key(0), jnp.ones((1, 2)))


def nnx_params() -> Any:
    return nnx.eval_shape(lambda: nnx.state(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))))


def equinox_params() -> Any:
    return eqx.filter(
        eqx.filter_eval_shape(lambda: eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))),
        lambda x: isinstance(x, jax.ShapeDtypeStruct),
    )


def haiku_params() -> Any:
    net = hk.transform(lambda x: hk.nets.MLP([4, 3])(x))
    return jax.eval_shape(promoting(net.init), jax.random.key(0), jnp.ones((1, 2)))


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (linen_params, "params/layers_0/kernel"),
        (nnx_params, "layers/0/kernel"),
        (equinox_params, "layers/0/weight"),
        (haiku_params, "mlp/~/linear_0/w"),
    ],
)
def test_params_of_the_libraries(make: Any, name: str, tmp_path: Path) -> None:
    like = make()
    params = jax.tree.map(lambda x: jnp.arange(1, 1 + x.size, dtype=x.dtype).reshape(x.shape) / 3, like)
    jt.save_weights(tmp_path / NAME, params)
    assert name in safetensors.flax.load_file(tmp_path / NAME)
    assert_bitwise_equal(jt.load_weights(tmp_path / NAME, like), params)
    jt.save_weights(tmp_path / NAME, params, dtype=jnp.bfloat16)
    loaded = jt.load_weights(tmp_path / NAME, params)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params)
    assert_bitwise_equal(loaded, rounded)


def test_arrays_go_back_to_where_those_of_like_are(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, sharded = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    x = jnp.arange(8.0)
    params = {"all": jax.device_put(x, everywhere), "sharded": jax.device_put(x, sharded), "free": x}
    jt.save_weights(tmp_path / NAME, params)
    struct_ = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharded)
    for like in (params, {**params, "sharded": struct_}):
        loaded = jt.load_weights(tmp_path / NAME, like)
        assert_bitwise_equal(loaded, params)
        assert [loaded[name].sharding for name in ("all", "sharded")] == [everywhere, sharded]
        assert not loaded["free"].committed


def test_shapes_found_under_an_explicit_mesh_have_no_devices_to_go_to(tmp_path: Path) -> None:
    jt.save_weights(tmp_path / NAME, {"w": np.ones(8)})
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        like = jax.eval_shape(lambda: {"w": jnp.ones(8)})
        assert not jt.load_weights(tmp_path / NAME, like)["w"].committed


# --- what other programs see ------------------------------------------------------------------


def test_the_plain_libraries_read_it_and_it_reads_theirs(tmp_path: Path) -> None:
    params = {"a": {"b": jnp.array([1.5, -0.0], jnp.bfloat16)}, "c": jnp.ones((2, 0))}
    flat = {"a/b": params["a"]["b"], "c": params["c"]}
    jt.save_weights(tmp_path / NAME, params)
    assert_bitwise_equal(safetensors.flax.load_file(tmp_path / NAME), flat)
    assert_bitwise_equal(safetensors.numpy.load_file(tmp_path / NAME), jax.device_get(flat))
    safetensors.flax.save_file(dict(flat), tmp_path / "theirs")
    assert_bitwise_equal(jt.load_weights(tmp_path / "theirs", params), params)


def test_the_metadata_say_the_format_and_the_dtypes_before_the_cast(tmp_path: Path) -> None:
    params = {"w": jnp.ones(2), "n": jnp.array(1)}
    jt.save_weights(tmp_path / NAME, params, dtype="bfloat16")
    with safe_open(tmp_path / NAME, framework="numpy") as file:
        metadata = file.metadata()
    assert json.loads(metadata.pop("dtypes")) == {"w": "float32", "n": "int32"}
    assert metadata == {"format": "jmp_train.weights", "format_version": "1"}


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    metadata = {"format": "jmp_train.weights", "format_version": "2"}
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / NAME, metadata)
    with pytest.raises(ValueError, match=rf"{NAME} has format_version 2, but this version of jmp_train reads 1"):
        jt.load_weights(tmp_path / NAME, {"w": np.ones(2)})


# --- what is refused --------------------------------------------------------------------------


class Point(NamedTuple):
    x: Any


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"a": {"b": 1.0}, "ok": np.ones(1), "c": [None, "x"]}, TypeError,
         "params must contain only arrays:\n  'a/b': 1.0 is not an array\n  'c/1': 'x' is not an array"),
        ({"rng": jax.random.key(0)}, TypeError, "  'rng': a random key; pass jax.random.key_data"),
        ({"w": jnp.ones(2, jnp.float8_e4m3fn)}, TypeError, "  'w': safetensors files cannot store float8"),
        ({"w": np.array("text")}, TypeError, "  'w': safetensors files cannot store <U4"),
        ({"a": {"b": np.ones(1)}, "a/b": np.ones(2)}, ValueError,
         "  'a/b': of ['a']['b'] and of ['a/b']"),
        ([Point({"y": np.ones(1)}), {"x": np.ones(1)}, {"x/y": np.ones(1)}, np.ones(1)], None, ""),
        ({"__metadata__": np.ones(1)}, ValueError,
         "  '__metadata__': of ['__metadata__'] and of safetensors itself"),
        ({"w": jax.ShapeDtypeStruct((2,), np.float32)}, ValueError, "  'w': a shape without values"),
        ({"w": np.ma.masked_equal([1.0, 2.0], 2.0)}, TypeError, "  'w': a masked array, whose mask"),
    ],
)  # fmt: skip
def test_leaves_that_cannot_be_stored_are_named(
    params: Any, error: type[Exception] | None, message: str, tmp_path: Path
) -> None:
    if error is None:
        jt.save_weights(tmp_path / NAME, params)
        assert_bitwise_equal(jt.load_weights(tmp_path / NAME, params), params)
        return
    with pytest.raises(error, match=re.escape(message)):
        jt.save_weights(tmp_path / NAME, params)
    assert list(tmp_path.iterdir()) == []


def test_donated_arrays_and_tracers_are_named(tmp_path: Path) -> None:
    gone = jnp.ones(3)
    jt.save_weights(tmp_path / NAME, {"w": gone})
    gone.delete()
    with pytest.raises(ValueError, match="'w': deleted, usually by donation"):
        jt.save_weights(tmp_path / NAME, {"w": gone})
    assert jt.load_weights(tmp_path / NAME, {"w": gone})["w"].tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match=r"'w': .* is not an array"):
        jax.jit(lambda w: jt.save_weights(tmp_path / NAME, {"w": w}))(jnp.ones(3))


def test_values_that_overflow_are_an_error_that_names_the_leaves(tmp_path: Path) -> None:
    params = {
        "a": jnp.array([7e4, -1e5, jnp.inf]), "b": jnp.array([jnp.inf, jnp.nan, 65504.0]),
        "c": jnp.array(65520.0),
    }  # fmt: skip
    with pytest.raises(ValueError, match="float16") as error:
        jt.save_weights(tmp_path / NAME, params, dtype=jnp.float16)
    assert str(error.value) == (
        "params do not fit into float16:\n"
        "  'a': 2 of 3 values overflow, the largest 100000\n"
        "  'c': 1 of 1 values overflow, the largest 65520"
    )
    jt.save_weights(tmp_path / NAME, params)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    with pytest.raises(ValueError, match=rf"{NAME} does not fit into like's dtypes:\n  'a': 2 of 3"):
        jt.load_weights(tmp_path / NAME, half)


def test_an_unfit_dtype_is_refused(tmp_path: Path) -> None:
    dtypes: list[Any] = ["int8", "float64", "nonsense", 3, jnp.complex64]
    for dtype in dtypes:
        with pytest.raises(ValueError, match=r"dtype=.* must be float16, bfloat16, float32 or None"):
            jt.save_weights(tmp_path / NAME, {"w": np.ones(2)}, dtype=dtype)


def test_all_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    jt.save_weights(tmp_path / NAME, {
        "shape": np.ones((2, 3)), "more": np.ones(1), "int": np.ones(2, np.int32),
        "float": np.ones(2, np.float32), "complex": np.ones(1, np.complex64), "fine": np.ones(1),
    })  # fmt: skip
    like = {
        "shape": np.ones((3, 2)), "absent": np.ones(1), "int": np.ones(2, np.int16),
        "float": np.ones(2, np.int32), "complex": np.ones(1, np.float32),
        "fine": np.ones(1, np.float16),
    }  # fmt: skip
    with pytest.raises(ValueError, match="does not fit") as error:
        jt.load_weights(tmp_path / NAME, like)
    assert str(error.value).splitlines() == [
        f"{tmp_path / NAME} does not fit like:",
        "  'absent': missing in the file",
        "  'more': not in like",
        "  'complex': complex64 in the file, float32 in like",
        "  'float': float32 in the file, int32 in like",
        "  'int': int32 in the file, int16 in like",
        "  'shape': shape (2, 3) in the file, (3, 2) in like",
    ]
    with pytest.raises(TypeError, match="like must contain only arrays:\n  'w': 1 is not an array"):
        jt.load_weights(tmp_path / NAME, {"w": 1})


def test_float64_needs_x64_but_in_numpy(tmp_path: Path) -> None:
    jt.save_weights(tmp_path / NAME, {"w": np.array(1 / 3)})
    with pytest.raises(ValueError, match="'w': float64 wants jax_enable_x64"):
        jt.load_weights(tmp_path / NAME, {"w": jax.ShapeDtypeStruct((), np.float64)})
    assert jt.load_weights(tmp_path / NAME, {"w": np.array(0.0)})["w"] == 1 / 3


# --- damage -----------------------------------------------------------------------------------

CONTENT = {"layer": {"w": np.arange(6, dtype=np.float16).reshape(2, 3), "n": np.arange(3)}}


@pytest.fixture(name="whole", scope="module")
def fixture_whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / NAME
    jt.save_weights(path, CONTENT)
    return path.read_bytes()


@fast
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_named(tmp_path: Path, whole: bytes, share: float) -> None:
    (tmp_path / NAME).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=rf"{NAME} is not a safetensors file, or a damaged one: "):
        jt.load_weights(tmp_path / NAME, CONTENT)


@settings(fast, max_examples=200)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_changed_byte_of_the_header_is_an_error_or_changes_no_weight(
    tmp_path: Path, whole: bytes, place: float, flip: int
) -> None:
    (length,) = struct.unpack("<Q", whole[:8])
    index = int(place * (8 + length))
    damaged = bytearray(whole)
    damaged[index] ^= flip
    (tmp_path / NAME).write_bytes(damaged)
    try:
        loaded = jt.load_weights(tmp_path / NAME, CONTENT)
    except ValueError as error:
        assert NAME in str(error)
    else:
        assert_bitwise_equal(loaded, CONTENT)


def test_a_failing_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jt.save_weights(tmp_path / NAME, CONTENT)
    earlier = (tmp_path / NAME).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        jt.save_weights(tmp_path / NAME, CONTENT, dtype="bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == earlier


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"absent.*{NAME}"):
        jt.save_weights(tmp_path / "absent" / NAME, CONTENT)
