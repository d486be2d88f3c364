"""jmp 0.0.4 beside us: its own tests, its strings, its sequences, and the defects we repair."""

import importlib.util
import re
import sys
import types
import unittest
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jmp._src import policy as jmp_policy

import jmp_train as jt

FEW = settings(max_examples=25, deadline=None)


@pytest.fixture(autouse=True)
def standard_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):  # jmp itself needs it
        yield


@pytest.mark.parametrize(("module", "count"), [("loss_scale", 25), ("policy", 72)])
def test_jmps_own_tests_pass(module: str, count: int) -> None:
    spec = importlib.util.find_spec(f"jmp._src.{module}_test")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    ours, replaced = re.subn(
        rf"^from jmp\._src import {module} as jmp$", "import drop_in as jmp", source, flags=re.M
    )
    assert replaced == 1
    drop_in: Any = types.ModuleType("drop_in")
    for name in jmp.__all__:
        setattr(drop_in, name, getattr(jt, name))
    drop_in.dtype_to_names = jmp_policy.dtype_to_names  # the tests' private table
    tests = types.ModuleType("jmp_tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "drop_in", drop_in)
        patch.setitem(sys.modules, "jmp_tests", tests)
        exec(compile(ours, spec.origin, "exec"), vars(tests))
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromModule(tests).run(result)
    problems = [text for _, text in result.failures + result.errors]
    assert not problems, "\n".join(problems)
    assert result.testsRun >= count and not result.skipped


def test_every_public_name_of_jmp_is_here() -> None:
    assert len(jmp.__all__) == 11
    assert [name for name in jmp.__all__ if not hasattr(jt, name)] == []


# --- policy strings ---------------------------------------------------------------------------

DTYPE_NAMES = [*jmp_policy.name_to_dtype, "half"]
ALMOST = st.sampled_from([*DTYPE_NAMES, "f", "FULL", "", " f32", "compute_float16", "int32"])
KEYS = st.sampled_from(["p", "params", "c", "compute", "o", "output", "P", "x", "", " c"])
GOOD_PARTS = st.tuples(
    st.sampled_from(["p", "params", "c", "compute", "o", "output"]), st.sampled_from(DTYPE_NAMES)
)
PARTS = st.one_of(
    st.tuples(KEYS, ALMOST).map("=".join), st.sampled_from(["", "c", "c=f16=x", "c=f16="])
)
STRINGS = st.one_of(
    ALMOST,
    st.lists(GOOD_PARTS.map("=".join), min_size=1, max_size=4).map(",".join),
    st.lists(PARTS, min_size=1, max_size=3).map(",".join),
)


@settings(max_examples=300, deadline=None)
@given(STRINGS)
def test_what_jmp_reads_we_read_alike(text: str) -> None:
    try:
        theirs = jmp.get_policy(text)
    except ValueError as error:
        # What jmp refuses, we refuse too, or it is one of its parser's defects: blanks.
        try:
            jt.get_policy(text)
        except ValueError as ours:
            if str(error).startswith("Unknown dtype") and "=" not in text:
                assert str(ours).startswith("Unknown dtype")
        else:
            assert " " in text
        return
    ours = jt.get_policy(text)
    for name in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert str(ours) == str(theirs)
    assert ours.reduce_dtype == jnp.float32


# --- sequences --------------------------------------------------------------------------------


def run_scale(scale: Any, finite: list[bool]) -> list[tuple[float, int]]:
    states = []
    for ok in finite:
        scale = scale.adjust(jnp.array(ok))
        states.append((float(scale.loss_scale), int(scale.counter)))
    return states


@FEW
@given(
    start=st.floats(0.25, 2.0**30, width=32),
    period=st.integers(1, 7),
    factor=st.sampled_from([2, 3, 1.5, 2.5, 4.0, 10]),
    low=st.sampled_from([0.0, 0.3125, 0.37, 1.0, 64.0]),
    finite=st.lists(st.sampled_from([True, True, False]), max_size=60),
)
def test_sequences_are_jmps(
    start: float, period: int, factor: float, low: float, finite: list[bool]
) -> None:
    args = (jnp.float32(start), jnp.int32(0), period, factor, jnp.asarray(low))
    theirs = run_scale(jmp.DynamicLossScale(*args), finite)
    assert run_scale(jt.DynamicLossScale(*args), finite) == theirs


@pytest.mark.parametrize("factor", [1.1, 1.001, 1.7])
def test_sequences_are_jmps_for_a_factor_that_is_no_float32_number(factor: float) -> None:
    args = (jnp.float32(1000.0), jnp.int32(0), 1, factor)
    finite = [True] * 40 + [False, True] * 10
    theirs = run_scale(jmp.DynamicLossScale(*args), finite)
    assert run_scale(jt.DynamicLossScale(*args), finite) == theirs


def test_scale_and_unscale_give_jmps_numbers_and_dtypes() -> None:
    rng = np.random.default_rng(0)
    tree = {
        "f16": jnp.asarray(rng.normal(size=9), jnp.float16),
        "bf16": jnp.asarray(rng.normal(size=9), jnp.bfloat16),
        "f32": jnp.asarray(rng.normal(size=9), jnp.float32),
        "number": 1.5,
        "nothing": None,
    }
    for start in (2.0**15, 1000.0, 3.0):
        theirs: Any = jmp.DynamicLossScale(jnp.float32(start))
        ours: Any = jt.DynamicLossScale(jnp.float32(start))
        for method in ("scale", "unscale"):
            expected, got = getattr(theirs, method)(tree), getattr(ours, method)(tree)
            assert jax.tree.structure(expected) == jax.tree.structure(got)
            for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)


# --- what jmp gets wrong (jmp_compat.md, section 7, in its order) --------------------------------


@pytest.mark.parametrize("finite", [True, False])
def test_fix_1_a_half_typed_scale_adjusts(finite: bool) -> None:
    half = jnp.asarray(2.0**15, jnp.float16)
    with pytest.raises(TypeError):
        jmp.DynamicLossScale(half).adjust(jnp.array(finite))
    scale = jt.DynamicLossScale(half, period=1).adjust(jnp.array(finite))
    assert scale.loss_scale.dtype == jnp.float32
    assert float(scale.loss_scale) == (2.0**16 if finite else 2.0**14)  # fix 3: beyond 2**15


@pytest.mark.parametrize("low", [0.0, 0.3125, np.float32(0.25), jnp.float32(64.0)])
def test_fix_2_the_floor_survives_flattening_and_jit(low: Any) -> None:
    def floor(scale: Any) -> Any:
        for _ in range(12):
            scale = scale.adjust(jnp.array(False))
        return scale

    expected = max(float(low), 256 / 2**12)
    scale = jt.DynamicLossScale(jnp.float32(256.0), min_loss_scale=low)
    assert len(jax.tree.leaves(scale)) == 2
    mapped = jax.tree.map(lambda x: x, scale)
    assert mapped.min_loss_scale == float(low) and mapped == scale
    assert float(floor(scale).loss_scale) == expected
    jitted = jax.jit(floor)(scale)
    assert float(jitted.loss_scale) == expected
    assert float(jitted.adjust(jnp.array(False)).loss_scale) == max(float(low), expected / 2)
    theirs: Any = jax.tree.map(
        lambda x: x, jmp.DynamicLossScale(jnp.float32(256.0), min_loss_scale=jnp.asarray(low))
    )
    assert float(theirs.min_loss_scale) == 1.0


def test_fix_2_a_traced_floor_is_refused() -> None:
    with pytest.raises(ValueError, match="min_loss_scale must be a concrete number"):
        jax.jit(lambda low: jt.DynamicLossScale(8.0, min_loss_scale=low).adjust(True))(1.0)


def test_fix_4_the_scale_stops_where_unscaling_still_works() -> None:
    ours: Any = jt.DynamicLossScale(2.0**125, period=1)
    theirs: Any = jmp.DynamicLossScale(jnp.float32(2.0**125), period=1)
    for _ in range(2):
        ours, theirs = ours.adjust(jnp.array(True)), theirs.adjust(jnp.array(True))
    gradient = jnp.float32(2.0**100)
    assert float(theirs.unscale(gradient)) == 0.0
    assert float(ours.loss_scale) == 2.0**126
    assert float(ours.unscale(gradient)) == 2.0**-26


def test_fix_5_what_is_no_float_passes() -> None:
    tree = {"n": jnp.arange(3), "key": jax.random.key(0), "f": abs, "s": "text", "flag": True}
    for scale in (jt.StaticLossScale(4), jt.DynamicLossScale(4.0)):
        for result in (scale.scale(tree), scale.unscale(tree)):
            assert all(result[name] is tree[name] for name in tree)


def test_fix_6_half_gradients_do_not_underflow_by_a_static_number() -> None:
    small = jnp.asarray(1e-3, jnp.float16)
    assert float(jmp.StaticLossScale(2.0**15).unscale(small)) != float(small) / 2**15
    unscaled = jt.StaticLossScale(2.0**15).unscale(small)
    assert unscaled.dtype == jnp.float32 and float(unscaled) == float(small) / 2**15
    scaled = jt.StaticLossScale(2.0**16).scale(jnp.float16(1.0))
    assert float(scaled) == 2.0**16


def test_fix_7_fp8_metadata_is_not_unscaled() -> None:
    grads = {
        "_overwrite_with_gradient": {"dense": {"scale": jnp.float32(1.0), "amax": jnp.ones(4)}},
        "params": {"kernel": jnp.ones(4)},
    }
    unscaled = jt.DynamicLossScale(1024.0).unscale(grads)
    np.testing.assert_array_equal(unscaled["params"]["kernel"], np.full(4, 2.0**-10))
    metadata = unscaled["_overwrite_with_gradient"]["dense"]
    np.testing.assert_array_equal(metadata["scale"], 1.0)
    np.testing.assert_array_equal(metadata["amax"], np.ones(4))


def test_fixes_8_and_9_numpy_dtypes_hash_and_print() -> None:
    by_dtype = jt.Policy(np.dtype("float16"), np.dtype("float32"), "bfloat16")
    by_type = jt.Policy(jnp.float16, jnp.float32, jnp.bfloat16)
    assert by_dtype == by_type and hash(by_dtype) == hash(by_type)
    assert str(by_dtype) == "p=f16,c=full,o=bf16"
    theirs = jmp.Policy(*[np.dtype("float16")] * 3)
    assert theirs == jmp.get_policy("f16") and hash(theirs) != hash(jmp.get_policy("f16"))
    with pytest.raises(KeyError):
        str(theirs)
    assert str(jt.Policy(*[jnp.float8_e5m2] * 3)) == "p=float8_e5m2,c=float8_e5m2,o=float8_e5m2"


def test_fix_10_blanks_are_read_and_parts_are_named() -> None:
    assert jt.get_policy(" p=f32, c = f16 ") == jt.get_policy("p=f32,c=f16")
    for text, part in [("c=f16=x", "c=f16=x"), ("c=f16,", ""), ("p=f32,c", "c")]:
        with pytest.raises(ValueError, match=re.escape(f"{part!r} in {text!r} must have the form")):
            jt.get_policy(text)


@pytest.mark.parametrize("name", ["param_dtype", "compute_dtype", "output_dtype", "reduce_dtype"])
@pytest.mark.parametrize("dtype", [jnp.int32, np.bool_, jnp.complex64, "int8", None, "half-ish"])
def test_fix_11_other_dtypes_are_refused(name: str, dtype: Any) -> None:
    fields: dict[str, Any] = dict.fromkeys(("param_dtype", "compute_dtype", "output_dtype"), "f4")
    with pytest.raises(ValueError, match=f"{name}=.*floating dtype"):
        jt.Policy(**{**fields, name: dtype})


@pytest.mark.parametrize("true", [True, np.bool_(True), np.array(True), jnp.array(True)])
def test_fix_12_every_boolean_scalar_is_accepted(true: Any) -> None:
    scale = jt.DynamicLossScale(4.0, period=1).adjust(true)
    assert float(scale.loss_scale) == 8.0
    assert float(jt.select_tree(true, 1.0, 2.0)) == 1.0


@pytest.mark.parametrize("wrong", [jnp.ones(1, bool), np.ones(2, bool), 1, 1.0, jnp.ones(()), None])
def test_fix_12_anything_else_is_refused_in_jmps_words(wrong: Any) -> None:
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        jt.DynamicLossScale(4.0).adjust(wrong)
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        jt.select_tree(wrong, None, None)


def test_fix_13_select_tree_takes_functions_from_the_first_tree() -> None:
    a, b = {"f": abs, "w": jnp.ones(2)}, {"f": max, "w": jnp.zeros(2)}
    for pred, expected in ((True, 1.0), (False, 0.0)):
        chosen = jt.select_tree(jnp.array(pred), a, b)
        assert chosen["f"] is abs
        np.testing.assert_array_equal(chosen["w"], np.full(2, expected))
    with pytest.raises(TypeError, match="leaf 'w' is float32"):
        jt.select_tree(True, {"w": jnp.ones(2)}, {"w": jnp.ones(2, jnp.float16)})


@pytest.mark.parametrize(
    "options",
    [
        {"period": 0},
        {"period": -3},
        {"period": np.nan},
        {"factor": 1},
        {"factor": 0.5},
        {"factor": np.inf},
        {"factor": np.nan},
        {"min_loss_scale": -1.0},
        {"min_loss_scale": np.inf},
        {"loss_scale": 0.0},
        {"loss_scale": -8.0},
        {"loss_scale": np.nan},
        {"loss_scale": np.float32(np.inf)},
    ],
)
def test_fix_14_questionable_fields_warn(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.warns(UserWarning, match=f"DynamicLossScale: {name}="):
        jt.DynamicLossScale(**{"loss_scale": 8.0, **options})


@pytest.mark.parametrize("x", [1, jnp.int32(1), np.int64(1), True])
def test_integer_scales_warn_and_work(x: Any) -> None:
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale, got"):
        scale = jt.DynamicLossScale(x)
    assert scale.loss_scale.dtype == np.float32 and float(scale.loss_scale) == 1.0


def test_sensible_fields_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jt.DynamicLossScale(2.0**15, 0, 5.0, 3, 0.37)


def test_fix_15_a_static_scale_can_be_a_leaf_and_then_does_not_retrace() -> None:
    traces = []

    @jax.jit
    def scaled(loss_scale: Any, x: Any) -> Any:
        traces.append(1)
        return loss_scale.scale(x)

    for number in (2.0, 4.0, 8.0):
        scale = jt.StaticLossScale(jnp.float32(number))
        assert len(jax.tree.leaves(scale)) == 1
        assert float(scaled(scale, jnp.float32(3.0))) == 3 * number
    assert len(traces) == 1
    for number in (2.0, 4.0):
        scaled(jt.StaticLossScale(number), jnp.float32(3.0))
    assert len(traces) == 3 and jax.tree.leaves(jt.StaticLossScale(2.0)) == []


# --- kept although tempting ---------------------------------------------------------------------


def test_what_stays_as_it_was() -> None:
    assert jt.DynamicLossScale(8.0).scale(jnp.float16(1.5)).dtype == jnp.float32
    none = jt.NoOpLossScale()
    tree = {"w": jnp.ones(2)}
    assert none.scale(tree) is tree and none.unscale(tree) is tree and none.adjust(False) is none
    assert none.loss_scale == jmp.NoOpLossScale().loss_scale == 1
    half = jt.get_policy("f16").cast_to_param(np.ones(2, np.float64))
    assert isinstance(half, np.ndarray) and half.dtype == np.float16
    assert jt.half_dtype() == jmp.half_dtype() == jnp.float16


def test_jmps_program_from_its_readme_runs() -> None:
    policy = jt.get_policy("params=float32,compute=float16,output=float32")
    loss_scale: Any = jt.DynamicLossScale(jnp.asarray(2.0**15, jt.half_dtype()))

    def loss(params: Any, x: jax.Array, loss_scale: Any) -> jax.Array:
        params, x = policy.cast_to_compute((params, x))
        return loss_scale.scale(policy.cast_to_output(jnp.sum(params["w"] * x)))

    @jax.jit
    def step(params: Any, loss_scale: Any, x: jax.Array) -> Any:
        grads = loss_scale.unscale(jax.grad(loss)(params, x, loss_scale))
        finite = jt.all_finite(grads)
        new = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        return jt.select_tree(finite, new, params), loss_scale.adjust(finite)

    params = {"w": jnp.ones(2)}
    params, loss_scale = step(params, loss_scale, jnp.array([1.0, 0.5]))
    np.testing.assert_array_equal(params["w"], [0.5, 0.75])
    params, loss_scale = step(params, loss_scale, jnp.array([4.0, np.inf]))
    np.testing.assert_array_equal(params["w"], [0.5, 0.75])
    assert float(loss_scale.loss_scale) == 2.0**14
