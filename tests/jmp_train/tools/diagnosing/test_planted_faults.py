"""Each planted fault is what a diagnosis names first, and the remedy that it proposes mends it."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from planted_faults import FAULTS
from planting import Fault, Way, harmful
from promotion import promoting

import jmp_train as jt

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore::jmp_train.policies.MissingLossScaleWarning"),
    pytest.mark.filterwarnings("ignore::jmp_train.policies.InnerGradientWarning"),  # of a gradient penalty
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),  # of a constant, which is a fault
]


def result_of(fn: Any, args: Any) -> np.ndarray:
    """Returns the floats of a function's result, of a train step's the loss and the gradients, as one array."""
    result: Any = eqx.filter_jit(promoting(fn))(*args)
    if isinstance(result, tuple) and isinstance(result[0], jt.TrainState):
        state, metrics = result
        result = metrics["loss"], optax.tree.get(state.opt_state, "trace")
    floats = eqx.filter(result, eqx.is_inexact_array)
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(floats)])


def difference(mended: np.ndarray, exact: np.ndarray) -> float:
    """Returns how far results are apart, relative to those in float32."""
    assert np.isfinite(exact).all()
    return float(np.linalg.norm(mended - exact) / np.linalg.norm(exact))


def standing(fault: Fault, report: jt.tools.NumericsReport) -> str:
    """Returns how a report names a fault: "first", "nearly", "wrong" or "quiet"."""
    lines = [problem.code.partition("# fault: ")[2] for problem in harmful(report)]
    if fault.name not in lines:
        return "wrong" if lines else "quiet"
    first = report.problems[0]
    found = lines[0], first.kind, first.direction, first.remedy.action
    return "first" if found == (fault.name, fault.kind, fault.direction, fault.action) else "nearly"


@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=str(f), marks=[] if f.quick else pytest.mark.full) for f in FAULTS]
)
def test_it_is_named_first_and_mended(fault: Fault) -> None:
    fn, args = fault.build(fault.planted)
    report = jt.diagnose(promoting(fn), *args, steps=fault.steps)
    assert standing(fault, report) == fault.named, report
    if not report.problems:
        return
    way = fault.by_remedy(report)
    fn, args = fault.build(way)
    again = jt.diagnose(promoting(fn), *args, steps=fault.steps)
    exact, exact_args = fault.build(Way(fault.dtype, value=way.value, exact=True))
    off = difference(result_of(fn, args), result_of(exact, exact_args))
    assert (not harmful(again) and off <= fault.tolerance) == fault.mended, (off, again)
