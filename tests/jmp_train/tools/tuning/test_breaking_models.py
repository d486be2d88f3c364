"""Models of `benchmarks/breaking_models` that float16 breaks, small: tune's rules bring loss and gradient back."""

import pytest
from breaking_models import BREAKING
from tune import errors_by

import jmp_train as jt

pytestmark = pytest.mark.full


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
