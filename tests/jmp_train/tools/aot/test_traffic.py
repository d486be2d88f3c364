import pytest

from jmp_train.tools.aot.hlo import read_hlo
from jmp_train.tools.aot.traffic import Places, is_kernel, traffic

pytestmark = pytest.mark.quick

HEAD = """%fused (a: f32[100,8], b: f32[10,8], i: s32[], rows: s32[5,1]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[10,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %rows = s32[5,1]{1,0} parameter(3)
"""
MAIN = """}

ENTRY %main (x: f32[100,8], y: f32[10,8], n: s32[], index: s32[5,1]) -> f32[] {
  %x = f32[100,8]{1,0} parameter(0)
  %y = f32[10,8]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %index = s32[5,1]{1,0} parameter(3)
"""


def bytes_of(text: str) -> tuple[dict[str, int], dict[int, int]]:
    """Returns the least that %out reads and writes."""
    program = read_hlo(text)
    found = traffic(program.instructions["out"], Places(program))
    return (
        {f"{name}.{i}" if i else name: n for (name, i), n in found.reads.items()},
        {i: n for (_, i), n in found.writes.items()},
    )


def fusion(inside: str, result: str = "f32[100,8]{1,0}") -> tuple[dict[str, int], dict[int, int]]:
    """Returns the least that a fusion reads and writes."""
    line = f"  ROOT %out = {result} fusion(%x, %y, %n, %index), kind=kLoop, calls=%fused\n}}\n"
    reads, writes = bytes_of(HEAD + inside + MAIN + line)
    return {k: n for k, n in reads.items() if n}, writes


def test_a_fusion_reads_its_operands_and_writes_its_result() -> None:
    inside = "  %c = f32[100,8]{1,0} multiply(%a, %a)\n  ROOT %d = f32[100,8]{1,0} add(%c, %a)\n"
    assert fusion(inside) == ({"x": 3200}, {0: 3200})


def test_results_of_several_arrays() -> None:
    inside = """  %c = f32[10,8]{1,0} negate(%b)
  %d = bf16[10,8]{1,0} convert(%c)
  ROOT %e = (f32[10,8]{1,0}, bf16[10,8]{1,0}) tuple(%c, %d)
"""
    assert fusion(inside, "(f32[10,8]{1,0}, bf16[10,8]{1,0})") == ({"y": 320}, {0: 320, 1: 160})


def test_a_slice_is_read_in_part() -> None:
    inside = """  %flat = f32[800]{0} bitcast(%a)
  %s = f32[40]{0} slice(%flat), slice={[0:40]}
  %t = f32[5,8]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={5,8}
  %u = f32[5,8]{1,0} bitcast(%s)
  ROOT %v = f32[5,8]{1,0} add(%u, %t)
"""
    assert fusion(inside, "f32[5,8]{1,0}") == ({"x": 160, "n": 4}, {0: 160})  # parts may overlap


def test_slices_are_no_more_than_the_whole() -> None:
    """And at least the larger one, since they may overlap."""
    slices = "".join(f"  %s{i} = f32[60,8]{{1,0}} slice(%a), slice={{[{i}:{i + 60}], [0:8]}}\n" for i in range(2))
    inside = slices + "  ROOT %v = f32[60,8]{1,0} add(%s0, %s1)\n"
    assert fusion(inside, "f32[60,8]{1,0}") == ({"x": 1920}, {0: 1920})


def test_gathered_rows_could_be_one_row() -> None:
    inside = "  ROOT %g = f32[5,8]{1,0} gather(%a, %rows), offset_dims={1}, slice_sizes={1,8}\n"
    assert fusion(inside, "f32[5,8]{1,0}") == ({"index": 20}, {0: 160})


def test_an_update_in_place_writes_what_it_updates() -> None:
    inside = """  %c = f32[10,8]{1,0} negate(%b)
  %d = f32[100,8]{1,0} dynamic-update-slice(%a, %c, %i, %i)
  ROOT %e = f32[100,8]{1,0} bitcast(%d)
"""
    assert fusion(inside) == ({"y": 320, "n": 4}, {0: 320})


def test_an_update_of_what_it_computes_writes_all() -> None:
    inside = """  %c = f32[100,8]{1,0} negate(%a)
  ROOT %d = f32[100,8]{1,0} dynamic-update-slice(%c, %b, %i, %i)
"""
    assert fusion(inside) == ({"x": 3200, "y": 320, "n": 4}, {0: 3200})


def test_an_update_that_is_used_further_reads_all() -> None:
    inside = """  %c = f32[100,8]{1,0} dynamic-update-slice(%a, %b, %i, %i)
  ROOT %d = f32[100,8]{1,0} negate(%c)
"""
    assert fusion(inside) == ({"x": 3200, "y": 320, "n": 4}, {0: 3200})


def test_scattered_rows_could_be_one_row() -> None:
    inside = """  %s = f32[5,8]{1,0} slice(%b), slice={[0:5], [0:8]}
  ROOT %c = f32[100,8]{1,0} scatter(%a, %rows, %s), update_window_dims={1}, to_apply=%add
"""
    assert fusion(inside) == ({"y": 160, "index": 20}, {0: 0})


def single(line: str) -> tuple[dict[str, int], dict[int, int]]:
    return bytes_of(MAIN.removeprefix("}\n") + line + "}\n")


def test_instructions_outside_of_fusions() -> None:
    assert single("  ROOT %out = f32[8,100]{1,0} transpose(%x), dimensions={1,0}\n") == (
        {"x": 3200},
        {0: 3200},
    )
    assert single("  ROOT %out = f32[100,8]{1,0} dynamic-update-slice(%x, %y, %n, %n)\n") == (
        {"x": 0, "y": 320, "n": 4},
        {0: 320},
    )
    assert single("  ROOT %out = f32[2,8]{1,0} slice(%x), slice={[0:2], [0:8]}\n") == ({"x": 64}, {0: 64})


def test_an_array_is_read_once() -> None:
    lines = """  %b = f32[800]{0} bitcast(%x)
  %t = (f32[10,8]{1,0}, (s32[], f32[800]{0})) tuple(%y, %pair)
  %pair = (s32[], f32[800]{0}) tuple(%n, %b)
  %u = (s32[], f32[800]{0}) get-tuple-element(%t), index=1
  %v = f32[800]{0} get-tuple-element(%u), index=1
  ROOT %out = f32[800]{0} add(%b, %v)
"""
    assert single(lines) == ({"x": 3200}, {0: 3200})


def test_elements_of_a_result_are_different_arrays() -> None:
    lines = """  %s = (f32[10,8]{1,0}, f32[10,8]{1,0}) sort(%y, %y), dimensions={0}
  %u = f32[10,8]{1,0} get-tuple-element(%s), index=0
  %v = f32[10,8]{1,0} get-tuple-element(%s), index=1
  ROOT %out = f32[10,8]{1,0} add(%u, %v)
"""
    assert single(lines) == ({"s": 320, "s.1": 320}, {0: 320})


def test_workspaces_of_libraries_do_not_count() -> None:
    call = '  ROOT %out = (f32[100]{0}, s8[4096]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm"\n'
    assert single(call) == ({"x": 3200, "y": 320}, {0: 400, 1: 0})


def test_other_custom_calls_may_read_less() -> None:
    call = '  ROOT %out = (f32[100]{0}, s8[4096]{0}) custom-call(%x, %n), custom_call_target="mine"\n'
    assert single(call) == ({"x": 0, "n": 0}, {0: 0, 1: 0})


@pytest.mark.parametrize(("size", "read"), [(1, 3200 // 4), (3, 3200)])
def test_a_strided_convolution_reads_what_its_taps_meet(size: int, read: int) -> None:
    """A tap of size 1 and stride 2 meets every other row and column; 3 with a padding of 1 meet all."""
    pad = (size - 1) // 2
    text = f"""ENTRY %main (x: f32[2,10,10,4], w: f32[8,{size},{size},4]) -> f32[] {{
  %x = f32[2,10,10,4]{{3,2,1,0}} parameter(0)
  %w = f32[8,{size},{size},4]{{3,2,1,0}} parameter(1)
  ROOT %out = (f32[2,5,5,8]{{3,2,1,0}}, u8[16]{{0}}) custom-call(%x, %w), window={{size={size}x{size} stride=2x2 \
pad={pad}_{pad}x{pad}_{pad}}}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
}}
"""
    weights = 4 * 8 * 4 * size**2
    assert bytes_of(text) == ({"x": read, "w": weights}, {0: 1600, 1: 0})


def test_asynchronous_kernels_write_their_results_only() -> None:
    assert single("  %out = (f32[10,8]{1,0}, f32[10,8]{1,0:S(5)}, u32[]) copy-start(%y)\n") == (
        {"y": 320},
        {0: 320},
    )
    start = "  %out = ((f32[10,8]{1,0}), f32[8,10]{1,0}, u32[]) transpose-start(%y), dimensions={1,0}\n"
    assert single(start) == ({"y": 320}, {0: 320})


def test_a_library_call_without_a_result() -> None:
    assert single('  ROOT %out = () custom-call(%y), custom_call_target="__cudnn$done"\n') == ({"y": 0}, {})


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("fusion(%x), calls=%f", True),
        ("copy-start(%x)", True),
        ("copy-done(%x)", False),
        ("tuple(%x)", False),
        ("while(%x), body=%b, condition=%c", False),
        ("all-reduce(%x)", False),
        ("all-gather-start(%x)", False),
        ("send(%x, %x), channel_id=1", False),
        ("reduce(%x, %x), to_apply=%add", True),
    ],
)
def test_what_a_kernel_is(call: str, expected: bool) -> None:
    program = read_hlo(f"ENTRY %main (x: f32[]) -> f32[] {{\n  ROOT %r = f32[] {call}\n}}\n")
    assert is_kernel(program.instructions["r"]) == expected
