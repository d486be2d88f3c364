"""`CompiledProgram`: the memory that a program needs on each of its devices."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

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
