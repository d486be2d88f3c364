"""Which arrays a compiled program stores, read from its optimized HLO.

A fusion computes what is inside it without storing it, so only the instructions outside of fusions
have memory: those of the entry computation and of the loops, branches and calls that it runs.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class StoredArray:
    """An array that an instruction of the optimized HLO leaves in memory.

    Attributes:
      name: the instruction's, as the HLO has it.
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
        """How many bytes the array takes, padding not counted."""
        return math.ceil(_bits(self.dtype) * math.prod(self.shape) / 8)


def stored_arrays(hlo: str) -> tuple[StoredArray, ...]:
    """Returns the arrays that a program stores, one for each array of each instruction's result.

    Instructions that only pass arrays on (tuples, bitcasts, loops) are left out, and an asynchronous
    operation is listed once. The sum of all says nothing: arrays that do not live at the same time
    share memory.

    Args:
      hlo: the text of a compiled program, `jax.jit(f).lower(...).compile().as_text()`.

    Raises:
      ValueError: `hlo` is not the text of a whole HLO module.

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
    computations, entry = _computations(hlo)
    return tuple(
        StoredArray(instruction.name, instruction.opcode.removesuffix("-done"), dtype, shape)
        for name in _unfused(computations, entry)
        for instruction in computations[name]
        if _stores(instruction.opcode, in_entry=name == entry)
        for dtype, shape in _arrays(instruction.type)
    )


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    called: tuple[str, ...]  # the computations that it runs and that store what they compute


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_START = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\((.*)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|(?:true|false)_computation|branch_computations)="
    r"(\{[^}]*\}|[%\w.\-]+)"
)
_RUNS_OTHERS = {"while", "call", "conditional", "async-start", "call-start"}
_HANDS_ON = {
    *("tuple", "get-tuple-element", "bitcast", "optimization-barrier", "async-done", "call-done"),
    *_RUNS_OTHERS,
}


def _computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Returns the instructions of each computation and the entry's name."""
    computations: dict[str, list[_Instruction]] = {}
    entry = None
    inside: list[_Instruction] | None = None
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if line == "}":
            inside = None
        elif inside is not None:
            inside.append(_instruction(line))
        elif header:
            inside = computations[header[2]] = []
            entry = header[2] if header[1] else entry
    if entry is None:
        raise ValueError(f"hlo must be the text of an HLO module, with its ENTRY, got {hlo[:80]!r}")
    return computations, entry


def _instruction(line: str) -> _Instruction:
    start = _START.match(line)
    rest = start[2] if start else ""
    split = _type_length(rest)
    operation = _OPCODE.match(rest[split:])
    if start is None or operation is None:
        raise ValueError(f"hlo has a line that is not an instruction: {line[:200]!r}")
    called = ()
    if operation[1] in _RUNS_OTHERS:
        attributes = operation[2].partition(", metadata={")[0]
        found = _CALLED.findall(attributes)
        called = tuple(name for names in found for name in re.findall(r"[\w.\-]+", names))
    return _Instruction(start[1], rest[:split], operation[1], called)


def _type_length(text: str) -> int:
    """Returns where the type that a text begins with ends: at a space outside of parentheses."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == " " and depth == 0:
            return i
    return len(text)


def _unfused(computations: dict[str, list[_Instruction]], entry: str) -> list[str]:
    """Returns the computations whose results are stored: the entry and what it runs, in order."""
    found = [entry]
    for name in found:  # which grows while it is read
        for instruction in computations[name]:
            found += [called for called in instruction.called if called not in found]
    return found


def _stores(opcode: str, *, in_entry: bool) -> bool:
    if opcode == "parameter":
        return in_entry
    # The type of a start names operands too, that of the end is the result's.
    return opcode not in _HANDS_ON and not opcode.endswith(("-start", "-update"))


def _arrays(type_: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for dtype, lengths in _ARRAY.findall(type_):
        if _bits(dtype):
            yield dtype, tuple(int(n.removeprefix("<=")) for n in lengths.split(",") if n)


def _bits(dtype: str) -> int:
    """Returns how many bits an element has, which XLA's names say; tokens and the like have 0."""
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 8 * (dtype == "pred")
