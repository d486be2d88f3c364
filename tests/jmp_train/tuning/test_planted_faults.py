"""Of the faults that a diagnosis is tested with: tuned rules hold under autocast itself, and each entry is needed."""

import pytest
from helpers import promoting
from planted_faults import FAULTS
from planting import Fault, Way

import jmp_train as jt

pytestmark = pytest.mark.quick

# One place of each fault that rules mend.
MENDED = list({fault.name: fault for fault in FAULTS if fault.action == "rules"}.values())
QUICK = ("squares on devices", "softmax of an offset", "product of probabilities")


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=str(f), marks=[] if f.name in QUICK else pytest.mark.full) for f in MENDED]
)
def test_it_is_kept_out_of_half_precision(fault: Fault) -> None:
    fn, args = fault.build(Way(fault.dtype, exact=True))
    tuned = jt.tune(fn if isinstance(fn, jt.TrainStep) else promoting(fn), [args], dtype=fault.dtype)
    assert tuned.complete
    assert tuned.verification.passed
    for entry in tuned.entries:
        assert entry.repaired or (entry.without is not None and not tuned.tolerance.passes(entry.without)), entry
