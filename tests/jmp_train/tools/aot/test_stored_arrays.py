import pytest

from jmp_train.tools.aot.compiled import StoredArray, stored_arrays

pytestmark = pytest.mark.quick

PROGRAM = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "program.py"

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[8]) -> f32[8,8] {
  %p = f32[8]{0} parameter(0)
  ROOT %inner = f32[8,8]{1,0} broadcast(%p), dimensions={0}
}

%body (state: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %state = (s32[], bf16[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x.1 = bf16[8]{0} get-tuple-element(%state), index=1
  %gemm = (bf16[8]{0}, s8[4096]{0}) custom-call(%x.1), custom_call_target="__cublas$gemm"
  ROOT %next = (s32[], bf16[8]{0}) tuple(%i, %x.1)
}

%condition (state.1: (s32[], bf16[8])) -> pred[] {
  %state.1 = (s32[], bf16[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %less = pred[] compare(%i.1, %i.1), direction=LT
}

%yes (y: f32[8]) -> f16[2,3] {
  %y = f32[8]{0} parameter(0)
  ROOT %chosen = f16[2,3]{1,0} slice(%y), slice={[0:8]}
}

%no (n: f32[8]) -> f16[2,3] {
  %n = f32[8]{0} parameter(0)
  ROOT %other = f16[2,3]{1,0:T(8,128)(2,1)S(1)} slice(%n), slice={[0:8]}
}

%commands (c: f32[8]) -> s4[3] {
  %c = f32[8]{0} parameter(0)
  ROOT %small = s4[3]{0:E(4)} convert(%c)
}

%apart (d: f32[8]) -> u8[2] {
  %d = f32[8]{0} parameter(0)
  ROOT %bytes = u8[2]{0} slice(%d)
}

ENTRY %main.5 (x: f32[8]) -> u8[2] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %large = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="calls=%body"}
  %total = f32[] reduce(%large, %x), dimensions={0,1}, to_apply=%add
  %start = (s32[], /*index=1*/bf16[8]{0}) tuple(%total, %x)
  %while.1 = (s32[], bf16[8]{0}) while(%start), condition=%condition, body=%body
  %branch = f16[2,3]{1,0} conditional(%total, %x, %x), branch_computations={%yes, %no}
  %call.1 = s4[3]{0} call(%x), to_apply=%commands
  %token = token[] after-all()
  %begun = (f32[8]{0}, f32[8]{0}) all-reduce-start(%x), to_apply=%add, replica_groups={{0,1}}
  %reduced = f32[8]{0} all-reduce-done(%begun)
  %later = ((f32[8]{0}), u8[2]{0}, s32[]) async-start(%x), calls=%apart
  ROOT %done = u8[2]{0} async-done(%later)
}
"""


def test_what_is_outside_of_fusions_is_stored() -> None:
    assert stored_arrays(PROGRAM) == (
        StoredArray("x", "parameter", "f32", (8,)),
        StoredArray("large", "fusion", "f32", (8, 8)),
        StoredArray("total", "reduce", "f32", ()),
        StoredArray("reduced", "all-reduce", "f32", (8,)),
        StoredArray("less", "compare", "pred", ()),
        StoredArray("gemm", "custom-call", "bf16", (8,)),
        StoredArray("gemm", "custom-call", "s8", (4096,)),
        StoredArray("chosen", "slice", "f16", (2, 3)),
        StoredArray("other", "slice", "f16", (2, 3)),
        StoredArray("small", "convert", "s4", (3,)),
        StoredArray("bytes", "slice", "u8", (2,)),
    )


def test_bytes_of_an_array() -> None:
    assert StoredArray("x", "add", "bf16", (2, 3)).n_bytes == 12
