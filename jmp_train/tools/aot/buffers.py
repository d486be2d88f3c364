"""The contents of a device's memory at the peak of a compiled train step, with their purposes and origins."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jmp_train.tools.aot.allocations import TEMPORARIES as BLOCK
from jmp_train.tools.aot.allocations import (
    Allocation,
    LiveRanges,
    Share,
    Value,
    fullest_moment,
    read_allocations,
    read_live_ranges,
    shares_at,
)
from jmp_train.tools.aot.array_types import ArrayType, array_types
from jmp_train.tools.aot.data_flow import Array, DataFlow, data_flow
from jmp_train.tools.aot.hlo import Instruction, Program
from jmp_train.tools.aot.origins import UNKNOWN, Origin, Origins

PARAMETERS = "parameters"
OTHER_ARGUMENTS = "other arguments"
RESULTS = "results"
CONSTANTS = "constants"
KEPT = "kept for other moments"
PADDING = "padding"

ACTIVATIONS = "activations saved for the backward pass"
PARAMETER_COPIES = "copies of parameters"
GRADIENTS = "gradients"
WORKSPACES = "workspaces"
TEMPORARIES = "temporaries"

Maker = tuple[Instruction, int]
"""An instruction, and an array's place in its result."""


@dataclass(frozen=True)
class Argument:
    """A description of an argument of the compiled program.

    Attributes:
      path: "state.params['Dense_0']['kernel']".
      group: "parameters", "optimizer state", "model state", "batch", or "other arguments".
    """

    path: str
    group: str = OTHER_ARGUMENTS


@dataclass(frozen=True)
class Buffer:
    """A part of a device's memory at the peak of a program.

    Attributes:
      n_bytes: its length on one device.
      kind: the group of an argument; otherwise "results", "constants", "activations saved for the backward pass",
        "copies of parameters" (in another dtype or order, for the forward or backward pass), "gradients", "workspaces"
        (of libraries such as cuBLAS), "temporaries", "kept for other moments" (free parts of the block for temporaries,
        named by the largest value that has the place at another moment), or "padding" between temporaries.
      operation: the primitive of jax that computes it, "argument", or the opcode of an instruction of the compiler.
      dtype: XLA's name: "f16", "bf16", "f32", "s32", "pred"; "" for tables of pointers and padding.
      shape: the shape on one device.
      source: "file.py:12 (function)", its line of code; if that is in a package, it comes after " from " and
        the user's line that led there; for an argument its path.
      module: the path of modules: "Dense_0", or "Model.__call__ > Linear.__call__"; "" if unknown.
      tile_bytes: the part of `n_bytes` that only fills tiles: TPUs store whole tiles, for example of 8 x 128 numbers.
    """

    n_bytes: int
    kind: str
    operation: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    module: str
    tile_bytes: int = 0


def buffers_at_peak(
    assignment: str,
    live_range: str,
    program: Program,
    arguments: Mapping[int, Argument] | None = None,
    *,
    platform: str = "cuda",
    temp_bytes: int = 0,
) -> tuple[Buffer, ...]:
    """Returns the contents of a device's memory at the peak of a program, the largest first.

    XLA allocates arguments, results, and one block for all temporary values, for as long as the program runs. The
    peak is when most of that block is in use. The sum of all buffers equals the allocated bytes.

    Args:
      assignment: the text of "...-buffer-assignment.txt", from XLA's dump.
      live_range: the text of "...-live-range.txt", of the same module.
      program: the same module, optimized.
      arguments: descriptions of the arguments, by their numbers in the program.
      platform: "cuda" or "tpu".
      temp_bytes: the size of the block of temporary values, if it exceeds that of the text, as on TPUs.

    Raises:
      ValueError: a text is of another kind.
    """
    allocations = read_allocations(assignment, platform)
    live = read_live_ranges(live_range)
    temporaries = _one_block(allocations)
    moment = fullest_moment(temporaries, live.ranges)
    shares = shares_at(moment, temporaries, live.ranges)
    describe = _Describer(program, live, arguments or {}, moment)
    buffers = [describe.lasting(allocation) for allocation in allocations if BLOCK not in allocation.flags]
    buffers += [describe.temporary(share) for share in shares]
    block = max(temp_bytes, sum(a.size for a in allocations if BLOCK in a.flags))
    unused = block - sum(share.n_bytes for share in shares)
    buffers.append(Buffer(unused, PADDING, "", "", (), "", ""))
    return tuple(sorted((b for b in buffers if b.n_bytes), key=lambda buffer: -buffer.n_bytes))


def _one_block(allocations: Sequence[Allocation]) -> tuple[Value, ...]:
    """Returns the temporary values with offsets in a single block that joins the blocks of all kinds of memory."""
    blocks = [allocation for allocation in allocations if BLOCK in allocation.flags]
    starts = accumulate((block.size for block in blocks), initial=0)
    pairs = zip(blocks, starts, strict=False)
    return tuple(replace(value, offset=start + value.offset) for block, start in pairs for value in block.values)


class _Describer:
    """Describes values and their origins."""

    def __init__(self, program: Program, live: LiveRanges, arguments: Mapping[int, Argument], moment: int) -> None:
        self.flow = data_flow(program)
        self.origins = Origins(program, self.flow)
        self.uses = Uses(self.flow, self.origins, {n for n, a in arguments.items() if a.group == PARAMETERS})
        self.live, self.arguments, self.moment = live, arguments, moment

    def lasting(self, allocation: Allocation) -> Buffer:
        """Returns the buffer of a lasting allocation: an argument, a result or a constant."""
        by_time = sorted(allocation.values, key=lambda value: self.live.ranges.get(value.position, (0, 0)))
        if allocation.parameter is not None:
            argument = self.arguments.get(allocation.parameter, Argument(f"argument {allocation.parameter}"))
            values = [v for v in by_time if self._opcode(v) == "parameter"] or by_time  # others may overwrite it
            return _buffer(allocation.size, argument.group, Origin("argument", "", argument.path, ""), values[0].type)
        kind = CONSTANTS if "constant" in allocation.flags else RESULTS
        return _buffer(allocation.size, kind, self._origin(by_time[-1]), by_time[-1].type)

    def temporary(self, share: Share) -> Buffer:
        array = self.flow.array_at(*share.value.position)
        kind = KEPT if not share.is_alive else TEMPORARIES if array is None else self.uses.kind(array)
        return _buffer(share.n_bytes, kind, self._origin(share.value), share.value.type)

    def _opcode(self, value: Value) -> str:
        instruction = self.flow.instructions.get(value.position[0])
        return instruction.opcode if instruction else ""

    def _origin(self, value: Value) -> Origin:
        """Returns the origin of a value: the instruction that wrote it last before the moment."""
        array = self.flow.array_at(*value.position)
        makers = () if array is None else self.uses.makers(array)
        if not makers:
            instruction = self.flow.instructions.get(value.position[0])
            return self.origins.of(instruction) if instruction else UNKNOWN
        before = [maker for maker in makers if self.live.times.get(maker[0].name, 0) <= self.moment]
        return self.origins.of(*(before[-1] if before else makers[0]))


def _buffer(n_bytes: int, kind: str, origin: Origin, type_: str) -> Buffer:
    arrays = () if type_[:1] == "(" else array_types(type_)
    if not arrays:
        return Buffer(n_bytes, kind, origin.operation, "", (), origin.source, origin.module)
    array = arrays[0]
    filled = n_bytes * (array.stored_bytes - array.n_bytes) // max(array.stored_bytes, 1)
    return Buffer(n_bytes, kind, origin.operation, array.dtype, array.shape, origin.source, origin.module, filled)


class Uses:
    """Finds the purpose of arrays.

    Args:
      flow: the data flow of the program.
      origins: the origins of the same program.
      parameters: the numbers of the arguments that are the model's parameters.
    """

    def __init__(self, flow: DataFlow, origins: Origins, parameters: Collection[int]) -> None:
        self._flow, self._origins = flow, origins
        self._parameters = {str(number) for number in parameters}
        self._gradients: dict[Array, bool] = {}
        self._copies: dict[Array, bool] = {}

    def kind(self, array: Array) -> str:
        """Returns the purpose of an array, such as `ACTIVATIONS` or `WORKSPACES`.

        Args:
          array: a temporary array.
        """
        readers = {direction for reader in self._flow.readers.get(array, ()) for direction in self._directions(reader)}
        if self._is_workspace(array):
            return WORKSPACES
        if readers - {""} and self._is_copy(array):
            return PARAMETER_COPIES
        if "backward" in readers and not self._is_made_backward(array):
            return ACTIVATIONS
        return GRADIENTS if self._is_gradient(array) else TEMPORARIES

    def makers(self, array: Array) -> Sequence[Maker]:
        """Returns the instructions that write an array, without those that only fill it, for example with zeros.

        Args:
          array: any array.
        """
        makers = self._flow.makers.get(array, ())
        return [maker for maker in makers if self._sources(maker[0], array)] or makers

    def _sources(self, maker: Instruction, array: Array) -> list[Array]:
        """Returns the arrays that a maker of an array reads, without the array itself and without single numbers."""
        return [other for other in self._flow.operands(maker) if other != array and self._size(other) > 1]

    def _size(self, array: Array) -> int:
        type_ = self._type(array)
        return type_.size if type_ else 0

    def _type(self, array: Array) -> ArrayType | None:
        for maker, place in self._flow.makers.get(array, ()):
            if place < len(maker.arrays):
                return maker.arrays[place]
        return None

    def _directions(self, instruction: Instruction) -> set[str]:
        places = range(len(self._flow.arrays[instruction.name]))
        return {self._origins.of(instruction, place).direction for place in places}

    def _is_workspace(self, array: Array) -> bool:
        type_ = self._type(array)
        is_bytes = type_ is not None and type_.dtype in ("s8", "u8") and len(type_.shape) == 1
        return is_bytes and all(m.opcode == "custom-call" and place for m, place in self._flow.makers[array])

    def _is_made_backward(self, array: Array) -> bool:
        return any(self._origins.of(*maker).direction == "backward" for maker in self.makers(array))

    def _is_copy(self, array: Array) -> bool:
        """Returns whether an array is computed only from parameters, without a product."""
        return self._follow(array, self._copies, self._is_parameter, _copies)

    def _is_parameter(self, array: Array) -> bool:
        makers = self._flow.makers.get(array, ())
        return any(m.opcode == "parameter" and m.literal in self._parameters for m, _ in makers)

    def _is_gradient(self, array: Array) -> bool:
        """Returns whether an array is a result of the backward pass, or computed only from such results."""
        return self._follow(array, self._gradients, self._is_left_by_backward, lambda _: True)

    def _is_left_by_backward(self, array: Array) -> bool:
        readers = self._flow.readers.get(array, ())
        return self._is_made_backward(array) and any("" in self._directions(reader) for reader in readers)

    def _follow(
        self,
        array: Array,
        known: dict[Array, bool],
        is_start: Callable[[Array], bool],
        passes: Callable[[Instruction], bool],
        depth: int = 20,
    ) -> bool:
        """Returns whether an array is a start, or all of its makers pass and read only such arrays."""
        if array in known or depth == 0:
            return known.get(array, False)
        known[array] = False  # for cycles
        makers = [maker for maker, _ in self.makers(array)]
        sources = [source for maker in makers for source in self._sources(maker, array)]
        known[array] = is_start(array) or (
            bool(sources)
            and all(map(passes, makers))
            and all(self._follow(source, known, is_start, passes, depth - 1) for source in sources)
        )
        return known[array]


def _copies(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in _COPIES


_COPIES = frozenset(
    ("fusion", "convert", "copy", "transpose", "slice", "dynamic-slice", "pad", "concatenate", "all-gather")
)
