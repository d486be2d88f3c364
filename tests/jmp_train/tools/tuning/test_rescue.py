"""With the rules that `tune` finds, models train as in float32 that torch's table in float16 does not train."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from promotion import promoting
from rescue_models import MODELS, Model, moments, train

import jmp_train as jt

pytestmark = pytest.mark.full

# By hand its distances alone have to be float32 for it to train; `tune` may not find that with its default tolerance.
ALL_FLOAT32 = ("gaussian_process",)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_model_trains_by_tuned_rules_as_in_float32(make: Callable[[int], Model]) -> None:
    """Tuned on moments of a training in float32, since some fail only after a while; a part stays in half."""
    model = make(0)
    tuned = jt.tune(promoting(model.loss_fn), promoting(moments)(make))
    assert tuned.verification.passed, tuned
    assert tuned.half_flops[1] > 0.1 or make.__name__ in ALL_FLOAT32, tuned

    exact = promoting(train)(make, None, (0, 1, 2))
    half = promoting(train)(make, tuned.rules)
    assert half.losses[0] <= exact.losses.max() + np.ptp(exact.losses), tuned
    assert half.skipped[0] < 0.1, tuned
    jax.clear_caches()
