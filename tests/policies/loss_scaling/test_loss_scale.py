"""A contract for every loss scale, and what is special to each class."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytrees import assert_bitwise_equal

import jmp_train as jt
from jmp_train.policies.loss_scaling.dynamic_loss_scale import float64_product

pytestmark = [pytest.mark.newest, pytest.mark.quick]

# Non-default values throughout, so that a field lost on the way is noticed.
SCALES: dict[str, Callable[[], Any]] = {
    "none": jt.NoOpLossScale,
    "static": lambda: jt.StaticLossScale(2.0**13),
    "static leaf": lambda: jt.StaticLossScale(jnp.float32(2.0**13)),
    "dynamic": lambda: jt.DynamicLossScale(2.0**13, 2, 5, 4, 0.25, max_loss_scale=2.0**20),
    "hysteresis": lambda: jt.DynamicLossScale(2.0**13, period=5, backoff_factor=0.25, hysteresis=3, hysteresis_left=2),
    "torch": lambda: jt.torch_loss_scale(2.0**13, 4.0, 0.25, 5),
    "apex": lambda: jt.apex_loss_scale(init_scale=2.0**13, scale_window=5, min_loss_scale=2.0),
    "megatron": lambda: jt.megatron_loss_scale(2.0**13, growth_interval=5, hysteresis=3),
    "nemo": lambda: jt.policies.nemo_loss_scale(2.0**13, growth_interval=5, hysteresis=3),
    "deepspeed": lambda: jt.deepspeed_loss_scale(0, 13, 5, 3, consecutive_hysteresis=True),
}
every_scale = pytest.mark.parametrize("name", SCALES)
adjusting = pytest.mark.parametrize("name", [n for n in SCALES if n not in ("none", "static leaf")])


@every_scale
def test_scaling_and_unscaling_gives_the_value_back(name: str) -> None:
    scale = SCALES[name]()
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "complex64"):
        x = jnp.asarray(1.5, dtype)
        scaled = scale.scale({"x": x})["x"]
        assert complex(scaled) == 1.5 * float(scale.loss_scale), dtype
        back = scale.unscale({"x": scaled})["x"]
        assert complex(back) == 1.5, dtype
        if name != "none":
            upcast = "complex64" if dtype == "complex64" else "float32"
            assert scaled.dtype.name == back.dtype.name == upcast, dtype


@every_scale
def test_half_leaves_neither_overflow_nor_vanish(name: str) -> None:
    scale = SCALES[name]()
    assert np.isfinite(scale.scale(jnp.float16(60000.0)))
    tiny = jnp.asarray(2.0**-24, jnp.float16)
    assert float(scale.unscale(tiny)) * float(scale.loss_scale) == 2.0**-24


@every_scale
def test_leaves_that_are_not_floats_pass(name: str) -> None:
    scale = SCALES[name]()
    tree = {
        "int": jnp.arange(3), "bool": jnp.array(True), "key": jax.random.key(0), "none": None,
        "str": "text", "fn": len, "python": 3, "float0": np.zeros(2, jax.dtypes.float0),
    }  # fmt: skip
    for same in (scale.scale(tree), scale.unscale(tree)):
        assert all(same[key] is tree[key] for key in tree)


@every_scale
def test_flax_fp8_statistics_are_not_unscaled(name: str) -> None:
    grads = {"_overwrite_with_gradient": {"kernel_scale": jnp.ones(1)}, "params": jnp.ones(1)}
    result = SCALES[name]().unscale(grads)
    assert float(result["_overwrite_with_gradient"]["kernel_scale"][0]) == 1.0
    assert float(result["params"][0]) == 1.0 / float(SCALES[name]().loss_scale)


@every_scale
def test_it_survives_flattening_pickling_copying_and_jit(name: str) -> None:
    scale = SCALES[name]()
    leaves, structure = jax.tree.flatten(scale)
    for again in (
        jax.tree.unflatten(structure, leaves),
        pickle.loads(pickle.dumps(scale)),
        copy.deepcopy(scale),
        jax.jit(lambda s: s)(scale),
        jax.tree.map(lambda x: x, scale),
    ):
        assert type(again) is type(scale)
        for field in dataclasses.fields(scale):
            assert getattr(again, field.name) == getattr(scale, field.name), field.name
    if structure.num_leaves:
        shapes = jax.eval_shape(lambda s: s, scale)
        assert shapes.loss_scale.dtype == jnp.float32
        assert jax.tree.leaves(jax.tree.map(lambda _: True, scale)) == [True] * len(leaves)


@adjusting
def test_building_touches_no_device(name: str) -> None:
    assert not [x for x in jax.tree.leaves(SCALES[name]()) if isinstance(x, jax.Array)]


@pytest.mark.quick_cases(1)
@every_scale
@pytest.mark.parametrize("finite", [True, False])
def test_adjusting_keeps_the_state_for_scan_cond_and_vmap(name: str, finite: bool) -> None:
    scale = jax.tree.map(jnp.asarray, SCALES[name]())
    shapes = jax.eval_shape(lambda s: s, scale)
    assert jax.eval_shape(lambda s: s.adjust(jnp.array(finite)), scale) == shapes
    jax.lax.cond(finite, lambda s: s.adjust(True), lambda s: s.adjust(False), scale)
    jax.lax.scan(lambda s, ok: (s.adjust(ok), None), scale, jnp.array([True, finite]))
    if jax.tree.leaves(scale):
        flags = jnp.array([True, False])
        both = jax.vmap(lambda ok: scale.adjust(ok))(flags)
        for i, flag in enumerate([True, False]):
            assert_bitwise_equal(jax.tree.map(lambda x, i=i: x[i], both), scale.adjust(flag))


@pytest.mark.quick_cases(7)
@every_scale
def test_one_trace_for_all_steps_and_for_a_state_from_elsewhere(name: str) -> None:
    traces = []

    @jax.jit
    def adjust(scale: Any, finite: Any) -> Any:
        traces.append(1)
        return scale.adjust(finite)

    scale = SCALES[name]()
    for finite in (True, False, True, True, False, True, True, True, True, True):
        scale = adjust(scale, jnp.array(finite))
    for place in (jax.device_get, jax.device_put, lambda s: jax.tree.map(np.array, s)):
        scale = adjust(place(scale), np.array(True))
    assert len(traces) == 1


@adjusting
def test_it_goes_on_from_a_checkpoint_in_the_middle_of_a_period(name: str) -> None:
    sequence = [True, False, True, True, False, True, True, True, True, True, True, True]
    through = SCALES[name]()
    stopped = SCALES[name]()
    for i, finite in enumerate(sequence):
        through, stopped = through.adjust(finite), stopped.adjust(finite)
        if i in (2, 6):
            saved = [np.array(x) for x in jax.tree.leaves(stopped)]
            stopped = jax.tree.unflatten(jax.tree.structure(SCALES[name]()), saved)
        assert_bitwise_equal(*(jax.tree.map(jnp.asarray, s) for s in (through, stopped)))


@every_scale
def test_every_kind_of_boolean_adjusts(name: str) -> None:
    for finite in (np.bool_(True), jnp.array(True), np.array(True)):
        found = jax.tree.leaves(SCALES[name]().adjust(finite))
        assert found == jax.tree.leaves(SCALES[name]().adjust(True))


@pytest.mark.parametrize("number", [0, 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:StaticLossScale")  # of what is above 2**126
def test_a_static_scale_that_cannot_scale_is_refused_where_it_is_used(number: float) -> None:
    loss_scale = jt.StaticLossScale(number)  # jmp's own tests have a zero
    with pytest.raises(ValueError, match=r"loss_scale=.* must be a finite number above 0"):
        jt.with_loss_scale(optax.sgd(0.1), jt.policies.PerLossScale((jt.NoOpLossScale(), loss_scale)))
    with pytest.raises(ValueError, match=r"loss_scale=.* must be a finite number above 0"):
        jt.scaled_value_and_grad(jnp.sum)(loss_scale, jnp.ones(2))


@pytest.mark.parametrize("number", ["1", True, None])
def test_a_static_scale_is_a_number(number: Any) -> None:
    with pytest.raises(ValueError, match=r"loss_scale=.* must be a number"):
        jt.StaticLossScale(number)


def test_static_scales_are_values_and_arrays_are_leaves() -> None:
    assert jt.StaticLossScale(np.float32(8)) == jt.StaticLossScale(8.0)
    assert hash(jt.StaticLossScale(np.asarray(8.0))) == hash(jt.StaticLossScale(8.0))
    assert jax.tree.leaves(jt.StaticLossScale(8.0)) == []
    traces = []

    @jax.jit
    def scaled(scale: jt.StaticLossScale) -> jax.Array:
        traces.append(1)
        return scale.scale(jnp.float32(1))

    for value in (1.0, 2.0, 4.0):
        assert float(scaled(jt.StaticLossScale(jnp.float32(value)))) == value
    assert len(traces) == 1


def test_named_paths_for_checkpoints() -> None:
    scale = SCALES["hysteresis"]()
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(scale)]
    assert paths == [".loss_scale", ".counter", ".hysteresis_left"]


def test_own_fields_are_strict() -> None:
    for name, values in {
        "backoff_factor": (0.0, 1.0, -1.0, np.nan),
        "max_loss_scale": (0.0, 2.0**127, np.nan),
        "hysteresis": (0, 1.5, 2.0, True, np.inf, np.nan),
        "counter_start": (-1.0,),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name}="):
                jt.DynamicLossScale(8.0, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_loss_scale=4\.0"):
        jt.DynamicLossScale(8.0, min_loss_scale=8.0, max_loss_scale=4.0)
    with pytest.raises(ValueError, match="min_loss_scale must be a concrete number"):
        jax.jit(lambda low: jt.DynamicLossScale(8.0, min_loss_scale=low).scale(1.0))(1.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((8.0, 0, 0), "period=0 should be at least 1"),
        ((8.0, 0, 10, 1), "factor=1 should be finite and above 1"),
        ((8.0, 0, 10, 2, -1.0), "min_loss_scale=-1.0 should be finite and not negative"),
        ((0.0,), "loss_scale=0.0 should be finite and above 0"),
        ((8,), "Expected floating type for loss_scale, got int32"),
    ],
)
def test_fields_of_jmp_are_lenient_and_warn(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        jt.DynamicLossScale(*arguments)


def test_a_scale_can_be_made_of_a_traced_number() -> None:
    made = jax.jit(lambda s: jt.DynamicLossScale(s).adjust(False))(jnp.float16(8))
    assert float(made.loss_scale) == 4
    assert made.loss_scale.dtype == jnp.float32


@every_scale
def test_the_structure_does_not_depend_on_what_the_leaves_are(name: str) -> None:
    scale = SCALES[name]()
    structure = jax.tree.structure(scale)
    hash(structure)
    others = [jax.device_get(scale), jax.device_put(scale), jax.eval_shape(lambda s: s, scale)]
    for leaf in (lambda _: "sharding", lambda _: True, np.asarray):
        others.append(jax.tree.map(leaf, scale))
    assert [jax.tree.structure(other) for other in others] == [structure] * 6


def test_a_float_counter_stays_a_count() -> None:
    scale = jt.DynamicLossScale(8.0, counter=1.0)
    for finite in (False, True, False):
        scale = scale.adjust(finite)
        assert [x.dtype for x in jax.tree.leaves(scale)] == [jnp.float32, jnp.int32]


@pytest.mark.parametrize("period", [2**31, 10**12, np.inf])
def test_a_period_that_never_ends_never_grows(period: float) -> None:
    scale = jt.DynamicLossScale(8.0, period=period).adjust(True).adjust(True)
    assert (float(scale.loss_scale), int(scale.counter)) == (8.0, 2)
    assert float(scale.adjust(False).loss_scale) == 4.0


def test_a_lowered_period_takes_effect_after_a_resume() -> None:
    scale = jt.DynamicLossScale(8.0, period=100)
    for _ in range(5):
        scale = scale.adjust(True)
    resumed = jt.DynamicLossScale(scale.loss_scale, scale.counter, period=3)
    assert float(resumed.adjust(True).loss_scale) == 16.0


@pytest.mark.full
def test_building_scales_starts_no_backend() -> None:
    program = """
import numpy as np
import jmp_train as jt
for scale in (
    jt.torch_loss_scale(), jt.apex_loss_scale(), jt.policies.nemo_loss_scale(), jt.deepspeed_loss_scale(),
    jt.megatron_loss_scale(hysteresis=3), jt.StaticLossScale(8.0), jt.NoOpLossScale(),
    jt.DynamicLossScale(np.float16(8), np.int64(3)),
):
    print(jt.policies.skips_to_floor(scale), end=" ")
"""
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}  # which raises as soon as it starts
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == ["142", "142", "142", "17", "34", "0", "0", "3"], result.stderr


X = np.random.default_rng(0).uniform(1, 2, 100_000).astype(np.float32) * np.float32(2.0) ** (
    np.random.default_rng(1).integers(-60, 60, 100_000)
)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("factor", [0.7, 0.1, 0.9, 0.999, 1.001, 1.7, 1 / 3, 0.123456789, 1e10 + 0.1, 1.5, 2.0, np.pi])
@pytest.mark.parametrize("compiled", [True, False])
def test_it_is_the_product_of_double_precision(factor: float, compiled: bool) -> None:
    fn = lambda x: float64_product(x, factor)
    result = (jax.jit(fn) if compiled else fn)(jnp.asarray(X))
    np.testing.assert_array_equal(result, (X.astype(np.float64) * factor).astype(np.float32))


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(2.0**-60, 2.0**60, width=32))
def test_any_factor(factor: float, x: float) -> None:
    expected = np.float32(np.float64(np.float32(x)) * factor)
    assert np.asarray(float64_product(jnp.float32(x), factor)) == expected


def test_zero_infinity_and_overflow() -> None:
    x = jnp.array([0.0, np.inf, 3e38], jnp.float32)
    np.testing.assert_array_equal(float64_product(x, 1.7), [0, np.inf, np.inf])
