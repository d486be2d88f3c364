from pathlib import Path

import jax
import optax
import pytest

import jmp_train
from jmp_train.tools.aot.buffers import Origin, direction, origin_of, source_of
from jmp_train.tools.aot.hlo import StackFrame, read_hlo

pytestmark = pytest.mark.quick

JAX, OPTAX = f"{Path(jax.__file__).parent}/_src/api.py", f"{Path(optax.__file__).parent}/_src/transform.py"
OURS = f"{Path(jmp_train.__file__).parent}/steps/step.py"
COMPILER = f"{Path(jmp_train.__file__).parent}/tools/aot/exported_process.py"
USER = "/home/me/train.py"


def origins(
    *lines: str, before: str = "", frames: tuple[tuple[str, int, str], ...] = ((USER, 5, "loss"),)
) -> dict[str, Origin]:
    """Returns the origins of all instructions of a program; frame i is called from frame i + 1."""
    head = [
        "HloModule jit_f\n\nFileNames",
        *(f'{i} "{file}"' for i, (file, _, _) in enumerate(frames, 1)),
        "\nFunctionNames",
        *(f'{i} "{name}"' for i, (_, _, name) in enumerate(frames, 1)),
        "\nFileLocations",
        *(f"{i} {{file_name_id={i} function_name_id={i} line={n}}}" for i, (_, n, _) in enumerate(frames, 1)),
        "\nStackFrames",
        *(
            f"{i} {{file_location_id={i} parent_frame_id={i + 1 if i < len(frames) else 0}}}"
            for i in range(1, len(frames) + 1)
        ),
    ]
    body = "\n".join(
        f"  {line}" for line in ("%x = f32[8]{0} parameter(0), metadata={op_name=\"params['w']/x\"}", *lines)
    )
    program = read_hlo("\n".join(head) + f"\n\n{before}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n")
    return {i.name: origin_of(program, i) for i in program.computations[program.entry]}


def test_a_line_of_a_package_is_followed_by_the_users() -> None:
    frames = ((JAX, 1, "jit"), (OPTAX, 7, "update"), (OURS, 8, "step"), (USER, 9, "main"))
    found = origins('ROOT %y = f32[8]{0} sine(%x), metadata={op_name="jit(f)/sin" stack_frame_id=1}', frames=frames)
    assert found["y"].source == f"{OPTAX}:7 (update) from {USER}:9 (main)"
    assert source_of([StackFrame(USER, 9, "main")]) == f"{USER}:9 (main)"
    assert source_of([StackFrame(OURS, 8, "")]) == f"{OURS}:8"
    assert source_of([]) == ""


@pytest.mark.parametrize(
    ("op_name", "module", "operation", "way"),
    [
        ("jit(f)/jvp(Model)/Dense_0/dot_general", "Model/Dense_0", "dot_general", "forward"),
        ("jit(f)/jvp(Model/Dense_0)/jit(relu)/max", "Model/Dense_0", "max", "forward"),
        ("jit(f)/transpose(jvp(Model))/while/body/closed_call/layer/mul", "Model/layer", "mul", "backward"),
        ("jit(f)/transpose(jvp(M))/jvp(M)/checkpoint/rematted_computation/a/tanh", "M/a", "tanh", "backward"),
        ("jit(f)/jvp(M)/x/jvp(y)/z/tanh", "M/x/y/z", "tanh", "forward"),
        ("jit(f)/vmap(jvp(jmp_train.autocast:float32))/head/add", "head", "add", "forward"),
        ("jit(f)/jvp(jit(take))/gather", "", "gather", "forward"),
        ("jit(f)/jvp(transpose(jvp(M)))/mul", "M", "mul", "forward"),  # the gradient of a gradient's norm
        ("jit(f)/mul", "", "mul", ""),
    ],
)
def test_names_of_jax_say_module_operation_and_direction(op_name: str, module: str, operation: str, way: str) -> None:
    found = origins(f'ROOT %y = f32[8]{{0}} sine(%x), metadata={{op_name="{op_name}" stack_frame_id=1}}')
    assert found["y"] == Origin(operation, module, f"{USER}:5 (loss)", way)
    assert direction(op_name) == way


def test_what_the_compiler_made_has_the_origin_of_what_it_reads() -> None:
    found = origins(
        '%named = f32[8]{0} sine(%x), metadata={op_name="jit(f)/jvp(A)/sin" stack_frame_id=1}',
        '%placeless = f32[8]{0} cosine(%named), metadata={op_name="jit(f)/jvp(B)/cos"}',
        "ROOT %last = f32[8]{0} copy(%placeless)",
    )
    place = f"{USER}:5 (loss)"
    assert found["named"] == Origin("sin", "A", place, "forward")
    assert found["placeless"] == found["last"] == Origin("cos", "B", place, "forward")
    assert found["x"].operation == "parameter"  # what an argument is called is no operation


def test_lines_of_the_compiling_process_are_no_origin() -> None:
    frames = ((COMPILER, 1, "main"),)
    found = origins(
        '%y = f32[8]{0} sine(%x), metadata={op_name="jit(call)/call_exported" stack_frame_id=1}',
        "ROOT %z = f32[8]{0} copy(%y)",
        frames=frames,
    )
    assert found["z"] == Origin("copy", "", "", "")


FUSED = """%fused (p: f32[8], q: f32[4]) -> (f32[8], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %zero = s32[] constant(0)
  %exp = f32[8]{0} exponential(%p), metadata={op_name="jit(f)/jvp(A)/exp" stack_frame_id=1}
  %log = f32[8]{0} log(%exp), metadata={op_name="jit(f)/transpose(jvp(A))/log" stack_frame_id=1}
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%exp, %log)
}

%stored (r: f32[8], s: f32[4]) -> f32[8] {
  %r = f32[8]{0} parameter(0)
  %s = f32[4]{0} parameter(1)
  %nil = s32[] constant(0)
  %row = f32[4]{0} reshape(%s), metadata={op_name="jit(f)/jvp(while)/broadcast_in_dim" stack_frame_id=1}
  ROOT %update = f32[8]{0} dynamic-update-slice(%r, %row, %nil), metadata={op_name="jit(f)/body/update"}
}

ENTRY %main (x: f32[8], y: f32[4]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %layer = f32[4]{0} tanh(%y), metadata={op_name="jit(f)/jvp(while)/body/layer/tanh"}
  %two = (f32[8]{0}, f32[8]{0}) fusion(%x, %y), calls=%fused, metadata={op_name="jit(f)/transpose(jvp(A))/log"}
  ROOT %rows = f32[8]{0} fusion(%x, %layer), calls=%stored, metadata={op_name="jit(f)/jvp(while)/body/update"}
}
"""


def test_each_result_of_a_fusion_has_its_own_origin() -> None:
    program = read_hlo("HloModule jit_f\n\n" + FUSED)
    two = [origin_of(program, program.instructions["two"], place) for place in (0, 1)]
    assert [origin.direction for origin in two] == ["forward", "backward"]
    assert [origin.operation for origin in two] == ["exp", "log"]
    assert origin_of(program, program.instructions["rows"]) == Origin(
        "tanh", "layer", "", "forward"
    )  # and not the row's update
