"""`CompiledProgram`: the memory that a program needs on each of its devices, and the arrays that it stores.

The arrays come from the optimized HLO. A fusion computes its contents without storing them, so only instructions
outside of fusions have memory: those of the entry computation and of the loops, branches and calls that it runs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from jmp_train.tools.aot.array_types import ArrayType
from jmp_train.tools.aot.hlo import RUNS_OTHERS, read_hlo


@dataclass(frozen=True)
class StoredArray:
    """An array that an instruction of the optimized HLO leaves in memory.

    Attributes:
      name: the instruction's name in the HLO.
      opcode: the instruction's: "fusion", "custom-call"; "parameter" for an argument; "all-reduce"
        for the pair "all-reduce-start" and "all-reduce-done" too, and so on.
      dtype: XLA's name: "f16", "bf16", "f32", "s32", "pred".
      shape: the lengths of the axes, on one device.

    Example:
      >>> StoredArray("loop_add_fusion", "fusion", "f16", (1000, 64)).n_bytes
      128000
    """

    name: str
    opcode: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the array, without padding."""
        return ArrayType(self.dtype, self.shape).n_bytes


def stored_arrays(hlo: str) -> tuple[StoredArray, ...]:
    """Returns the arrays that a program stores, one for each array of each instruction's result.

    Instructions that only pass arrays on (tuples, bitcasts, loops) are left out, and an asynchronous
    operation is listed once. The sum of all is not the memory in use, because arrays that are alive at different times
    share memory.

    Args:
      hlo: the text of a compiled program, `jax.jit(f).lower(...).compile().as_text()`.

    Raises:
      ValueError: `hlo` is not a whole HLO module.

    Example:
      >>> arrays = stored_arrays('''
      ... %fused (p: f32[9]) -> f32[] {
      ...   %p = f32[9]{0} parameter(0)
      ...   %square = f32[9]{0} multiply(%p, %p)
      ...   ROOT %first = f32[] slice(%square)
      ... }
      ... ENTRY %main (x: f32[9]) -> f32[] {
      ...   %x = f32[9]{0} parameter(0)
      ...   ROOT %out = f32[] fusion(%x), kind=kLoop, calls=%fused
      ... }''')
      >>> [(array.name, array.opcode, array.dtype, array.shape) for array in arrays]
      [('x', 'parameter', 'f32', (9,)), ('out', 'fusion', 'f32', ())]
    """
    program = read_hlo(hlo)
    return tuple(
        StoredArray(instruction.name, instruction.opcode.removesuffix("-done"), array.dtype, array.shape)
        for name in program.unfused
        for instruction in program.computations[name]
        if _stores(instruction.opcode, in_entry=name == program.entry)
        for array in instruction.arrays
    )


_HANDS_ON = RUNS_OTHERS | {"tuple", "get-tuple-element", "bitcast", "optimization-barrier", "async-done", "call-done"}


def _stores(opcode: str, *, in_entry: bool) -> bool:
    if opcode == "parameter":
        return in_entry
    # The type of a start includes operands; that of the end is the result's.
    return opcode not in _HANDS_ON and not opcode.endswith(("-start", "-update"))


_CONSTANT = re.compile(r"^allocation \d+: size (\d+),.*\bconstant\b", re.MULTILINE)


@dataclass(frozen=True)
class CompiledProgram:
    """The needs of a compiled program on each of its devices.

    Attributes:
      peak_bytes: the largest number of bytes alive at one time, arguments and results included.
      argument_bytes: bytes of the arguments.
      output_bytes: bytes of the results.
      alias_bytes: bytes of the results that reuse the memory of donated arguments.
      temp_bytes: bytes of everything else, one common allocation.
      hlo: the text of the optimized HLO.
      buffer_assignment: XLA's text about the placement of values, only from `compile_program`.
      live_range: XLA's text about the live ranges of values, only from `compile_program`.
      reported_bytes: for TPUs, arguments, results and temporaries by libtpu's own analysis, the memory of donated
        arguments counted once; None if libtpu refused the program because it does not fit, and for GPUs.
      refusal: libtpu's message about a program that does not fit; otherwise "".
      coordinates: the coordinates of each TPU's chip, in the order of the mesh; only from `compile_program`.
    """

    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    hlo: str = field(repr=False)
    buffer_assignment: str = field(default="", repr=False)
    live_range: str = field(default="", repr=False)
    reported_bytes: int | None = None
    refusal: str = ""
    coordinates: Sequence[Sequence[int]] = field(default=(), repr=False)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that a device allocates for a run: arguments, results that do not reuse their memory, and temporaries.

        Constants are included if `buffer_assignment` has them. If temporaries do not fit together without gaps, it
        exceeds `peak_bytes`.
        """
        constants = sum(map(int, _CONSTANT.findall(self.buffer_assignment)))
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + constants

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """The arrays that the program stores, arguments included; see `stored_arrays`."""
        return stored_arrays(self.hlo)

    def arrays_of_at_least(self, n_bytes: int) -> tuple[StoredArray, ...]:
        """Returns the stored arrays of the program with `n_bytes` or more.

        Args:
          n_bytes: the least number of bytes.
        """
        return tuple(array for array in self.arrays if array.n_bytes >= n_bytes)
