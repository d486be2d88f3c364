import pytest

from jmp_train.aot.buffers import Argument, Buffer, buffers_at_peak
from jmp_train.aot.hlo import read_hlo

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


def test_buffers_of_a_step_that_is_checked_by_hand() -> None:
    assert set(buffers_at_peak(ASSIGNMENT, LIVE_RANGE, read_hlo(PROGRAM), ARGUMENTS)) == {
        Buffer(512, "workspaces", "dot_general", "s8", (512,), LINE, "M"),
        Buffer(256, "parameters", "argument", "f32", (8, 8), "state.params['w']", ""),
        Buffer(128, "batch", "argument", "f16", (8, 8), "batch['x']", ""),
        Buffer(128, "activations saved for the backward pass", "sin", "f16", (8, 8), LINE, "M"),
        Buffer(128, "temporaries", "mul", "f16", (8, 8), LINE, "M"),
        Buffer(128, "gradients", "dot_general", "f16", (8, 8), LINE, "M"),
        Buffer(112, "padding", "", "", (), "", ""),
        Buffer(16, "temporaries", "dot_general", "", (), LINE, "M"),
        Buffer(16, "results", "sub", "", (), LINE, ""),
        Buffer(4, "results", "reduce_sum", "f32", (), LINE, "M"),
    }
