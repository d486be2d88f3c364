"""`tune` in 8 and 4 bits on models in the styles of others: what it leaves out costs most, as measured without trials.

`python -m pytest -s tests/foreign/test_tune_few_bits.py` prints what was found.
"""

import statistics
from collections.abc import Callable
from typing import Any

import few_bits_models
import jax
import optax
import pytest
from few_bits_models import MODELS, equinox_vision_transformer, mixture_of_experts

import jmp_train as jt
from jmp_train.tools.tuning.precisions import precision_of
from jmp_train.tools.tuning.tolerance import Reference, as_numbers, errors_of
from jmp_train.tools.tuning.tuned_functions import as_it_is, subject_of

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

FLOAT32_STEPS, STEPS, EXAMPLES, OTHERS = 300, 300, 3, 13


def trained(subject: few_bits_models.Subject) -> tuple[Any, jt.TrainState]:
    """Returns a step in bfloat16, and the state after some steps in float32."""
    optimizer = jt.with_loss_scale(optax.adam(2e-3), jt.NoOpLossScale())
    loss_fn = jt.stateless(subject.loss_fn)
    float32_step = jax.jit(jt.train_step(loss_fn, optimizer))
    state = jt.TrainState.create(subject.params, optimizer)
    for seed in range(FLOAT32_STEPS):
        state, _ = float32_step(state, subject.batch(seed))
    return jt.train_step(loss_fn, optimizer, policy="autocast_bfloat16"), state


def leave_one_in(step: Any, example: Any, tolerance: jt.tuning.Tolerance, dtype: str) -> list[tuple[str, int, float]]:
    """Returns place, flops and the used part of the tolerance of each product, if only it runs in few bits."""
    subject, precision = subject_of(step, [example])[0], precision_of(step, dtype, None)

    def outcome(transform: Any, example: Any) -> jt.tuning.Outcome:
        return jax.jit(lambda *args: subject.outcome(transform, 1.0, *args))(*example)

    exact = outcome(as_it_is, example)
    slack = jt.tuning.Tolerance().slack(outcome(as_it_is, subject.rounded(example, precision.rounded)), exact)
    units = precision.units(subject, example)
    found = []
    for number, unit in enumerate(units):
        rules = precision.rules({i for i in range(len(units)) if i != number}, units)
        alone = outcome(lambda fn, rules=rules: precision.run(fn, rules), example)
        used = tolerance.used(as_numbers(errors_of(alone, Reference(exact, slack))))
        found.append((f"{unit.path} {unit.line}", unit.flops, used))
    return found


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        *((make, "float8_e4m3fn") for make in MODELS),
        *((make, "int8") for make in (equinox_vision_transformer, mixture_of_experts)),
        (mixture_of_experts, "float4_e2m1fn"),
    ],
)
def test_what_stays_out_of_few_bits_costs_most(make: Callable[[], few_bits_models.Subject], dtype: str) -> None:
    subject = make()
    step, state = trained(subject)
    examples = [(state, subject.batch(1000 + i)) for i in range(EXAMPLES)]
    others = [(state, subject.batch(2000 + i)) for i in range(OTHERS)]
    tuned = jt.tune(step, examples, held_out=others, dtype=dtype, steps=STEPS)
    table = leave_one_in(step, examples[0], tuned.tolerance, dtype)
    print(f"\n{make.__name__}, {dtype}: {tuned}\n{tuned.code()}", *table, sep="\n")
    assert tuned.complete
    assert tuned.verification.passed
    assert len(tuned.verification.tuned_losses) == STEPS
    assert tuned.few_bits_flops > 0.3
    out = {f"{x.path} {x.line}" for x in tuned.products if not x.in_few_bits}
    assert all(not tuned.tolerance.passes(x.without) for x in tuned.products if x.without is not None)
    costs = [[cost**2 / flops for place, flops, cost in table if (place in out) == is_out] for is_out in (True, False)]
    by_trials = all(x.in_few_bits or x.without is not None for x in tuned.products)  # not by the curve of losses
    assert not (out and by_trials) or statistics.median(costs[0]) > statistics.median(costs[1])
    if make is mixture_of_experts:
        assert {x.path for x in tuned.products if x.in_few_bits} >= {"block0/experts"}
        assert dtype != "float8_e4m3fn" or "block0/router" not in {x.path for x in tuned.products if x.in_few_bits}
