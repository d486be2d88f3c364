import pytest

from jmp_train.tools.aot.allocations import (
    AllocatedValue,
    fullest_moment,
    read_allocations,
    read_live_ranges,
    shares_at,
)

pytestmark = pytest.mark.quick

ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, parameter 1, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <3 x.1 @0> (size=64,offset=0): f32[16]{0}
 value: <9 out{1} @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 16, output shape is |(f32[16], preallocated-temp)|, maybe-live-out:
 value: <8 tuple{} @0> (size=16,offset=0): (f32[16]{0}, f32[16]{0})
allocation 2: size 4, thread-local:
 value: <1 sum @0> (size=4,offset=0): f32[]
allocation 3: size 8, constant:
 value: <2 c @0> (size=8,offset=0): f32[2]{0}
allocation 4: size 4096, color 5, preallocated-temp:
 value: <4 offloaded @5> (size=4096,offset=0): f32[1024]{0:S(5)}
allocation 5: size 160, color 1, preallocated-temp:
 value: <5 gemm{0,2} (phi) @1> (size=32,offset=128): f16[16]{0}
"""


def test_allocations_of_the_device_are_read() -> None:
    read = read_allocations(ASSIGNMENT)
    assert [(a.number, a.size, a.color, a.parameter, set(a.flags)) for a in read] == [
        (0, 64, 0, 1, {"maybe-live-out"}),
        (1, 16, 0, None, {"maybe-live-out"}),
        (3, 8, 0, None, {"constant"}),
        (5, 160, 1, None, {"preallocated-temp"}),
    ]
    assert [v.position for v in read[0].values] == [("x.1", ()), ("out", (1,))]
    assert read[3].values == (AllocatedValue(("gemm", (0, 2)), "f16[16]{0}", 32, 128),)


def test_live_ranges_end_before_xlas_own_view_of_the_peak() -> None:
    live = read_live_ranges(
        "HloLiveRange (max 3):\n  InstructionSequence:\n    0:x.1\n    1:gemm\n    2:tuple\n"
        "  BufferLiveRange:\n    x.1{}:0-3\n    gemm{0,2}:1-2\n"
        "  Live ranges at 1 (peak):\n    y{}: 4 bytes (cumulative: 4 bytes)\n    9:strange\n"
    )
    assert live.times == {"x.1": 0, "gemm": 1, "tuple": 2}
    assert live.ranges == {("x.1", ()): (0, 3), ("gemm", (0, 2)): (1, 2)}


@pytest.mark.parametrize("read", [read_allocations, read_live_ranges])
def test_another_text_is_refused(read: object) -> None:
    assert callable(read)
    with pytest.raises(ValueError, match="got 'HloModule jit_f'"):
        read("HloModule jit_f")


def value(name: str, size: int, offset: int) -> AllocatedValue:
    return AllocatedValue((name, ()), f"s8[{size}]", size, offset)


# a: ------          b is written over a at time 3, where both are alive; c and d are never alive together
# b:    ------
# c:   -
# d:      --
VALUES = (value("a", 100, 0), value("b", 60, 40), value("c", 30, 100), value("d", 50, 100), value("unused", 999, 0))
RANGES = {("a", ()): (0, 3), ("b", ()): (3, 6), ("c", ()): (2, 2), ("d", ()): (5, 6)}


@pytest.mark.parametrize(
    ("moment", "alive", "kept"),
    [
        (0, {"a": 100}, {"d": 50}),
        (2, {"a": 100, "c": 30}, {"d": 20}),
        (3, {"a": 100}, {"d": 50}),  # b has all of its bytes from a, the older one
        (4, {"b": 60}, {"a": 40, "d": 50}),
        (5, {"b": 60, "d": 50}, {"a": 40}),
        (7, {}, {"a": 100, "d": 50}),
    ],
)
def test_each_byte_has_one_value(moment: int, alive: dict[str, int], kept: dict[str, int]) -> None:
    shares = shares_at(moment, VALUES, RANGES)
    assert {share.value.position[0]: share.n_bytes for share in shares if share.is_alive} == alive
    assert {share.value.position[0]: share.n_bytes for share in shares if not share.is_alive} == kept


def test_a_value_that_outgrows_the_one_that_it_overwrites_has_the_rest() -> None:
    values = (value("old", 40, 10), value("new", 100, 0))
    shares = shares_at(1, values, {("old", ()): (0, 1), ("new", ()): (1, 2)})
    assert {share.value.position[0]: share.n_bytes for share in shares} == {"old": 40, "new": 60}


def test_the_fullest_moment_counts_bytes_and_not_values() -> None:
    assert fullest_moment(VALUES, RANGES) == 2  # 130 bytes; at 3, a and b have 160 between them, in 100
    assert fullest_moment((), RANGES) == 0
    many = {("a", ()): (0, 9), ("b", ()): (8, 9), ("c", ()): (8, 9)}
    apart = (value("a", 10, 0), value("b", 1, 10), value("c", 1, 11))
    assert fullest_moment(apart, many) == 8
