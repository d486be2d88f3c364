"""The contents of a device's memory at the peak of a compiled train step, with their purposes and origins.

An origin is an operation, its module and line, in the forward or the backward pass.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import jax

from jmp_train.tools.aot.allocations import TEMPORARIES as BLOCK
from jmp_train.tools.aot.allocations import (
    AllocatedValue,
    Allocation,
    LiveRanges,
    Share,
    fullest_moment,
    read_allocations,
    read_live_ranges,
    shares_at,
)
from jmp_train.tools.aot.hlo import HloModule, Instruction, StackFrame, array_types


@dataclass(frozen=True)
class Origin:
    """The origin of an array.

    Attributes:
      operation: jax's primitive, or if it is unknown the opcode of the instruction.
      module: the path of scopes from modules of flax.linen: "Dense_0", "layers_1/attention"; "" without scopes.
      source: "file.py:12 (function)", the innermost line outside jax; if that is in an installed package
        or in this library, the user's line follows: " from train.py:34 (loss)". "" if it is unknown.
      direction: "forward", "backward", or "" outside of gradients.
    """

    operation: str
    module: str
    source: str
    direction: str


@dataclass(frozen=True)
class Argument:
    """A description of an argument of the compiled program.

    Attributes:
      path: "state.params['Dense_0']['kernel']".
      group: "parameters", "optimizer state", "model state", "batch", or "other arguments".
    """

    path: str
    group: str = "other arguments"


@dataclass(frozen=True)
class Buffer:
    """A part of a device's memory at the peak of a program.

    Attributes:
      n_bytes: its length on one device.
      kind: the group of an argument; otherwise "results", "constants", "saved for the backward pass" (activations, and
        copies of parameters in half precision), "temporaries", "kept for other moments" (free parts of the block for
        temporaries, named by the largest value that has the place at another moment), or "padding" between temporaries.
      operation: the primitive of jax that computes it, "argument", or the opcode of an instruction of the compiler.
      dtype: XLA's name: "f16", "bf16", "f32", "s32", "pred"; "" for tables of pointers and padding.
      shape: the shape on one device.
      source: "file.py:12 (function)", its line of code; if that is in a package, it comes after " from " and
        the user's line that led there; for an argument its path.
      module: the path of scopes, such as flax.linen's "Dense_0"; "" if unknown.
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
    program: HloModule,
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
    describe = _Describer(program, live, arguments or {}, temporaries, moment)
    buffers = [describe.lasting(allocation) for allocation in allocations if BLOCK not in allocation.flags]
    buffers += [describe.temporary(share) for share in shares]
    block = max(temp_bytes, sum(a.size for a in allocations if BLOCK in a.flags))
    unused = block - sum(share.n_bytes for share in shares)
    buffers.append(Buffer(unused, "padding", "", "", (), "", ""))
    return tuple(sorted((b for b in buffers if b.n_bytes), key=lambda buffer: -buffer.n_bytes))


def _one_block(allocations: Sequence[Allocation]) -> tuple[AllocatedValue, ...]:
    """Returns the temporary values with offsets in a single block that joins the blocks of all kinds of memory."""
    blocks = [allocation for allocation in allocations if BLOCK in allocation.flags]
    starts = accumulate((block.size for block in blocks), initial=0)
    pairs = zip(blocks, starts, strict=False)
    return tuple(replace(value, offset=start + value.offset) for block, start in pairs for value in block.values)


class _Describer:
    """Describes values and their origins."""

    def __init__(
        self,
        program: HloModule,
        live: LiveRanges,
        arguments: Mapping[int, Argument],
        temporaries: Sequence[AllocatedValue],
        moment: int,
    ) -> None:
        self.program, self.live, self.arguments, self.moment = program, live, arguments, moment
        self.running = {time: name for name, time in live.times.items()}
        self.at = defaultdict[tuple[int, int], list[AllocatedValue]](list)  # the values of each place, by their starts
        for value in sorted(temporaries, key=self._range):
            self.at[value.offset, value.size].append(value)

    def lasting(self, allocation: Allocation) -> Buffer:
        """Returns the buffer of a lasting allocation: an argument, a result or a constant."""
        by_time = sorted(allocation.values, key=self._range)
        if allocation.parameter is not None:
            argument = self.arguments.get(allocation.parameter, Argument(f"argument {allocation.parameter}"))
            values = [v for v in by_time if self._opcode(v) == "parameter"] or by_time  # others may overwrite it
            return _buffer(allocation.size, argument.group, Origin("argument", "", argument.path, ""), values[0].type)
        kind = "constants" if "constant" in allocation.flags else "results"
        return _buffer(allocation.size, kind, self._origin(by_time[-1]), by_time[-1].type)

    def temporary(self, share: Share) -> Buffer:
        """Returns the buffer of a value, which has the origin of the last instruction that wrote it."""
        if not share.is_alive:
            return _buffer(share.n_bytes, "kept for other moments", self._origin(share.value), share.value.type)
        values = self._same(share.value)
        writers = [v for v in values if self._range(v)[0] <= self.moment and self._opcode(v) not in _PASS]
        origin = self._origin((writers or values)[-1])
        reader = self.program.instructions.get(self.running.get(max(self._range(v)[1] for v in values), ""))
        read = origin_of(self.program, reader) if reader else UNKNOWN
        is_saved = read.direction == "backward" and origin.direction != "backward"
        kind = "saved for the backward pass" if is_saved else "temporaries"
        return _buffer(share.n_bytes, kind, origin if origin.source else read, share.value.type)

    def _same(self, value: AllocatedValue) -> list[AllocatedValue]:
        """Returns a value and those that replace it in place, as in loops, where each starts while the last lives."""
        found, end = [value], self._range(value)[1]
        for other in self.at[value.offset, value.size]:
            if other is not value and self._range(value)[0] <= self._range(other)[0] <= end:
                found.append(other)
                end = max(end, self._range(other)[1])
        return found

    def _range(self, value: AllocatedValue) -> tuple[int, int]:
        return self.live.ranges.get(value.position, (0, 0))

    def _opcode(self, value: AllocatedValue) -> str:
        instruction = self.program.instructions.get(value.position[0])
        return instruction.opcode if instruction else ""

    def _origin(self, value: AllocatedValue) -> Origin:
        name, index = value.position
        instruction = self.program.instructions.get(name)
        return origin_of(self.program, instruction, index[0] if index else 0) if instruction else UNKNOWN


def _buffer(n_bytes: int, kind: str, origin: Origin, type_: str) -> Buffer:
    arrays = () if type_[:1] == "(" else array_types(type_)
    if not arrays:
        return Buffer(n_bytes, kind, origin.operation, "", (), origin.source, origin.module)
    array = arrays[0]
    filled = n_bytes * (array.stored_bytes - array.n_bytes) // max(array.stored_bytes, 1)
    return Buffer(n_bytes, kind, origin.operation, array.dtype, array.shape, origin.source, origin.module, filled)


_PASS = ("while", "parameter", "broadcast", "constant")  # they only pass an array on, or fill it


UNKNOWN = Origin("", "", "", "")


def origin_of(program: HloModule, instruction: Instruction, place: int = 0) -> Origin:
    """Returns the origin of one of the arrays of an instruction's result.

    Instructions added by the compiler have no origin of their own. A fusion gets that of its contents; others get
    that of the nearest instruction that makes their inputs.

    Args:
      program: the program of the instruction.
      instruction: an instruction outside of fusions.
      place: the array's place in the result.
    """
    name, frames = "", ()
    for near in _near(program, instruction, place):
        name = name or (near.op_name if _scopes(near.op_name)[1] else "")
        frames = frames or tuple(f for f in program.frames(near.stack_frame) if not _is_internal(f.file))
        if name and frames:
            break
    scopes, primitive = _scopes(name)
    is_product = "cublas" in instruction.attribute("custom_call_target")  # its name may be that of a transpose
    operation = "dot_general" if is_product else primitive or instruction.opcode
    return Origin(operation, scopes, source_of(frames), direction(name))


def _near(program: HloModule, instruction: Instruction, place: int) -> Iterator[Instruction]:
    """Yields the instructions that may have the origin of another: its contents, then its inputs, the nearest first."""
    inside = {i.name for name in instruction.called for i in program.computations.get(name, ())}
    inside = inside if instruction.opcode == "fusion" else set()

    def inputs(near: Instruction) -> Sequence[str]:
        if near.opcode == "parameter" and near.name in inside:
            return (instruction.operands[int(near.literal)],)
        return near.operands

    def through(near: Instruction, opcodes: Sequence[str]) -> Instruction:
        while near.opcode in opcodes:
            near = program.instructions[near.operands[0]]
        return near

    made, results = instruction, ()
    if inside:
        root = next(program.instructions[name] for name in inside if program.instructions[name].is_root)
        results = root.operands if root.opcode == "tuple" else (root.name,)
        made = program.instructions[results[min(place, len(results) - 1)]]
    update = through(made, ("bitcast",))
    if update.opcode == "dynamic-update-slice":  # what it stores
        queue = [through(program.instructions[update.operands[1]], _MOVES)]
    else:
        queue = [instruction, made] if len(results) < 2 else [made, instruction]
    seen = {near.name for near in queue}
    for near in queue:  # grows during the loop
        yield near
        names = dict.fromkeys(name for name in inputs(near) if name not in seen and len(seen) < _MOST)
        seen.update(names)
        new = (program.instructions[name] for name in names)
        queue += sorted(new, key=lambda made: direction(made.op_name) != "backward")  # what reads those belongs to it


def direction(op_name: str) -> str:
    """Returns "forward" or "backward" by the outermost gradient transformation, "" without one.

    Args:
      op_name: an instruction's.

    Example:
      >>> direction("jit(step)/transpose(jvp(Dense_0))/dot_general"), direction("jit(step)/jvp(Dense_0)/dot_general")
      ('backward', 'forward')
    """
    if "rematted_computation" in op_name:
        return "backward"
    outermost = _DIFFERENTIATION.search(op_name)
    return "" if outermost is None else "backward" if outermost[1] == "transpose" else "forward"


def source_of(frames: Sequence[StackFrame]) -> str:
    """Returns the innermost of some lines, and the user's line if it is another one.

    Args:
      frames: the lines, innermost first, none of them in jax.

    Example:
      >>> layer = StackFrame("/venv/site-packages/flax/linear.py", 422, "Linear.__call__")
      >>> source_of([layer, StackFrame("train.py", 9, "loss"), StackFrame("train.py", 31, "<module>")])
      '/venv/site-packages/flax/linear.py:422 (Linear.__call__) from train.py:9 (loss)'
    """
    users = next((frame for frame in frames if not _is_installed(frame.file)), None)
    named = dict.fromkeys((*frames[:1], *([users] if users else ())))
    return " from ".join(f"{f.file}:{f.line}" + (f" ({f.function})" if f.function else "") for f in named)


def _scopes(op_name: str) -> tuple[str, str]:
    """Returns the path of scopes and the primitive in one of jax's names, "" for a missing part."""
    if "(" not in op_name.partition("/")[0]:  # the name of an argument
        return "", ""
    path, slash, primitive = _JITTED.sub("", op_name).rpartition("/")
    outer, _, inner = path.rpartition("/jvp(")  # operations recomputed for the gradient repeat their scopes
    before, scopes = _parts(outer), _parts(inner)
    scopes = scopes if scopes[: len(before)] == before else before + scopes
    primitive = _TRANSFORMATION.sub("", primitive)
    return "/".join(scopes), "" if not slash or _STRUCTURE.fullmatch(primitive) else primitive


def _parts(path: str) -> list[str]:
    parts = _TRANSFORMATION.sub("", path).split("/")
    return [part for part in parts if part and not _STRUCTURE.fullmatch(part)]


def _is_internal(file: str) -> bool:
    """Returns whether a file belongs to jax or to a library that compiles code of others."""
    return file.startswith(("<frozen", _HERE, _JAX)) or "/site-packages/jax/" in file


def _is_installed(file: str) -> bool:
    return file.startswith(_OURS) or "/site-packages/" in file or "/dist-packages/" in file


_MOST = 200  # instructions to visit; the nearest one with an origin is a few steps away
_MOVES = ("bitcast", "reshape", "broadcast", "copy")
_HERE = f"{Path(__file__).parent}/"
_OURS = f"{Path(__file__).parents[2]}/"
_JAX = f"{Path(jax.__file__).parent}/"
_DIFFERENTIATION = re.compile(r"\b(jvp|transpose)\(")
_JITTED = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORMATION = re.compile(r"\b\w+\(|\)")
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|core_call|call_exported|checkpoint|remat2?|rematted_computation"
    r"|custom_jvp_call|custom_vjp_call(?:_jaxpr)?|shard_map|shmap_body|p?jit|jmp_train\.autocast(?::\w+)?"
)
