"""`import jmp_train as jmp`: jmp's own tests, jmp beside us, and its faults mended."""

import importlib.util
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

import jmp_train as jt

pytestmark = pytest.mark.quick

MANY = settings(max_examples=40, deadline=None)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # of the tests
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # in one of those tests
@pytest.mark.parametrize(("module", "count"), [("loss_scale", 25), ("policy", 60)])
def test_jmps_own_tests_pass(module: str, count: int) -> None:
    spec = importlib.util.find_spec(f"jmp._src.{module}_test")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    line = f"from jmp._src import {module} as jmp"
    assert line in source
    upstream = types.ModuleType("upstream")
    # One test looks its expectation up in a private table of jmp's.
    names = {"dtype_to_names": importlib.import_module("jmp._src.policy").dtype_to_names}
    vars(upstream)["jmp"] = types.SimpleNamespace(**{**vars(jt), **names})
    exec(compile(source.replace(line, ""), spec.origin, "exec"), vars(upstream))  # noqa: S102
    suite = unittest.defaultTestLoader.loadTestsFromModule(upstream)
    with jax.numpy_dtype_promotion("standard"):
        result = unittest.TextTestRunner().run(suite)
    assert not result.failures + result.errors
    assert result.testsRun - len(result.skipped) >= count


def test_every_public_name_is_here() -> None:
    assert set(jmp.__all__) <= set(vars(jt))


words = st.sampled_from(
    ["f32", "full", "float32", "f16", "float16", "half", "bf16", "bfloat16", "f64", "float64", "f", ""]
)
keys = st.sampled_from(["p", "params", "c", "compute", "o", "output", "P"])
part = st.tuples(keys, words).map("=".join)
texts = st.one_of(words, st.lists(part, min_size=1, max_size=4).map(",".join))


@MANY
@given(texts)
def test_policy_strings_mean_what_they_mean_in_jmp(text: str) -> None:
    fields = [part[:1].lower() for part in text.split(",") if "=" in part]
    if len(set(fields)) < len(fields):  # of which jmp takes the last
        with pytest.raises(ValueError, match=r"Unknown (dtype|key)|must have the form|more than once"):
            jt.get_policy(text)
        return
    try:
        theirs = jmp.get_policy(text)
    except ValueError:
        with pytest.raises(ValueError, match=r"Unknown (dtype|key)|must have the form"):
            jt.get_policy(text)
        return
    ours = jt.get_policy(text)
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert str(ours) == str(theirs)
    assert jmp.get_policy(str(ours)) == theirs


@pytest.mark.full
@MANY
@given(
    st.floats(0.5, 2.0**20, width=32),
    st.integers(1, 5),
    st.sampled_from([2, 3, 1.5, 4.0, 1.1, 1.001, 1.7]),
    st.sampled_from([0.0, 0.37, 1.0, 8.0]),
    st.lists(st.booleans(), max_size=25),
)
def test_adjusting_is_jmps(start: float, period: int, factor: float, low: float, finite: list[bool]) -> None:
    ours: Any = jt.DynamicLossScale(jnp.float32(start), period=period, factor=factor,  # type: ignore[arg-type]
                                    min_loss_scale=low)  # fmt: skip
    theirs = jmp.DynamicLossScale(
        jnp.float32(start), period=period, factor=factor,  # type: ignore[arg-type]
        min_loss_scale=jnp.float32(low),
    )  # fmt: skip
    for ok in finite:
        with jax.numpy_dtype_promotion("standard"):
            theirs = theirs.adjust(jnp.array(ok))
        ours = ours.adjust(jnp.array(ok))
        assert float(ours.loss_scale) == float(theirs.loss_scale)
        assert int(ours.counter) == int(theirs.counter)


# --- the faults of jmp_compat's table, mended -------------------------------------------------


def test_1_and_3_a_half_scale_is_held_in_float32() -> None:
    scale = jt.DynamicLossScale(jnp.float16(2.0**15), period=1)
    scale = scale.adjust(jnp.array(True)).adjust(jnp.array(True))
    assert (float(scale.loss_scale), scale.loss_scale.dtype) == (2.0**17, jnp.float32)


def test_2_min_loss_scale_survives_flatten_and_jit() -> None:
    scale = jt.DynamicLossScale(jnp.float32(10), min_loss_scale=0.25)
    for again in (jax.jit(lambda s: s)(scale), jax.tree.map(lambda x: x, scale)):
        assert again.min_loss_scale == 0.25
    falling = jax.jit(lambda s: s.adjust(jnp.array(False)))
    for _ in range(10):
        scale = falling(scale)
    assert float(scale.loss_scale) == 0.25
    assert len(jax.tree.leaves(scale)) == 2


def test_14_nonsense_warns_and_does_not_raise() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jt.DynamicLossScale(8.0, period=0, factor=0.5)
    assert [str(w.message) for w in caught] == [
        "DynamicLossScale: period=0 should be at least 1",
        "DynamicLossScale: factor=0.5 should be finite and above 1",
    ]


@pytest.mark.parametrize("name", ["param_dtype", "compute_dtype", "output_dtype", "reduce_dtype"])
def test_11_other_dtypes_are_refused_by_name(name: str) -> None:
    fields: dict[str, Any] = dict.fromkeys(("param_dtype", "compute_dtype", "output_dtype"), "f4")
    for dtype in (jnp.int32, np.bool_, jnp.complex64, "int8", "half-ish"):
        with pytest.raises(ValueError, match=rf"^{name}=.*floating dtype"):
            jt.Policy(**{**fields, name: dtype})


def test_12_anything_else_is_refused_in_jmps_words() -> None:
    wrong: Any
    for wrong in (jnp.ones(1, bool), np.ones(2, bool), 1, jnp.ones(()), None):
        with pytest.raises(AssertionError, match="expected boolean scalar"):
            jt.DynamicLossScale(4.0).adjust(wrong)
        with pytest.raises(AssertionError, match="expected boolean scalar"):
            jt.select_tree(wrong, None, None)


def test_14_each_questionable_field_warns() -> None:
    for name, values in {
        "factor": (np.inf,),
        "min_loss_scale": (-1.0, np.inf),
        "loss_scale": (-8.0, np.nan, np.float32(np.inf), 2.0**127),  # 1 / 2**127 is flushed to zero
    }.items():
        for value in values:
            with pytest.warns(UserWarning, match=f"DynamicLossScale: {name}="):
                jt.DynamicLossScale(**{"loss_scale": 8.0, name: value})


def test_placeholders_for_leaves_are_kept() -> None:
    leaf = object()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jt.DynamicLossScale(leaf).loss_scale is leaf
        assert jt.DynamicLossScale(2.0, leaf).counter is leaf


# --- the same numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("start", [2.0**15, 1000.0, 3.0])
@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_scaling_gives_jmps_numbers_and_dtypes(method: str, start: float) -> None:
    x = np.random.default_rng(0).normal(size=9)
    tree = {
        "f16": jnp.asarray(x, jnp.float16),
        "bf16": jnp.asarray(x, jnp.bfloat16),
        "f32": jnp.asarray(x, jnp.float32),
        "nothing": None,
    }
    with jax.numpy_dtype_promotion("standard"):
        theirs = getattr(jmp.DynamicLossScale(jnp.float32(start)), method)(tree)
    ours = getattr(jt.DynamicLossScale(jnp.float32(start)), method)(tree)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_static_number_unscales_float64_in_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.float64(1.0) / 7
        for cls in (jmp.StaticLossScale, jt.StaticLossScale):
            loss_scale = cls(3.0)  # type: ignore[arg-type]
            back = loss_scale.unscale(loss_scale.scale(x))
            assert back.dtype == jnp.float64
            np.testing.assert_allclose(back, 1 / 7, rtol=1e-15)


def test_the_program_of_jmps_readme_runs_with_a_half_typed_scale() -> None:
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
