import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from gpu_builders import compile_for_gpu

from jmp_train.tools.aot.costs import Costs, program_costs
from jmp_train.tools.aot.gpus import GPUS
from jmp_train.tools.aot.hlo import HloModule, read_hlo
from jmp_train.tools.aot.kernels import Kernel

PROGRAMS = Path(__file__).parents[3] / "programs" / "gpu_programs.py"
pytestmark = [pytest.mark.quick, pytest.mark.timeout(200)]

H100 = GPUS["H100-80GB"]
# 1,000 operations a second in float16, 100 in TF32, 10 in float32; 50 bytes a second, 5 to another GPU
GPU = dataclasses.replace(
    H100,
    rates={"float16": 1000.0, "tfloat32": 100.0, "float32": 10.0},
    bandwidth=50.0,
    link_bandwidth=5.0,
    l2_cache_size=1000,
)

PROGRAM = """HloModule jit_step, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%cast (c: f32[20,50]) -> f16[50,32] {
  %c = f32[20,50]{1,0} parameter(0)
  %half = f16[20,50]{1,0} convert(%c)
  %t = f16[50,20]{1,0} transpose(%half), dimensions={1,0}
  %zero = f16[] constant(0)
  ROOT %padded = f16[50,32]{1,0} pad(%t, %zero), padding=0_0x0_12
}

%scaled (d: f32[20,50]) -> f16[20,50] {
  %d = f32[20,50]{1,0} parameter(0)
  %two = f32[20,50]{1,0} add(%d, %d)
  ROOT %half.1 = f16[20,50]{1,0} convert(%two)
}

%mask (e: pred[20,50]) -> f16[20,50] {
  %e = pred[20,50]{1,0} parameter(0)
  ROOT %half.2 = f16[20,50]{1,0} convert(%e)
}

%inner (f: f16[20,50], g: f16[50,30]) -> f16[20,30] {
  %f = f16[20,50]{1,0} parameter(0)
  %g = f16[50,30]{1,0} parameter(1)
  ROOT %dot.1 = f16[20,30]{1,0} dot(%f, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="fused"}
}

%triton (h: f16[20,50], k: f16[50,30]) -> f16[20,30] {
  %h = f16[20,50]{1,0} parameter(0)
  %k = f16[50,30]{1,0} parameter(1)
  ROOT %nested = f16[20,30]{1,0} fusion(%h, %k), kind=kCustom, calls=%inner
}

%body (state: (s32[], f32[20,20])) -> (s32[], f32[20,20]) {
  %state = (s32[], f32[20,20]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %m = f32[20,20]{1,0} get-tuple-element(%state), index=1
  %mm = f32[20,20]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="loop" stack_frame_id=7}
  %reduced = f32[20,20]{1,0} all-reduce(%mm), to_apply=%add
  ROOT %next = (s32[], f32[20,20]{1,0}) tuple(%i, %reduced)
}

%condition (state.1: (s32[], f32[20,20])) -> pred[] {
  %state.1 = (s32[], f32[20,20]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%i.1, %i.1), direction=LT
}

ENTRY %main (x: f32[20,50], y: f16[50,30], m0: f32[20,20], p: pred[20,50]) -> f16[20,30] {
  %x = f32[20,50]{1,0} parameter(0)
  %y = f16[50,30]{1,0} parameter(1)
  %m0 = f32[20,20]{1,0} parameter(2)
  %p = pred[20,50]{1,0} parameter(3)
  %cast_fusion = f16[50,32]{1,0} fusion(%x), kind=kLoop, calls=%cast
  %scaled_fusion = f16[20,50]{1,0} fusion(%x), kind=kLoop, calls=%scaled
  %mask_fusion = f16[20,50]{1,0} fusion(%p), kind=kLoop, calls=%mask
  %one = s32[] constant(1)
  %start = (s32[], f32[20,20]{1,0}) tuple(%one, %m0)
  %loop = (s32[], f32[20,20]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %sorted = f32[20,50]{1,0} custom-call(%x), custom_call_target="mine"
  ROOT %gemm_fusion = f16[20,30]{1,0} fusion(%scaled_fusion, %y), kind=kCustom, calls=%triton, metadata={op_name="outer"}
}
"""  # noqa: E501


FOUND = program_costs(read_hlo(PROGRAM), GPU)


def kernel(found: Costs, name: str) -> Kernel:
    (one,) = (kernel for kernel in found.kernels if kernel.name == name)
    return one


def test_operations_by_dtype() -> None:
    assert FOUND.operations == {"f32": 6 * 2 * 20**3, "f16": 2 * 20 * 50 * 30}
    assert {x.name: x.times for x in FOUND.kernels if x.times > 1} == {"less": 6, "mm": 6}


def test_the_least_time_of_each_kernel() -> None:
    assert {x.name: x.seconds for x in FOUND.kernels} == {
        "cast_fusion": (3000 + 2200) / 50,  # the cache may have 1,000 of the bytes, and keep 1,000
        "scaled_fusion": (3000 + 1000) / 50,
        "mask_fusion": 1000 / 50,
        "less": 0,
        "mm": 16_000 / 100,  # TF32
        "sorted": 0,  # it may read nothing
        "gemm_fusion": (4000 + 200) / 50,  # of which the product needs 60
    }
    assert FOUND.compute_seconds == pytest.approx(104 + 80 + 20 + 6 * 160 + 84)
    assert FOUND.products_seconds == pytest.approx(6 * 160 + 60)
    assert FOUND.memory_seconds == pytest.approx(104 + 80 + 20 + 6 * 24 + 84)


def test_what_bounds_a_step() -> None:
    assert FOUND.bound_by == "links"
    fast = dataclasses.replace(GPU, link_bandwidth=1e9)
    assert program_costs(read_hlo(PROGRAM), fast).bound_by == "arithmetic"
    assert program_costs(read_hlo(PROGRAM), dataclasses.replace(fast, bandwidth=5.0)).bound_by == "memory"


def test_float32_that_must_be_exact_has_its_own_rate() -> None:
    precise = PROGRAM.replace("(%m, %m), ", "(%m, %m), operand_precision={highest,highest}, ")
    assert kernel(program_costs(read_hlo(precise), GPU), "mm").seconds == 16_000 / 10


def test_communication() -> None:
    """Each of six times, a device sends 2 x 3/4 of 1,600 bytes."""
    (item,) = FOUND.communication
    assert (item.kind, item.dtype, item.group_size, item.count) == ("all-reduce", "f32", 4, 6)
    assert (item.n_bytes, item.sent_bytes, item.seconds) == (9600, 14_400, 14_400 / 5)
    assert FOUND.communication_seconds == FOUND.seconds == 14_400 / 5
    fast = program_costs(read_hlo(PROGRAM), dataclasses.replace(GPU, link_bandwidth=1e9))
    assert fast.seconds == fast.compute_seconds == FOUND.compute_seconds


def test_arguments_are_read_and_results_are_written() -> None:
    """Even if a cache has all of each kernel's bytes: in all, it can hold only as much as its size."""
    results = """ENTRY %main (x: f32[500], y: f32[500]) -> (f32[500], f32[500]) {
  %x = f32[500]{0} parameter(0)
  %y = f32[500]{0} parameter(1)
  %s = f32[500]{0} negate(%x)
  %t = f32[500]{0} negate(%y)
  ROOT %r = (f32[500]{0}, f32[500]{0}) tuple(%s, %t)
}
"""
    found = program_costs(read_hlo(results), dataclasses.replace(GPU, l2_cache_size=2000))
    assert [x.seconds for x in found.kernels] == [0, 0]
    assert found.compute_seconds == found.memory_seconds == (2000 + 2000) / 50


def test_loops_whose_trip_count_is_unknown_run_once() -> None:
    text = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"6"}}', "")
    found = program_costs(read_hlo(text), GPU)
    assert found.operations["f32"] == 16_000
    assert found.communication[0].count == 1


def test_nested_loops_multiply() -> None:
    outer = """%outer (s: (s32[], f32[20,20])) -> (s32[], f32[20,20]) {
  %s = (s32[], f32[20,20]{1,0}) parameter(0)
  ROOT %w = (s32[], f32[20,20]{1,0}) while(%s), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
}

ENTRY """  # noqa: E501
    text = PROGRAM.replace("ENTRY ", outer).replace(
        "while(%start), condition=%condition, body=%body", "while(%start), condition=%condition, body=%outer"
    )
    found = program_costs(read_hlo(text), GPU)
    assert kernel(found, "mm").times == found.communication[0].count == 36


CONDITIONAL = """%large (v: f32[1000]) -> f32[1000] {
  %v = f32[1000]{0} parameter(0)
  ROOT %n = f32[1000]{0} negate(%v)
}

%small (w: f32[1000]) -> f32[1000] {
  %w = f32[1000]{0} parameter(0)
  %s = f32[10]{0} slice(%w), slice={[0:10]}
  ROOT %b = f32[1000]{0} broadcast(%s), dimensions={0}
}

ENTRY %main (x: f32[1000], i: s32[]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = f32[1000]{0} conditional(%i, %x, %x), branch_computations={%large, %small}
}
"""


def test_of_a_conditional_the_fastest_branch_counts() -> None:
    found = program_costs(read_hlo(CONDITIONAL), GPU)
    assert [x.name for x in found.kernels] == ["s", "b"]


@pytest.mark.newest
def test_a_program_compiled_here_is_counted() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 7, lambda _, z: jnp.tanh(z @ w), x)

    shapes = jax.ShapeDtypeStruct((24, 40), jnp.float32), jax.ShapeDtypeStruct((40, 40), jnp.float32)
    found = program_costs(read_hlo(jax.jit(f).lower(*shapes).compile().as_text() or ""), H100)
    assert found.operations == {"f32": 7 * 2 * 24 * 40 * 40}


def compiled(plan_python: str, name: str, **options: object) -> tuple[HloModule, Costs]:
    program = read_hlo(compile_for_gpu(f"{PROGRAMS}:{name}", gpu="H100-80GB", python=plan_python, **options).hlo)  # pyright: ignore[reportArgumentType]
    return program, program_costs(program, H100)


def test_layers_on_one_gpu(plan_python: str) -> None:
    """Of `counted_layers`: all figures follow from its shapes."""
    _, found = compiled(plan_python, "counted_layers")
    rows, square = 2048, 512 * 512
    strided = 2 * 16 * 64 * 32 * (16 * 3 - 1) ** 2  # 32 x 32 to 16 x 16, whose first tap meets padding once
    grouped = 2 * 16 * 128 * 16 * (14 * 3) ** 2  # 16 x 16 to 14 x 14
    dense = (3 + 3 + 2) * 2 * rows * square  # forward, of the weights, of the inputs but for those of the first layer
    loop = 5 * (1 + 1 + 1) * 2 * rows * square
    exact = 3 * 2 * 256 * 128 * 256
    assert found.operations == {"f16": dense + loop + 2 * strided + 3 * grouped, "f32": exact}
    assert found.communication == ()
    precise = [p for kernel in found.kernels for p in kernel.products if p.precision == "highest"]
    assert [p.dtype for p in precise] == ["f32"] * 3

    # Each step of the loop saves its activations and reads them again, not the stack of all of them.
    written = {x.name: max(x.traffic.writes.values(), default=0) for x in found.kernels if x.times == 5}
    stacked = {n for name, n in written.items() if "dynamic_update" in name and n > 2**16}
    assert stacked
    assert stacked <= {2 * rows * 512, 2 * square}
    assert found.operations["f16"] / H100.matrix_rate("float16") < found.compute_seconds


def test_gradients_are_reduced_over_devices(plan_python: str) -> None:
    """Of `half_gradient`: the gradient of 256 x 128 weights, in float16."""
    _, found = compiled(plan_python, "half_gradient", devices=8)
    (item,) = found.communication
    assert (item.kind, item.dtype, item.group_size, item.count) == ("all-reduce", "f16", 8, 1)
    n_bytes = 2 * 256 * 128
    assert (item.n_bytes, item.sent_bytes) == (n_bytes, 2 * 7 / 8 * n_bytes)
    assert item.seconds == item.sent_bytes / H100.link_bandwidth
    assert found.operations == {"f16": 2 * 2 * 512 // 8 * 256 * 128}


def test_sharded_weights_are_gathered(plan_python: str) -> None:
    """Of `gathered_layers`: four layers of 2048 x 2048 weights, and 1024 rows over eight devices."""
    _, found = compiled(plan_python, "gathered_layers", devices=8)
    found_of = {item.kind: item for item in found.communication}
    assert set(found_of) == {"all-gather", "reduce-scatter"}
    n_bytes = 4 * 2 * 2048 * 2048
    for item in found_of.values():
        assert (item.dtype, item.group_size, item.n_bytes) == ("bf16", 8, n_bytes)
        assert item.sent_bytes == 7 / 8 * n_bytes
    product = 2 * 1024 // 8 * 2048 * 2048
    assert found.operations == {"bf16": (4 + 4 + 3) * product}  # forward, weights, inputs but for the first layer's


def test_collective_operations_of_all_kinds(plan_python: str) -> None:
    """Of `collective_operations`: 1024 x 512 numbers of a device, a quarter of them after they are scattered."""
    _, found = compiled(plan_python, "collective_operations", devices=8)
    mine = 2 * 1024 * 512
    assert {(x.kind, x.group_size): (x.count, x.dtype, x.n_bytes, x.sent_bytes) for x in found.communication} == {
        ("collective-permute", 8): (1, "bf16", mine, mine),
        ("all-to-all", 4): (1, "bf16", mine, 3 / 4 * mine),
        ("all-reduce", 2): (1, "bf16", mine, mine),
        ("reduce-scatter", 4): (1, "bf16", mine, 3 / 4 * mine),
        ("all-gather", 8): (1, "bf16", 2 * mine, 7 / 8 * 2 * mine),
        ("all-reduce", 8): (1, "bf16", 2 * mine, 2 * 7 / 8 * 2 * mine),
    }
    assert found.communication_seconds == pytest.approx((1 + 0.75 + 1 + 0.75 + 1.75 + 3.5) * mine / H100.link_bandwidth)
