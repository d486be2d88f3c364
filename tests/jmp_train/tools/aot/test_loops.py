"""Trip counts of loops that the compiler has not written down."""

import pytest

from jmp_train.tools.aot.hlo import read_hlo
from jmp_train.tools.aot.kernels import trip_count

pytestmark = pytest.mark.quick

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
