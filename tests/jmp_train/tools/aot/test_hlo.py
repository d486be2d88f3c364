"""Trip counts of loops that the compiler has not written down."""

import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jmp_train.tools.aot.hlo import (
    ArrayType,
    Instruction,
    StackFrame,
    array_types,
    read_hlo,
    split_outside,
    tuple_types,
)
from jmp_train.tools.aot.kernels import trip_count

pytestmark = pytest.mark.quick

PROGRAM = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "train.py"
2 "a folder/model.py"

FunctionNames
1 "main"
2 "Model.__call__.<locals>.layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=30 end_line=32 column=3 end_column=9}
2 {file_name_id=2 function_name_id=2 line=7 end_line=7 column=3 end_column=9}
3 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=3 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}


%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%a, %b)
}

%fused (p: f32[8], q: (f32[8], s32[])) -> (f32[8], f32[]) {
  %p = f32[8]{0} parameter(0)
  %q = (f32[8]{0}, s32[]) parameter(1)
  %c = c64[2]{0} constant({(1, -2), (0, 3)})
  %zero = f32[] constant(0)
  %r = f32[] reduce(%p, %zero), dimensions={0}, to_apply=%add, metadata={op_name="sum" stack_frame_id=2}
  ROOT %t = (f32[8]{0}, /*index=1*/f32[]) tuple(%p, /*index=1*/%r)
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %s = (s32[], f32[8]{0}) parameter(0)
}

%condition (s.1: (s32[], f32[8])) -> pred[] {
  %s.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main.5 (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(8,128)S(1)} parameter(0), sharding={replicated}, metadata={op_name="x[\\'a\\']"}
  %one = s32[] constant(1)
  %start = (s32[], f32[8]{0}) tuple(%one, %x)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %pair = (f32[8]{0}, f32[]) fusion(f32[8]{0} %x, (s32[], f32[8]{0}) %loop), kind=kInput, calls=%fused, metadata={op_name="jit(f)/calls=%body}, b" stack_frame_id=3 profile_info={a=1}}, backend_config={"a":"x=1, y"}
  ROOT %out = f32[8]{0} get-tuple-element(%pair), index=0, metadata={op_name="say \\"hi\\""}
}
"""  # noqa: E501


def named(program_text: str) -> dict[str, Instruction]:
    program = read_hlo(program_text)
    return {i.name: i for instructions in program.computations.values() for i in instructions}


def test_instructions_are_read() -> None:
    program = read_hlo(PROGRAM)
    assert program.entry == "main.5"
    assert program.header.startswith("HloModule jit_f, is_scheduled=true, ")
    assert {name: [i.name for i in instructions] for name, instructions in program.computations.items()} == {
        "add": ["a", "b", "sum.1"],
        "fused": ["p", "q", "c", "zero", "r", "t"],
        "body": ["s"],
        "condition": ["s.1", "yes"],
        "main.5": ["x", "one", "start", "loop", "pair", "out"],
    }
    assert [i.name for x in program.computations.values() for i in x if i.is_root] == ["sum.1", "t", "s", "yes", "out"]
    assert program.unfused == ("main.5", "condition", "body")


def test_the_parts_of_an_instruction() -> None:
    found = named(PROGRAM)
    pair, x, c = found["pair"], found["x"], found["c"]
    assert (pair.type, pair.opcode, pair.operands) == ("(f32[8]{0}, f32[])", "fusion", ("x", "loop"))
    assert (pair.called, pair.op_name, pair.stack_frame) == (("fused",), "jit(f)/calls=%body}, b", 3)
    assert pair.attributes == 'kind=kInput, calls=%fused, backend_config={"a":"x=1, y"}'
    assert pair.attribute("backend_config") == '{"a":"x=1, y"}'
    assert pair.attribute("y") == pair.attribute("metadata") == ""
    assert (x.type, x.literal, x.operands) == ("f32[8]{0:T(8,128)S(1)}", "0", ())
    assert (c.literal, c.attributes) == ("{(1, -2), (0, 3)}", "")
    assert found["t"].operands == ("p", "r")
    assert found["r"].called == ("add",)
    assert found["loop"].called == ("condition", "body")


def test_strings_have_no_quotes() -> None:
    line = '  ROOT %y = f32[] custom-call(), custom_call_target="__cublas$gemm", window={size=1}'
    (call,) = read_hlo("ENTRY %main () -> f32[] {\n" + line + "\n}\n").computations["main"]
    assert call.attribute("custom_call_target") == "__cublas$gemm"
    assert call.operands == ()


def test_names_without_percent_signs_are_read() -> None:
    text = "ENTRY main {\n  x = f32[8]{0} parameter(0)\n  ROOT y = f32[8]{0} add(f32[8]{0} x, x), calls=f\n}\n"
    y = named(text.replace("main {", "main (x: f32[8]) -> f32[8] {"))["y"]
    assert (y.operands, y.called) == (("x", "x"), ("f",))


@pytest.mark.parametrize("shift", [1, 0])  # 1 as XLA of 2026 writes it
def test_the_lines_that_an_instruction_comes_from(shift: int) -> None:
    text = PROGRAM
    for parent in (1, 2):
        text = text.replace(f"parent_frame_id={parent}}}", f"parent_frame_id={parent - 1 + shift}}}")
    program = read_hlo(text)
    layer = "Model.__call__.<locals>.layer"
    assert program.frames(3) == (StackFrame("a folder/model.py", 9, layer), StackFrame("train.py", 30, "main"))
    assert program.frames(2) == (StackFrame("a folder/model.py", 7, layer), StackFrame("train.py", 30, "main"))
    assert program.frames(1) == (StackFrame("train.py", 30, "main"),)
    assert program.frames(None) == program.frames(77) == ()


@pytest.mark.newest
def test_lines_of_a_program_compiled_here() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return jnp.sort(x)  # here

    def outer(x: jax.Array) -> jax.Array:
        return jax.lax.map(inner, x)  # there

    outer.__name__ = f"outer_{zlib.crc32(__file__.encode())}"  # what another checkout compiled has its own files
    hlo = jax.jit(outer).lower(jax.ShapeDtypeStruct((3, 4), jnp.float32)).compile().as_text() or ""
    program = read_hlo(hlo)
    (sort,) = (i for x in program.computations.values() for i in x if i.opcode == "sort")
    frames = program.frames(sort.stack_frame)
    source = Path(__file__).read_text().splitlines()
    ours = [frame for frame in frames if frame.file == __file__]
    assert [source[frame.line - 1].partition("# ")[2] for frame in ours[:2]] == ["here", "there"]
    assert [frame.function.rpartition(".")[2] for frame in ours[:2]] == ["inner", "outer"]


@pytest.mark.parametrize("text", ["", "HloModule jit_f", PROGRAM.replace("ENTRY ", "")])
def test_a_text_without_a_program_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^hlo must be the text of an HLO module, .*, got '"):
        read_hlo(text)


@pytest.mark.parametrize("line", ["%x", "%x = f32[8", "%x = f32[8]{0} add", "x = (f32[8] add(%y)", "x = f32[8] add(%y"])
def test_a_line_that_is_no_instruction_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"^hlo has a line that is not an instruction: '  "):
        read_hlo("ENTRY %main (x: f32[8]) -> f32[8] {\n  " + line + "\n}\n")


@pytest.mark.parametrize(
    ("dtype", "n_bytes"),
    [("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("bf16", 12), ("f32", 24), ("c128", 96)],
)
def test_bytes_come_from_the_name_of_the_dtype(dtype: str, n_bytes: int) -> None:
    (array,) = array_types(f"{dtype}[2,3]{{1,0:T(8,128)(2,1)S(1)}}")
    assert array == ArrayType(dtype, (2, 3))
    assert (array.size, array.n_bytes) == (6, n_bytes)


@pytest.mark.parametrize(
    ("type_", "stored"),
    [
        ("f32[1000,500]{1,0:T(8,128)}", 4 * 1000 * 512),  # sizes that libtpu has assigned
        ("f32[500,3]{0,1:T(4,128)S(1)}", 4 * 512 * 4),
        ("bf16[128,3]{0,1:T(4,128)(2,1)}", 2 * 128 * 4),
        ("f32[]{:T(128)}", 512),
        ("f32[10]{0:T(128)}", 512),
        ("bf16[10,1000,3]{2,1,0:T(8,128)(2,1)}", 2 * 10 * 1000 * 128),
        ("f32[1000,500]{1,0}", 4 * 1000 * 500),  # GPUs have no tiles
    ],
)
def test_tpus_store_whole_tiles(type_: str, stored: int) -> None:
    (array,) = array_types(type_)
    assert array.stored_bytes == stored


def test_memories_of_a_tpu_core_are_not_the_main_one() -> None:
    types = ("f32[8]{0:T(128)}", "f32[8]{0:T(128)S(1)}", "s32[]{:T(128)S(6)}", "f32[8]{0}", "f32[8]{0:S(1)}")
    found = [array_types(type_)[0].is_in_main_memory for type_ in types]
    assert found == [True, False, False, True, True], "on GPUs, S(1) is memory of collectives"


def test_dynamic_lengths_count_as_their_bounds_and_tokens_are_no_arrays() -> None:
    type_ = "((s32[], token[]), /*index=1*/f32[<=8,4]{1,0}, u8[0]{0})"
    assert array_types(type_) == (ArrayType("s32", ()), ArrayType("f32", (8, 4)), ArrayType("u8", (0,)))
    assert tuple_types(type_) == ("(s32[], token[])", "f32[<=8,4]{1,0}", "u8[0]{0}")
    assert tuple_types("f32[8,4]{1,0}") == ("f32[8,4]{1,0}",)
    assert tuple_types("()") == ()


def test_a_text_is_split_outside_of_brackets_and_strings() -> None:
    text = r'a={x, "}, "}, b="\", {", c=(1, 2), d={{0, 1}, {2, 3}}, e'
    assert list(split_outside(text)) == [r'a={x, "}, "}', r'b="\", {"', "c=(1, 2)", "d={{0, 1}, {2, 3}}", "e"]


LOOP = """HloModule jit_f
%cond (t: (s32[], s32[])) -> pred[] {
  %t = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %end = s32[] constant(10)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}
%body (u: (s32[], s32[])) -> (s32[], s32[]) {
  %u = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  %k = s32[] get-tuple-element(%u), index=1
  %moved = s32[]{:S(6)} copy(%j)
  %step = s32[] constant(4)
  %next = s32[] add(%moved, %step)
  ROOT %out = (s32[], s32[]) tuple(%next, %k)
}
ENTRY %main (n: s32[]) -> (s32[], s32[]) {
  %n = s32[] parameter(0)
  %start = s32[] constant(1)
  %first = (s32[], s32[]) tuple(%start, %n)
  ROOT %loop = (s32[], s32[]) while(%first), condition=%cond, body=%body
}
"""


def counted(text: str) -> int | None:
    program = read_hlo(text)
    return trip_count(program, program.instructions["loop"])


def test_a_counter_from_a_constant_to_a_constant() -> None:
    assert counted(LOOP) == len(range(1, 10, 4))
    assert counted(LOOP.replace("constant(1)", "constant(11)")) == 0
    assert counted(LOOP.replace("constant(1)", "constant(-3)")) == len(range(-3, 10, 4))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("direction=LT", "direction=NE"),
        ("tuple(%start, %n)", "tuple(%n, %start)"),  # it starts at an argument
        ("compare(%i, %end)", "compare(%end, %i)"),
        ("add(%moved, %step)", "add(%k, %step)"),  # it is not the counter that grows
        ("add(%moved, %step)", "add(%moved, %k)"),
        ("add(%moved, %step)", "multiply(%moved, %step)"),
        ("constant(4)", "constant(0)"),
    ],
)
def test_other_loops_are_unknown(old: str, new: str) -> None:
    assert old in LOOP
    assert counted(LOOP.replace(old, new)) is None


def test_the_number_that_the_compiler_has_written_is_taken() -> None:
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"6"}}')
    assert counted(known) == 6
