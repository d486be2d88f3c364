from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_steps
import jax
import optax
import pytest
from gpu_builders import compile_for_gpu

import jmp_train
from jmp_train.tools.aot import CompiledProgram
from jmp_train.tools.aot.buffers import Argument, Buffer, Origin, buffers_at_peak, direction, origin_of, source_of
from jmp_train.tools.aot.hlo import StackFrame, read_hlo

pytestmark = pytest.mark.quick

# A step with a layer, its gradient and an update in place, as XLA's dumps describe it. At time 6, when the gradient of
# the weights is computed, 512 of the block's 1024 bytes are a workspace.
PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/train.py"

FunctionNames
1 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY %main (w: f32[8,8], x: f16[8,8], m: f32[8,8]) -> (f32[8,8], f32[]) {
  %w = f32[8,8]{1,0} parameter(0)
  %x = f16[8,8]{1,0} parameter(1)
  %half = f16[8,8]{1,0} convert(%w), metadata={op_name="jit(step)/jvp(M)/convert_element_type" stack_frame_id=1}
  %y = f16[8,8]{1,0} sine(%x), metadata={op_name="jit(step)/jvp(M)/sin" stack_frame_id=1}
  %sum = f32[] custom-call(%y, %half), metadata={op_name="jit(step)/jvp(M)/reduce_sum" stack_frame_id=1}
  %dy = f16[8,8]{1,0} custom-call(%half), metadata={op_name="jit(step)/transpose(jvp(M))/mul" stack_frame_id=1}
  %dot = (f16[8,8]{1,0}, s8[512]{0}) custom-call(%y, %dy), custom_call_target="__cublas$gemm"
  %dw = f16[8,8]{1,0} get-tuple-element(%dot), index=0
  %unscaled = f32[8,8]{1,0} convert(%dw), metadata={op_name="jit(step)/mul" stack_frame_id=1}
  %new = f32[8,8]{1,0} subtract(%w, %unscaled), metadata={op_name="jit(step)/sub" stack_frame_id=1}
  ROOT %out = (f32[8,8]{1,0}, f32[]) tuple(%new, %sum)
}
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 256, parameter 0, shape |f32[8,8]| at ShapeIndex {}, maybe-live-out:
 value: <9 new @0> (size=256,offset=0): f32[8,8]{1,0}
 value: <1 w @0> (size=256,offset=0): f32[8,8]{1,0}
allocation 1: size 128, parameter 1, shape |f16[8,8]| at ShapeIndex {}:
 value: <2 x @0> (size=128,offset=0): f16[8,8]{1,0}
allocation 2: size 16, output shape is |(f32[8,8], f32[])|, maybe-live-out:
 value: <10 out{} @0> (size=16,offset=0): (f32[8,8]{1,0}, f32[])
allocation 3: size 4, maybe-live-out:
 value: <5 sum @0> (size=4,offset=0): f32[]
allocation 4: size 1024, preallocated-temp:
 value: <3 half @0> (size=128,offset=640): f16[8,8]{1,0}
 value: <4 y @0> (size=128,offset=768): f16[8,8]{1,0}
 value: <6 dy @0> (size=128,offset=512): f16[8,8]{1,0}
 value: <7 dot{} @0> (size=16,offset=896): (f16[8,8]{1,0}, s8[512]{0})
 value: <8 dot{0} @0> (size=128,offset=640): f16[8,8]{1,0}
 value: <11 dot{1} @0> (size=512,offset=0): s8[512]{0}
 value: <12 unscaled @0> (size=256,offset=0): f32[8,8]{1,0}
allocation 5: size 4, thread-local:
 value: <0 p @0> (size=4,offset=0): f32[]
"""
LIVE_RANGE = """HloLiveRange (max 11):
  InstructionSequence:
    0:w
    1:x
    2:half
    3:y
    4:sum
    5:dy
    6:dot
    7:dw
    8:unscaled
    9:new
    10:out
  BufferLiveRange:
    w{}:0-9
    x{}:0-11
    half{}:2-5
    y{}:3-6
    sum{}:4-11
    dy{}:5-6
    dot{}:6-7
    dot{0}:6-8
    dot{1}:6-6
    unscaled{}:8-9
    new{}:9-11
    out{}:10-11
"""
ARGUMENTS = {0: Argument("state.params['w']", "parameters"), 1: Argument("batch['x']", "batch")}
LINE = "/home/me/train.py:3 (loss)"


@pytest.mark.timeout(500)
def test_buffers_of_a_step_that_is_checked_by_hand() -> None:
    assert set(buffers_at_peak(ASSIGNMENT, LIVE_RANGE, read_hlo(PROGRAM), ARGUMENTS)) == {
        Buffer(512, "temporaries", "dot_general", "s8", (512,), LINE, "M"),
        Buffer(256, "parameters", "argument", "f32", (8, 8), "state.params['w']", ""),
        Buffer(128, "batch", "argument", "f16", (8, 8), "batch['x']", ""),
        Buffer(128, "saved for the backward pass", "sin", "f16", (8, 8), LINE, "M"),
        Buffer(128, "temporaries", "mul", "f16", (8, 8), LINE, "M"),
        Buffer(128, "temporaries", "dot_general", "f16", (8, 8), LINE, "M"),
        Buffer(112, "padding", "", "", (), "", ""),
        Buffer(16, "temporaries", "dot_general", "", (), LINE, "M"),
        Buffer(16, "results", "sub", "", (), LINE, ""),
        Buffer(4, "results", "reduce_sum", "f32", (), LINE, "M"),
    }


@pytest.mark.timeout(500)
def test_memory_for_collectives_is_a_block_of_its_own() -> None:
    moved = " value: <6 dy @0> (size=128,offset=512): f16[8,8]{1,0}\n"
    apart = "allocation 6: size 192, color 1, preallocated-temp:\n" + moved.replace("@0", "@1").replace("512", "0")
    one, two = (
        buffers_at_peak(text, LIVE_RANGE, read_hlo(PROGRAM), ARGUMENTS)
        for text in (ASSIGNMENT, ASSIGNMENT.replace(moved, "") + apart)
    )
    assert sum(b.n_bytes for b in two) == sum(b.n_bytes for b in one) + 192
    same = {b for b in one if b.kind != "padding"}
    assert set(two) == same | {Buffer(112 + 128 + 64, "padding", "", "", (), "", "")}


@dataclass(frozen=True)
class Found:
    """A compiled step and its buffers."""

    program: CompiledProgram
    buffers: tuple[Buffer, ...]
    expected: Mapping[str, int]  # bytes of each group of arguments

    def bytes_of(self, kind: str) -> int:
        return sum(buffer.n_bytes for buffer in self.buffers if buffer.kind == kind)


Compile = Callable[..., Found]


@pytest.fixture
def compiled(plan_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Returns what compiles one of the steps in `gpu_steps`."""

    def compile_step(name: str, *arguments: str, gpu: str, devices: int = 1) -> Found:
        dump = tmp_path / f"{gpu}{arguments}"
        monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={dump} --xla_dump_hlo_as_text")
        target = f"{gpu_steps.__file__}:{name}"
        program = compile_for_gpu(target, *arguments, gpu=gpu, devices=devices, python=plan_python, timeout=250)
        assignment, live_range = (_largest(dump, kind) for kind in ("buffer-assignment", "live-range"))
        build = gpu_steps.stack if name == "stack" else gpu_steps.mlp
        leaves = jax.tree_util.tree_leaves_with_path(build(*("mixed_float16",) if name == "mlp_on" else arguments)[1])
        known = {i: Argument(jax.tree_util.keystr(path), _group(path)) for i, (path, _) in enumerate(leaves)}
        expected = Counter[str]()
        for path, leaf in leaves:
            is_shared = devices > 1 and (_group(path) == "batch" or arguments == ("True",)) and gpu_steps.is_split(leaf)
            expected[_group(path)] += leaf.size * leaf.dtype.itemsize // (devices if is_shared else 1)
        buffers = buffers_at_peak(assignment, live_range, read_hlo(program.hlo), known)
        return Found(program, buffers, expected)

    return compile_step


def _largest(dump: Path, kind: str) -> str:
    return max((file.read_text() for file in dump.glob(f"*gpu_after_optimizations-{kind}.txt")), key=len)


def _group(path: tuple[Any, ...]) -> str:
    text = jax.tree_util.keystr(path)
    groups = {"[0].params": "parameters", "[0].opt_state": "optimizer state", "[1]": "batch"}
    return next((group for start, group in groups.items() if text.startswith(start)), "other arguments")


def holds(found: Found) -> None:
    """Asserts what holds for any step."""
    program, buffers = found.program, found.buffers
    allocated = program.argument_bytes + program.temp_bytes + program.output_bytes - program.alias_bytes
    assert sum(buffer.n_bytes for buffer in buffers) == allocated + found.bytes_of("constants")
    assert list(buffers) == sorted(buffers, key=lambda buffer: -buffer.n_bytes)
    assert {kind: found.bytes_of(kind) for kind in found.expected} == found.expected
    named = [buffer for buffer in buffers if buffer.operation == "argument" or _line(buffer.source)]
    assert sum(buffer.n_bytes for buffer in named) > 0.95 * allocated
    for buffer in buffers:
        if buffer.n_bytes > 0.01 * allocated and buffer.operation != "argument":
            assert _line(buffer.source), buffer
    assert found.bytes_of("padding") < 0.01 * allocated


def _line(source: str) -> str:
    """Returns the text of the innermost line that a source names, "" if it names none."""
    file, _, rest = source.partition(" ")[0].rpartition(":")
    return Path(file).read_text().splitlines()[int(rest) - 1].strip() if file else ""


@pytest.mark.timeout(500)
@pytest.mark.full
@pytest.mark.parametrize(("gpu", "after_relu"), [("V100-16GB", 1), ("H100-80GB", 2)])
@pytest.mark.parametrize("policy", ["mixed_float16", "autocast", "float32"])
def test_a_plain_mlp_saves_what_the_chain_rule_needs(compiled: Compile, policy: str, gpu: str, after_relu: int) -> None:
    found = compiled("mlp", policy, gpu=gpu)
    holds(found)
    dtype = "f32" if policy == "float32" else "f16"
    saved = [b for b in found.buffers if b.kind == "saved for the backward pass"]
    wide = (gpu_steps.ROWS, gpu_steps.WIDTH)
    large = Counter((b.dtype, b.shape) for b in saved if b.shape[0] == gpu_steps.ROWS and b.n_bytes > 32 * b.shape[0])
    inputs = {} if policy == "float32" else {(dtype, (gpu_steps.ROWS, gpu_steps.INPUTS)): 1}  # else they are the batch
    # Of both hidden layers, what is before relu and after it. On a V100 the peak is within the backward pass, when the
    # last has been used; on an H100 it is when the last layer multiplies, for which cuBLAS has a workspace of 32 MiB.
    assert large == {(dtype, wide): 2 + after_relu, **inputs}
    assert Counter(b.operation for b in saved if b.shape == wide) == {"dot_general": 2, "max": after_relu}
    lines = {_line(b.source.rpartition(" from ")[2]) for b in saved if b.shape == wide}
    assert lines == {"return self.third(nnx.relu(self.second(nnx.relu(self.first(x)))))"}
    assert ((gpu_steps.WIDTH, gpu_steps.WIDTH) in {b.shape for b in saved}) == (policy != "float32")  # copies in half


@pytest.mark.timeout(500)
@pytest.mark.full
@pytest.mark.parametrize("gpu", ["A100-40GB", "H100-80GB"])
def test_recomputing_saves_only_what_goes_into_a_layer(compiled: Compile, gpu: str) -> None:
    kept, recomputed = (compiled("stack", str(remat), gpu=gpu) for remat in (False, True))
    holds(kept)
    holds(recomputed)
    saved = "saved for the backward pass"
    rows = (gpu_steps.DEPTH, gpu_steps.ROWS)
    inputs = 2 * gpu_steps.DEPTH * gpu_steps.ROWS * gpu_steps.WIDTH
    few, stacked = ([b for b in x.buffers if b.kind == saved and b.shape[:2] == rows] for x in (recomputed, kept))
    assert [b.shape for b in few] == [(*rows, gpu_steps.WIDTH)]
    assert sum(b.n_bytes for b in few) == inputs
    assert sum(b.n_bytes for b in stacked) > 4 * inputs
    assert {b.module.rpartition("/")[0] or b.module for b in stacked} <= {"Stack", "Stack/blocks"}
    assert "dot_general" in {b.operation for b in stacked}
    assert all(_line(b.source) for b in stacked)


@pytest.mark.timeout(500)
@pytest.mark.full
@pytest.mark.parametrize("is_state_shared", [False, True])
def test_eight_gpus_share_the_batch_and_what_is_made_of_it(compiled: Compile, is_state_shared: bool) -> None:
    found = compiled("mlp_on", str(is_state_shared), gpu="H100-80GB", devices=8)
    holds(found)
    saved = [b for b in found.buffers if b.kind == "saved for the backward pass"]
    assert (gpu_steps.ROWS // 8, gpu_steps.WIDTH) in {b.shape for b in saved}
    assert (gpu_steps.WIDTH, gpu_steps.WIDTH) in {b.shape for b in found.buffers if b.dtype == "f16"}  # gathered


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
