import pytest

from jmp_train.tools.aot.buffers import ACTIVATIONS, GRADIENTS, PARAMETER_COPIES, TEMPORARIES, WORKSPACES, Uses
from jmp_train.tools.aot.data_flow import data_flow
from jmp_train.tools.aot.hlo import read_hlo
from jmp_train.tools.aot.origins import Origins

pytestmark = pytest.mark.quick

FORWARD, BACKWARD = 'metadata={op_name="jit(f)/jvp(M)/x"}', 'metadata={op_name="jit(f)/transpose(jvp(M))/x"}'
OPTIMIZER = 'metadata={op_name="jit(f)/x"}'
# Micro-batches in a loop: each adds its gradient to a sum, which the optimizer then clips and applies.
PROGRAM = read_hlo(f"""HloModule jit_f

%body (state: (f32[8], f16[8], f32[8])) -> (f32[8], f16[8], f32[8]) {{
  %state = (f32[8]{{0}}, f16[8]{{0}}, f32[8]{{0}}) parameter(0)
  %so_far = f32[8]{{0}} get-tuple-element(%state), index=0
  %half = f16[8]{{0}} get-tuple-element(%state), index=1
  %rows = f32[8]{{0}} get-tuple-element(%state), index=2
  %input = f16[8]{{0}} convert(%rows), {FORWARD}
  %within = f16[8]{{0}} multiply(%input, %half), {FORWARD}
  %after = f16[8]{{0}} custom-call(%within), {FORWARD}
  %dy = f16[8]{{0}} multiply(%after, %half), {BACKWARD}
  %product = (f16[8]{{0}}, s8[64]{{0}}) custom-call(%input, %dy), custom_call_target="__cublas$gemm", {BACKWARD}
  %dw = f16[8]{{0}} get-tuple-element(%product), index=0
  %sum = f32[8]{{0}} add(%so_far, %dw), {OPTIMIZER}
  ROOT %next = (f32[8]{{0}}, f16[8]{{0}}, f32[8]{{0}}) tuple(%sum, %half, %rows)
}}

%condition (state.1: (f32[8], f16[8], f32[8])) -> pred[] {{
  %state.1 = (f32[8]{{0}}, f16[8]{{0}}, f32[8]{{0}}) parameter(0)
  ROOT %more = pred[] constant(false)
}}

ENTRY %main (w: f32[2], m: f32[8], x: f32[8]) -> f32[8] {{
  %w = f32[2]{{0}} parameter(0)
  %m = f32[8]{{0}} parameter(1)
  %x = f32[8]{{0}} parameter(2)
  %zero = f32[] constant(0)
  %zeros = f32[8]{{0}} broadcast(%zero), dimensions={{}}
  %gathering = (f32[2]{{0}}, f32[8]{{0}}) all-gather-start(%w), {FORWARD}
  %gathered = f32[8]{{0}} all-gather-done(%gathering)
  %cast = f16[8]{{0}} convert(%gathered), {FORWARD}
  %init = (f32[8]{{0}}, f16[8]{{0}}, f32[8]{{0}}) tuple(%zeros, %cast, %x)
  %loop = (f32[8]{{0}}, f16[8]{{0}}, f32[8]{{0}}) while(%init), condition=%condition, body=%body
  %total = f32[8]{{0}} get-tuple-element(%loop), index=0
  %clipped = f32[8]{{0}} multiply(%total, %total), {OPTIMIZER}
  %decay = f32[2]{{0}} multiply(%w, %w), {OPTIMIZER}
  %mean = f32[8]{{0}} add(%m, %clipped), {OPTIMIZER}
  ROOT %new = f32[8]{{0}} custom-call(%mean, %decay), {OPTIMIZER}
}}
""")


@pytest.mark.parametrize(
    ("name", "index", "kind"),
    [
        ("gathering", (1,), PARAMETER_COPIES),
        ("cast", (), PARAMETER_COPIES),
        ("half", (), PARAMETER_COPIES),  # the same, in the loop
        ("input", (), ACTIVATIONS),
        ("within", (), TEMPORARIES),  # which only the forward pass reads
        ("after", (), ACTIVATIONS),
        ("dy", (), TEMPORARIES),
        ("product", (0,), GRADIENTS),
        ("product", (1,), WORKSPACES),
        ("zeros", (), GRADIENTS),  # the sum's place
        ("loop", (0,), GRADIENTS),
        ("clipped", (), GRADIENTS),
        ("decay", (), TEMPORARIES),  # made of parameters, but for the optimizer
        ("mean", (), TEMPORARIES),  # made of gradients and of what is no gradient
    ],
)
def test_what_an_array_is_for(name: str, index: tuple[int, ...], kind: str) -> None:
    flow = data_flow(PROGRAM)
    array = flow.array_at(name, index)
    assert array is not None
    assert Uses(flow, Origins(PROGRAM, flow), {0}).kind(array) == kind


def test_what_fills_an_array_with_zeros_does_not_make_it() -> None:
    flow = data_flow(PROGRAM)
    array = flow.array_at("loop", (0,))
    assert array is not None
    uses = Uses(flow, Origins(PROGRAM, flow), {0})
    assert [maker.name for maker, _ in flow.makers[array]] == ["sum", "zeros"]
    assert [maker.name for maker, _ in uses.makers(array)] == ["sum"]
