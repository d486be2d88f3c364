"""The memory that XLA assigned to each value, and when each value is alive, read from its dumps.

`xla_dump_to` with `xla_dump_hlo_as_text` leaves two texts that this module reads: "...-buffer-assignment.txt" has the
allocations, each with its values and their offsets; "...-live-range.txt" has the order of execution of the
instructions, with loops' bodies in their place, and the range of times in which each value is needed.

libtpu's texts differ in two things. Values are spread over several memories; only the main memory counts, not the
vector and scalar memory of a core. And libtpu has no single allocation for tables of pointers: a block that holds
nothing else takes no memory, and other blocks take whole units of 16 KiB, as `memory_analysis` reports them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise

Position = tuple[str, tuple[int, ...]]
"""An instruction's name, and of what element of its result: () for a whole one."""

TEMPORARIES = "preallocated-temp"
"""The flag of an allocation for temporary values."""


@dataclass(frozen=True)
class AllocatedValue:
    """A result of an instruction, stored in an allocation.

    Attributes:
      position: the instruction and the element of its result.
      type: the text of its type; a tuple has a table of pointers to its elements.
      size: bytes.
      offset: offset in the allocation, in bytes.
    """

    position: Position
    type: str
    size: int
    offset: int


@dataclass(frozen=True)
class Allocation:
    """A block of memory, allocated for as long as the program runs.

    Attributes:
      number: its number in the text.
      size: bytes.
      color: the kind of memory: 0 is the device's, 5 is the host's.
      parameter: number of the argument that it holds, None if it holds none.
      flags: "constant", "thread-local", "maybe-live-out" (a result), "preallocated-temp".
      values: its values, not all alive at the same time.
    """

    number: int
    size: int
    color: int
    parameter: int | None
    flags: frozenset[str]
    values: tuple[AllocatedValue, ...] = field(repr=False)


@dataclass(frozen=True)
class LiveRanges:
    """The times at which instructions run and values are alive.

    Attributes:
      times: the time at which each instruction runs, by name; a loop's body runs before the loop's own time.
      ranges: the first and the last time at which each value is needed, both inclusive.
    """

    times: Mapping[str, int]
    ranges: Mapping[Position, tuple[int, int]]


@dataclass(frozen=True)
class Share:
    """A value, and the bytes of an allocation that are its own at a moment.

    Attributes:
      value: the value.
      n_bytes: fewer than its size if other values are in a part of its place.
      is_alive: whether it is alive at that moment; if not, its bytes are reserved for another moment.
    """

    value: AllocatedValue
    n_bytes: int
    is_alive: bool


def read_allocations(text: str, platform: str = "cuda") -> tuple[Allocation, ...]:
    """Returns the allocations of a program in the main memory of its device, without those in registers (thread-local).

    Args:
      text: the text of "...-buffer-assignment.txt".
      platform: "cuda" or "tpu".

    Raises:
      ValueError: the text has another format.

    Example:
      >>> allocation, = read_allocations('''BufferAssignment:
      ... allocation 0: size 36, parameter 0, shape |f32[9]| at ShapeIndex {}:
      ...  value: <1 x @0> (size=36,offset=0): f32[9]{0}''')
      >>> allocation.parameter, allocation.values[0].position
      (0, ('x', ()))
    """
    if not text.startswith("BufferAssignment:"):
        raise ValueError(f"assignment must be the text of a buffer assignment, got {text[:80]!r}")
    found: list[tuple[re.Match[str], list[AllocatedValue]]] = []
    for line in text.splitlines():
        value = _VALUE.match(line)
        if value and found:
            found[-1][1].append(AllocatedValue(_position(value[1]), value[4], int(value[2]), int(value[3])))
        elif allocation := _ALLOCATION.match(line):
            found.append((allocation, []))
    allocations = (_allocation(head, values) for head, values in found)
    on_device = (a for a in allocations if a.color != _HOST and "thread-local" not in a.flags)
    if platform == "tpu":
        return tuple(_in_whole_units(a) for a in on_device if a.color == _MAIN and not _is_empty(a))
    return tuple(on_device)


def _is_empty(allocation: Allocation) -> bool:
    """Returns whether a block has only tables of pointers."""
    return TEMPORARIES in allocation.flags and all(value.type.startswith("(") for value in allocation.values)


def _in_whole_units(allocation: Allocation) -> Allocation:
    if TEMPORARIES not in allocation.flags:
        return allocation
    return replace(allocation, size=-(-allocation.size // _UNIT) * _UNIT)


def _allocation(head: re.Match[str], values: Iterable[AllocatedValue]) -> Allocation:
    parameter, color = _PARAMETER.search(head[3]), _COLOR.match(head[3])
    return Allocation(
        number=int(head[1]),
        size=int(head[2]),
        color=int(color[1]) if color else 0,
        parameter=int(parameter[1]) if parameter else None,
        flags=frozenset(_FLAG.findall(_SHAPE.sub("", head[3]))),
        values=tuple(values),
    )


def read_live_ranges(text: str) -> LiveRanges:
    """Returns the times of instructions and the live ranges of values.

    Args:
      text: the text of "...-live-range.txt".

    Raises:
      ValueError: the text has another format.

    Example:
      >>> ranges = read_live_ranges('''HloLiveRange (max 2):
      ...   InstructionSequence:
      ...     0:x
      ...     1:out
      ...   BufferLiveRange:
      ...     x{}:0-1
      ...     out{0}:1-2''')
      >>> ranges.times["out"], ranges.ranges["out", (0,)]
      (1, (1, 2))
    """
    if not text.startswith("HloLiveRange"):
        raise ValueError(f"live_range must be the text of live ranges, got {text[:80]!r}")
    times: dict[str, int] = {}
    ranges: dict[Position, tuple[int, int]] = {}
    for line in text.splitlines():
        if run := _RUN.fullmatch(line):
            times[run[2]] = int(run[1])
        elif live := _LIVE.fullmatch(line):
            ranges[_position(live[1])] = int(live[2]), int(live[3])
        elif line.startswith("  Live ranges at"):
            break  # the rest repeats it
    return LiveRanges(times, ranges)


def fullest_moment(values: Iterable[AllocatedValue], ranges: Mapping[Position, tuple[int, int]]) -> int:
    """Returns the first time at which the live values take the most memory.

    When an instruction writes its result over an operand, both are alive in the same place, counted once.

    Args:
      values: values of one allocation, or of several whose values do not share memory.
      ranges: the live range of each; values without one are never alive.
    """
    starting, ending = defaultdict[int, list[AllocatedValue]](list), defaultdict[int, list[AllocatedValue]](list)
    for value in values:
        if value.position in ranges and value.size:
            start, end = ranges[value.position]
            starting[start].append(value)
            ending[end].append(value)
    best, moment, alive = -1, 0, 0
    for time in sorted({*starting, *ending}):
        alive += sum(value.size for value in starting[time])
        shared = sum(_overlap(a, b) for a in starting[time] for b in ending[time] if ranges[b.position][0] < time)
        if alive - shared > best:
            best, moment = alive - shared, time
        alive -= sum(value.size for value in ending[time])
    return moment


def shares_at(
    moment: int, values: Iterable[AllocatedValue], ranges: Mapping[Position, tuple[int, int]]
) -> tuple[Share, ...]:
    """Returns the values that occupy the bytes of one allocation at a moment.

    Each live value has its own bytes. If one is written over another at that moment, the older one has the place. The
    remaining bytes go to the largest value that needs them at another moment.

    Args:
      moment: a time of the live ranges.
      values: values of one allocation.
      ranges: the live range of each; values without one are never alive.
    """

    def order(value: AllocatedValue) -> tuple[bool, int, int]:
        start, end = ranges[value.position]
        is_alive = start <= moment <= end
        return not is_alive, start if is_alive else -value.size, end

    known = sorted((value for value in values if value.size and value.position in ranges), key=order)
    own = _bytes_of_the_first(known)
    return tuple(Share(v, n, is_alive=not order(v)[0]) for v, n in zip(known, own, strict=True) if n)


def tpu_sizes(assignment: str, live_range: str) -> dict[str, int]:
    """Returns the bytes that a program needs in the main memory of a TPU, by the names of `CompiledProgram`.

    Args:
      assignment: the text of "...-buffer-assignment.txt".
      live_range: the text of "...-live-range.txt", of the same module.

    Raises:
      ValueError: a text is of another kind.
    """
    allocations = read_allocations(assignment, "tpu")
    arguments = [a for a in allocations if a.parameter is not None]
    blocks = [a for a in allocations if TEMPORARIES in a.flags]
    temporaries = _sum(blocks)
    ranges = read_live_ranges(live_range).ranges
    values = [value for block in blocks for value in block.values]
    moment = fullest_moment(values, ranges)
    alive = [v for v in values if v.position in ranges and ranges[v.position][0] <= moment <= ranges[v.position][1]]
    lasting = _sum(allocations) - temporaries
    return {
        "peak_bytes": lasting + min(temporaries, _sum(alive)),
        "argument_bytes": _sum(arguments),
        "output_bytes": _sum(a for a in allocations if _RESULT in a.flags),
        "alias_bytes": _sum(a for a in arguments if _RESULT in a.flags),
        "temp_bytes": temporaries,
    }


def _sum(parts: Iterable[Allocation | AllocatedValue]) -> int:
    return sum(part.size for part in parts)


def _bytes_of_the_first(values: Sequence[AllocatedValue]) -> list[int]:
    """Returns for each value the number of bytes at which it is the first value in the list."""
    own = [0] * len(values)
    starting = defaultdict[int, list[int]](list)
    for number, value in enumerate(values):
        starting[value.offset].append(number)
    edges = sorted({*starting, *(value.offset + value.size for value in values)})
    here: list[int] = []  # a heap; values that have ended stay in it until they come first
    for edge, after in pairwise(edges):
        for number in starting[edge]:
            heappush(here, number)
        while here and values[here[0]].offset + values[here[0]].size <= edge:
            heappop(here)
        if here:
            own[here[0]] += after - edge
    return own


def _overlap(a: AllocatedValue, b: AllocatedValue) -> int:
    return max(0, min(a.offset + a.size, b.offset + b.size) - max(a.offset, b.offset))


def _position(text: str) -> Position:
    """Returns the position in a text like "fusion.1", "fusion.1{}" or "fusion.1{0,2}"."""
    name, _, index = text.rstrip("}").partition("{")
    return name, tuple(int(i) for i in index.split(",") if i)


_MAIN, _HOST = 0, 5  # colors
_UNIT = 16 * 1024
_RESULT = "maybe-live-out"
_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+)(?: \(phi\))? @-?\d+> \(size=(\d+),offset=(\d+)\): (.*)")
_SHAPE = re.compile(r"\|[^|]*\|")
_FLAG = re.compile(r", (constant|thread-local|maybe-live-out|preallocated-temp)(?=,|$)")
_COLOR = re.compile(r", color (\d+)")
_PARAMETER = re.compile(r", parameter (\d+), shape")
_RUN = re.compile(r"    (\d+):(.+)")
_LIVE = re.compile(r"    (\S+\{[\d,]*\}):(\d+)-(\d+)")
