"""Extremes of messages, and their gradients, against float64: a term has other last bits in another pass."""

from pathlib import Path

import pytest
from extremes import check
from process_helpers import run_python

pytestmark = pytest.mark.full

PROGRAM = Path(__file__).parents[2] / "programs" / "extremes.py"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("operation", "shape"),
    [("add", (5,)), ("sub", (5,)), ("mul", (5,)), ("div", (5,)), ("dot", (2, 33)), ("dot", (64,))],
)
def test_extremes_of_built_in_messages(operation: str, shape: tuple[int, ...], dtype: str) -> None:
    check(operation, shape, dtype)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", ["", "--xla_cpu_max_isa=AVX", "--xla_backend_optimization_level=0"])
def test_extremes_however_xla_rounds(flags: str) -> None:
    """With and without fused multiply-adds, and with optimized machine code or not."""
    run_python(PROGRAM, timeout=500, XLA_FLAGS=flags)
