"""The statistics of `spikes` beside float64, and which norms it skips."""

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_train as jt
from jmp_train.policies.optimizers import SpikeStatistics

pytestmark = pytest.mark.quick

STEPS = 64
SIGMA, WINDOW, WARMUP, RATIO = 4.0, 16, 8, 1.5


@functools.cache
def over(**options: Any) -> Any:
    """Returns a compiled function from norms to what is skipped and the statistics after each."""
    rule = jt.spikes(**options)

    def step(state: SpikeStatistics, norm: jax.Array) -> Any:
        skip, state = rule.update(norm, state)
        return state, (skip, state)

    return jax.jit(lambda norms: jax.lax.scan(step, rule.init(), norms)[1])


def reference(norms: np.ndarray) -> tuple[list[float], list[tuple[float, float, int]]]:
    """Returns how far each norm is above the threshold, in logarithms, and the statistics after it, in float64."""
    mean, variance, samples, excesses, states = 0.0, 0.0, 0, [], []
    for norm in norms.astype(np.float64):
        excess = -math.inf
        if norm > 0:
            x = math.log(min(max(norm, np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)))
            limit = max(SIGMA * math.sqrt(variance), math.log(RATIO))
            if samples >= WARMUP:
                excess = x - mean - limit
                x = min(max(x, mean - limit), mean + limit)
            samples += 1
            weight = 1 / min(samples, WINDOW)
            variance = (1 - weight) * variance + weight * (1 - weight) * (x - mean) ** 2
            mean = (1 - weight) * mean + weight * x
        excesses.append(excess)
        states.append((mean, variance, samples))
    return excesses, states


NORMS = st.one_of(
    st.floats(0.5, 2.0, width=32),
    st.floats(float(np.float32(1e-36)), float(np.float32(1e36)), width=32),
    st.sampled_from([0.0, math.inf]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(NORMS, min_size=1, max_size=STEPS))
def test_the_statistics_and_decisions_are_those_of_float64(norms: list[float]) -> None:
    padded = np.pad(np.asarray(norms, np.float32), (0, STEPS - len(norms)))
    skips, states = jax.device_get(over(sigma=SIGMA, window=WINDOW, warmup=WARMUP, min_ratio=RATIO)(padded))
    excesses, expected = reference(padded)
    means, variances, samples = zip(*expected, strict=True)
    np.testing.assert_array_equal(states.samples, samples)
    # Logarithms are below 89, so float32 has them to 4e-6, and a window adds up at most some dozens of roundings.
    np.testing.assert_allclose(states.mean, means, atol=2e-4)
    np.testing.assert_allclose(states.variance, variances, atol=2e-3, rtol=1e-4)
    clear = np.abs(excesses) > 2e-2
    np.testing.assert_array_equal(skips[clear], np.asarray(excesses)[clear] > 0)


def test_before_the_window_is_full_they_are_the_plain_mean_and_variance() -> None:
    norms = np.random.default_rng(0).lognormal(size=WINDOW).astype(np.float32)
    _, states = over(window=WINDOW, warmup=WINDOW)(norms)
    np.testing.assert_allclose(states.mean[-1], np.log(norms).mean(), rtol=1e-5)
    np.testing.assert_allclose(states.variance[-1], np.log(norms).var(), rtol=1e-5)


def steady(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(sigma=0.1, size=count).astype(np.float32)


def test_a_spike_is_skipped_and_the_steps_beside_it_are_taken() -> None:
    norms = steady(300)
    norms[[150, 220]] = 100.0, math.inf
    skips, _ = over()(norms)
    np.testing.assert_array_equal(np.flatnonzero(skips), [150, 220])


@pytest.mark.parametrize(("options", "first"), [({}, 64), ({"window": 30}, 20), ({"warmup": 5}, 5)])
def test_nothing_is_skipped_before_the_warmup(options: dict[str, int], first: int) -> None:
    for place in (first - 1, first):
        norms = np.ones(128, np.float32)
        norms[place] = 1e6
        assert over(**options)(norms)[0].tolist() == [i == place == first for i in range(128)]


def test_norms_of_zero_leave_the_statistics_as_they_were() -> None:
    norms = steady(200)
    with_zeros = np.insert(norms, [0, 1, 70, 70, 150], 0.0)
    skips, states = jax.device_get(over()(with_zeros))
    expected = jax.device_get(over()(norms))[1]
    assert not skips.any()
    np.testing.assert_array_equal(states.mean[with_zeros > 0], expected.mean)
    np.testing.assert_array_equal(states.variance[with_zeros > 0], expected.variance)


@pytest.mark.parametrize(("jump", "most"), [(10.0, 14), (1e4, 26), (1e30, 45)])
def test_a_new_level_is_skipped_for_a_while_and_then_taken(jump: float, most: int) -> None:
    norms = steady(600)
    norms[300:] *= np.float32(jump)
    skips = np.flatnonzero(over()(norms)[0])
    assert len(skips) > 3
    np.testing.assert_array_equal(skips, np.arange(300, 300 + len(skips)))
    assert len(skips) <= most


def test_a_level_that_falls_is_followed() -> None:
    norms = steady(900)
    norms[300:] *= np.float32(1e-4)
    skips, states = over()(norms)
    assert not np.any(skips)
    np.testing.assert_allclose(states.mean[-1], math.log(1e-4), atol=0.2)


def test_a_steady_norm_may_double_before_it_is_a_spike() -> None:
    norms = np.ones(100, np.float32)
    norms[[80, 90]] = 1.9, 4.0
    assert np.flatnonzero(over()(norms)[0]).tolist() == [90]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sigma": 0.0}, "sigma=0.0"),
        ({"sigma": math.nan}, "sigma=nan"),
        ({"window": 1}, "window=1"),
        ({"window": 10.0}, "window=10.0"),
        ({"warmup": 1}, "warmup=1"),
        ({"min_ratio": 1.0}, "min_ratio=1.0"),
    ],
)
def test_wrong_numbers_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jt.spikes(**arguments)
