"""Collective operations of a compiled program: their bytes, and the devices between which they communicate."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from jmp_train.tools.aot.hlo import HloModule, Instruction


@dataclass(frozen=True)
class Collective:
    """The arrays of one dtype that a collective operation works on.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast" or
        "ragged-all-to-all"; the same for synchronous and asynchronous ones.
      dtype: XLA's name of the arrays' dtype.
      group_size: number of devices in the largest group, of a collective-permute in all pairs.
      group: the numbers of the devices in the largest group, of a collective-permute those that pairs connect.
      n_bytes: bytes of the whole arrays: the result for all-gather, otherwise the operands on one device.
      sent_bytes: bytes that each device must send at least, if devices do the reduction: 2 (n - 1) / n of an all-reduce
        in a group of n, (n - 1) / n of an all-gather, a reduce-scatter and an all-to-all, and all bytes of the others.
        0 for a ragged-all-to-all, which depends on the data.
      times: number of its executions per run of the program.
    """

    kind: str
    dtype: str
    group_size: int
    group: tuple[int, ...] = field(repr=False)
    n_bytes: int
    sent_bytes: float
    times: int


KINDS = frozenset(
    {
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
        *("collective-permute", "collective-broadcast"),
    }
)


def collectives(
    program: HloModule, instruction: Instruction, times: int = 1, *, kind: str | None = None
) -> Iterator[Collective]:
    """Yields the arrays that a collective instruction sends, by dtype; nothing for other instructions and for "-done".

    Args:
      program: the program of the instruction.
      instruction: an instruction of any opcode.
      times: number of executions.
      kind: its kind together with adjacent instructions; None for its opcode.
    """
    kind = kind or instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return
    group = largest_group(instruction, n_devices(program))
    pairs = instruction.attribute("source_target_pairs")
    size = len(set(re.findall(r"\d+", pairs))) if pairs else len(group)
    names = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
    by_dtype: dict[str, int] = {}
    for array in (array for name in names for array in program.instructions[name].arrays):
        n_bytes = array.n_bytes * (size if kind == "all-gather" else 1)
        by_dtype[array.dtype] = by_dtype.get(array.dtype, 0) + n_bytes
    for dtype, n_bytes in by_dtype.items():
        sent = fraction_sent(kind, size) * n_bytes
        yield Collective(kind, dtype, size, group, n_bytes, sent, times)


def n_devices(program: HloModule) -> int:
    """Returns the number of devices that run a program.

    Args:
      program: a program, whose first line has the number.
    """
    return math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", program.header))


def fraction_sent(kind: str, n: int) -> float:
    """Returns the fraction of its bytes that each device of a group sends in a collective operation, see `Collective`.

    Args:
      kind: one of `KINDS`.
      n: number of devices in the group.
    """
    if n < 2 or kind == "ragged-all-to-all":
        return 0
    return {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1, "collective-broadcast": 1}.get(kind, (n - 1) / n)


def largest_group(instruction: Instruction, devices: int) -> tuple[int, ...]:
    """Returns the numbers of the devices in the largest group of a collective operation, the first of such groups.

    Args:
      instruction: a collective instruction.
      devices: number of all devices; they form one group if the instruction names none.

    Example:
      >>> from jmp_train.aot import read_hlo
      >>> program = read_hlo('''
      ... ENTRY %main () -> f32[] {
      ...   ROOT %r = f32[] all-reduce(), replica_groups=[4,2]<=[2,4]T(1,0)
      ... }''')
      >>> largest_group(program.instructions["r"], 8)
      (0, 4)
    """
    pairs = instruction.attribute("source_target_pairs")
    if pairs:
        return _connected([(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)])
    groups = instruction.attribute("replica_groups")
    if groups.startswith("mesh"):
        return _of_mesh(groups, instruction.attribute("device_ids"))
    if groups.startswith("["):
        return _of_iota(groups)
    listed = [tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d, ]+)\}", groups)]
    return max(listed, key=len, default=tuple(range(devices)))


def axes_of(group: tuple[int, ...], mesh: Mapping[str, int]) -> str:
    """Returns the axes of a mesh along which a group of devices lies: "data", "data x model"; "" for one device.

    Args:
      group: the numbers of devices, counted with the last axis of the mesh first.
      mesh: the axes and their lengths.

    Example:
      >>> axes_of((0, 4), {"data": 2, "model": 4}), axes_of((0, 1, 2, 3), {"data": 2, "model": 4})
      ('data', 'model')
    """
    if max(group, default=0) >= math.prod(mesh.values()):
        return ""
    places = np.unravel_index(np.asarray(group, int), tuple(mesh.values()))
    return " x ".join(name for name, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1)


def _connected(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the most devices that pairs of source and target connect."""
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if group & {*pair}]
        groups = [group for group in groups if not group & {*pair}] + [set(pair).union(*touched)]
    return tuple(sorted(max(groups, key=len, default=set())))


def _of_mesh(text: str, order: str) -> tuple[int, ...]:
    """Returns the first group of mesh['x'=4,'y'=2] {'y'}, or for a part of an axis {'x':(2)2}.

    If devices are in another order, it comes before the axes: device_ids=([2,4]T(1,0)) {'y'}.
    """
    shape, _, used = f"{text} {order}".rpartition("{")
    lengths = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", shape)}
    own = re.search(r"\((\[.*)\)", order)
    ids = _ids(own[1]) if own else np.arange(math.prod(lengths.values()))
    ids = ids.reshape(tuple(lengths.values()))
    parts = {name: (pre, part) for name, pre, part in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", used)}
    for place, (name, length) in enumerate(lengths.items()):
        taken = range(1)
        if name in parts:
            before, part = (int(n) if n else None for n in parts[name])
            step = length // (before * part) if before and part else 1
            taken = range(0, (part or length) * step, step)
        ids = ids.take(taken, axis=place)
    return tuple(ids.reshape(-1).tolist())


def _of_iota(text: str) -> tuple[int, ...]:
    """Returns the first group of [2,4]<=[8], two groups of four, or of [4,2]<=[2,4]T(1,0)."""
    shape, _, source = text.partition("<=")
    return tuple(_ids(source).reshape(_numbers(shape))[0].tolist())


def _ids(text: str) -> np.ndarray:
    """Returns the numbers of devices in the order of [8], or of [2,4]T(1,0)."""
    lengths, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(lengths))).reshape(_numbers(lengths))
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))
