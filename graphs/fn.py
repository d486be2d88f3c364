"""Built-in messages and reductions, under DGL's names.

A message combines two features: of the edge's sender `u`, of its receiver `v`, of the edge `e` itself.
`u_mul_e("h", "w", "m")` is the sender's `h` times the edge's `w`, and is called `m`; `sum("m", "x")` adds
the messages `m` that reach a node, and is called `x`. `dot` multiplies along the last axis and keeps it
with size 1. Axes that one feature lacks are inserted after its first, and then numpy's rules hold. The
reductions `var`, `std`, `softmax`, `argmax` and `argmin` are not DGL's, but PyTorch Geometric's and torch_scatter's.

Source: https://docs.dgl.ai/api/python/dgl.function.html
"""

import dataclasses
from typing import Literal

End = Literal["u", "v", "e"]
Operation = Literal["copy", "add", "sub", "mul", "div", "dot"]
Reduction = Literal["sum", "mean", "max", "min", "var", "std", "softmax", "argmax", "argmin"]


@dataclasses.dataclass(frozen=True)
class Message:
    """What each edge sends.

    Attributes:
      operation: what is done with the features.
      operands: the end of the edge and the name of the feature there; two, and one of "copy".
      out: what the message is called.
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
    """What a node makes of the messages that reach it.

    Attributes:
      reduction: what is done with the messages.
      message: what the messages are called.
      out: what the result is called.
      temperature: of "softmax", by which messages are multiplied before powers are taken of them.
    """

    reduction: Reduction
    message: str
    out: str
    temperature: float = 1.0


class BuiltIn:
    """A function of this module: it makes a message or a reduction, and is not one itself."""


@dataclasses.dataclass(frozen=True)
class _Binary(BuiltIn):
    left: End
    operation: Operation
    right: End

    def __call__(self, left_field: str, right_field: str, out: str) -> Message:
        """Returns the message of two features.

        Args:
          left_field: the feature of the left end.
          right_field: the feature of the right end.
          out: what the message is called.
        """
        return Message(self.operation, ((self.left, left_field), (self.right, right_field)), out)


@dataclasses.dataclass(frozen=True)
class _Reducer(BuiltIn):
    reduction: Reduction

    def __call__(self, msg: str, out: str) -> Reduce:
        """Returns the reduction of a message.

        Args:
          msg: what the messages are called.
          out: what the result is called.
        """
        return Reduce(self.reduction, msg, out)


def copy_u(u: str, out: str) -> Message:
    """Returns the message that is the sender's feature.

    Args:
      u: the feature.
      out: what the message is called.
    """
    return Message("copy", (("u", u),), out)


def copy_e(e: str, out: str) -> Message:
    """Returns the message that is the edge's feature.

    Args:
      e: the feature.
      out: what the message is called.
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
    """Returns the sum of a message, weighted elementwise by the softmax of temperature times the message.

    The result lies between the mean, of temperature 0, and the maximum, of a large one.

    Args:
      msg: what the messages are called.
      out: what the result is called.
      temperature: a number.

    Example:
      >>> softmax("m", "x", temperature=0.5).temperature
      0.5

    Reference: Li et al., DeeperGCN, https://arxiv.org/abs/2006.07739; PyTorch Geometric's SoftmaxAggregation.
    """
    if not isinstance(temperature, int | float) or isinstance(temperature, bool):
        raise TypeError(f"temperature must be a number, got {temperature!r}; for arrays, use segment_softmax_sum")
    return Reduce("softmax", msg, out, float(temperature))


def moments(msg: str, mean_out: str, var_out: str) -> tuple[Reduce, Reduce]:
    """Returns the reductions of a message to its mean and its variance, which share their passes over the edges.

    Args:
      msg: what the messages are called.
      mean_out: what the mean is called.
      var_out: what the variance is called.

    Example:
      >>> [reduce.reduction for reduce in moments("m", "mean", "var")]
      ['mean', 'var']
    """
    return mean(msg, mean_out), var(msg, var_out)
