"""Which leaves a checkpoint holds, to the last bit, and how it refuses the others."""

import fractions
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pytrees import assert_same

import jmp_train as jt
from jmp_train.checkpoints.leaves import STORED

pytestmark = [pytest.mark.quick, pytest.mark.newest]

KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def every_value(name: str) -> np.ndarray:
    """Returns [2, n], of the small dtypes every pattern of bits, those that name no value too."""
    dtype = np.dtype(name)
    if dtype == bool:
        return np.array([[True], [False]])
    if dtype.itemsize == 1:
        return np.arange(256, dtype=np.uint8).view(dtype).reshape(2, -1)
    bits = np.random.default_rng(0).integers(0, 256, (2, 16 * dtype.itemsize), np.uint8)
    return bits.view(dtype)


def every_dtype() -> dict[str, np.ndarray]:
    """Returns an array of each dtype that jax has."""
    kind = type(jnp.int8)
    names = {np.dtype(x).name for x in vars(jnp).values() if isinstance(x, kind)}
    return {name: every_value(name) for name in sorted(names)}


@pytest.mark.full
def test_every_dtype_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    arrays = every_dtype()
    assert set(arrays) == STORED >= {"int4", "float8_e4m3fn", "complex128", "bool"}
    # On CPUs jax has no arrays of these, and 64 bits only if they are asked for.
    absent = re.compile(r".*64|complex128|float6.*|u?int1")
    on_devices = [jax.device_put(x) for name, x in arrays.items() if not absent.fullmatch(name)]
    state = {"arrays": arrays, "devices": on_devices}
    like = [jax.device_put(np.zeros(x.shape, x.dtype)) for x in on_devices]
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, state)
        step, found = store.restore({"arrays": jax.tree.map(np.zeros_like, arrays), "devices": like})
    assert step == 1
    assert_same(found, state)


def test_numbers_keys_and_odd_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "keys": [jax.random.key(3, impl=name) for name in KEYS],
        "batches": [jax.random.split(jax.random.key(4, impl=name), 3) for name in KEYS],
        "numbers": [True, -(2**63), 2**63 - 1, 0.1, 1 - 2j, float("nan")],
        "scalars": [np.float64(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), ml_dtypes.bfloat16(1)],
        "swapped": np.arange(6).astype(">i4").reshape(2, 3),
        "swapped_scalar": np.array(2.5, ">f8"),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "strided": np.arange(24.0).reshape(4, 6)[::2, ::-3],
        "one": jnp.ones((1, 1, 1)),
        "deep": np.ones((1,) * 32),
        "none": [np.zeros((0, 3), ml_dtypes.int4), np.zeros((2, 0), ">f4")],
    }
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, state)
        found = store.restore(state)[1]
    assert_same(found, state)
    assert found["swapped"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_bytes_seen_as_booleans_come_back_as_the_booleans_that_they_are(tmp_path: Path) -> None:
    seen = np.array([[0, 2, 255], [1, 128, 0]], np.uint8).view(bool)
    state = {"numpy": seen, "strided": seen[:, ::-2], "scalar": seen[0, 1], "jax": jnp.asarray(seen)}
    values = jax.tree.map(lambda x: np.asarray(x).tolist(), state)
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, state)
        found = store.restore(state)[1]
    assert jax.tree.map(lambda x: np.asarray(x).tolist(), found) == values
    jt.save_weights(tmp_path / "weights.safetensors", state)
    assert jax.tree.map(lambda x: x.tolist(), jt.load_weights(tmp_path / "weights.safetensors", state)) == values


class Twins:
    """Two children under one name."""


jax.tree_util.register_pytree_with_keys(
    Twins,
    lambda _: ([(jax.tree_util.GetAttrKey("same"), 1.0), (jax.tree_util.GetAttrKey("same"), 2.0)], None),
    lambda *_: Twins(),
)


def refused() -> dict[str, tuple[Any, type[Exception], str]]:
    """Returns for each refused leaf the leaf, the error, and what it says of it."""
    donated = jnp.ones(3)
    donated.delete()
    array, held = "must be an array or a number, got ", "which checkpoints cannot store"
    return {
        "text": ("mean", TypeError, f"{array}'mean'"),
        "long": ("x" * 10_000, TypeError, f"{array}'x{{79}}\\.\\.\\."),
        "bytes": (b"x", TypeError, f"{array}b'x'"),
        "fraction": (fractions.Fraction(1, 3), TypeError, array),
        "function": (np.sum, TypeError, array),
        "shape": (jax.ShapeDtypeStruct((2,), jnp.float32), TypeError, f"{array}ShapeDtypeStruct"),
        "large": (2**70, ValueError, "is an int of 71 bits, which does not fit into int64"),
        "larger": (2**63, ValueError, "is an int of 64 bits, which does not fit into int64"),
        "largest": (-(10**5000), ValueError, "is an int of 16610 bits, which does not fit into int64"),
        "texts": (np.array(["a"]), TypeError, f"has dtype <U1, {held}"),
        "objects": (np.array([1, None]), TypeError, f"has dtype object, {held}"),
        "structured": (np.zeros(2, "i4,f4"), TypeError, rf"has dtype \[\('f0'.*, {held}"),
        "dates": (np.array(["2026-01-01"], "M8[D]"), TypeError, rf"has dtype datetime64\[D\], {held}"),
        "spans": (np.zeros(1, "m8[s]"), TypeError, rf"has dtype timedelta64\[s\], {held}"),
        "long_double": (np.zeros(1, np.longdouble), TypeError, f"has dtype float128, {held}"),
        "float0": (np.zeros(1, jax.dtypes.float0), TypeError, f"has dtype .*float0.*, {held}"),
        "masked": (np.ma.masked_equal([1, 2], 2), TypeError, "is a masked array, whose mask would be lost"),
        "deep": (np.zeros((1,) * 33), ValueError, "has 33 axes; checkpoints can store at most 32"),
        "donated": (donated, ValueError, "was deleted, usually by donation"),
    }


@pytest.mark.parametrize("name", list(refused()))
def test_a_leaf_that_cannot_come_back_is_refused_by_its_path(name: str, tmp_path: Path) -> None:
    leaf, error, message = refused()[name]
    with jt.CheckpointStore(tmp_path) as store:
        with pytest.raises(error, match=rf"^state 'outer/1' {message}"):
            store.save(1, {"first": jnp.ones(3), "outer": [jnp.ones(2), leaf]})
        assert store.steps() == []


def test_a_state_that_cannot_come_back_is_refused(tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path) as store:
        for empty in ({}, [], None, {"a": [None, {}]}):
            with pytest.raises(ValueError, match="the state has no leaves"):
                store.save(1, empty)
        with pytest.raises(ValueError, match=r"two leaves of the state have the same path, \.same"):
            store.save(1, Twins())
        with pytest.raises(TypeError, match="state 'w' is traced"):
            jax.jit(lambda x: store.save(1, {"w": x}))(1.0)
        assert store.steps() == []


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (1.5, TypeError, "step=1.5 must be a whole number"),
        (2.0, TypeError, "step=2.0 must be a whole number"),
        ("1", TypeError, "step='1' must be a whole number"),
        (None, TypeError, "step=None must be a whole number"),
        (jnp.ones(2, jnp.int32), TypeError, "must be a whole number"),
        (-1, ValueError, "step=-1 must be at least 0"),
        (2**63, ValueError, r"must be at least 0 and below 2\*\*63"),
    ],
)
def test_a_step_that_is_no_count_is_refused(step: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path) as store:
        with pytest.raises(error, match=message):
            store.save(step, {"w": 1})
        assert store.steps() == []


def test_counts_of_numpy_and_jax_are_steps(tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path, max_to_keep=9) as store:
        for step in (np.int64(1), np.uint8(2), jnp.int32(3), np.array(4), 2**63 - 1):
            store.save(step, {"w": int(step)})
            assert store.restore({"w": 0}) == (int(step), {"w": int(step)})


def test_a_closed_store_reads_and_does_not_save(tmp_path: Path) -> None:
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, {"w": 1})
    with pytest.raises(ValueError, match=r"the store of .* is closed: step 2 cannot be saved"):
        store.save(2, {"w": 2})
    assert store.steps() == [1]
    assert store.restore({"w": 0}) == (1, {"w": 1})
    store.close()


def test_one_leaf_that_does_not_fit_is_no_number_of_another_kind(tmp_path: Path) -> None:
    """A restored state is as the one that was asked for, also where Python could convert."""
    with jt.CheckpointStore(tmp_path) as store:
        store.save(1, {"w": 1})
        for other in (True, 1.0, 1j, np.int64(1), np.zeros((), np.int64)):
            with pytest.raises(ValueError, match=r"\['w'\]: the checkpoint has int int64\[\], the state has "):
                store.restore({"w": other})
