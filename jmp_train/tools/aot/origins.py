"""The origins of the arrays of a compiled program: operation, module, line, forward or backward pass."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax

from jmp_train.tools.aot.data_flow import Array, DataFlow, results_of_fusion
from jmp_train.tools.aot.hlo import Instruction, Program
from jmp_train.tools.aot.stack_frames import Frame


@dataclass(frozen=True)
class Origin:
    """The origin of an array.

    Attributes:
      operation: jax's primitive, or if it is unknown the opcode of the instruction.
      module: the path of scopes from modules of flax.linen: "Dense_0", "layers_1/attention"; without scopes,
        the modules that were called: "Model.__call__ > Linear.__call__"; "" if neither is known.
      source: "file.py:12 (function)", the innermost line outside jax; if that is in an installed package
        or in this library, the user's line follows: " from train.py:34 (loss)". "" if it is unknown.
      direction: "forward", "backward", or "" outside of gradients.
    """

    operation: str
    module: str
    source: str
    direction: str


UNKNOWN = Origin("", "", "", "")


@dataclass(frozen=True, eq=False)
class Origins:
    """Finds the origins of the arrays of a program.

    Attributes:
      program: the program.
      flow: its data flow.
    """

    program: Program
    flow: DataFlow

    def of(self, instruction: Instruction, place: int = 0) -> Origin:
        """Returns the origin of one of the arrays of an instruction's result.

        Instructions added by the compiler have no origin of their own. A fusion gets that of its contents; others get
        that of the nearest instruction that makes their inputs, or of the nearest one that reads their result.

        Args:
          instruction: an instruction outside of fusions.
          place: the array's place in the result.
        """
        key = instruction.name, place
        if key not in self._known:
            self._known[key] = UNKNOWN  # for circular references
            self._known[key] = self._find(instruction, place)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, int], Origin]:
        return {}

    def _find(self, instruction: Instruction, place: int) -> Origin:
        inside = {i.name: i for name in instruction.called for i in self.program.computations.get(name, ())}
        results = [inside[name] for name in results_of_fusion(instruction, self.program)]
        result = results[min(place, len(results) - 1)] if results else instruction
        stored = _stored(result, inside or self.flow.instructions)
        if stored.opcode == "parameter" and inside:  # a loop stores it for the backward pass, but does not make it
            stored = self.flow.instructions[instruction.operands[int(stored.literal)]]
        if stored.name not in inside and stored is not instruction:
            elsewhere = self._passed_on(stored)
            if elsewhere != UNKNOWN:
                return elsewhere
            stored = result
        near = self._near(instruction, stored, inside, is_named=len(results) < 2 and stored is result)
        return self._origin(instruction, near)

    def _passed_on(self, instruction: Instruction) -> Origin:
        """Returns the origin of an array that an instruction passes on; in a loop, that of the loop's body."""
        array = self.flow.array_at(instruction.name, ())
        makers = () if array is None else self.flow.makers.get(array, ())
        made = [maker for maker in makers if maker[0].opcode != "parameter"]
        return self.of(*made[0]) if made else UNKNOWN

    def _origin(self, instruction: Instruction, near: Iterable[Instruction]) -> Origin:
        """Returns the origin of the first of some instructions with a known one."""
        name, frames = "", ()
        for other in near:
            name = name or (other.op_name if _scopes(other.op_name)[1] else "")
            frames = frames or tuple(f for f in self.program.frames(other.stack_frame) if not _is_internal(f.file))
            if name and frames:
                break
        scopes, primitive = _scopes(name)
        is_product = "cublas" in instruction.attribute("custom_call_target")  # its name may be that of a transpose
        operation = "dot_general" if is_product else primitive or instruction.opcode
        return Origin(operation, scopes or _modules(frames), source_of(frames), direction(name))

    def _near(
        self, instruction: Instruction, result: Instruction, inside: Mapping[str, Instruction], *, is_named: bool
    ) -> Iterator[Instruction]:
        """Yields the instructions that may have the origin of another, the best first."""

        def inputs(near: Instruction) -> Iterable[Instruction]:
            if near.name not in inside:
                return self._makers(near)
            if near.opcode == "parameter":
                return self._makers_of(self.flow.arrays.get(instruction.operands[int(near.literal)], ()))
            return [inside[name] for name in near.operands]

        yield from (instruction, result) if is_named else (result, instruction)
        yield from _breadth_first(result, inputs)
        yield from _breadth_first(instruction, self._readers)

    def _makers(self, instruction: Instruction) -> Iterable[Instruction]:
        return self._makers_of(self.flow.operands(instruction))

    def _makers_of(self, arrays: Iterable[Array]) -> Iterable[Instruction]:
        """Returns the instructions that make arrays; readers of arrays of the backward pass belong to it too."""
        makers = (maker for array in arrays for maker, _ in self.flow.makers.get(array, ()))
        made = (maker for maker in makers if maker.opcode != "parameter")
        return sorted(made, key=lambda maker: direction(maker.op_name) != "backward")

    def _readers(self, instruction: Instruction) -> Iterable[Instruction]:
        arrays = self.flow.arrays.get(instruction.name, ())
        return (reader for array in arrays for reader in self.flow.readers.get(array, ()))


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


def source_of(frames: Sequence[Frame]) -> str:
    """Returns the innermost of some lines, and the user's line if it is another one.

    Args:
      frames: the lines, innermost first, none of them in jax.

    Example:
      >>> layer = Frame("/venv/site-packages/flax/linear.py", 422, "Linear.__call__")
      >>> source_of([layer, Frame("train.py", 9, "loss"), Frame("train.py", 31, "<module>")])
      '/venv/site-packages/flax/linear.py:422 (Linear.__call__) from train.py:9 (loss)'
    """
    users = next((frame for frame in frames if not _is_installed(frame.file)), None)
    named = dict.fromkeys((*frames[:1], *([users] if users else ())))
    return " from ".join(f"{f.file}:{f.line}" + (f" ({f.function})" if f.function else "") for f in named)


def _modules(frames: Sequence[Frame]) -> str:
    """Returns the modules that were called, the outermost first."""
    return " > ".join(f.function for f in reversed(frames) if _is_module(f))


def _is_module(frame: Frame) -> bool:
    """Returns whether a line is in the call of a module, not of a transformation of flax or equinox."""
    if not frame.function.endswith(".__call__") or frame.function.startswith("_") or _is_ours(frame.file):
        return False
    return "/nnx/transforms/" not in frame.file


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


def _stored(result: Instruction, instructions: Mapping[str, Instruction]) -> Instruction:
    """Returns the instruction whose result a slice update stores, up to its shape; otherwise the result itself."""
    update = _through(result, instructions, ("bitcast",))
    if update.opcode != "dynamic-update-slice":
        return result
    return _through(instructions[update.operands[1]], instructions, ("bitcast", "reshape", "broadcast", "copy"))


def _through(
    instruction: Instruction, instructions: Mapping[str, Instruction], opcodes: tuple[str, ...]
) -> Instruction:
    while instruction.opcode in opcodes:
        instruction = instructions[instruction.operands[0]]
    return instruction


def _breadth_first(
    start: Instruction, next_to: Callable[[Instruction], Iterable[Instruction]]
) -> Iterator[Instruction]:
    """Yields the instructions reachable from one, the nearest first, up to a limit."""
    seen = {start.name}
    queue = deque([start])
    while queue and len(seen) < _MOST:
        instruction = queue.popleft()
        yield instruction
        for other in next_to(instruction):
            if other.name not in seen:
                seen.add(other.name)
                queue.append(other)


def _is_internal(file: str) -> bool:
    """Returns whether a file belongs to jax or to a library that compiles code of others."""
    return file.startswith(("<frozen", _HERE, _JAX)) or "/site-packages/jax/" in file


def _is_ours(file: str) -> bool:
    """Returns whether a file belongs to this library, except the models of its tasks, which count as a user's."""
    return file.startswith(_OURS) and not file.startswith(_TASKS)


def _is_installed(file: str) -> bool:
    packages = "/site-packages/" in file or "/dist-packages/" in file
    return _is_ours(file) or (packages and not file.startswith(_TASKS))


_MOST = 200  # instructions to visit; the nearest one with an origin is a few steps away
_HERE = f"{Path(__file__).parent}/"
_OURS = f"{Path(__file__).parents[2]}/"
_TASKS = f"{_OURS}app/tasks/"
_JAX = f"{Path(jax.__file__).parent}/"
_DIFFERENTIATION = re.compile(r"\b(jvp|transpose)\(")
_JITTED = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORMATION = re.compile(r"\b\w+\(|\)")
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|core_call|call_exported|checkpoint|remat2?|rematted_computation"
    r"|custom_jvp_call|custom_vjp_call(?:_jaxpr)?|shard_map|shmap_body|p?jit|jmp_train\.autocast(?::\w+)?"
)
