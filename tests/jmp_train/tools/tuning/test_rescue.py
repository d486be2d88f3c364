"""With the rules that `tune` finds, models train as in float32 that torch's table in float16 does not train.

Models of `benchmarks/breaking_models` that float16 breaks, small: tune's rules bring loss and gradient back.

The models of `benchmarks/rescue_models`: float32 learns their tasks, torch's table in float16 does not.

Nor is it half precision as such: with the guilty operations in float32, the others train as float32 does.

Of the faults that a diagnosis is tested with: tuned rules hold under autocast itself, and each entry is needed.
"""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from breaking_models import BREAKING
from planted_faults import FAULTS
from planting import Fault, Way
from promotion import promoting
from rescue_models import MODELS, Model, moments, train
from tune import errors_by

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


@pytest.mark.parametrize(
    ("name", "kept", "half_elements"),
    [
        ("codebook", [("dot_general",)], 0.5),
        ("large_logits", [("add",), ("dot_general",)], 0.3),  # neither of them alone mends it
        ("coupling_flow", [("mul",)], 0.7),  # with a loss scale below 1, without which no product can be half
    ],
)
def test_half_precision_breaks_it_and_tuned_rules_mend_it(
    name: str, kept: list[tuple[str, ...]], half_elements: float
) -> None:
    case = BREAKING[name](True)
    tuned = jt.tune(case.loss_fn, case.examples, dtype="float16")
    assert [entry.primitives for entry in tuned.entries] == kept
    assert tuned.half_elements[1] > half_elements
    half, mended = (errors_by(case, rules, tuned.loss_scale) for rules in (jt.MOSTLY_HALF, tuned.rules))
    assert half["gradient_error"] > 0.1  # or infinite
    assert mended["loss_error"] < tuned.tolerance.loss
    assert mended["gradient_error"] < 0.02


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_model_fails_by_the_table_alone(make: Callable[[int], Model]) -> None:
    exact = promoting(train)(make, None, (0, 1, 2))
    table = promoting(train)(make, jt.TORCH_CUDA)
    mended = promoting(train)(make, jt.TORCH_CUDA.replace(paths={make(0).guilty: "float32"}))
    worst, spread = exact.losses.max(), np.ptp(exact.losses)
    assert worst + 3 * spread < exact.before.min()
    assert not table.losses[0] <= worst + 3 * spread
    assert mended.losses[0] <= worst + spread
    assert mended.skipped[0] < 0.1


# Programs without a product or an operand that could be half: tune says so.
NO_CHOICE = ("sum over pixels", "squares of small distances", "gradient of an embedding", "root near 0")
# Its loss is the sum of a softmax, whose gradient is 0: there is nothing to compare with but roundings.
CONSTANT = ("softmax over edges",)
# One place of each fault that rules mend.
MENDED = list({fault.name: fault for fault in FAULTS if fault.action == "rules"}.values())
TUNED = [fault for fault in MENDED if fault.name not in NO_CHOICE + CONSTANT]


@pytest.mark.parametrize("fault", TUNED, ids=str)
def test_it_is_kept_out_of_half_precision(fault: Fault) -> None:
    fn, args = fault.build(Way(fault.dtype, exact=True))
    tuned = jt.tune(fn if isinstance(fn, jt.steps.TrainStep) else promoting(fn), [args], dtype=fault.dtype)
    assert tuned.complete
    assert tuned.verification.passed
    for entry in tuned.entries:
        assert entry.repaired or (entry.without is not None and not tuned.tolerance.passes(entry.without)), entry


@pytest.mark.parametrize("fault", [fault for fault in MENDED if fault.name in NO_CHOICE], ids=str)
def test_where_nothing_could_be_half_there_is_nothing_to_tune(fault: Fault) -> None:
    fn, args = fault.build(Way(fault.dtype, exact=True))
    with pytest.raises(ValueError, match=f"no operation of fn could be {fault.dtype}"):
        jt.tune(fn if isinstance(fn, jt.steps.TrainStep) else promoting(fn), [args], dtype=fault.dtype)
