"""What compiled programs store, and that the library compiles nothing when it is imported."""

from pathlib import Path
from typing import Any

import pytest
from gpu_builders import compile_for_gpu, stored_arrays
from process_helpers import run_python

PROGRAMS = Path(__file__).parents[3] / "programs" / "gpu_programs.py"
EDGES, FEATURES = 20_000, 64  # as in PROGRAMS
pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]


def compiled(plan_python: str, name: str, *arguments: str, **options: Any) -> Any:
    return compile_for_gpu(f"{PROGRAMS}:{name}", *arguments, python=plan_python, timeout=150, **options)


@pytest.mark.parametrize(("returned", "stored"), [("sum", 0), ("both", 1)])
def test_messages_that_are_only_summed_are_not_stored(plan_python: str, returned: str, stored: int) -> None:
    program = compiled(plan_python, "messages", returned)
    arrays = stored_arrays(program.hlo)
    large = [array for array in arrays if array.n_bytes >= EDGES * FEATURES]
    assert len(large) == stored
    for array in large:
        assert (array.opcode, array.dtype) == ("fusion", "f32")
        assert array.n_bytes == 4 * EDGES * FEATURES
    assert (program.peak_bytes > 4 * EDGES * FEATURES) == bool(stored)
    arguments = [a.n_bytes for a in arrays if a.opcode == "parameter"]
    assert program.argument_bytes == sum(arguments)


@pytest.mark.parametrize("gpu", ["V100-16GB", "A100-40GB", "H100-80GB"])
def test_donated_matrices_and_products_are_seen(plan_python: str, gpu: str) -> None:
    program = compiled(plan_python, "loop", "256", gpu=gpu)
    matrix = 2 * 256 * 256
    assert program.argument_bytes == 2 * matrix
    assert program.alias_bytes == program.output_bytes == matrix  # the donated one
    assert 2 * matrix < program.peak_bytes < 2**26  # cuBLAS works in up to 32 MB
    products = [a for a in stored_arrays(program.hlo) if a.opcode == "custom-call" and a.dtype == "f16"]
    assert [a.shape for a in products] == [(256, 256)]  # in the loop's body
    assert len(repr(program)) < 200


def test_importing_jmp_train_leaves_it_alone() -> None:
    code = "import sys, jmp_train; print({f'jmp_train.tools.aot.{x}' for x in ('exported', 'hlo')} & {*sys.modules})"
    assert run_python("-c", code) == "set()\n"
