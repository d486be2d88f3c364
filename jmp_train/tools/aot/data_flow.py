"""The instructions that make and read the arrays of a compiled program.

Many instructions make nothing: tuples, their elements, loops and calls pass on arrays of others, and slices are
updated in place. So several names stand for one array, and this module resolves them.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

from jmp_train.tools.aot.array_types import tuple_types
from jmp_train.tools.aot.hlo import RUNS_OTHERS, Instruction, Program

Array = int
"""The number of an array."""


@dataclass(frozen=True, eq=False)
class DataFlow:
    """The arrays of a program; equality is identity.

    Attributes:
      instructions: the instructions of all computations, by name.
      arrays: the arrays of an instruction's result in the order of its type, by name; not inside fusions.
      makers: the instructions that write an array, each with the array's place in its result, in the text's order.
      readers: the instructions that read an array, in the text's order.
    """

    instructions: Mapping[str, Instruction] = field(repr=False)
    arrays: Mapping[str, Sequence[Array]] = field(repr=False)
    makers: Mapping[Array, Sequence[tuple[Instruction, int]]] = field(repr=False)
    readers: Mapping[Array, Sequence[Instruction]] = field(repr=False)

    def array_at(self, name: str, index: Sequence[int]) -> Array | None:
        """Returns the array at an index of an instruction's result, None if there is a tuple or nothing.

        Args:
          name: the name of the instruction.
          index: () for the whole result.
        """
        arrays = self.arrays.get(name, ())
        type_ = self.instructions[name].type if arrays else "()"
        for i in index:
            arrays, type_ = _element(arrays, type_, i)
        return arrays[0] if arrays and type_[:1] != "(" else None

    def operands(self, instruction: Instruction) -> tuple[Array, ...]:
        """Returns the arrays that an instruction reads, in order.

        Args:
          instruction: an instruction outside of fusions.
        """
        return tuple(array for name in instruction.operands for array in self.arrays.get(name, ()))


def data_flow(program: Program) -> DataFlow:
    """Returns the arrays of a program.

    Args:
      program: from `read_hlo`.

    Example:
      >>> from jmp_train.aot import read_hlo
      >>> flow = data_flow(read_hlo('''HloModule jit_f
      ...
      ... ENTRY %main (x: f32[9]) -> (f32[9], f32[9]) {
      ...   %x = f32[9]{0} parameter(0)
      ...   %sine = f32[9]{0} sine(%x)
      ...   ROOT %out = (f32[9]{0}, f32[9]{0}) tuple(%x, %sine)
      ... }'''))
      >>> array = flow.array_at("out", (1,))
      >>> [instruction.name for instruction, _ in flow.makers[array]]
      ['sine']
      >>> array == flow.array_at("sine", ())
      True
    """
    return _Builder(program).build()


class _Builder:
    """Numbers arrays, computation by computation, callees before callers, as in the text."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.instructions = {i.name: i for computation in program.computations.values() for i in computation}
        self.arrays: dict[str, Sequence[Array]] = {}
        self.parents: list[Array] = []  # a forest, with one tree for equal arrays
        self.made: list[tuple[Array, Instruction, int]] = []
        self.read: list[tuple[Array, Instruction]] = []

    def build(self) -> DataFlow:
        stored = set(self.program.unfused)
        for name, computation in self.program.computations.items():
            for instruction in computation if name in stored else ():
                self._add(instruction, is_argument=name == self.program.entry)
        makers = defaultdict[Array, list[tuple[Instruction, int]]](list)
        readers = defaultdict[Array, list[Instruction]](list)
        for array, instruction, place in self.made:
            makers[self._root(array)].append((instruction, place))
        for array, instruction in self.read:
            readers[self._root(array)].append(instruction)
        arrays = {name: tuple(map(self._root, arrays)) for name, arrays in self.arrays.items()}
        return DataFlow(self.instructions, arrays, dict(makers), dict(readers))

    def _add(self, instruction: Instruction, *, is_argument: bool) -> None:
        operands = [self.arrays.get(name, ()) for name in instruction.operands]
        arrays = self._passed_on(instruction, operands)
        if arrays is None or len(arrays) != _count(instruction.type):
            arrays = self._new(instruction.type)
            if instruction.opcode != "parameter" or is_argument:
                self.made += [(array, instruction, place) for place, array in enumerate(arrays)]
            self.read += [(array, instruction) for operand in operands for array in operand]
            for place, operand in _in_place(instruction, self.program):
                if place < len(arrays) and operand < len(operands) and len(operands[operand]) == 1:
                    self._join(arrays[place : place + 1], operands[operand])
        self.arrays[instruction.name] = arrays

    def _passed_on(self, instruction: Instruction, operands: Sequence[Sequence[Array]]) -> Sequence[Array] | None:
        """Returns the arrays of an instruction that only passes arrays on; None for others."""
        opcode = instruction.opcode
        if opcode == "get-tuple-element" and operands:
            source = self.instructions[instruction.operands[0]].type
            return _element(operands[0], source, int(instruction.attribute("index") or 0))[0]
        if opcode in ("tuple", "bitcast", "optimization-barrier"):
            return _flat(operands)
        if opcode == "while":
            return self._loop(instruction, _flat(operands))
        if opcode == "conditional":
            self.read += [(array, instruction) for array in operands[0]]
            results = [self._call(name, [x]) for name, x in zip(instruction.called, operands[1:], strict=False)]
            for result in results[1:]:
                self._join(results[0], result)
            return results[0] if results else None
        if opcode in RUNS_OTHERS:
            results = [self._call(name, operands) for name in instruction.called]
            if opcode == "call":
                return results[0] if results else None
            passed = (*_flat(operands), *_flat(results))
            return (*passed, *self._more(_count(instruction.type) - len(passed)))
        if opcode.endswith(("-done", "-update")) and operands:
            return self._finished(instruction, operands[0])
        return None

    def _loop(self, instruction: Instruction, state: Sequence[Array]) -> Sequence[Array]:
        for name in instruction.called:
            result = self._call(name, [state])
            if name == instruction.attribute("body").lstrip("%"):
                self._join(state, result)
        return state

    def _call(self, name: str, arguments: Sequence[Sequence[Array]]) -> Sequence[Array]:
        """Joins the arguments of a computation with its parameters, and returns the arrays of its result."""
        computation = self.program.computations.get(name, ())
        for parameter in computation:
            if parameter.opcode == "parameter" and int(parameter.literal) < len(arguments):
                self._join(self.arrays[parameter.name], arguments[int(parameter.literal)])
        return next((self.arrays[i.name] for i in computation if i.is_root), ())

    def _finished(self, instruction: Instruction, started: Sequence[Array]) -> Sequence[Array]:
        """Returns the arrays of the end of an asynchronous operation; the result of its start includes the operands."""
        start = self.instructions[instruction.operands[0]]
        if start.type == instruction.type:
            return started
        return _element(started, start.type, 0 if start.opcode == "copy-start" else 1)[0]

    def _new(self, type_: str) -> Sequence[Array]:
        return self._more(_count(type_))

    def _more(self, count: int) -> Sequence[Array]:
        first = len(self.parents)
        self.parents += range(first, first + count)
        return range(first, len(self.parents))

    def _join(self, some: Sequence[Array], others: Sequence[Array]) -> None:
        for a, b in zip(some, others, strict=False):
            self.parents[self._root(a)] = self._root(b)

    def _root(self, array: Array) -> Array:
        while self.parents[array] != array:
            self.parents[array] = array = self.parents[self.parents[array]]
        return array


def _in_place(instruction: Instruction, program: Program) -> list[tuple[int, int]]:
    """Returns pairs of a result array and the operand whose place it takes, by number."""
    if instruction.opcode in _UPDATES:
        return [(0, 0)]
    if instruction.opcode == "fusion":
        return _updates_of_fusion(instruction, program)
    aliases = _ALIAS.findall(instruction.attribute("output_to_operand_aliasing"))
    return [(int(place or 0), int(operand)) for place, operand in aliases]


def _updates_of_fusion(instruction: Instruction, program: Program) -> list[tuple[int, int]]:
    inner = {i.name: i for name in instruction.called for i in program.computations.get(name, ())}
    found = []
    for place, name in enumerate(results_of_fusion(instruction, program)):
        update = _without_bitcasts(name, inner)
        if update.opcode in _UPDATES:
            updated = _without_bitcasts(update.operands[0], inner)
            if updated.opcode == "parameter":
                found.append((place, int(updated.literal)))
    return found


def results_of_fusion(instruction: Instruction, program: Program) -> tuple[str, ...]:
    """Returns the names of the instructions inside a fusion that make the arrays of its result, in order.

    Args:
      instruction: the fusion; for other instructions, the result is empty.
      program: the program of the instruction.
    """
    if instruction.opcode != "fusion" or not instruction.called:
        return ()
    root = next(i for i in program.computations[instruction.called[0]] if i.is_root)
    return root.operands if root.opcode == "tuple" else (root.name,)


def _without_bitcasts(name: str, instructions: Mapping[str, Instruction]) -> Instruction:
    while instructions[name].opcode == "bitcast":
        name = instructions[name].operands[0]
    return instructions[name]


def _flat(arrays: Sequence[Sequence[Array]]) -> tuple[Array, ...]:
    return tuple(array for some in arrays for array in some)


def _element(arrays: Sequence[Array], type_: str, index: int) -> tuple[Sequence[Array], str]:
    """Returns the arrays and the type of an element of a tuple."""
    types, ends = _elements(type_)
    if index >= len(types):
        return (), "()"
    return arrays[ends[index] - _count(types[index]) : ends[index]], types[index]


@lru_cache(maxsize=1024)
def _elements(type_: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the types of a tuple's elements, and for each the end of its arrays among all."""
    types = tuple_types(type_)
    return types, tuple(accumulate(map(_count, types)))


@lru_cache(maxsize=1024)
def _count(type_: str) -> int:
    """Returns the number of arrays of a type; tokens count too."""
    return sum(map(_count, tuple_types(type_))) if type_[:1] == "(" else 1


_UPDATES = ("dynamic-update-slice", "scatter")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")
