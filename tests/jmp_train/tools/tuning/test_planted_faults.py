"""Of the faults that a diagnosis is tested with: tuned rules hold under autocast itself, and each entry is needed."""

import pytest
from planted_faults import FAULTS
from planting import Fault, Way
from promotion import promoting

import jmp_train as jt

pytestmark = pytest.mark.full

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
