"""Reasons of decisions: a cause, and the name of the deciding entry. Only reports and warnings convert them to text."""

import dataclasses
import enum


class Cause(enum.Enum):
    """Causes of a decision on an operation; the value is its text, with a place for a name."""

    # Entries of the rules, and what precedes them.
    OPERATION = "operation {!r}"
    PATH = "path {!r}"
    FUNCTION = "function {!r}"
    MODULE = "function of {}"
    WITHIN = "within a function of rule {!r}"
    PRIMITIVE = "primitive {!r}"
    NO_RULE = "no rule"
    AUTOCAST_AS = "autocast_as"
    INNER_REGION = "decided by an inner region"
    # The operation.
    CONVERSION = "explicit conversion"
    EACH_OPERAND = "each operand by itself"
    ELEMENTWISE = "elementwise"
    HIGHEST = "precision=HIGHEST"
    INNER_PRODUCT = "inner product"
    NEAR_A_CONSTANT = "subtracted from a constant"
    NOT_ENTERED = "{} is not entered"
    NOT_KNOWN = "{} is not known"
    OUTER_PRODUCT = "outer product"
    OWN_PRECISION = "its precision is spelled out"
    SQUARE = "a square"
    TYPED_BODY = "its body is typed"
    # Its operands.
    ACTIVATIONS = "no operand is a weight"
    COMPLEX = "complex numbers have no half type"
    INTEGERS = "operand from integers"
    UNTOUCHED = "no operand that autocast touches"


@dataclasses.dataclass(frozen=True)
class Reason:
    """The reason for a rule.

    Attributes:
      cause: what decided.
      name: the name that its text needs, or "".
      of_logits: True for a product in half that computes the logits of a softmax.
    """

    cause: Cause
    name: str = ""
    of_logits: bool = False

    def __str__(self) -> str:
        return self.cause.value.format(self.name) + (", logits of a softmax" if self.of_logits else "")
