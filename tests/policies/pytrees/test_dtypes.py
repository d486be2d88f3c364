"""Names of dtypes in policy strings, the half type, and what counts as one."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_train as jt
from jmp_train.policies.pytrees.casting import (
    at_least_float32,
    check_half,
    float_dtype,
    is_half,
    parse_dtype,
    short_name,
)

pytestmark = pytest.mark.quick

FLOAT8 = [
    getattr(jnp, name)
    for name in dir(jnp)
    if name.startswith("float8_") and isinstance(getattr(jnp, name), type(jnp.float32))
]
USUAL: list[Any] = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("full f32 float32", np.float32),
        ("f16 float16", np.float16),
        ("bf16 bfloat16", jnp.bfloat16),
        ("f64 float64", np.float64),
    ],
)
def test_the_names_of_jmp(names: str, dtype: Any) -> None:
    assert {parse_dtype(name) for name in names.split()} == {np.dtype(dtype)}
    assert short_name(np.dtype(dtype)) == names.split()[0]


def test_there_are_float8_types_to_test() -> None:
    assert len(FLOAT8) >= 5


@pytest.mark.parametrize("dtype", USUAL + FLOAT8)
def test_every_short_name_is_read_back(dtype: Any) -> None:
    assert parse_dtype(short_name(jnp.dtype(dtype))) == jnp.dtype(dtype)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "f",
        "F16",
        "FULL",
        "float",
        "f8",
        "float8",
        "float8_",
        "float8_e9m9",
        "int32",
        "floating",
        "float_",
        "float_power",
    ],
)
def test_other_names_are_refused(name: str) -> None:
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


@pytest.mark.parametrize("dtype", [*USUAL, *FLOAT8, "bfloat16", "half", np.dtype("f2"), float, jnp.dtype("float32")])
def test_floating_dtypes_become_numpy_dtypes(dtype: Any) -> None:
    result = float_dtype(dtype, "x")
    assert isinstance(result, np.dtype) and result == jnp.dtype(dtype)


@pytest.mark.parametrize("dtype", [np.int8, jnp.int4, bool, np.complex64, np.uint32, "int32", np.object_, jax.float0])
def test_other_dtypes_are_named(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"^compute=.* must be a floating dtype"):
        float_dtype(dtype, "compute")


@pytest.mark.parametrize("dtype", ["nonsense", 3, object()])
def test_what_is_not_a_dtype_is_named(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"^compute=.*is not a dtype; pass a floating dtype"):
        float_dtype(dtype, "compute")


def test_none_is_not_a_dtype_although_numpy_reads_float64() -> None:
    with pytest.raises(ValueError, match=r"^compute=None must be a floating dtype"):
        float_dtype(cast(Any, None), "compute")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *((half, np.float32) for half in [jnp.float16, jnp.bfloat16, *FLOAT8]),
        (np.float32, np.float32),
        (np.float64, np.float64),
        (np.complex64, np.complex64),
        (np.complex128, np.complex128),
    ],
)
def test_at_least_float32(dtype: Any, expected: Any) -> None:
    assert at_least_float32(dtype) == np.dtype(expected)


def test_half_types() -> None:
    assert [is_half(dtype) for dtype in USUAL] == [True, True, False, False]
    assert all(is_half(dtype) for dtype in FLOAT8)
    assert not any(is_half(dtype) for dtype in (np.int8, np.bool_, np.complex64))


@pytest.mark.parametrize("half", ["float16", jnp.bfloat16, np.dtype(np.float16)])
def test_half_types_are_checked(half: Any) -> None:
    assert check_half(half, "dtype") == np.dtype(half)


@pytest.mark.parametrize(
    ("dtype", "said"), [("float32", "half=float32 must be float16 or bfloat16"), ("int8", "half=")]
)
def test_what_is_no_half_type_is_named(dtype: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_half(dtype, "half")
