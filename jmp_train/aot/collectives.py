"""Communication between the devices of a compiled program."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from jmp_train.aot.device_groups import largest_group
from jmp_train.aot.hlo import Instruction, Program


@dataclass(frozen=True)
class Collective:
    """The arrays of one dtype that a collective operation works on.

    Attributes:
      name: the instruction's.
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
      op_name: the instruction's.
      stack_frame: the instruction's.
    """

    name: str
    kind: str
    dtype: str
    group_size: int
    group: tuple[int, ...] = field(repr=False)
    n_bytes: int
    sent_bytes: float
    times: int
    op_name: str
    stack_frame: int | None


KINDS = frozenset(
    {
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
        *("collective-permute", "collective-broadcast"),
    }
)


def collectives(
    program: Program, instruction: Instruction, times: int = 1, *, kind: str | None = None
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
        origin = (instruction.op_name, instruction.stack_frame)
        yield Collective(instruction.name, kind, dtype, size, group, n_bytes, sent, times, *origin)


def n_devices(program: Program) -> int:
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
