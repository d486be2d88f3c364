import pytest

from jmp_train.tools.aot.data_flow import DataFlow, data_flow, results_of_fusion
from jmp_train.tools.aot.hlo import read_hlo

pytestmark = pytest.mark.quick

# A loop that stores a row in each turn, in place, as `jax.lax.scan` does for the backward pass.
LOOP = read_hlo("""HloModule jit_f, is_scheduled=true

%row (p: f32[4,8], q: f32[8], i: s32[]) -> f32[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %flat = f32[32]{0} bitcast(%p)
  %q = f32[8]{0} parameter(1)
  %i = s32[] parameter(2)
  %updated = f32[32]{0} dynamic-update-slice(%flat, %q, %i)
  ROOT %back = f32[4,8]{1,0} bitcast(%updated)
}

%body (state: (s32[], f32[8], f32[4,8])) -> (s32[], f32[8], f32[4,8]) {
  %state = (s32[], f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %turn = s32[] get-tuple-element(%state), index=0
  %carry = f32[8]{0} get-tuple-element(%state), index=1
  %rows = f32[4,8]{1,0} get-tuple-element(%state), index=2
  %store = f32[4,8]{1,0} fusion(%rows, %carry, %turn), kind=kLoop, calls=%row
  %next = f32[8]{0} sine(%carry)
  %one = s32[] constant(1)
  %later = s32[] add(%turn, %one)
  ROOT %after = (s32[], f32[8]{0}, f32[4,8]{1,0}) tuple(%later, %next, %store)
}

%condition (state.1: (s32[], f32[8], f32[4,8])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %turn.1 = s32[] get-tuple-element(%state.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%turn.1, %four), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[4,8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = f32[8]{0} copy(%x)
  %zeros = f32[4,8]{1,0} broadcast(%zero), dimensions={}
  %init = (s32[], f32[8]{0}, f32[4,8]{1,0}) tuple(%zero, %start, %zeros)
  %loop = (s32[], f32[8]{0}, f32[4,8]{1,0}) while(%init), condition=%condition, body=%body
  %all = f32[4,8]{1,0} get-tuple-element(%loop), index=2
  ROOT %out = f32[4,8]{1,0} negate(%all)
}
""")


def names(flow: DataFlow, name: str, *index: int) -> tuple[set[str], set[str]]:
    """Returns what makes and what reads the array at an index of an instruction's result."""
    array = flow.array_at(name, index)
    assert array is not None
    return {maker.name for maker, _ in flow.makers[array]}, {reader.name for reader in flow.readers.get(array, ())}


def test_a_loop_passes_on_what_its_body_updates_in_place() -> None:
    flow = data_flow(LOOP)
    assert names(flow, "loop", 2) == ({"zeros", "store"}, {"store", "out"})
    assert names(flow, "loop", 1) == ({"start", "next"}, {"store", "next"})
    same = [
        flow.array_at(*where) for where in [("zeros", ()), ("rows", ()), ("state", (2,)), ("after", (2,)), ("all", ())]
    ]
    assert set(same) == {flow.array_at("loop", (2,))}
    assert flow.array_at("x", ()) != flow.array_at("start", ())


def test_what_is_no_array_has_none() -> None:
    flow = data_flow(LOOP)
    assert [flow.array_at(*where) for where in [("loop", ()), ("loop", (3,)), ("nothing", ()), ("p", ())]] == [None] * 4


def test_results_of_a_fusion() -> None:
    store = next(i for i in LOOP.computations["body"] if i.name == "store")
    assert results_of_fusion(store, LOOP) == ("back",)
    assert results_of_fusion(LOOP.computations["main"][0], LOOP) == ()


def flow_of(*lines: str, before: str = "") -> DataFlow:
    body = "\n".join(f"  {line}" for line in lines)
    return data_flow(
        read_hlo(f"HloModule jit_f\n\n{before}\nENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {{\n{body}\n}}\n")
    )


X, Y = "%x = f32[8]{0} parameter(0)", "%y = f32[8]{0} parameter(1)"


@pytest.mark.parametrize(
    "lines",
    [
        (
            "%start = ((f32[8]{0}), f32[16]{0}) all-gather-start(%x), dimensions={0}",
            "ROOT %done = f32[16]{0} all-gather-done(%start)",
        ),
        ("%start = f32[8]{0} all-reduce-start(%x), to_apply=%add", "ROOT %done = f32[8]{0} all-reduce-done(%start)"),
        (
            "%start = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%x)",
            "ROOT %done = f32[8]{0} copy-done(%start)",
        ),
    ],
    ids=["all-gather", "all-reduce", "copy"],
)
def test_the_end_of_an_asynchronous_operation_has_the_result_of_its_start(lines: tuple[str, str]) -> None:
    flow = flow_of(X, Y, *lines)
    assert names(flow, "done")[0] == {"start"}


def test_a_call_and_a_condition_have_the_results_of_what_they_run() -> None:
    sine = """%sines (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %sine = f32[8]{0} sine(%a)
}

%cosines (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %cosine = f32[8]{0} cosine(%b)
}
"""
    flow = flow_of(
        X,
        Y,
        "%p = pred[] constant(true)",
        "%called = f32[8]{0} call(%x), to_apply=%sines",
        "ROOT %chosen = f32[8]{0} conditional(%p, %called, %y), true_computation=%sines, false_computation=%cosines",
        before=sine,
    )
    assert {"sine", "cosine"} <= names(flow, "chosen")[0]
    assert "cosine" in names(flow, "y")[1]
    assert "chosen" in names(flow, "p")[1]


def test_a_custom_call_may_write_over_an_operand() -> None:
    call = (
        'ROOT %sorted = (f32[8]{0}, u8[64]{0}) custom-call(%x, %y), custom_call_target="s", output_to_operand_aliasing='
    )
    flow = flow_of(X, Y, call + "{{0}: (1, {})}")
    assert flow.array_at("sorted", (0,)) == flow.array_at("y", ())
    assert flow.array_at("sorted", (1,)) not in (flow.array_at("x", ()), flow.array_at("y", ()))
