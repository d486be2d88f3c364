"""The number of operations in the matrix products and convolutions of a compiled program.

A multiplication and an addition are two operations. In convolutions, multiplications with padding and with the zeros
between dilated elements are not counted. If XLA itself stores zeros around or between the elements of an array,
because cuDNN or the matrix units do not support its shape, they count like other elements: 10 columns of
float16 that are padded to 16 count as 16.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jmp_train.tools.aot.hlo import ArrayType, HloModule, Instruction


@dataclass(frozen=True)
class HloProduct:
    """A matrix product or a convolution.

    Attributes:
      dtype: XLA's name of the operands' dtype: "f16", "bf16", "f32"; the wider one if they differ.
      operations: number of operations on one device.
      precision: "default", "high" or "highest": how float32 operands may be rounded. GPUs round them to TF32 unless it
        is "highest"; TPUs take one, three or six passes in bfloat16.
    """

    dtype: str
    operations: int
    precision: str


@dataclass(frozen=True)
class SpatialAxis:
    """A spatial axis of a convolution.

    Attributes:
      length: length of the input.
      size: number of taps of the filter.
      outputs: length of the output.
      stride: stride between outputs.
      padding: padding before the input; the padding after it follows from the lengths.
      lhs_dilate: distance of input elements, with zeros in the gaps.
      rhs_dilate: distance of taps.
    """

    length: int
    size: int
    outputs: int
    stride: int = 1
    padding: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


@dataclass(frozen=True)
class Convolution:
    """The shapes of a convolution in the forward pass, also for its gradients.

    Attributes:
      spatial: input length, number of taps and output length of each spatial axis, and the movement of the window.
      batch: number of outputs, without spatial axes and channels.
      channels: output channels.
      channels_in: input channels that an output channel depends on, those of its group.
    """

    spatial: tuple[SpatialAxis, ...]
    batch: int
    channels: int
    channels_in: int

    @property
    def operations(self) -> int:
        """Number of operations of the convolution, and of each of its two gradients."""
        meetings = math.prod(_meetings(axis) for axis in self.spatial)
        return 2 * self.batch * self.channels * self.channels_in * meetings

    @property
    def positions_read(self) -> int:
        """Number of positions of the input that some output depends on."""
        return math.prod(_positions_read(axis) for axis in self.spatial)


def product(program: HloModule, instruction: Instruction) -> HloProduct | None:
    """Returns the product that an instruction computes, None if it is none; it does not look into fusions.

    Args:
      program: the program of the instruction.
      instruction: an instruction of any opcode.

    Example:
      >>> from jmp_train.aot import read_hlo
      >>> program = read_hlo('''
      ... ENTRY %main (x: f16[2,3], y: f16[3,5]) -> f16[2,5] {
      ...   %x = f16[2,3]{1,0} parameter(0)
      ...   %y = f16[3,5]{1,0} parameter(1)
      ...   ROOT %z = f16[2,5]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ... }''')
      >>> product(program, program.instructions["z"])
      HloProduct(dtype='f16', operations=60, precision='default')
    """
    target, shapes = instruction.attribute("custom_call_target"), None
    if instruction.opcode == "dot":
        contracted = _numbers(instruction.attribute("lhs_contracting_dims"))
        precision, algorithm = instruction.attribute("operand_precision"), instruction.attribute("algorithm")
    elif target.startswith(CUBLAS):
        config = backend_config(instruction).get("gemm_backend_config", {})
        contracted = [int(n) for n in config["dot_dimension_numbers"].get("lhs_contracting_dimensions", ())]
        precisions = config.get("precision_config", {})
        precision, algorithm = str(precisions.get("operand_precision", "")), precisions.get("algorithm", "")
    elif is_block_scaled(program, instruction):
        contracted, precision, algorithm = [-1], "", ""
    elif shapes := convolution(program, instruction):
        contracted, precision, algorithm = (), instruction.attribute("operand_precision"), ""
    else:
        return None
    lhs, rhs = (program.instructions[name].arrays[0] for name in instruction.operands[:2])
    operations = (
        shapes.operations if shapes else 2 * instruction.arrays[0].size * math.prod(lhs.shape[i] for i in contracted)
    )
    return _product(lhs, rhs, operations, precision, algorithm)


def is_block_scaled(program: HloModule, instruction: Instruction) -> bool:
    """Returns whether an instruction is a product of operands in 8 or 4 bits with scales of blocks.

    XLA for an absent GPU has it as a call of a computation that multiplies by the scales first. On a GPU with such
    units, of compute capability 10 and above, it is a product of cuDNN.

    Args:
      program: the program of the instruction.
      instruction: an instruction of any opcode.
    """
    if instruction.opcode != "call" or len(instruction.operands) != 4:
        return False
    lhs, _, scales, _ = (program.instructions[name].arrays[0].dtype for name in instruction.operands)
    return (lhs, scales) in (("f8e4m3fn", "f8e8m0fnu"), ("f8e5m2", "f8e8m0fnu"), ("f4e2m1fn", "f8e4m3fn"))


def convolution(program: HloModule, instruction: Instruction) -> Convolution | None:
    """Returns the shapes of the convolution that an instruction computes, None if it is none.

    Args:
      program: the program of the instruction.
      instruction: an instruction of any opcode.
    """
    target = instruction.attribute("custom_call_target")
    if instruction.opcode != "convolution" and not target.startswith(CUDNN_CONVOLUTION):
        return None
    lhs, rhs = (program.instructions[name].arrays[0].shape for name in instruction.operands[:2])
    result = instruction.arrays[0].shape
    if target.startswith(f"{CUDNN_CONVOLUTION}BackwardInput"):  # labels and window are those of the forward pass
        lhs, result = result, lhs
    elif target.startswith(f"{CUDNN_CONVOLUTION}BackwardFilter"):
        rhs, result = result, rhs
    labels = re.split("_|->", instruction.attribute("dim_labels"))
    inputs, filters, outputs = (dict(zip(*pair, strict=True)) for pair in zip(labels, (lhs, rhs, result), strict=True))
    window = _window(instruction.attribute("window"))
    spatial = tuple(
        SpatialAxis(
            inputs[label],
            filters[label],
            outputs[label],
            **{name: values[int(label)] for name, values in window.items() if values},
        )
        for label in labels[0]
        if label.isdecimal()
    )
    return Convolution(spatial, outputs["b"], outputs["f"], filters["i"])


def backend_config(instruction: Instruction) -> dict[str, Any]:
    """Returns the configuration that XLA's backend stored for an instruction, in older versions as a string.

    Args:
      instruction: an instruction of any opcode.
    """
    text = instruction.attribute("backend_config")
    return json.loads(text.replace('\\"', '"') if text.startswith('{\\"') else text or "{}")


CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
CUDNN_CONVOLUTION = "__cudnn$conv"

_WIDTH = {"f64": 8, "c128": 8, "f32": 4, "c64": 4, "f16": 2, "bf16": 2}
_ALGORITHM = re.compile(r"dot_(bf16|f16|f32|f64)_")


def _product(lhs: ArrayType, rhs: ArrayType, operations: int, precision: str, algorithm: str) -> HloProduct:
    dtype = max(lhs.dtype, rhs.dtype, key=lambda dtype: _WIDTH.get(dtype, 1))
    named = _ALGORITHM.search(algorithm.lower())  # "dot_bf16_bf16_f32" on float32 operands computes in bfloat16
    exact = named is not None and named[1] == "f32"
    asked = "highest" if exact else next((p for p in ("highest", "high") if p in precision.lower()), "default")
    factor = 4 if dtype.startswith("c") else 1
    return HloProduct(named[1] if named else dtype, factor * operations, asked)


def _window(text: str) -> Mapping[str, list[int]]:
    """Returns the window of each spatial axis by the names of `SpatialAxis`; missing entries are 1 or 0."""
    found = dict(re.findall(r"(\w+)=([\w\-]+)", text))
    return {
        "stride": _numbers(found.get("stride", "")),
        "padding": [int(pair.partition("_")[0]) for pair in found.get("pad", "").split("x") if pair],
        "lhs_dilate": _numbers(found.get("lhs_dilate", "")),
        "rhs_dilate": _numbers(found.get("rhs_dilate", "")),
    }


@lru_cache(maxsize=4096)
def _meetings(axis: SpatialAxis) -> int:
    """Returns the number of pairs (output, tap) that read an element of the input, not padding or a gap."""
    if axis.size > axis.outputs:  # taps and outputs can change roles in output * stride + tap * rhs_dilate - padding
        roles = {"size": axis.outputs, "outputs": axis.size, "stride": axis.rhs_dilate, "rhs_dilate": axis.stride}
        axis = replace(axis, **roles)
    return sum(_outputs_that_meet(axis, tap * axis.rhs_dilate - axis.padding) for tap in range(axis.size))


def _outputs_that_meet(axis: SpatialAxis, offset: int) -> int:
    """Returns the number of outputs with an input element at position output * stride + offset."""
    last = (axis.length - 1) * axis.lhs_dilate
    start = max(0, -(offset // axis.stride))
    end = min(axis.outputs - 1, (last - offset) // axis.stride)
    firsts = range(start, min(start + axis.lhs_dilate, end + 1))
    first = next((i for i in firsts if (i * axis.stride + offset) % axis.lhs_dilate == 0), None)
    if first is None:
        return 0
    return (end - first) // (axis.lhs_dilate // math.gcd(axis.stride, axis.lhs_dilate)) + 1


@lru_cache(maxsize=4096)
def _positions_read(axis: SpatialAxis) -> int:
    """Returns the number of elements of the input that some output depends on."""
    places = {
        output * axis.stride + tap * axis.rhs_dilate - axis.padding
        for tap in range(axis.size)
        for output in range(axis.outputs)
    }
    return sum(0 <= x <= (axis.length - 1) * axis.lhs_dilate and x % axis.lhs_dilate == 0 for x in places)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
