"""Reads the text of optimized HLO, in time linear in its length.

`read_hlo` returns the common basis of all analyses of a compiled program: computations, instructions with their types,
operands and attributes, and the lines of Python from which instructions come.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby, zip_longest

COMMENT = re.compile(r"/\*.*?\*/")
"""What the text counts long lists with: "/*index=5*/"."""


@dataclass(frozen=True)
class StackFrame:
    """A line of Python that was executed while the program was traced.

    Attributes:
      file: its path.
      line: its number, from 1.
      function: the qualified name of its function, "" if the text does not have it.
    """

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The dtype and shape of an array.

    Attributes:
      dtype: XLA's name: "f16", "bf16", "f32", "s32", "pred".
      shape: the lengths of the axes, on one device.
      layout: the order of the axes in memory, and on TPUs the tiles: "1,0:T(8,128)"; "" if unknown.

    Example:
      >>> ArrayType("f16", (1000, 64)).n_bytes
      128000
      >>> ArrayType("f32", (1000, 3), "1,0:T(8,128)").stored_bytes  # whole tiles: 3 columns take the place of 128
      512000
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = field(default="", repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements of the array."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes of the array, without padding."""
        return math.ceil(_bits(self.dtype) * self.size / 8)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the array in memory: on TPUs whole tiles, elsewhere `n_bytes`."""
        tile = _TILE.search(self.layout)
        if tile is None:
            return self.n_bytes
        order = [int(n) for n in self.layout.partition(":")[0].split(",") if n]
        lengths = [self.shape[axis] for axis in order]  # the axis of neighbors in memory first
        sizes = [int(n) for n in reversed(tile[1].split(","))]
        lengths += [1] * (len(sizes) - len(lengths))
        whole = [-(-n // size) * size for n, size in zip_longest(lengths, sizes, fillvalue=1)]
        return math.ceil(_bits(self.dtype) * math.prod(whole) / 8)

    @property
    def is_in_main_memory(self) -> bool:
        """Returns whether the array is in the device's main memory, not in a TPU core's vector or scalar memory."""
        return _TILE.search(self.layout) is None or "S(" not in self.layout


@lru_cache(maxsize=4096)
def array_types(type_: str) -> tuple[ArrayType, ...]:
    """Returns the arrays of a type, those of tuples in order, without tokens and the like.

    Args:
      type_: the type of an instruction.

    Example:
      >>> array_types("(s32[], f16[2,3]{1,0:T(8,128)}, token[])")
      (ArrayType(dtype='s32', shape=()), ArrayType(dtype='f16', shape=(2, 3)))
    """
    return tuple(
        ArrayType(dtype, tuple(int(n.removeprefix("<=")) for n in lengths.split(",") if n), layout)
        for dtype, lengths, layout in _ARRAY.findall(type_)
        if _bits(dtype)
    )


def tuple_types(type_: str) -> tuple[str, ...]:
    """Returns the types of a tuple's elements; for another type, the type itself.

    Args:
      type_: the type of an instruction.

    Example:
      >>> tuple_types("(s32[], /*index=1*/(f16[2,3]{1,0}, f32[]))")
      ('s32[]', '(f16[2,3]{1,0}, f32[])')
    """
    return tuple(COMMENT.sub("", part) for part in split_outside(type_[1:-1])) if type_[:1] == "(" else (type_,)


def split_outside(text: str, separator: str = ", ") -> Iterator[str]:
    """Yields the parts of a text between separators outside of brackets and strings.

    Args:
      text: text with strings in double quotes.
      separator: the separator.

    Example:
      >>> list(split_outside('calls=%f, window={size=3, pad=1}, name="a, b"'))
      ['calls=%f', 'window={size=3, pad=1}', 'name="a, b"']
    """
    depth = start = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif token[0] == "," and depth == 0 and text.startswith(separator, token.start()):
            yield text[start : token.start()]
            start = token.start() + len(separator)
    if text[start:]:
        yield text[start:]


_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r":T\(([\d,]+)\)")


@lru_cache
def _bits(dtype: str) -> int:
    """Returns the number of bits per element from XLA's name; 0 for tokens and the like."""
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 8 * (dtype == "pred")


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


def read_stack_frames(lines: Iterable[str]) -> dict[int, tuple[StackFrame, int | None]]:
    """Returns the stack frames by number, each with the number of the one that called it.

    Args:
      lines: the lines of the text before its computations.

    Example:
      >>> read_stack_frames('''FileNames
      ... 1 "train.py"
      ...
      ... FunctionNames
      ... 1 "loss"
      ...
      ... FileLocations
      ... 1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
      ...
      ... StackFrames
      ... 1 {file_location_id=1 parent_frame_id=1}'''.splitlines())
      {1: (StackFrame(file='train.py', line=12, function='loss'), None)}
    """
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    table: dict[int, str] | None = None
    for line in lines:
        number, _, value = line.partition(" ")
        if line in tables:
            table = tables[line]
        elif table is not None and number.isdecimal():
            table[int(number)] = value
        else:
            table = None
    files, functions, locations, frames = tables.values()
    parents = {number: _number("parent_frame_id", value) for number, value in frames.items()}
    none = min(parents.values(), default=0)  # the parent of an outermost frame: 1, or 0 if frames are numbered from 0
    return {
        number: (
            _frame(locations.get(_number("file_location_id", value), ""), files, functions),
            None if parents[number] == none else parents[number] - none,
        )
        for number, value in frames.items()
    }


def _frame(location: str, files: Mapping[int, str], functions: Mapping[int, str]) -> StackFrame:
    file, function = (
        names.get(_number(key, location), "").strip('"')
        for names, key in ((files, "file_name_id"), (functions, "function_name_id"))
    )
    return StackFrame(file, _number("line", location), function)


def _number(key: str, text: str) -> int:
    """Returns the number after `key=` in a text, 0 if there is none."""
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else 0


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
