"""What message passing stores on a GPU, read from what XLA compiles ahead of time for a V100."""

import math
from pathlib import Path

import pytest
from gpu_builders import compile_for_gpu, stored_arrays
from gpu_programs import EDGES, FEATURES, GAT_EDGES, NODES

pytestmark = [pytest.mark.quick, pytest.mark.newest]

PROGRAMS = Path(__file__).parents[2] / "programs" / "gpu_programs.py"


@pytest.mark.quick_cases(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "hub"), [("float16", 5_000), ("float32", 1)])
def test_fused_pairs_store_no_array_of_edges_by_features(dtype: str, hub: int, plan_python: str) -> None:
    target = f"{PROGRAMS}:fused_pairs"
    compiled = compile_for_gpu(target, dtype, str(hub), python=plan_python, timeout=200)
    arrays = stored_arrays(compiled.hlo)
    sizes = [array.n_bytes for array in arrays]
    assert max(sizes) >= NODES * FEATURES * 2  # it is the program that was meant
    elements = [array for array in arrays if array.n_bytes >= EDGES * FEATURES]
    assert not elements, elements  # not even in 8 bits


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "dtype"), [("gat", "float16"), pytest.param("gatv2", "float32", marks=pytest.mark.full)]
)
def test_chunked_attention_stores_no_float_for_an_edge(name: str, dtype: str, plan_python: str) -> None:
    target = f"{PROGRAMS}:attention"
    compiled = compile_for_gpu(target, name, dtype, python=plan_python, timeout=200)
    long = [x for x in stored_arrays(compiled.hlo) if math.prod(x.shape) >= GAT_EDGES]
    assert {(x.dtype, x.opcode) for x in long} == {("s32", "parameter")}, long
