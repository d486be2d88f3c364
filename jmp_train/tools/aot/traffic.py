"""The bytes that the kernels of a compiled program read and write.

A kernel is an instruction outside of fusions that computes something: a fusion, a call of a library, a copy, a
reduction. It reads each of its arrays once, or only a part if it only slices or gathers from it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jmp_train.tools.aot.hlo import RUNS_OTHERS, ArrayType, HloModule, Instruction, array_types, tuple_types
from jmp_train.tools.aot.hlo_collectives import KINDS
from jmp_train.tools.aot.hlo_products import CUBLAS, CUDNN_CONVOLUTION, convolution

ArrayPlace = tuple[str, int]
"""An array in memory: the instruction that stores it, and which of the arrays of its result it is."""


@dataclass(frozen=True)
class Traffic:
    """The least bytes that a kernel reads and writes, whatever the indices.

    They are 0 for gathers, scatters and the arguments of a custom call other than XLA's products and convolutions. If
    a kernel updates an array in place, it only writes the updated part.

    Attributes:
      reads: bytes by array.
      writes: bytes by array.
    """

    reads: Mapping[ArrayPlace, int]
    writes: Mapping[ArrayPlace, int]

    @property
    def n_bytes(self) -> int:
        """All bytes together."""
        return sum(self.reads.values()) + sum(self.writes.values())


@dataclass(frozen=True)
class Places:
    """The places of the results of instructions; `tuple`, `bitcast` and the like only pass places on.

    Attributes:
      program: the program of the instructions.
    """

    program: HloModule
    _known: dict[str, tuple[ArrayPlace, ...]] = field(default_factory=dict, repr=False)
    _offsets: dict[str, list[int]] = field(default_factory=dict, repr=False)

    def of(self, name: str) -> tuple[ArrayPlace, ...]:
        """Returns the places of the arrays of an instruction's result.

        Args:
          name: the name of the instruction.
        """
        if name not in self._known:
            self._known[name] = self._find(self.program.instructions[name])
        return self._known[name]

    def _find(self, instruction: Instruction) -> tuple[ArrayPlace, ...]:
        if instruction.opcode in ("bitcast", "optimization-barrier"):
            return self.of(instruction.operands[0])
        if instruction.opcode == "tuple":
            return tuple(place for operand in instruction.operands for place in self.of(operand))
        if instruction.opcode == "get-tuple-element":
            start = self._offset(instruction.operands[0], int(instruction.attribute("index")))
            return self.of(instruction.operands[0])[start : start + len(instruction.arrays)]
        return tuple((instruction.name, i) for i in range(len(instruction.arrays)))

    def _offset(self, name: str, index: int) -> int:
        """Returns the number of the first array of a tuple's element."""
        if name not in self._offsets:
            offsets = [0]
            for part in tuple_types(self.program.instructions[name].type):
                offsets.append(offsets[-1] + len(array_types(part)))
            self._offsets[name] = offsets
        return self._offsets[name][index]


def is_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction reads and writes memory; collective operations do not count.

    Args:
      instruction: an instruction outside of fusions.
    """
    opcode = instruction.opcode
    if opcode in _NO_KERNELS or opcode.endswith(("-done", "-update")):
        return False
    if instruction.attribute("custom_call_target") in _NOTHING_TO_DO:
        return False
    return opcode.removesuffix("-start") not in KINDS


def traffic(kernel: Instruction, places: Places) -> Traffic:
    """Returns the least bytes that a kernel reads and writes.

    Args:
      kernel: see `is_kernel`.
      places: the places of its program.
    """
    program = places.program
    body = _body(program, kernel)
    reads: dict[ArrayPlace, int] = {}
    for operand, inner in zip(kernel.operands, body.inputs, strict=True):
        for i, place in enumerate(places.of(operand)):
            reads[place] = max(reads.get(place, 0), _read(program, body, inner, i))
    writes = {
        (kernel.name, i): _written(program, body, root, n_bytes) for i, (root, n_bytes) in enumerate(body.results)
    }
    return Traffic(reads, writes)


@dataclass(frozen=True)
class _Body:
    """The contents of a kernel, a fusion or a single instruction.

    Attributes:
      inputs: the names of the parameters, or of the operands of a single instruction, in order.
      uses: for each input, the instructions that use it and the number of the operand, skipping bitcasts.
      results: for each array of the result, its instruction, skipping bitcasts, and its bytes, 0 for workspaces.
      in_place: the names of instructions that update an input instead of making an array.
      is_known: whether it is XLA's own, or one of its products or convolutions, which read all of their arguments.
      is_fused: whether it is a fusion.
    """

    inputs: tuple[str, ...]
    uses: Mapping[str, Sequence[tuple[Instruction, int]]]
    results: tuple[tuple[Instruction, int], ...]
    in_place: frozenset[str]
    is_known: bool
    is_fused: bool


def _body(program: HloModule, kernel: Instruction) -> _Body:
    fused = kernel.opcode.removesuffix("-start") == "fusion"
    inside = program.computations[kernel.called[0]] if fused else (kernel,)
    parameters = {int(i.literal): i.name for i in inside if i.opcode == "parameter"} if fused else {}
    inputs = tuple(parameters.get(i, name) for i, name in enumerate(kernel.operands))

    def origin(name: str) -> str:
        return _through_bitcasts(program, name) if fused else name

    uses: dict[str, list[tuple[Instruction, int]]] = defaultdict(list)
    for instruction in inside:
        for i, operand in enumerate(instruction.operands):
            if instruction.opcode != "bitcast":
                uses[origin(operand)].append((instruction, i))
    root = next(i for i in inside if i.is_root or not fused)
    makers = [program.instructions[origin(n)] for n in (root.operands if root.opcode == "tuple" else (root.name,))]
    targets = [i.attribute("custom_call_target") for i in inside if i.opcode == "custom-call"]
    results = _results(kernel, has_workspace=any(target.startswith(_WITH_WORKSPACE) for target in targets))
    makers = makers if len(makers) == len(results) else [root] * len(results)
    in_place = frozenset(m.name for m in makers if m.opcode in _UPDATES and origin(m.operands[0]) in inputs)
    is_known = all(target.startswith((*CUBLAS, CUDNN_CONVOLUTION)) for target in targets)
    return _Body(inputs, uses, tuple(zip(makers, results, strict=True)), in_place, is_known, fused)


def _results(kernel: Instruction, *, has_workspace: bool) -> tuple[int, ...]:
    """Returns the bytes of the arrays of a kernel's result, 0 for a library's workspace."""
    type_ = kernel.type
    if kernel.opcode.endswith("-start"):  # its tuple includes operands
        type_ = tuple_types(type_)[:2][0 if kernel.opcode == "copy-start" else -1]
    arrays = array_types(type_)
    workspace = len(arrays) - 1 if has_workspace and arrays and arrays[-1].dtype in ("s8", "u8") else 0
    return tuple(0 if i and i == workspace else _in_memory(array) for i, array in enumerate(arrays))


def _read(program: HloModule, body: _Body, name: str, i: int) -> int:
    """Returns the least that a kernel reads of an input, or of the i-th array of a tuple."""
    whole = _in_memory(program.instructions[name].arrays[i])
    parts = [_used(program, body, user, position, whole) for user, position in body.uses[name]]
    return max(parts, default=0) if body.is_known else 0  # parts may overlap


def _used(program: HloModule, body: _Body, user: Instruction, position: int, whole: int) -> int:
    """Returns the least that one instruction reads of an operand with `whole` bytes."""
    if user.opcode == "fusion" and body.is_fused:  # TPUs have fusions in fusions
        inner = _body(program, user)
        return min(whole, _read(program, inner, inner.inputs[position], 0))
    if user.opcode.removesuffix("-start") in ("slice", "dynamic-slice") and position == 0:
        return min(whole, user.arrays[-1 if user.opcode.endswith("-start") else 0].stored_bytes)
    if user.opcode == "gather" and position == 0:
        return 0
    if user.name in body.in_place and position < _n_updated(user):
        return 0
    return _image_bytes(program, user, whole) if position == 0 and _reads_image(user) else whole


def _written(program: HloModule, body: _Body, maker: Instruction, n_bytes: int) -> int:
    """Returns the least that a kernel writes of a result with `n_bytes` bytes."""
    if not body.is_known or (maker.name in body.in_place and maker.opcode == "scatter"):
        return 0
    return min(n_bytes, _updated_bytes(program, maker)) if maker.name in body.in_place else n_bytes


def _in_memory(array: ArrayType) -> int:
    """Returns the bytes of an array in the device's main memory, 0 for one in a TPU core's own memory."""
    return array.stored_bytes if array.is_in_main_memory else 0


def _through_bitcasts(program: HloModule, name: str) -> str:
    instruction = program.instructions[name]
    while instruction.opcode == "bitcast":
        instruction = program.instructions[instruction.operands[0]]
    return instruction.name


def _n_updated(instruction: Instruction) -> int:
    """Returns the number of operands, the first ones, that an instruction updates; a scatter has as many updates."""
    return (len(instruction.operands) - 1) // 2 if instruction.opcode == "scatter" else 1


def _updated_bytes(program: HloModule, update: Instruction) -> int:
    """Returns the bytes that a dynamic-update-slice writes."""
    return program.instructions[update.operands[1]].arrays[0].n_bytes


def _reads_image(instruction: Instruction) -> bool:
    target = instruction.attribute("custom_call_target")
    return target.startswith(CUDNN_CONVOLUTION) and "BackwardInput" not in target


def _image_bytes(program: HloModule, instruction: Instruction, whole: int) -> int:
    """Returns the bytes of its image that a convolution reads; large strides skip some."""
    shapes = convolution(program, instruction)
    assert shapes is not None
    return whole * shapes.positions_read // max(math.prod(axis.length for axis in shapes.spatial), 1)


_NO_KERNELS = RUNS_OTHERS | {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all"),
    *("add-dependency", "partition-id", "replica-id", "get-dimension-size", "domain"),
    *("send", "recv", "infeed", "outfeed"),
}
_NOTHING_TO_DO = ("AllocateBuffer", "ConcatBitcast")  # of libtpu: they only name memory
_UPDATES = ("dynamic-update-slice", "scatter")
_WITH_WORKSPACE = ("__cublas", "__cudnn", "__cub$", "cusolver")
