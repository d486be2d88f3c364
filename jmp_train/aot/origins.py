"""Where the arrays of a compiled program come from: operation, module, line, forward or backward pass."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax

from jmp_train.aot.data_flow import Array, DataFlow, results_of_fusion
from jmp_train.aot.hlo import Instruction, Program
from jmp_train.aot.stack_frames import Frame


@dataclass(frozen=True)
class Origin:
    """Where an array comes from.

    Attributes:
      operation: jax's primitive, or where none is known the opcode of the instruction.
      module: the path of scopes, which modules of flax.linen have: "Dense_0", "layers_1/attention"; where there are
        none, the modules that were called: "Model.__call__ > Linear.__call__"; "" if neither is known.
      source: "file.py:12 (function)", the innermost line that is not jax's own; if that is one of an installed package
        or of this library, the user's follows: " from train.py:34 (loss)". "" if none is known.
      direction: "forward", "backward", or "" for what is outside of gradients.
    """

    operation: str
    module: str
    source: str
    direction: str


UNKNOWN = Origin("", "", "", "")


@dataclass(frozen=True, eq=False)
class Origins:
    """Finds where the arrays of a program come from.

    Attributes:
      program: the program.
      flow: the same program's.
    """

    program: Program
    flow: DataFlow

    def of(self, instruction: Instruction, place: int = 0) -> Origin:
        """Returns where one of the arrays of an instruction's result comes from.

        What the compiler has made itself names no origin. It gets that of what is inside of it if it is a fusion, or
        that of the nearest instruction that makes what it reads, or of the nearest one that reads what it makes.

        Args:
          instruction: one that is not inside of a fusion.
          place: the array's place in the result.
        """
        key = instruction.name, place
        if key not in self._known:
            self._known[key] = UNKNOWN  # for who asks in a circle
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
        if stored.opcode == "parameter" and inside:  # what a loop stores for the backward pass is made elsewhere
            stored = self.flow.instructions[instruction.operands[int(stored.literal)]]
        if stored.name not in inside and stored is not instruction:
            elsewhere = self._passed_on(stored)
            if elsewhere != UNKNOWN:
                return elsewhere
            stored = result
        near = self._near(instruction, stored, inside, is_named=len(results) < 2 and stored is result)
        return self._origin(instruction, near)

    def _passed_on(self, instruction: Instruction) -> Origin:
        """Returns the origin of what an instruction passes on, of those in a loop that of the loop's body."""
        array = self.flow.array_at(instruction.name, ())
        makers = () if array is None else self.flow.makers.get(array, ())
        made = [maker for maker in makers if maker[0].opcode != "parameter"]
        return self.of(*made[0]) if made else UNKNOWN

    def _origin(self, instruction: Instruction, near: Iterable[Instruction]) -> Origin:
        """Returns the origin that the first of some instructions which know it have."""
        name, frames = "", ()
        for other in near:
            name = name or (other.op_name if _scopes(other.op_name)[1] else "")
            frames = frames or tuple(f for f in self.program.frames(other.stack_frame) if not _is_internal(f.file))
            if name and frames:
                break
        scopes, primitive = _scopes(name)
        is_product = "cublas" in instruction.attribute("custom_call_target")  # of which the name may be a transpose's
        operation = "dot_general" if is_product else primitive or instruction.opcode
        return Origin(operation, scopes or _modules(frames), source_of(frames), direction(name))

    def _near(
        self, instruction: Instruction, result: Instruction, inside: Mapping[str, Instruction], *, is_named: bool
    ) -> Iterator[Instruction]:
        """Yields the instructions that may know where one comes from, the best first."""

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
        """Returns the instructions that make arrays; what reads one of the backward pass is in that too."""
        makers = (maker for array in arrays for maker, _ in self.flow.makers.get(array, ()))
        made = (maker for maker in makers if maker.opcode != "parameter")
        return sorted(made, key=lambda maker: direction(maker.op_name) != "backward")

    def _readers(self, instruction: Instruction) -> Iterable[Instruction]:
        arrays = self.flow.arrays.get(instruction.name, ())
        return (reader for array in arrays for reader in self.flow.readers.get(array, ()))


def direction(op_name: str) -> str:
    """Returns "forward" or "backward" by the outermost transformation for gradients, "" without one.

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
    """Returns the innermost of some lines, and the user's line if that is another one.

    Args:
      frames: the innermost first, none of them jax's own.

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
    """Whether a line is in the call of a module, not in that of a transformation of flax or equinox."""
    if not frame.function.endswith(".__call__") or frame.function.startswith("_") or _is_ours(frame.file):
        return False
    return "/nnx/transforms/" not in frame.file


def _scopes(op_name: str) -> tuple[str, str]:
    """Returns the path of scopes and the primitive that a name of jax's has, "" for what it does not have."""
    if "(" not in op_name.partition("/")[0]:  # what an argument is called
        return "", ""
    path, slash, primitive = _JITTED.sub("", op_name).rpartition("/")
    outer, _, inner = path.rpartition("/jvp(")  # what is recomputed for the gradient repeats the scopes that it is in
    before, scopes = _parts(outer), _parts(inner)
    scopes = scopes if scopes[: len(before)] == before else before + scopes
    primitive = _TRANSFORMATION.sub("", primitive)
    return "/".join(scopes), "" if not slash or _STRUCTURE.fullmatch(primitive) else primitive


def _parts(path: str) -> list[str]:
    parts = _TRANSFORMATION.sub("", path).split("/")
    return [part for part in parts if part and not _STRUCTURE.fullmatch(part)]


def _stored(result: Instruction, instructions: Mapping[str, Instruction]) -> Instruction:
    """Returns what an update of a slice stores, up to its shape; of anything else the result itself."""
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
    """Yields what can be reached from an instruction, the nearest first, up to a bound."""
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
    """Whether a file is jax's own, or one that compiles what others have written."""
    return file.startswith(("<frozen", _HERE, _JAX)) or "/site-packages/jax/" in file


def _is_ours(file: str) -> bool:
    """Whether a file is this library's; the models that its tasks train are as a user's."""
    return file.startswith(_OURS) and not file.startswith(_TASKS)


def _is_installed(file: str) -> bool:
    packages = "/site-packages/" in file or "/dist-packages/" in file
    return _is_ours(file) or (packages and not file.startswith(_TASKS))


_MOST = 200  # instructions that are looked at; the nearest one that knows is a few steps away
_HERE = f"{Path(__file__).parent}/"
_OURS = f"{Path(__file__).parents[1]}/"
_TASKS = f"{_OURS}tasks/"
_JAX = f"{Path(jax.__file__).parent}/"
_DIFFERENTIATION = re.compile(r"\b(jvp|transpose)\(")
_JITTED = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORMATION = re.compile(r"\b\w+\(|\)")
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|core_call|call_exported|checkpoint|remat2?|rematted_computation"
    r"|custom_jvp_call|custom_vjp_call(?:_jaxpr)?|shard_map|shmap_body|p?jit|jmp_train\.autocast(?::\w+)?"
)
