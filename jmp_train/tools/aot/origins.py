"""The origins of the arrays of a compiled program: operation, module, line, forward or backward pass."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jmp_train.tools.aot.hlo import HloModule, Instruction
from jmp_train.tools.aot.stack_frames import StackFrame


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
