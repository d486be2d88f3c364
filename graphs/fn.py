"""Built-in messages and reductions, under DGL's names.

A message combines two features of the edge's sender `u`, its receiver `v` or the edge `e` itself.
`u_mul_e("h", "w", "m")` multiplies the sender's `h` by the edge's `w`, and stores the message as `m`. `sum("m", "x")`
adds the messages `m` of a node's incoming edges, and stores the result as `x`. `dot` sums over the last axis and keeps
it with size 1. Axes that one feature lacks are inserted after its first axis; then the features are broadcast. The
reductions `var`, `std`, `softmax`, `argmax` and `argmin` come from PyTorch Geometric and torch_scatter.

Source: https://docs.dgl.ai/api/python/dgl.function.html
"""

import dataclasses
from typing import Literal

from jmp_train.policies.pytrees import check_number

End = Literal["u", "v", "e"]
Operation = Literal["copy", "add", "sub", "mul", "div", "dot"]
Reduction = Literal["sum", "mean", "max", "min", "var", "std", "softmax", "argmax", "argmin"]


@dataclasses.dataclass(frozen=True)
class Message:
    """A message that each edge sends.

    Attributes:
      operation: the operation on the features.
      operands: pairs of an end of the edge and a feature's name; one pair for "copy", otherwise two.
      out: name of the message.
    """

    operation: Operation
    operands: tuple[tuple[End, str], ...]
    out: str

    @property
    def name(self) -> str:
        """DGL's name of the function."""
        if self.operation == "copy":
            return f"copy_{self.operands[0][0]}"
        (left, _), (right, _) = self.operands
        return f"{left}_{self.operation}_{right}"


@dataclasses.dataclass(frozen=True)
class Reduce:
    """A reduction of the messages of a node's incoming edges.

    Attributes:
      reduction: the reduction.
      message: name of the messages.
      out: name of the result.
      temperature: for "softmax", the factor of the messages in the exponent.
    """

    reduction: Reduction
    message: str
    out: str
    temperature: float = 1.0


class BuiltIn:
    """A function of this module, which returns a message or a reduction."""


@dataclasses.dataclass(frozen=True)
class _Binary(BuiltIn):
    left: End
    operation: Operation
    right: End

    def __call__(self, left_field: str, right_field: str, out: str) -> Message:
        """Returns the message of two features.

        Args:
          left_field: name of the left end's feature.
          right_field: name of the right end's feature.
          out: name of the message.
        """
        return Message(self.operation, ((self.left, left_field), (self.right, right_field)), out)


@dataclasses.dataclass(frozen=True)
class _Reducer(BuiltIn):
    reduction: Reduction

    def __call__(self, msg: str, out: str) -> Reduce:
        """Returns the reduction of a message.

        Args:
          msg: name of the messages.
          out: name of the result.
        """
        return Reduce(self.reduction, msg, out)


def copy_u(u: str, out: str) -> Message:
    """Returns the message that copies the sender's feature.

    Args:
      u: name of the feature.
      out: name of the message.
    """
    return Message("copy", (("u", u),), out)


def copy_e(e: str, out: str) -> Message:
    """Returns the message that copies the edge's feature.

    Args:
      e: name of the feature.
      out: name of the message.
    """
    return Message("copy", (("e", e),), out)


u_add_v = _Binary("u", "add", "v")
u_sub_v = _Binary("u", "sub", "v")
u_mul_v = _Binary("u", "mul", "v")
u_div_v = _Binary("u", "div", "v")
u_dot_v = _Binary("u", "dot", "v")
u_add_e = _Binary("u", "add", "e")
u_sub_e = _Binary("u", "sub", "e")
u_mul_e = _Binary("u", "mul", "e")
u_div_e = _Binary("u", "div", "e")
u_dot_e = _Binary("u", "dot", "e")
v_add_u = _Binary("v", "add", "u")
v_sub_u = _Binary("v", "sub", "u")
v_mul_u = _Binary("v", "mul", "u")
v_div_u = _Binary("v", "div", "u")
v_dot_u = _Binary("v", "dot", "u")
v_add_e = _Binary("v", "add", "e")
v_sub_e = _Binary("v", "sub", "e")
v_mul_e = _Binary("v", "mul", "e")
v_div_e = _Binary("v", "div", "e")
v_dot_e = _Binary("v", "dot", "e")
e_add_u = _Binary("e", "add", "u")
e_sub_u = _Binary("e", "sub", "u")
e_mul_u = _Binary("e", "mul", "u")
e_div_u = _Binary("e", "div", "u")
e_dot_u = _Binary("e", "dot", "u")
e_add_v = _Binary("e", "add", "v")
e_sub_v = _Binary("e", "sub", "v")
e_mul_v = _Binary("e", "mul", "v")
e_div_v = _Binary("e", "div", "v")
e_dot_v = _Binary("e", "dot", "v")

sum = _Reducer("sum")
mean = _Reducer("mean")
max = _Reducer("max")
min = _Reducer("min")
var = _Reducer("var")
std = _Reducer("std")
argmax = _Reducer("argmax")
argmin = _Reducer("argmin")


def softmax(msg: str, out: str, temperature: float = 1.0) -> Reduce:
    """Returns the sum of messages, weighted elementwise by the softmax of temperature times the messages.

    The result is the mean at temperature 0, and approaches the maximum at large temperatures.

    Args:
      msg: name of the messages.
      out: name of the result.
      temperature: a number.

    Example:
      >>> softmax("m", "x", temperature=0.5).temperature
      0.5

    Reference: Li et al., DeeperGCN, https://arxiv.org/abs/2006.07739; PyTorch Geometric's SoftmaxAggregation.
    """
    if not isinstance(temperature, int | float) or isinstance(temperature, bool):
        raise TypeError(f"temperature must be a number, got {temperature!r}; for arrays, use segment_softmax_sum")
    check_number("temperature", temperature)
    return Reduce("softmax", msg, out, float(temperature))


def moments(msg: str, mean_out: str, var_out: str) -> tuple[Reduce, Reduce]:
    """Returns the reductions to mean and variance, which share their passes over the edges.

    Args:
      msg: name of the messages.
      mean_out: name of the mean.
      var_out: name of the variance.

    Example:
      >>> [reduce.reduction for reduce in moments("m", "mean", "var")]
      ['mean', 'var']
    """
    return mean(msg, mean_out), var(msg, var_out)
