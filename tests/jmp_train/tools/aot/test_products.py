"""What `tests/gpu/test_products.py` reads on a GPU, read of programs that are compiled for GPUs."""

from collections import Counter
from pathlib import Path

import gpu_programs
import jax
import pytest
from gpu_builders import compile_for_gpu
from product_operands import Product, products

from jmp_train.tools.aot import compile_program, program_costs, read_hlo, tpu_slice
from jmp_train.tools.planning import Placement, Workload

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


E4M3, E5M2 = "f8e4m3fn", "f8e5m2"


@pytest.mark.parametrize(
    ("recipe", "backward"), [("Float8CurrentScaling", E5M2), ("DelayedScaling", E5M2), ("Float8RowwiseScaling", E4M3)]
)
def test_all_products_of_layers_in_8_bits_are_cublas_in_8_bits(plan_python: str, recipe: str, backward: str) -> None:
    program = compile_for_gpu(f"{PROGRAMS}:fp8_layer", recipe, gpu="H100-80GB", python=plan_python, timeout=150)
    found = Counter((x.library, *sorted(set(x.operands))) for x in products(program.hlo))
    assert found == Counter({("cublas", E4M3): 2}) + Counter({("cublas", *sorted({E4M3, backward})): 3})
    assert program.hlo.count("__cublas$lt$matmul$f8") == 5


def test_whole_numbers_are_multiplied_as_such(plan_python: str) -> None:
    program = compile_for_gpu(
        f"{PROGRAMS}:fp8_layer", "Int8RowwiseScaling", gpu="H100-80GB", python=plan_python, timeout=150
    )
    assert Counter(products(program.hlo)) == {Product("dot", "cublas", ("s8", "s8")): 5}


@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_products_of_blocks_are_lowered_to_the_units_of_gpus(recipe: str) -> None:
    """XLA makes them products of cuDNN on GPUs that have these units, and plain ones on others."""
    step, args, *_ = gpu_programs.fp8_layer(recipe)
    text = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__op$block_scaled_dot") == 5


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["v5e:1x1", "v6e:1x1"])
def test_tpus_multiply_whole_numbers(tpu_compiler: None, name: str) -> None:
    del tpu_compiler
    step, (state, batch), *_ = gpu_programs.fp8_layer("Int8RowwiseScaling", batch=8)
    (variant,) = Workload(step, jax.eval_shape(lambda: state), batch).variants(grows=False)
    slice_ = tpu_slice(name)
    program = compile_program(variant.exported(Placement(), variant.batch_size, slice_.platform), slice_)
    assert set(program_costs(read_hlo(program.hlo), slice_).operations) == {"s8"}
