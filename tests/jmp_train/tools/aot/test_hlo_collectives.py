import pytest

from jmp_train.tools.aot.hlo import read_hlo
from jmp_train.tools.aot.hlo_collectives import Collective, axes_of, collectives, largest_group, n_devices

pytestmark = pytest.mark.quick


def found(lines: str, header: str = "HloModule m, replica_count=1, num_partitions=8") -> list[Collective]:
    program = read_hlo(f"""{header}

ENTRY %main (x: f32[16,4], y: bf16[8]) -> f32[16,4] {{
  %x = f32[16,4]{{1,0}} parameter(0)
  %y = bf16[8]{{0}} parameter(1)
{lines}
}}
""")
    return [item for i in program.computations["main"] for item in collectives(program, i, times=3)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (  # a device sends 7/8 to reduce and scatter, and 7/8 to gather
            "ROOT %r = f32[16,4]{1,0} all-reduce(%x), replica_groups={}, to_apply=%add",
            ("all-reduce", "f32", 8, 256, 2 * 224),
        ),
        (
            "ROOT %r = f32[64,4]{1,0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}",
            ("all-gather", "f32", 4, 1024, 768),
        ),
        (
            "ROOT %r = f32[4,4]{1,0} reduce-scatter(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}",
            ("reduce-scatter", "f32", 4, 256, 192),
        ),
        ("ROOT %r = bf16[8]{0} all-to-all(%y), replica_groups={{0,1}}", ("all-to-all", "bf16", 2, 16, 8)),
        (
            "ROOT %r = bf16[8]{0} collective-permute(%y), source_target_pairs={{0,1},{1,2},{2,0}}",
            ("collective-permute", "bf16", 3, 16, 16),
        ),
        (
            "ROOT %r = bf16[8]{0} collective-broadcast(%y), replica_groups={{0,1,2,3}}",
            ("collective-broadcast", "bf16", 4, 16, 16),
        ),
        (
            "ROOT %r = bf16[8]{0} ragged-all-to-all(%y, %y, %x, %x, %x, %x), replica_groups={{0,1}}",
            ("ragged-all-to-all", "bf16", 2, 16, 0),
        ),
        ("ROOT %r = bf16[8]{0} all-reduce(%y), replica_groups={{0},{1}}", ("all-reduce", "bf16", 1, 16, 0)),
    ],
)
def test_what_a_collective_sends(line: str, expected: tuple[str, str, int, int, float]) -> None:
    (item,) = found("  " + line)
    assert (item.kind, item.dtype, item.group_size, item.n_bytes, item.sent_bytes) == expected
    assert item.times == 3


def test_an_asynchronous_one_counts_once() -> None:
    lines = """  %s = (f32[16,4]{1,0}, f32[128,4]{1,0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %r = f32[128,4]{1,0} all-gather-done(%s)"""
    assert [(item.kind, item.n_bytes) for item in found(lines)] == [("all-gather", 2048)]


def test_several_arrays_in_one() -> None:
    line = "  ROOT %r = (f32[16,4]{1,0}, bf16[8]{0}, f32[16,4]{1,0}) all-reduce(%x, %y, %x), replica_groups={{0,1}}"
    assert [(item.dtype, item.n_bytes) for item in found(line)] == [("f32", 512), ("bf16", 16)]


@pytest.mark.parametrize(
    ("groups", "group"),
    [
        ("replica_groups={{0,1},{2,3},{4,5}}", (0, 1)),
        ("replica_groups={{7},{0,1,2}}", (0, 1, 2)),
        ("replica_groups={}", tuple(range(8))),
        ("channel_id=1", tuple(range(8))),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
        ("replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", tuple(range(8))),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", (0, 1)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a','b'}", tuple(range(8))),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(1)2,'b'}", (0, 1, 4, 5)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}", (0, 2)),
        ("replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", (0, 4)),
        ("source_target_pairs={{0,1},{1,0},{2,4},{4,6},{6,2}}", (2, 4, 6)),
    ],
)
def test_devices_of_the_largest_group(groups: str, group: tuple[int, ...]) -> None:
    line = f"  ROOT %r = f32[] all-reduce(), {groups}, use_global_device_ids=true"
    program = read_hlo("ENTRY %main () -> f32[] {\n" + line + "\n}\n")
    assert largest_group(program.instructions["r"], 8) == group


@pytest.mark.parametrize(
    ("group", "axes"),
    [((0, 1), "model"), ((0, 4), "data"), ((0, 1, 4, 5), "data x model"), ((3,), ""), ((0, 8), "")],
)
def test_axes_of_a_mesh_along_which_a_group_lies(group: tuple[int, ...], axes: str) -> None:
    assert axes_of(group, {"data": 2, "model": 4}) == axes


@pytest.mark.parametrize(
    ("header", "n"), [("HloModule m", 1), ("HloModule m, replica_count=2, num_partitions=4, a=b", 8)]
)
def test_numbers_of_devices(header: str, n: int) -> None:
    assert n_devices(read_hlo(f"{header}\nENTRY %main () -> f32[] {{\n  ROOT %r = f32[] constant(0)\n}}\n")) == n


def test_other_instructions_send_nothing() -> None:
    assert found("  ROOT %r = f32[16,4]{1,0} add(%x, %x)") == []
