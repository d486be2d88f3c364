"""Names of dtypes in policy strings, the half type, and what counts as one."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_train as jt
from jmp_train.policies.pytrees import is_key, is_key_or_data
from jmp_train.policies.pytrees.casting import (
    at_least_float32,
    cast_leaf,
    cast_like,
    check_half,
    copy_like,
    float_dtype,
    is_half,
    parse_dtype,
    short_name,
    upcast_to_float32,
)

pytestmark = [pytest.mark.newest, pytest.mark.quick]


def test_casts_are_differentiable_and_traceable() -> None:
    grad = jax.jit(jax.grad(lambda x: cast_leaf(x, jnp.float16).astype(jnp.float32).sum()))
    assert (grad(jnp.ones(2)).dtype, grad(jnp.ones(2)).tolist()) == (jnp.float32, [1, 1])


def test_upcasting_touches_half_floats_only() -> None:
    tree = {"f16": jnp.ones(1, jnp.float16), "f32": jnp.ones(1), "c64": jnp.ones(1, jnp.complex64)}
    upcast = upcast_to_float32(tree)
    assert upcast["f16"].dtype == jnp.float32
    assert upcast["f32"] is tree["f32"] and upcast["c64"] is tree["c64"]
    with jax.enable_x64(True):
        x = jnp.ones(1, jnp.float64)
        assert upcast_to_float32(x) is x


def test_casts_like_another_tree() -> None:
    like = {"mean": jnp.ones(2, jnp.float16), "host": np.ones(2, np.float16), "count": jnp.ones(2, jnp.float16), "n": 0}
    tree = {"mean": jnp.ones(3), "host": np.ones(2, np.float32), "count": jnp.arange(2), "n": 1.5}
    cast = cast_like(tree, like)
    assert cast["mean"].dtype == cast["host"].dtype == jnp.float16
    assert isinstance(cast["host"], np.ndarray)
    assert cast["count"] is tree["count"] and cast["n"] == 1.5
    assert cast_like(tree, like | {"more": 0}) is tree
    weak = jnp.asarray(1.0)
    assert jax.typeof(weak).weak_type
    assert not jax.typeof(cast_like(weak, jnp.float32(0))).weak_type


def test_a_copy_has_the_dtype_and_the_devices_of_the_other() -> None:
    device = jax.devices()[1]
    placed = copy_like(np.float64(2), jax.device_put(jnp.float16(0), device))
    assert placed.dtype == jnp.float16 and placed.devices() == {device} and placed.committed
    assert not copy_like(2, jnp.float16(0)).committed
    copied = jax.jit(lambda like: copy_like(np.arange(2), like))(jnp.zeros(2, jnp.bfloat16))
    assert copied.dtype == jnp.bfloat16 and copied.tolist() == [0, 1]


def test_what_is_copied_may_be_donated() -> None:
    x = jnp.ones(2)
    copy = copy_like(x, jnp.zeros(2))
    x.delete()
    assert copy.tolist() == [1, 1]


FLOAT8 = [
    getattr(jnp, name)
    for name in dir(jnp)
    if name.startswith("float8_") and isinstance(getattr(jnp, name), type(jnp.float32))
]
USUAL: list[Any] = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]


def test_the_names_of_jmp() -> None:
    for names, dtype in (
        ("full f32 float32", np.float32),
        ("f16 float16", np.float16),
        ("bf16 bfloat16", jnp.bfloat16),
        ("f64 float64", np.float64),
    ):
        assert {parse_dtype(name) for name in names.split()} == {np.dtype(dtype)}
        assert short_name(np.dtype(dtype)) == names.split()[0]


def test_every_short_name_is_read_back_and_others_are_refused() -> None:
    assert len(FLOAT8) >= 5
    for dtype in USUAL + FLOAT8:
        assert parse_dtype(short_name(jnp.dtype(dtype))) == jnp.dtype(dtype)
    for name in ("", "f", "F16", "FULL", "float", "f8", "float8", "float8_", "float8_e9m9", "int32", "floating",
                 "float_", "float_power"):  # fmt: skip
        with pytest.raises(ValueError, match=f"^Unknown dtype '{name}' must be full, half, f32"):
            parse_dtype(name)


@pytest.mark.parametrize(("platform", "dtype"), [("tpu", jnp.bfloat16), ("gpu", jnp.float16), ("cpu", jnp.float16)])
def test_half_is_what_the_device_computes_fast(monkeypatch: pytest.MonkeyPatch, platform: str, dtype: Any) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(platform=platform)])
    assert jt.half_dtype() == dtype
    assert parse_dtype("half") == jnp.dtype(dtype)
    assert jt.get_policy("c=half").compute_dtype == dtype
    assert jt.cast_to_half(np.ones(2, np.float32)).dtype == dtype
    assert jt.cast_to_full(np.ones(2, dtype)).dtype == np.float32


def test_floating_dtypes_become_numpy_dtypes() -> None:
    for dtype in (*USUAL, *FLOAT8, "bfloat16", "half", np.dtype("f2"), float, jnp.dtype("float32")):
        result = float_dtype(dtype, "x")
        assert isinstance(result, np.dtype) and result == jnp.dtype(dtype)


def test_other_dtypes_and_what_is_none_are_named() -> None:
    for dtype in (np.int8, jnp.int4, bool, np.complex64, np.uint32, "int32", np.object_, jax.float0):
        with pytest.raises(ValueError, match=r"^compute=.* must be a floating dtype"):
            float_dtype(dtype, "compute")
    # NumPy reads None as float64, and an array as its dtype.
    for wrong in ("nonsense", 3, object(), None, jnp.ones(2, jnp.float16), np.ones(2, np.float16), np.float16(1)):
        with pytest.raises(ValueError, match=r"^compute=.*is not a dtype; pass a floating dtype"):
            float_dtype(cast(Any, wrong), "compute")


def test_at_least_float32() -> None:
    for half in (jnp.float16, jnp.bfloat16, *FLOAT8):
        assert at_least_float32(half) == np.dtype(np.float32)
    for dtype in (np.float32, np.float64, np.complex64, np.complex128):
        assert at_least_float32(dtype) == np.dtype(dtype)


def test_half_types() -> None:
    assert [is_half(dtype) for dtype in USUAL] == [True, True, False, False]
    assert all(is_half(dtype) for dtype in FLOAT8)
    assert not any(is_half(dtype) for dtype in (np.int8, np.bool_, np.complex64))
    for half in ("float16", jnp.bfloat16, np.dtype(np.float16)):
        assert check_half(half, "dtype") == np.dtype(half)
    for dtype, said in (("float32", "half=float32 must be float16 or bfloat16"), ("int8", "half=")):
        with pytest.raises(ValueError, match=said):
            check_half(dtype, "half")


KEY, DATA = jax.random.key(0), jax.random.PRNGKey(0)


@pytest.mark.parametrize(
    ("leaf", "typed", "either"),
    [
        (KEY, True, True),
        (jax.random.split(KEY), True, True),
        (jax.eval_shape(lambda: KEY), True, True),
        (DATA, False, True),
        (np.asarray(DATA), False, True),
        (jnp.arange(2), False, False),
        (2, False, False),
        (None, False, False),
        ("key", False, False),
    ],
)
def test_which_leaves_are_keys(leaf: object, typed: bool, either: bool) -> None:
    assert (is_key(leaf), is_key_or_data(leaf)) == (typed, either)


def test_keys_within_a_trace() -> None:
    seen: list[tuple[bool, bool]] = []
    jax.make_jaxpr(lambda *leaves: seen.extend((is_key(x), is_key_or_data(x)) for x in leaves))(KEY, DATA, 1.0)
    assert seen == [(True, True), (False, True), (False, False)]
