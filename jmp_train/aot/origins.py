"""Where the arrays of a compiled program come from: operation, module, line, forward or backward pass."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax

from jmp_train.aot.data_flow import DataFlow, results_of_fusion
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
            self._known[key] = self._find(instruction, place)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[str, int], Origin]:
        return {}

    def _find(self, instruction: Instruction, place: int) -> Origin:
        name, frames = "", ()
        for near in self._near(instruction, place):
            name = name or (near.op_name if _scopes(near.op_name)[1] else "")
            frames = frames or tuple(f for f in self.program.frames(near.stack_frame) if not _is_internal(f.file))
            if name and frames:
                break
        scopes, primitive = _scopes(name)
        is_product = "cublas" in instruction.attribute("custom_call_target")  # of which the name may be a transpose's
        operation = "dot_general" if is_product else primitive or instruction.opcode
        return Origin(operation, scopes or _modules(frames), source_of(frames), direction(name))

    def _near(self, instruction: Instruction, place: int) -> Iterator[Instruction]:
        """Yields the instructions that may know where one comes from, the best first."""
        inside = {i.name: i for name in instruction.called for i in self.program.computations.get(name, ())}
        results = [inside[name] for name in results_of_fusion(instruction, self.program)]
        if len(results) > 1:  # the fusion itself has the name of one of them
            yield results[min(place, len(results) - 1)]
        yield instruction
        if results:
            start = results[min(place, len(results) - 1)]
            yield from _breadth_first(start, lambda i: [inside[name] for name in i.operands])
        yield from _breadth_first(instruction, self._makers)
        yield from _breadth_first(instruction, self._readers)

    def _makers(self, instruction: Instruction) -> Iterable[Instruction]:
        makers = (maker for array in self.flow.operands(instruction) for maker, _ in self.flow.makers.get(array, ()))
        return (maker for maker in makers if maker.opcode != "parameter")

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
    called = (f.function for f in reversed(frames) if f.function.endswith(".__call__") and not _is_ours(f.file))
    return " > ".join(called)


def _scopes(op_name: str) -> tuple[str, str]:
    """Returns the path of scopes and the primitive that a name of jax's has, "" for what it does not have."""
    *scopes, primitive = _TRANSFORMATION.sub("", _JITTED.sub("", op_name)).split("/")
    named = (scope for scope in scopes if scope and not _STRUCTURE.fullmatch(scope))
    return "/".join(named), "" if not scopes or _STRUCTURE.fullmatch(primitive) else primitive


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
    return file.startswith(_OURS)


def _is_installed(file: str) -> bool:
    return _is_ours(file) or "/site-packages/" in file or "/dist-packages/" in file


_MOST = 200  # instructions that are looked at; the nearest one that knows is a few steps away
_HERE = f"{Path(__file__).parent}/"
_OURS = f"{Path(__file__).parents[1]}/"
_JAX = f"{Path(jax.__file__).parent}/"
_DIFFERENTIATION = re.compile(r"\b(jvp|transpose)\(")
_JITTED = re.compile(r"\bp?jit\([^()]*\)")
_TRANSFORMATION = re.compile(r"\b\w+\(|\)")
_STRUCTURE = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|core_call|call_exported|checkpoint|remat2?|rematted_computation"
    r"|custom_jvp_call|custom_vjp_call(?:_jaxpr)?|shard_map|shmap_body|p?jit|jmp_train\.autocast(?::\w+)?"
)
