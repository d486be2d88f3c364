"""Reads the text of optimized HLO, in time linear in its length.

`read_hlo` returns the common basis of all analyses of a compiled program: computations, instructions with their types,
operands and attributes, and the lines of Python from which instructions come.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from jmp_train.tools.aot.hlo_types import COMMENT, ArrayType, array_types, split_outside
from jmp_train.tools.aot.stack_frames import StackFrame, read_stack_frames


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction. Equality is identity: names are unique in a program.

    Attributes:
      name: its name, without "%".
      type: the text of the result's type: "f32[8]{0}", "(s32[], f32[8]{0})".
      opcode: "fusion", "dot", "custom-call", "all-reduce-start", ...
      operands: the names of the instructions of the same computation that it reads, in order.
      literal: the text in the parentheses of a parameter (its number) or a constant (its value), otherwise "".
      called: the names of the computations that it calls, in the order of the text.
      attributes: the text after the operands, without metadata.
      op_name: the operation's name in jax: "jit(f)/jvp(Dense_0)/dot_general"; "" if unknown.
      stack_frame: its innermost line of code, for `HloModule.frames`; None if unknown.
      is_root: whether its result is that of its computation.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    called: tuple[str, ...]
    attributes: str = field(repr=False)
    op_name: str
    stack_frame: int | None
    is_root: bool

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The arrays of the result: one, or the leaves of a tuple, in order."""
        return array_types(self.type)

    @cached_property
    def _attributes(self) -> dict[str, str]:
        pairs = (part.partition("=") for part in split_outside(self.attributes))
        return {name: value for name, _, value in pairs}

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute's value, without the quotes of a string; "" if there is none.

        Args:
          name: "window", "dim_labels", "replica_groups", "custom_call_target", "backend_config", ...
        """
        return self._attributes.get(name, "").strip('"')


@dataclass(frozen=True, eq=False)
class HloModule:
    """A compiled program. Equality is identity, so that results can be cached by it.

    Attributes:
      computations: the instructions of each computation by its name, in the order of the text, which is that of
        execution.
      entry: the name of the computation with which the program starts.
      stack_frames: by number, a line and the number of the line that called it, None for the outermost.
      header: the first line, with aliases and the layouts of arguments and results.
    """

    computations: Mapping[str, tuple[Instruction, ...]] = field(repr=False)
    entry: str
    stack_frames: Mapping[int, tuple[StackFrame, int | None]] = field(repr=False)
    header: str = field(repr=False)

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """All instructions by name."""
        return {i.name: i for instructions in self.computations.values() for i in instructions}

    @cached_property
    def unfused(self) -> tuple[str, ...]:
        """The names of the computations whose results are stored.

        These are the entry and the loops, branches and calls that it runs, but not fusions nor the functions of
        reductions.
        """
        found = {self.entry: None}
        to_read = [self.entry]
        for name in to_read:  # grows during the loop
            for instruction in self.computations[name]:
                if instruction.opcode in RUNS_OTHERS:
                    new = [called for called in instruction.called if called not in found]
                    found.update(dict.fromkeys(new))
                    to_read += dict.fromkeys(new)
        return tuple(found)

    def frames(self, stack_frame: int | None) -> tuple[StackFrame, ...]:
        """Returns the lines of Python that led to an instruction, innermost first.

        Equal lines in a row, which XLA creates when it inlines calls, are listed once.

        Args:
          stack_frame: the instruction's.
        """
        found: dict[int, StackFrame] = {}
        while stack_frame is not None and stack_frame in self.stack_frames and stack_frame not in found:
            found[stack_frame], stack_frame = self.stack_frames[stack_frame]
        return tuple(frame for frame, _ in groupby(found.values()))


RUNS_OTHERS = frozenset({"while", "call", "conditional", "async-start", "call-start"})
"""The opcodes of instructions that run other computations whose results are stored."""


def read_hlo(text: str) -> HloModule:
    """Returns the program in the text of a compiled HLO module.

    Args:
      text: `jax.jit(f).lower(...).compile().as_text()`.

    Raises:
      ValueError: `text` is not a whole HLO module.

    Example:
      >>> program = read_hlo('''HloModule jit_f
      ...
      ... ENTRY %main (x: f32[9]) -> f32[9] {
      ...   %x = f32[9]{0} parameter(0)
      ...   ROOT %out = f32[9]{0} add(%x, %x), metadata={op_name="jit(f)/add"}
      ... }''')
      >>> out = program.computations["main"][-1]
      >>> out.name, out.opcode, out.operands, out.arrays, out.op_name
      ('out', 'add', ('x', 'x'), (ArrayType(dtype='f32', shape=(9,)),), 'jit(f)/add')
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    before: list[str] = []
    inside: list[Instruction] | None = None
    entry, name = "", ""
    for line in text.splitlines():
        if inside is None:
            header = _HEADER.match(line)
            if header is None:
                before.append(line)
                continue
            inside, name = [], header[2]
            entry = name if header[1] else entry
        elif line == "}":
            computations[name], inside = tuple(inside), None
        else:
            inside.append(_instruction(line))
    if not entry:
        raise ValueError(f"hlo must be the text of an HLO module, with its ENTRY, got {text[:80]!r}")
    return HloModule(computations, entry, read_stack_frames(before), before[0] if before else "")


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_START = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_METADATA = re.compile(r', metadata=(\{(?:[^"{}]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*\})')
_WORD = re.compile(r"[\w.\-]+")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:^|, )(?:body|condition|to_apply|calls|(?:true|false)_computation|branch_computations|called_computations"
    r"|select|scatter)=(\{[^}]*\}|%?[\w.\-]+)"
)
_STACK_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')


def _instruction(line: str) -> Instruction:
    start = _START.match(line)
    rest = start[3] if start else ""
    split = _type_length(rest)
    operation = _OPCODE.match(rest, split)
    end = _closing(rest, operation.end()) if operation else -1
    if start is None or operation is None or end < 0:
        raise ValueError(f"hlo has a line that is not an instruction: {line[:200]!r}")
    opcode, between, attributes = operation[1], rest[operation.end() : end], rest[end + 1 :]
    metadata = _METADATA.search(attributes)
    origin = metadata[1] if metadata else ""
    op_name, stack_frame = _OP_NAME.search(origin), _STACK_FRAME.search(origin)
    if metadata:
        attributes = attributes[: metadata.start()] + attributes[metadata.end() :]
    is_literal = opcode in ("parameter", "constant")
    return Instruction(
        name=start[2],
        type=rest[:split],
        opcode=opcode,
        operands=() if is_literal else _operands(between),
        literal=between if is_literal else "",
        called=tuple(name for names in _CALLED.findall(attributes) for name in _WORD.findall(names)),
        attributes=attributes.removeprefix(", "),
        op_name=op_name[1] if op_name else "",
        stack_frame=int(stack_frame[1]) if stack_frame else None,
        is_root=start[1] is not None,
    )


def _type_length(text: str) -> int:
    """Returns the length of the type at the start of a text, up to a space or the end of a tuple's parentheses."""
    if text[:1] == "(":
        return _closing(text, 1) + 1
    end = text.find(" ")
    return end if end >= 0 else len(text)


def _closing(text: str, start: int) -> int:
    """Returns the position of the parenthesis that closes the one before `start`, -1 if there is none."""
    depth = 1
    for parenthesis in _PARENTHESIS.finditer(text, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    return -1


def _operands(text: str) -> tuple[str, ...]:
    """Returns the names of operands; some versions also write their types, or leave out "%"."""
    if "%" in text:
        return tuple(_NAME.findall(text))
    parts = (_WORD.findall(COMMENT.sub("", part)) for part in split_outside(text))
    return tuple(words[-1] for words in parts if words)
