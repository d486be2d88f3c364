"""What `tests/gpu/test_products.py` reads on a GPU, read of programs that are compiled for GPUs."""

from collections import Counter
from pathlib import Path

import pytest
from gpu_builders import compile_for_gpu
from product_operands import Product, products

PROGRAMS = Path(__file__).parents[3] / "programs" / "gpu_programs.py"
pytestmark = [pytest.mark.full, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("dtype", "name", "gpu"),
    [("float16", "f16", "V100-16GB"), ("bfloat16", "bf16", "H100-80GB"), ("float32", "f32", "A100-40GB")],
)
def test_cublas_and_cudnn_get_autocasts_dtype(plan_python: str, dtype: str, name: str, gpu: str) -> None:
    target = f"{PROGRAMS}:autocast_products"
    program = compile_for_gpu(target, dtype, gpu=gpu, python=plan_python, timeout=150)
    assert Counter(products(program.hlo)) == {
        Product("dot", "cublas", (name, name)): 9,
        Product("convolution", "cudnn", (name, name)): 3,
    }


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "DelayedScaling"])
def test_all_products_of_layers_in_8_bits_are_cublas_in_8_bits(plan_python: str, recipe: str) -> None:
    program = compile_for_gpu(f"{PROGRAMS}:fp8_layer", recipe, gpu="H100-80GB", python=plan_python, timeout=150)
    found = Counter(products(program.hlo))
    e4m3, e5m2 = "f8e4m3fn", "f8e5m2"
    assert sum(found.values()) == 5
    assert found[Product("dot", "cublas", (e4m3, e4m3))] == 2
    assert found[Product("dot", "cublas", (e5m2, e4m3))] + found[Product("dot", "cublas", (e4m3, e5m2))] == 3
    assert program.hlo.count("__cublas$lt$matmul$f8") == 5


def test_products_within_fusions_are_read_too() -> None:
    """As XLA has them where it generates their code, with operands' types or without, in each computation again."""
    hlo = """
%fused (p: bf16[8,8], q: bf16[8,8]) -> f32[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %q = bf16[8,8]{1,0} parameter(1)
  ROOT %inner = f32[8,8]{1,0} dot(%p, bf16[8,8]{1,0} %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %q = f32[8,8]{1,0} parameter(1)
  %outer = f32[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %sorted = (f32[8,8]{1,0}, s32[8,8]{1,0}) custom-call(%p), custom_call_target="__cub$DeviceRadixSort"
  ROOT %out = f32[8,8]{1,0} fusion(%p, %q), kind=kCustom, calls=%fused
}
"""
    assert products(hlo) == [Product("dot", "", ("bf16", "bf16")), Product("dot", "", ("f32", "f32"))]
