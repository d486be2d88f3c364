"""Presets against the golden traces and against step-by-step versions of the originals."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_train as jt
from jmp_train.policies.loss_scaling import presets

pytestmark = pytest.mark.quick

PRESETS = [function for name, function in vars(presets).items() if name.endswith("_loss_scale")]

# --- golden traces: measured on the real classes (init 256, interval 3), scale AFTER each update ---

BAD_A = "0 0 0 0 0 0 0 0 0 0"
BAD_B = "1 0 1 0 1 1 0 0 0 0 1 1 0 0 0 0 0"
BAD_C = "1 1 1 1 0 0 0 1 0 0 0 0"
BAD_D = "0 0 1 0 1 0 0 0 0"

TORCH_LIKE = [
    jt.torch_loss_scale(256.0, growth_interval=3),
    jt.apex_loss_scale(init_scale=256.0, scale_window=3),
    jt.DynamicLossScale(256.0, period=3),
]
D_TORCH = jt.torch_loss_scale(4.0, 2.0, 0.25, 2)


def megatron(hysteresis: int) -> jt.LossScale:
    return jt.megatron_loss_scale(256.0, growth_interval=3, hysteresis=hysteresis)


def nemo(hysteresis: int) -> jt.LossScale:
    return jt.policies.nemo_loss_scale(256.0, growth_interval=3, hysteresis=hysteresis)


def deepspeed(hysteresis: int, consecutive: bool = False) -> jt.LossScale:
    return jt.deepspeed_loss_scale(0, 8, 3, hysteresis, consecutive)


TRACES: dict[str, tuple[str, str, list[jt.LossScale]]] = {
    "A": (BAD_A, "256 256 512 512 512 1024 1024 1024 2048 2048", [*TORCH_LIKE, megatron(2), nemo(2)]),
    "A DeepSpeed": (BAD_A, "256 256 256 512 512 512 1024 1024 1024 2048",
                    [deepspeed(2), deepspeed(2, consecutive=True), deepspeed(1)]),
    "B": (BAD_B, "128 128 64 64 32 16 16 16 32 32 16 8 8 8 16 16 16", TORCH_LIKE),
    "B cumulative": (BAD_B, "256 256 128 128 64 32 32 32 64 64 64 32 32 32 64 64 64", [megatron(2)]),
    "B consecutive": (BAD_B, "256 256 256 256 256 128 128 128 256 256 256 128 128 128 256 256 256", [nemo(2)]),
    "B DeepSpeed": (BAD_B, "256 256 128 128 64 32 32 32 32 64 64 32 32 32 32 64 64", [deepspeed(2)]),
    "B DeepSpeed consecutive": (BAD_B, "256 256 256 256 256 128 128 128 128 256 256 128 128 128 128 256 256",
                                [deepspeed(2, consecutive=True)]),
    "B DeepSpeed fused": (BAD_B, "128 128 64 64 32 16 16 16 16 32 16 8 8 8 8 16 16", [deepspeed(1)]),
    "C": (BAD_C, "128 64 32 16 16 16 32 16 16 16 32 32", [*TORCH_LIKE, megatron(1), nemo(1)]),
    "C DeepSpeed": (BAD_C, "128 64 32 16 16 16 16 8 8 8 8 16", [deepspeed(1)]),
    "D": (BAD_D, "4 8 2 2 .5 .5 1 1 2", [D_TORCH]),
    "E bounds": ("0 0 0 1 1 1 1 1 1 0", "8 16 16 8 4 2 1 1 1 2",
                 [jt.megatron_loss_scale(4.0, growth_interval=1, hysteresis=1, max_scale=16.0)]),
    "G cumulative": (BAD_B, "256 256 256 256 128 64 64 64 128 128 128 128 128 128 256 256 256", [megatron(3)]),
    "G consecutive": (BAD_B, "256 256 256 256 256 256 256 256 512 512 512 512 512 512 1024 1024 1024", [nemo(3)]),
}  # fmt: skip


def steps(scale: Any, bad: str) -> list[Any]:
    """Returns the scale's states after each update."""
    states = []
    for step in bad.split():
        scale = scale.adjust(step == "0")
        states.append(scale)
    return states


@pytest.mark.parametrize("name", TRACES)
def test_golden_traces(name: str) -> None:
    bad, expected, scales = TRACES[name]
    for scale in scales:
        trace = [float(state.loss_scale) for state in steps(scale, bad)]
        assert trace == [float(value) for value in expected.split()], scale


@pytest.mark.parametrize(
    ("scale", "bad", "counters", "hysteresis_left"),
    [
        (D_TORCH, BAD_D, "1 0 0 1 0 1 0 1 0", None),
        (megatron(2), BAD_B[:17], "0 1 0 1 0 0 1 2 0", "1 1 0 0 0 0 0 0 2"),
        (nemo(2), BAD_B[:17], "0 1 0 1 0 0 1 2 0", "1 2 1 2 1 0 2 2 2"),
    ],
    ids=["torch", "megatron", "nemo"],
)
def test_golden_counters(scale: Any, bad: str, counters: str, hysteresis_left: str | None) -> None:
    states = steps(scale, bad)
    assert " ".join(str(state.counter) for state in states) == counters
    if hysteresis_left is not None:
        assert " ".join(str(state.hysteresis_left) for state in states) == hysteresis_left


DEFAULTS: list[tuple[Any, float, int]] = [  # the first scale, and its growth interval
    (jt.torch_loss_scale(), 2.0**16, 2000),
    (jt.apex_loss_scale(), 2.0**16, 2000),
    (jt.megatron_loss_scale(), 2.0**32, 1000),
    (jt.policies.nemo_loss_scale(), 2.0**16, 2000),
    (jt.deepspeed_loss_scale(), 2.0**16, 1000),
    (jt.deepspeed_loss_scale(initial_scale_power=-126, min_loss_scale=2.0**-126), 2.0**-126, 1000),
]


def test_defaults_are_the_originals() -> None:
    for scale, first, interval in DEFAULTS:
        assert (float(scale.loss_scale), scale.period) == (first, interval)


# --- independent step-by-step versions, in the originals' own arithmetic ----------------------


def product(scale: np.float32, factor: float) -> np.float32:
    """Returns float32(float64 product), as torch's kernels compute it."""
    with np.errstate(over="ignore"):
        return np.float32(np.float64(scale) * np.float64(factor))


@dataclasses.dataclass
class Torch:
    """With `hysteresis`, NeMo. The bounds of the scale are ours."""

    scale: np.float32
    growth: float
    backoff: float
    interval: int
    hysteresis: int = 1
    good: int = 0

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, ok: bool) -> None:
        if not ok:
            self.good, self.left = 0, self.left - 1
            if self.left <= 0:
                self.scale = max(product(self.scale, self.backoff), np.float32(2.0**-126))
            return
        self.good, self.left = self.good + 1, self.hysteresis
        if self.good == self.interval:
            self.scale, self.good = min(product(self.scale, self.growth), np.float32(2.0**126)), 0


@dataclasses.dataclass
class Apex:
    scale: float
    interval: int
    low: float | None
    high: float
    good: int = 0

    def update(self, ok: bool) -> None:
        if ok:
            self.good += 1
        else:
            self.scale = max(self.low, self.scale / 2) if self.low else self.scale / 2
            self.good = 0
        if self.good == self.interval:
            self.scale, self.good = min(self.high, self.scale * 2), 0


@dataclasses.dataclass
class Megatron:
    """With `high`, ColossalAI. The factors are float32 tensors in both."""

    scale: np.float32
    growth: float
    backoff: float
    interval: int
    hysteresis: int
    low: float
    high: float
    good: int = 0

    def __post_init__(self) -> None:
        self.left = self.hysteresis

    def update(self, ok: bool) -> None:
        if not ok:
            self.good, self.left = 0, self.left - 1
            if self.left <= 0:
                self.scale = max(self.scale * np.float32(self.backoff), np.float32(self.low))
            return
        self.good += 1
        if self.good == self.interval:
            self.good, self.left = 0, self.hysteresis
            self.scale = min(self.scale * np.float32(self.growth), np.float32(self.high))


@dataclasses.dataclass
class DeepSpeed:
    scale: float
    window: int
    hysteresis: int
    consecutive: bool
    low: float

    def __post_init__(self) -> None:
        self.left, self.step, self.last = self.hysteresis, 0, -1

    def update(self, ok: bool) -> None:
        if not ok:
            if self.hysteresis == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.low)
            else:
                self.left -= 1
            self.last = self.step
        else:
            if self.consecutive:
                self.left = self.hysteresis
            run = self.step - self.last - 1
            if run > 0 and run % self.window == 0:
                if not self.consecutive:
                    self.left = self.hysteresis
                self.scale *= 2
        self.step += 1


@jax.jit
def trace(scale: jt.DynamicLossScale, finite: jax.Array) -> jax.Array:
    def step(scale: Any, ok: jax.Array) -> Any:
        scale = scale.adjust(ok)
        return scale, scale.loss_scale

    start = jax.tree.map(jnp.asarray, scale)
    return jax.lax.scan(step, start, finite)[1]


def check(scale: Any, reference: Any, seed: int, bad_rate: float, count: int = 400) -> None:
    finite = np.random.default_rng(seed).random(count) >= bad_rate
    expected = []
    for ok in finite:
        reference.update(bool(ok))
        expected.append(np.float32(reference.scale))
    np.testing.assert_array_equal(np.asarray(trace(scale, finite)), np.asarray(expected))


seeds = st.integers(0, 2**32 - 1)
powers = st.integers(4, 20).map(lambda n: 2.0**n)
growths = st.sampled_from([2.0, 4.0, 1.5, 3.0, 1.001, 1.7])
backoffs = st.sampled_from([0.5, 0.25, 0.75, 0.7, 0.9])
intervals = st.integers(1, 6)
FEW = settings(max_examples=12, deadline=None)


@pytest.mark.full
@FEW
@given(seeds, powers, growths, backoffs, intervals, st.integers(1, 4), st.sampled_from([0.02, 0.2, 0.6]))
@pytest.mark.filterwarnings("ignore:.*is not a power of two")
def test_torch_and_nemo_bit_by_bit(
    seed: int, start: float, growth: float, backoff: float, interval: int, hysteresis: int, bad_rate: float
) -> None:
    options = (start, growth, backoff, interval)
    arguments = (np.float32(start), growth, backoff, interval)
    check(jt.torch_loss_scale(*options), Torch(*arguments), seed, bad_rate)
    nemo_scale = jt.policies.nemo_loss_scale(*options, hysteresis=hysteresis)
    check(nemo_scale, Torch(*arguments, hysteresis), seed, bad_rate)


@FEW
@given(seeds, powers, intervals, st.sampled_from([None, 0, 1.0, 8.0]), st.sampled_from([24, 30]))
def test_apex_bit_by_bit(seed: int, start: float, interval: int, low: float | None, high: int) -> None:
    scale = jt.apex_loss_scale(init_scale=start, scale_window=interval, min_loss_scale=low, max_loss_scale=2.0**high)
    check(scale, Apex(start, interval, low, 2.0**high), seed, 0.2)


@pytest.mark.full
@FEW
@given(seeds, powers, growths, backoffs, intervals, st.integers(1, 4), st.sampled_from([24.0, 32.0]))
@pytest.mark.filterwarnings("ignore:.*is not a power of two")
def test_megatron_and_colossalai_bit_by_bit(
    seed: int, start: float, growth: float, backoff: float, interval: int, hysteresis: int, high: float
) -> None:
    options = (start, 1.0, growth, backoff, interval, hysteresis, 2.0**high)
    reference = Megatron(np.float32(start), growth, backoff, interval, hysteresis, low=1.0, high=2.0**high)
    check(jt.megatron_loss_scale(*options), reference, seed, 0.25)


@pytest.mark.full
@FEW
@given(seeds, st.integers(4, 20), intervals, st.integers(1, 4), st.booleans())
def test_deepspeed_bit_by_bit(seed: int, power: int, window: int, hysteresis: int, consecutive: bool) -> None:
    scale = jt.deepspeed_loss_scale(0, power, window, hysteresis, consecutive)
    reference = DeepSpeed(2.0**power, window, hysteresis, consecutive, 1.0)
    check(scale, reference, seed, 0.35, count=90)


# --- bounds, options, validation --------------------------------------------------------------


def test_the_scale_stays_where_its_inverse_is_a_number() -> None:
    up: Any = jt.torch_loss_scale(2.0**124, growth_interval=1)
    down: Any = jt.torch_loss_scale(2.0**-124)
    for _ in range(6):
        up, down = up.adjust(True), down.adjust(False)
    assert (float(up.loss_scale), float(down.loss_scale)) == (2.0**126, 2.0**-126)
    assert float(up.unscale(up.scale(jnp.float32(1e-3)))) == np.float32(1e-3)
    assert float(down.unscale(down.scale(jnp.float32(3.0)))) == 3.0


def test_forms_without_a_loop_and_a_start_at_the_ceiling() -> None:
    assert jt.torch_loss_scale(enabled=False) == jt.NoOpLossScale()
    assert jt.policies.nemo_loss_scale(enabled=False) == jt.NoOpLossScale()
    assert jt.apex_loss_scale(128.0) == jt.StaticLossScale(128.0)
    assert jt.deepspeed_loss_scale(loss_scale=64) == jt.StaticLossScale(64.0)
    assert float(jt.apex_loss_scale(init_scale=2.0**30).loss_scale) == 2.0**24


WRONG: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (jt.torch_loss_scale, "init_scale", [0, -1.0, np.nan, np.inf, 2.0**127, 10**400, "x", None]),
    (jt.torch_loss_scale, "growth_factor", [1, 0.5, np.inf, 10**400, "2"]),
    (jt.torch_loss_scale, "backoff_factor", [0, 1, 2.0, -1, np.nan]),
    (jt.torch_loss_scale, "growth_interval", [0, -3, 2.5, None]),
    (jt.torch_loss_scale, "enabled", [2, "yes", None]),
    (jt.apex_loss_scale, "loss_scale", ["static", 0, -2.0, np.inf]),
    (jt.apex_loss_scale, "init_scale", [0, np.nan]),
    (jt.apex_loss_scale, "scale_factor", [1.0, np.inf]),
    (jt.apex_loss_scale, "scale_window", [0, 1.5]),
    (jt.apex_loss_scale, "min_loss_scale", [2.0**20, -1.0]),
    (jt.apex_loss_scale, "max_loss_scale", [0, 2.0**128]),
    (jt.megatron_loss_scale, "initial_scale", [0, np.inf]),
    (jt.megatron_loss_scale, "min_scale", [2.0**33, 0]),
    (jt.megatron_loss_scale, "growth_factor", [1.0]),
    (jt.megatron_loss_scale, "backoff_factor", [1.0]),
    (jt.megatron_loss_scale, "growth_interval", [0]),
    (jt.megatron_loss_scale, "hysteresis", [0, 1.5]),
    (jt.megatron_loss_scale, "max_scale", [2.0**127]),
    (jt.policies.nemo_loss_scale, "hysteresis", [0, None]),
    (jt.policies.nemo_loss_scale, "enabled", ["no"]),
    (jt.deepspeed_loss_scale, "loss_scale", [-1.0, np.inf, "dynamic"]),
    (jt.deepspeed_loss_scale, "initial_scale_power", [127, -127, 16.0]),
    (jt.deepspeed_loss_scale, "loss_scale_window", [0]),
    (jt.deepspeed_loss_scale, "hysteresis", [0]),
    (jt.deepspeed_loss_scale, "consecutive_hysteresis", [2]),
    (jt.deepspeed_loss_scale, "min_loss_scale", [2.0**17, 0]),
]


@pytest.mark.parametrize(("preset", "name", "values"), WRONG,
                         ids=[f"{p.__name__}-{n}" for p, n, _ in WRONG])  # fmt: skip
def test_wrong_arguments_are_named(preset: Callable[..., Any], name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}="):
            preset(**{name: value})


@pytest.mark.parametrize("preset", PRESETS)
def test_a_boolean_is_not_a_number(preset: Callable[..., Any]) -> None:
    for name, parameter in inspect.signature(preset).parameters.items():
        for value in () if isinstance(parameter.default, bool) else (True, False):
            with pytest.raises(ValueError, match=f"^{name}={value}"):
                preset(**{name: value})


def test_an_initial_scale_beyond_the_largest_is_named() -> None:
    with pytest.raises(ValueError, match=r"^initial_scale=.* must not exceed max_scale=2147483648"):
        jt.megatron_loss_scale(max_scale=2.0**31)


def test_an_interval_that_never_ends_never_grows() -> None:
    scale: Any = jt.torch_loss_scale(8.0, growth_interval=2**31)
    assert float(scale.adjust(True).loss_scale) == 8.0


@pytest.mark.parametrize(
    ("preset", "name", "number"),
    [
        (jt.torch_loss_scale, "init_scale", 1000.0),
        (jt.torch_loss_scale, "growth_factor", 1.5),
        (jt.torch_loss_scale, "backoff_factor", 0.7),
        (jt.policies.nemo_loss_scale, "init_scale", 1000.0),
        (jt.apex_loss_scale, "loss_scale", 1000.0),
        (jt.megatron_loss_scale, "backoff_factor", 0.7),
        (jt.deepspeed_loss_scale, "loss_scale", 1000.0),
    ],
)
def test_a_number_that_is_not_a_power_of_two_warns_its_caller(
    preset: Callable[..., Any], name: str, number: float
) -> None:
    with pytest.warns(UserWarning, match=f"{name}={number} is not a power of two") as record:
        preset(**{name: number})
    assert [warning.filename for warning in record] == [__file__]


def test_whole_numbers_as_in_configurations_are_numbers() -> None:
    scales = [
        (jt.torch_loss_scale(65536, 2), jt.torch_loss_scale()),
        (jt.apex_loss_scale(min_loss_scale=1, max_loss_scale=2**24), jt.apex_loss_scale(min_loss_scale=1.0)),
        (jt.megatron_loss_scale(2**32, 1, 2), jt.megatron_loss_scale()),
        (jt.policies.nemo_loss_scale(65536, 2), jt.policies.nemo_loss_scale()),
        (jt.deepspeed_loss_scale(0, min_loss_scale=1), jt.deepspeed_loss_scale()),
    ]
    for whole, usual in scales:
        assert jax.tree.structure(whole) == jax.tree.structure(usual)
        assert float(whole.loss_scale) == float(usual.loss_scale)


@pytest.mark.parametrize("number", [jnp.float32(1024), np.float32(1024), np.asarray(1024.0), jnp.int32(1024), 1024])
def test_scalars_of_numpy_and_jax_are_numbers(number: Any) -> None:
    for preset in (jt.torch_loss_scale, jt.apex_loss_scale, jt.policies.nemo_loss_scale):
        assert preset(init_scale=number) == preset(init_scale=1024.0)


def test_an_array_and_a_traced_number_are_refused() -> None:
    with pytest.raises(ValueError, match=r"init_scale=.*must be a finite number"):
        jt.torch_loss_scale(init_scale=jnp.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"init_scale=.*must be a finite number"):
        jax.jit(lambda x: jt.torch_loss_scale(init_scale=x).scale(x))(1024.0)
