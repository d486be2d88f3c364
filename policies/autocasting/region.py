"""Autocast regions: the rules of a program under autocast, and the decisions made for it.

A decision has a reason: a cause, and the name of the deciding entry. Only reports and warnings convert them to text.
"""

import dataclasses
import enum
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_train.policies.autocasting.fp8 import DEFAULT_RECIPE, DelayedScales, Recipe
from jmp_train.policies.autocasting.primitives import (
    CALLS,
    ENTERED,
    NEAR_A_CONSTANT,
    PRODUCTS,
    body_of,
    precisions_of,
    results_inside,
)
from jmp_train.policies.autocasting.rules import FEW_BITS_PRODUCTS, AutocastRules, Rule, kind_of
from jmp_train.policies.autocasting.source_lines import address_of
from jmp_train.policies.autocasting.values import Value, argument
from jmp_train.policies.programs import join, opened, repeats_of


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


Found = TypeVar("Found")

# An inner region decided on the operations under this name; an outer region does not change them.
DECIDED = "jmp_train.autocast"
_FIXED = re.compile(rf"{re.escape(DECIDED)}:(\w+)")  # by `autocast_as`


class BannedOperationError(TypeError):
    """Raised for an operation that the rules ban; the message names the alternative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.policies import TORCH_CUDA, autocast
      >>> rules = TORCH_CUDA.replace(banned={"fft": "take it outside"})
      >>> autocast(jnp.fft.fft, rules=rules)(jnp.ones(4))
      Traceback (most recent call last):
      jmp_train.policies.autocasting.region.BannedOperationError: autocast bans fft: take it outside
    """


@dataclasses.dataclass(frozen=True)
class Decision:
    """The decision on one equation: a row of `explain_autocast`."""

    path: str
    rule: str
    reason: Reason
    equation: Any
    callers: tuple[Any, ...]
    repeats: int
    dtypes_in: tuple[str, ...]
    dtypes_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Region:
    """The settings of an autocast region, and its position in the program.

    Attributes:
      half: the half type.
      rules: the table of rules.
      path: the path of modules and scopes around the current program.
      forced: "lower", "fp8" or one of `FLOAT32_RULES` if a rule applies to the whole current function; otherwise None.
      callers: the equations around the current program, the outermost first.
      repeats: the number of times that the loops around it run, if known.
      log: the list to which decisions are added, or None.
      programs: the list to which traced functions are added, or None.
      refused: the list to which products are added that no entry but one of `operations` puts in 8 bits, or None.
      constants: the constants of the programs so far, by identity.
      memory: cached facts about programs; see `remembered`.
      recipe: the recipe of products in 8 bits.
      delayed: their scales, if these come from outside.
      key: the random key of stochastic rounding; None if nothing rounds so.
      place: the place of the current body; see `place_of`.
      complemented: variables of the current program that are subtracted from a constant.
      read_in_float32: the current program's results that are read only in float32.
      differentiates: True within a custom derivative; the function that it is of runs for its value only.
      flags: on trial, a function of a product's address and the equations around it: a boolean scalar of the program,
        True to run the product by its rule "fp8" instead of `lower`.
    """

    half: Any
    rules: AutocastRules
    path: str = ""
    forced: Rule | None = None
    callers: tuple[Any, ...] = ()
    repeats: int = 1
    log: list[Decision] | None = None
    programs: list[Any] | None = None
    refused: list[Any] | None = None
    constants: dict[int, Value] = dataclasses.field(default_factory=dict)
    memory: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    recipe: Recipe = DEFAULT_RECIPE
    delayed: DelayedScales | None = None
    key: jax.Array | None = None
    place: str = ""
    complemented: frozenset[Any] = frozenset()
    read_in_float32: frozenset[Any] = frozenset()
    differentiates: bool = False
    flags: Callable[[str, tuple[Any, ...]], Any] | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        """The settings on which decisions within a program depend, in addition to the program itself."""
        if self.rules.operations:  # their addresses include the lines of callers
            return self.forced, self.complemented, self.path, tuple(map(id, self.callers))
        return self.forced, self.complemented, self.path if self.rules.paths else ""

    @property
    def takes_8_bits(self) -> bool:
        """Whether a rule of the region is "fp8"."""
        return self.forced == "fp8" or self.rules.has_fp8

    def remembered(self, key: object, program: object, find: Callable[[], Found]) -> Found:
        """Returns the cached result of `find` for a program; `key` identifies the fact that `find` computes."""
        key = (key, id(program))
        if key not in self.memory:
            self.memory[key] = program, find()  # keeps the program, and so its identity
        return self.memory[key][1]

    def constant(self, array: jax.Array) -> Value:
        """Returns the same value each time for a constant of any body."""
        return self.constants.setdefault(id(array), argument(array))

    def body(self) -> "Region":
        """Returns the region for the body of a loop or branch, so that its casts do not leak out."""
        inside = {key: value.inside() for key, value in self.constants.items()}
        return dataclasses.replace(self, constants=inside)

    def within(self, equation: JaxprEqn, scope: str, place: str = "") -> "Region":
        """Returns the region for the body of an equation in a scope, at a place."""
        callers, results = (*self.callers, equation), frozenset[Any]()
        if self.complemented and equation.primitive.name in CALLS:
            results = results_inside(body_of(equation), equation, self.complemented)
        return dataclasses.replace(
            self,
            path=join(self.path, scope),
            callers=callers,
            repeats=self.repeats * repeats_of(equation),
            place=place,
            complemented=results,
        )

    def note(
        self,
        equation: JaxprEqn,
        scope: str,
        rule: str,
        reason: Reason,
        dtypes_in: Sequence[Any],
        outputs: Sequence[Value],
    ) -> None:
        """Adds the decision on an equation in a scope to the log, if there is one."""
        if self.log is not None:
            dtypes = tuple(map(str, dtypes_in)), tuple(str(x.dtype) for x in outputs)
            path = join(self.path, scope)
            self.log.append(Decision(path, rule, reason, equation, self.callers, self.repeats, *dtypes))

    def rule_of(self, equation: JaxprEqn) -> tuple[Rule | None, Reason]:
        """Returns the rule of an equation of the current program and its reason; see `kind_of`."""
        rule, reason = self.word_of(equation)
        return kind_of(rule), reason

    def word_of(self, equation: JaxprEqn) -> tuple[Rule | None, Reason]:
        """Returns the rule of an equation as a table says it, and its reason; caches the result of `decide`."""
        scope = str(equation.source_info.name_stack)
        if DECIDED in scope.replace(f"{DECIDED}:", ""):
            return "keep", Reason(Cause.INNER_REGION)
        return self.remembered(("rule", self.settings), equation, lambda: self.decide(equation, scope))

    def decide(self, equation: JaxprEqn, scope: str) -> tuple[Rule | None, Reason]:
        """Returns the rule of an equation, None if no table names it, and the reason for it."""
        name = equation.primitive.name
        function = equation.params.get("name") if name in ("jit", "pjit") else None
        for banned, advice in self.rules.banned:
            if banned in (name, function):
                raise BannedOperationError(f"autocast bans {banned}: {advice}")
        takes_8_bits = name in ENTERED or in_8_bits(equation, self.recipe)
        entries = (entry for entry in self._entries(equation, scope) if takes_8_bits or entry[0] != "fp8")
        decided = next(entries, (None, Reason(Cause.NO_RULE)))
        if decided[0] is None and name in NEAR_A_CONSTANT and equation.outvars[0] in self.complemented:
            return "float32", Reason(Cause.NEAR_A_CONSTANT)
        return decided

    def _entries(self, equation: JaxprEqn, scope: str) -> Iterator[tuple[Rule, Reason]]:
        """Yields the rules that the tables have for an equation, the deciding one first, and their reasons."""
        name = equation.primitive.name
        function = equation.params.get("name") if name in ("jit", "pjit") else None
        path, rules, functions = join(self.path, scope), self.rules, dict(self.rules.functions)
        if rules.operations and name not in ENTERED:
            yield from _matching(rules.operations, address_of((*self.callers, equation), path), Cause.OPERATION)
        yield from _matching(rules.paths, path, Cause.PATH)
        if DECIDED in scope and (fixed := _FIXED.findall(scope)):
            yield fixed[-1], Reason(Cause.AUTOCAST_AS)
        if function is not None and function in functions:
            yield functions[function], Reason(Cause.FUNCTION, function)
        for module in jax_modules(equation):
            if module in functions:
                yield functions[module], Reason(Cause.MODULE, module)
        if self.forced is not None:
            yield self.forced, Reason(Cause.WITHIN, self.forced)
        if (rule := dict(rules.primitives).get(name)) is not None:
            in_half = rule in ("lower", "fp8") and name in PRODUCTS
            rule = "lower" if in_half and not in_8_bits(equation, self.recipe) else rule
            yield (_no_matrix_product(equation) if in_half else None) or (rule, Reason(Cause.PRIMITIVE, name))


def _matching(entries: Sequence[tuple[str, Rule]], text: str, cause: Cause) -> Iterator[tuple[Rule, Reason]]:
    return ((rule, Reason(cause, expression)) for expression, rule in entries if _compiled(expression).search(text))


@functools.cache
def _compiled(expression: str) -> re.Pattern[str]:
    """Returns a regular expression; `re` itself keeps only 512, and tables may have more."""
    return re.compile(expression)


def jax_modules(equation: Any) -> tuple[str, ...]:
    """Returns the jax modules of a called function, such as ("jax.numpy.linalg", "jax.numpy", "jax")."""
    body = equation.params.get(CALLS.get(equation.primitive.name))
    info = getattr(opened(body), "debug_info", None)
    return _modules_of(getattr(info, "func_src_info", None) or "")


_FILE = re.compile(rf" at {re.escape(os.path.dirname(jax.__file__))}\W(?:_src\W)?(.+)\.py:\d+$")


@functools.lru_cache(maxsize=1024)
def _modules_of(source: str) -> tuple[str, ...]:
    found = _FILE.search(source)
    parts = ["jax", *re.split(r"[\\/]", found.group(1))] if found else []
    return tuple(".".join(parts[:count]) for count in range(len(parts), 0, -1))


def in_8_bits(equation: Any, recipe: Recipe) -> bool:
    """Returns whether an equation is a matrix product or a convolution that a recipe can compute in 8 bits."""
    name, params = equation.primitive.name, equation.params
    if name not in FEW_BITS_PRODUCTS or _no_matrix_product(equation) or contracts_one(equation):
        return False
    if name == "dot_general":
        return True
    if name == "conv_general_dilated":
        return recipe.activations.whole
    numbers = params["ragged_dot_dimension_numbers"]
    (lhs, _), (batch, _) = numbers.dot_dimension_numbers
    groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions), params["group_offset"]
    return groups == ((0,), (0,), None) and len(lhs) == 1 and not batch and len(equation.outvars[0].aval.shape) == 2


def is_batched(product: Any) -> bool:
    """Returns whether a product is a `dot_general` with batch dimensions."""
    return product.primitive.name == "dot_general" and bool(product.params["dimension_numbers"][1][0])


def contracts_one(product: Any) -> bool:
    """Returns whether each result of a product or convolution is the product of two numbers."""
    match product.primitive.name:
        case "conv_general_dilated":
            kernel = product.invars[1].aval.shape
            return math.prod(kernel) == kernel[product.params["dimension_numbers"].rhs_spec[0]]
        case "ragged_dot_general":
            numbers = product.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        case _:
            numbers = product.params["dimension_numbers"]
    (contracted, _), _ = numbers
    return math.prod(product.invars[0].aval.shape[axis] for axis in contracted) == 1


def _no_matrix_product(equation: Any) -> tuple[Rule, Reason] | None:
    """Returns rule and reason for a product to which the rule of matrix products does not apply."""
    if lax.Precision.HIGHEST in precisions_of(equation):
        return "float32", Reason(Cause.HIGHEST)
    if equation.primitive.name != "dot_general":
        return None
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    if not contracted:
        return "promote", Reason(Cause.OUTER_PRODUCT)
    if len(batch) < len(equation.outvars[0].aval.shape):
        return None
    if not batch:
        return "float32", Reason(Cause.INNER_PRODUCT)
    return ("float32", Reason(Cause.SQUARE)) if equation.invars[0] is equation.invars[1] else None
