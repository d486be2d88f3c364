"""The memory that libtpu assigned to a program, from the same dumps as for GPUs.

Two things differ. Values are spread over several memories; only the main memory counts, not the vector and scalar
memory of a core. And libtpu has no single allocation for tables of pointers: a block that holds nothing else takes no
memory, and other blocks take whole units of 16 KiB, as `memory_analysis` reports them.
"""

from collections.abc import Sequence
from dataclasses import replace

from jmp_train.aot.allocations import TEMPORARIES, Allocation, fullest_moment, read_allocations, read_live_ranges

_UNIT = 16 * 1024
_MAIN = 0  # the color of the main memory


def tpu_allocations(assignment: str) -> tuple[Allocation, ...]:
    """Returns the allocations of a program in the main memory of a TPU.

    Args:
      assignment: the text of "...-buffer-assignment.txt".

    Raises:
      ValueError: the text has another format.
    """
    return tuple(_as_reported(a) for a in read_allocations(assignment) if a.color == _MAIN and not _is_empty(a))


def tpu_sizes(assignment: str, live_range: str) -> dict[str, int]:
    """Returns the bytes that a program needs in the main memory of a TPU, by the names of `CompiledProgram`.

    Args:
      assignment: the text of "...-buffer-assignment.txt".
      live_range: the text of "...-live-range.txt", of the same module.

    Raises:
      ValueError: a text is of another kind.
    """
    allocations = tpu_allocations(assignment)
    arguments = _sum([a for a in allocations if a.parameter is not None])
    results = _sum([a for a in allocations if "maybe-live-out" in a.flags])
    aliases = _sum([a for a in allocations if a.parameter is not None and "maybe-live-out" in a.flags])
    blocks = [a for a in allocations if TEMPORARIES in a.flags]
    temporaries = _sum(blocks)
    ranges = read_live_ranges(live_range).ranges
    values = [value for block in blocks for value in block.values]
    moment = fullest_moment(values, ranges)
    alive = [v for v in values if v.position in ranges and ranges[v.position][0] <= moment <= ranges[v.position][1]]
    lasting = _sum(allocations) - temporaries
    return {
        "peak_bytes": lasting + min(temporaries, sum(value.size for value in alive)),
        "argument_bytes": arguments,
        "output_bytes": results,
        "alias_bytes": aliases,
        "temp_bytes": temporaries,
    }


def _is_empty(allocation: Allocation) -> bool:
    """Returns whether a block has only tables of pointers."""
    return TEMPORARIES in allocation.flags and all(value.type.startswith("(") for value in allocation.values)


def _as_reported(allocation: Allocation) -> Allocation:
    if TEMPORARIES not in allocation.flags:
        return allocation
    return replace(allocation, size=-(-allocation.size // _UNIT) * _UNIT)


def _sum(allocations: Sequence[Allocation]) -> int:
    return sum(allocation.size for allocation in allocations)
