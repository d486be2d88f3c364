"""What message passing stores on a GPU, read from what XLA compiles for a V100 that is not there."""

from pathlib import Path

import pytest
from gpu_programs import EDGES, FEATURES, NODES

from jmp_train.absent_gpu import compile_for_gpu

PROGRAMS = Path(__file__).parents[1] / "gpu_programs.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "hub"), [("float16", 5_000), ("float32", 1)])
def test_fused_pairs_store_no_array_of_edges_by_features(
    dtype: str, hub: int, plan_python: str
) -> None:
    target = f"{PROGRAMS}:fused_pairs"
    compiled = compile_for_gpu(target, dtype, str(hub), python=plan_python, timeout=200)
    sizes = [array.n_bytes for array in compiled.arrays]
    assert max(sizes) >= NODES * FEATURES * 2  # it is the program that was meant
    elements = compiled.arrays_of_at_least(EDGES * FEATURES)
    assert not elements, elements  # not even in 8 bits
