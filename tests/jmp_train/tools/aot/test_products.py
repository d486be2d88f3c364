"""What `tests/gpu/test_products.py` reads on a GPU, read of programs that are compiled for GPUs."""

from collections import Counter
from pathlib import Path

import gpu_programs
import jax
import pytest
from gpu_builders import compile_for_gpu
from product_operands import Product, products

from jmp_train.tools.aot import GPUS, compile_program, program_costs, read_hlo, tpu_slice
from jmp_train.tools.aot.kernels import Executed, Kernel
from jmp_train.tools.aot.traffic import Places
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


def test_convolutions_in_8_bits_are_so_forward_and_store_8_bits(plan_python: str) -> None:
    half, few = (
        compile_for_gpu(f"{PROGRAMS}:convolutions", rule, gpu="H100-80GB", python=plan_python, timeout=150)
        for rule in ("lower", "fp8")
    )
    forward = [line for line in few.hlo.splitlines() if "__cudnn$convForwardGraph" in line]
    assert len(forward) == 4
    assert few.temp_bytes < 0.9 * half.temp_bytes


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


BLOCK_SCALED = """
%scaled (l: f4e2m1fn[1,8,32], r: f4e2m1fn[1,16,32], ls: f8e4m3fn[1,8,2], rs: f8e4m3fn[1,16,2]) -> f32[1,8,16] {
  %l = f4e2m1fn[1,8,32]{2,1,0} parameter(0)
  %r = f4e2m1fn[1,16,32]{2,1,0} parameter(1)
  %ls = f8e4m3fn[1,8,2]{2,1,0} parameter(2)
  %rs = f8e4m3fn[1,16,2]{2,1,0} parameter(3)
  %wide = f32[1,8,32]{2,1,0} convert(%l)
  %wider = f32[1,16,32]{2,1,0} convert(%r)
  ROOT %dot = f32[1,8,16]{2,1,0} dot(%wide, %wider), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}
}

ENTRY %main (l: f4e2m1fn[1,8,32], r: f4e2m1fn[1,16,32], ls: f8e4m3fn[1,8,2], rs: f8e4m3fn[1,16,2]) -> f32[1,8,16] {
  %l.1 = f4e2m1fn[1,8,32]{2,1,0} parameter(0)
  %r.1 = f4e2m1fn[1,16,32]{2,1,0} parameter(1)
  %ls.1 = f8e4m3fn[1,8,2]{2,1,0} parameter(2)
  %rs.1 = f8e4m3fn[1,16,2]{2,1,0} parameter(3)
  ROOT %call = f32[1,8,16]{2,1,0} call(%l.1, %r.1, %ls.1, %rs.1), to_apply=%scaled
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("gpu", "dtype", "rate"), [("B200-180GB", "f4e2m1fn", 9000e12), ("H100-80GB", "f32", 494.7e12)]
)
def test_products_of_blocks_count_at_the_rate_of_their_units(gpu: str, dtype: str, rate: float) -> None:
    """On GPUs that have these; on others XLA multiplies by the scales first, and that is what counts."""
    program = read_hlo(BLOCK_SCALED)
    assert program_costs(program, GPUS[gpu]).operations == {dtype: 2 * 8 * 16 * 32}
    kernels = [x for x in Executed(Places(program), GPUS[gpu]).work(program.entry) if isinstance(x, Kernel)]
    (multiplies,) = [kernel for kernel in kernels if kernel.products]
    assert multiplies.seconds_of_products == pytest.approx(2 * 8 * 16 * 32 / rate)
    in_few_bits = (8 * 32 + 16 * 32) // 2 + 8 * 2 + 16 * 2
    assert sum(multiplies.traffic.reads.values()) == (in_few_bits if dtype != "f32" else 4 * (8 * 32 + 16 * 32))


@pytest.mark.parametrize(("recipe", "dtype"), [("MXFP8BlockScaling", E4M3), ("NVFP4BlockScaling", "f4e2m1fn")])
def test_layers_in_blocks_count_at_the_rate_of_an_absent_gpus_units(plan_python: str, recipe: str, dtype: str) -> None:
    name = "B200-180GB"
    program = compile_for_gpu(f"{PROGRAMS}:fp8_layer", recipe, gpu=name, python=plan_python, timeout=150)
    operations = program_costs(read_hlo(program.hlo), GPUS[name]).operations
    assert operations[dtype] > 0.9 * sum(operations.values())  # the others are Hadamard transforms


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
