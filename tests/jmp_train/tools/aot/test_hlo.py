import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jmp_train.tools.aot.hlo import Instruction, StackFrame, read_hlo

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
