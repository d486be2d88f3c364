"""Noticing stalled runs: how long a fall takes, and who is told."""

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_train as jt

pytestmark = pytest.mark.quick


def overflows_to_floor(state: Any, backoff: float, floor: float) -> int:
    """Counts, step by step, the overflows in a row after which the scale is at its floor."""
    scale, left = np.float32(state.loss_scale), int(state.hysteresis_left or 0)
    count = 0
    while scale > np.float32(floor):
        count, left = count + 1, max(left - 1, 0)
        if left == 0:
            scale = max(np.float32(np.float64(scale) * backoff), np.float32(floor))
    return count


def after(scale: Any, steps: str) -> Any:
    for step in steps:
        scale = scale.adjust(step == "+")
    return scale


# --- skips_to_floor ---------------------------------------------------------------------------


def test_powers_of_two_are_counted_exactly() -> None:
    counts = {n: jt.policies.skips_to_floor(jt.DynamicLossScale(2.0**n)) for n in range(127)}
    assert {n: count for n, count in counts.items() if count != n} == {}
    scales = jax.vmap(jt.DynamicLossScale)(jnp.array([4.0, 256.0, 16.0]))
    assert jt.policies.skips_to_floor(scales) == 8  # to its last member


@pytest.mark.filterwarnings("ignore:DynamicLossScale. factor=")
def test_how_far_the_usual_scales_fall() -> None:
    for scale, expected in (
        (jt.NoOpLossScale(), 0),
        (jt.StaticLossScale(1024.0), 0),
        (jt.StaticLossScale(jnp.float32(1024)), 0),
        (jt.DynamicLossScale(1.0), 0),
        (jt.DynamicLossScale(0.5), 0),
        (jt.DynamicLossScale(8.0, factor=1), 0),  # it never falls
        (jt.DynamicLossScale(8.0, factor=0.5), 0),
        (jt.DynamicLossScale(1.5), 1),
        (jt.DynamicLossScale(2.0**15, min_loss_scale=0.0), 15 + 126),
        (jt.DynamicLossScale(81.0, factor=3), 4),
        (jt.torch_loss_scale(), 16 + 126),
        (jt.apex_loss_scale(min_loss_scale=16.0), 12),
        (jt.megatron_loss_scale(), 32 + 1),
        (jt.deepspeed_loss_scale(), 16 + 1),
        (jt.policies.nemo_loss_scale(hysteresis=4), 16 + 126 + 3),
    ):
        assert jt.policies.skips_to_floor(scale) == expected, scale


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    start=st.floats(1.0, 2.0**32, width=32),
    low=st.floats(2.0**-10, 64.0, width=32),
    backoff=st.sampled_from([0.5, 0.25, 0.125, 0.7, 0.9, 0.1]),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    steps=st.text(alphabet="+-", max_size=8),
)
def test_it_is_the_number_of_overflows_in_a_row(
    start: float, low: float, backoff: float, hysteresis: int, consecutive: bool, steps: str
) -> None:
    scale = jt.DynamicLossScale(
        start, period=3, min_loss_scale=low, backoff_factor=backoff, hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
    )  # fmt: skip
    scale = after(scale, steps)  # a scale in use has spent some of its hysteresis
    assert jt.policies.skips_to_floor(scale) == overflows_to_floor(scale, backoff, low)


@settings(max_examples=25, deadline=None)
@given(power=st.integers(1, 32), hysteresis=st.integers(1, 4), steps=st.text(alphabet="+-", max_size=6))
def test_presets_are_counted_alike(power: int, hysteresis: int, steps: str) -> None:
    for scale, floor in (
        (jt.megatron_loss_scale(2.0**power, hysteresis=hysteresis, growth_interval=2), 1.0),
        (jt.deepspeed_loss_scale(0, power, 2, hysteresis), 1.0),
        (jt.policies.nemo_loss_scale(2.0**power, hysteresis=hysteresis, growth_interval=2), 2.0**-126),
        (jt.apex_loss_scale(init_scale=2.0**power, min_loss_scale=0.5), 0.5),
    ):
        scale = after(scale, steps)
        assert jt.policies.skips_to_floor(scale) == overflows_to_floor(scale, 0.5, floor)


@pytest.mark.parametrize("start", [2.0**29, 1000.0])
def test_the_count_is_that_of_adjust_itself(start: float) -> None:
    scale: Any = jt.DynamicLossScale(start, factor=4, hysteresis=3).adjust(False)
    count = jt.policies.skips_to_floor(scale)
    before = after(scale, "-" * (count - 1))
    assert float(before.loss_scale) > 1.0
    assert float(before.adjust(False).loss_scale) == 1.0


# --- check_progress ---------------------------------------------------------------------------

PARAMS = jnp.ones(2)
BAD, GOOD = jnp.array([1.0, jnp.nan]), jnp.array([1.0, 1.0])


def run_steps(optimizer: Any, steps: str, state: Any = None) -> Any:
    state = optimizer.init(PARAMS) if state is None else state
    for step in steps:
        _, state = optimizer.update(GOOD if step == "+" else BAD, state, PARAMS)
    return state


def scaled(loss_scale: jt.LossScale | None = None) -> Any:
    return jt.with_loss_scale(optax.sgd(0.1), loss_scale or jt.StaticLossScale(8.0))


def test_only_skips_in_a_row_stop() -> None:
    optimizer = scaled()
    for steps, stop_after, stops in (
        ("", 1, False),
        ("-", 1, True),
        ("-", 2, False),
        ("--", 2, True),
        ("---", 2, True),
        ("---+", 1, False),
        ("--+-", 2, False),
        ("+--", 2, True),
    ):
        state = run_steps(optimizer, steps)
        says = pytest.raises(jt.policies.StalledTrainingError, match="skipped for non-finite gradients")
        with says if stops else contextlib.nullcontext():
            jt.check_progress(state, stop_after=stop_after, warn_after=None if stops else stop_after)
    jt.check_progress(run_steps(optimizer, "---"), stop_after=math.inf)


def test_the_message_has_the_numbers() -> None:
    for scale, steps, stop_after, message in (
        (jt.megatron_loss_scale(256.0, 4.0, hysteresis=1), "---", 3,
         r"^the last 3 steps were skipped .* loss scale is now 32 \(floor 4\)\. "),
        (jt.StaticLossScale(8.0), "-", 1, r"^the last step was .* scale is now 8\. "),
        (jt.NoOpLossScale(), "--", 1, r"^the last 2 .* scale is now 1\. "),
    ):  # fmt: skip
        with pytest.raises(jt.policies.StalledTrainingError, match=message):
            jt.check_progress(run_steps(scaled(scale), steps), stop_after=stop_after)
    assert issubclass(jt.policies.StalledTrainingError, FloatingPointError)


class Recorder:
    """Stands for a `SkipRecorder` that has written one capsule, or none."""

    def __init__(self, capsule: Path | None) -> None:
        self.capsule = capsule

    def last_capsule(self) -> Path | None:
        return self.capsule


def test_the_last_capsule_is_named() -> None:
    state = run_steps(scaled(), "-")
    named = r"load_capsule\('capsules/step_00000000.capsule', state\) gives the step that was skipped last$"
    with pytest.raises(jt.policies.StalledTrainingError, match=named):
        jt.check_progress(state, stop_after=1, recorder=Recorder(Path("capsules", "step_00000000.capsule")))
    with pytest.warns(RuntimeWarning, match=named):
        jt.check_progress(state, stop_after=2, warn_after=1, recorder=Recorder(Path("capsules/step_00000000.capsule")))
    with pytest.raises(jt.policies.StalledTrainingError, match=r"nonfinite_report\(gradients\)$"):
        jt.check_progress(state, stop_after=1, recorder=Recorder(None))


def test_a_warning_comes_first() -> None:
    state = run_steps(scaled(), "--")
    with pytest.warns(RuntimeWarning, match="the last 2 steps were skipped") as record:
        jt.check_progress(state, stop_after=3, warn_after=2)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jt.check_progress(state, stop_after=3)
        jt.check_progress(state, stop_after=4, warn_after=3)
    with pytest.raises(jt.policies.StalledTrainingError):
        jt.check_progress(state, stop_after=2, warn_after=1)


def test_a_scale_that_collapses_between_good_steps_is_warned_of() -> None:
    collapsed = r"^4 steps were skipped, now and then, and the loss scale is now 1, .* below 3e-08\. .*SkipRecorder"
    state = run_steps(scaled(jt.DynamicLossScale(16.0)), "+-+-+-+-+")  # one batch in two has a NaN
    with pytest.warns(RuntimeWarning, match=collapsed):
        jt.check_progress(state, stop_after=10, warn_after=4)
    lower = run_steps(scaled(jt.torch_loss_scale(4.0)), "+-+-+-+-+")
    with pytest.warns(RuntimeWarning, match=r"scale of opt_state 'b/0' is now 0\.25, .* below 1e-07"):
        jt.check_progress({"a": run_steps(scaled(), "+"), "b": [lower]}, stop_after=10, warn_after=4)
    with pytest.warns(RuntimeWarning, match="the last 4 steps were skipped") as record:  # that is said alone
        jt.check_progress(run_steps(scaled(jt.DynamicLossScale(16.0)), "----"), stop_after=10, warn_after=4)
    assert len(record) == 1


def test_other_scales_are_not_warned_of() -> None:
    for loss_scale, steps in (
        (jt.DynamicLossScale(16.0), "+-+-+-+"),  # it is 2
        (jt.DynamicLossScale(1.0), "+-+-+-+"),  # 3 skips
        (jt.NoOpLossScale(), "+-+-+-+-+"),
        (jt.StaticLossScale(1.0), "+-+-+-+-+"),
    ):
        jt.check_progress(run_steps(scaled(loss_scale), steps), stop_after=10, warn_after=4)


def test_it_finds_scales_in_any_nesting_and_names_them() -> None:
    chain = optax.chain(optax.clip(1.0), scaled())
    with pytest.raises(jt.policies.StalledTrainingError, match="of opt_state '1'"):
        jt.check_progress(run_steps(chain, "-"), stop_after=1)

    fine, twice, thrice = (run_steps(scaled(), steps) for steps in ("-+", "--", "---"))
    state = {"generator": fine, "critic": {"opt": twice}}
    with pytest.raises(jt.policies.StalledTrainingError, match="of opt_state 'critic/opt' is now"):
        jt.check_progress(state, stop_after=2)
    with pytest.warns(RuntimeWarning, match="of opt_state 'critic/opt' is now"):
        jt.check_progress(state, stop_after=3, warn_after=2)
    jt.check_progress(state, stop_after=3)
    behind_a_warning = pytest.raises(jt.policies.StalledTrainingError, match="of opt_state 'b'")
    with pytest.warns(RuntimeWarning, match="of opt_state 'a'"), behind_a_warning:
        jt.check_progress({"a": twice, "b": thrice}, stop_after=3, warn_after=2)


@pytest.mark.full
def test_vmapped_states_stop_for_their_worst_member() -> None:
    optimizer = scaled(jt.DynamicLossScale(64.0))

    @jax.vmap
    def two_steps(grads: jax.Array) -> Any:
        state = optimizer.init(PARAMS)
        for _ in range(2):
            _, state = optimizer.update(grads, state, PARAMS)
        return state

    state = two_steps(jnp.stack([GOOD, BAD, GOOD]))
    np.testing.assert_array_equal(state.consecutive_skips, [0, 2, 0])
    jt.check_progress(state, stop_after=3)
    # The message is about the member that is stuck: its scale was halved twice.
    with pytest.raises(jt.policies.StalledTrainingError, match=r"the last 2 steps .* is now 16 "):
        jt.check_progress(state, stop_after=2)


def test_wrong_calls_are_named() -> None:
    state = run_steps(scaled(), "")
    options: Any
    for options in ({"stop_after": 0}, {"stop_after": -2}, {"stop_after": 5, "warn_after": 0}):
        name, number = list(options.items())[-1]
        with pytest.raises(ValueError, match=f"^{name}={number} must be an integer of at least 1"):
            jt.check_progress(state, **options)
    with pytest.raises(ValueError, match="opt_state has no loss scale; wrap the optimizer"):
        jt.check_progress(optax.adam(0.1).init(PARAMS), stop_after=1)
    with pytest.raises(ValueError, match=r"check_progress reads values on the host; call it out"):
        jax.jit(lambda state: jt.check_progress(state, stop_after=1))(state)


def test_more_than_skips_to_floor_lets_a_high_start_through() -> None:
    scale = jt.megatron_loss_scale(2.0**20, hysteresis=3)
    optimizer = scaled(scale)
    limit = jt.policies.skips_to_floor(scale) + 1
    state = run_steps(optimizer, "-" * (limit - 1))
    assert float(jt.get_loss_scale(state).loss_scale) == 1.0
    jt.check_progress(state, stop_after=limit)
    with pytest.raises(jt.policies.StalledTrainingError, match=r"is now 1 \(floor 1\)"):
        jt.check_progress(run_steps(optimizer, "-", state), stop_after=limit)
