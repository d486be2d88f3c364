"""Finds the precision in which the readers of a variable compute, and whether gradients need it.

Products that compute attention logits keep float32 results. `jax.nn.dot_product_attention` requests a float32 result
for half queries and keys, as torch's attention does: logits often exceed 65504, and every operation that reads them
runs in float32. In a program traced in float32, this request looks the same as the default of `jnp.einsum` and
`jnp.matmul`, so attention written with those is treated alike. A softmax stores its probabilities for the gradient and
not its logits, so float32 logits cost no memory. The logits of a classifier have no batch dimensions and stay half,
because a loss stores them.

`1 - a` keeps few digits of an `a` that half precision rounded near 1, as gates are: that of a GRU, a highway, a
hand-written cross-entropy. The function that makes `a` then runs in float32.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_train.policies.autocasting.primitives import (
    ADDITIONS,
    ARITHMETIC,
    CALLS,
    LAYOUT,
    LIMITS,
    PICKS,
    PLACEMENT,
    body_of,
    names,
    results_inside,
)
from jmp_train.policies.autocasting.region import DECIDED, Region
from jmp_train.policies.autocasting.rules import Rule
from jmp_train.policies.autocasting.values import FLOAT32, variables_read
from jmp_train.policies.programs import bodies_of, opened

_SHAPES = names("reshape squeeze")
_INTO_FLOAT32 = ARITHMETIC | PICKS | LIMITS | {"stop_gradient", "logistic"}
_INTO_HALF = LAYOUT | ARITHMETIC | {"max", "tanh", "logistic"}
_ONTO = ARITHMETIC | LAYOUT | {"select_n", "max"}  # operations that scale, mask and shift logits
_INTO_DIFFERENCES = (
    ARITHMETIC | LAYOUT | PICKS | names("square integer_pow abs max min clamp select_n concatenate pad split")
)
_LOOKED_INTO = {*CALLS, "scan", "remat2", "cond"}


class Readers(NamedTuple):
    """Variables of a program, by their readers.

    Attributes:
      in_float32: variables that are read only in float32, and sums of neighbors.
      in_half: variables that are read only in half, and not only by additions; no sums of neighbors.
      only_add: variables that are only added, so that no gradient needs them.
      read_again: variables that are read more than once.
    """

    in_float32: frozenset[Any]
    in_half: frozenset[Any]
    only_add: frozenset[Any]
    read_again: frozenset[Any]


def readers_of(region: Region, jaxpr: Jaxpr) -> Readers:
    """Returns the variables of a program, grouped by their readers."""

    def find() -> Readers:
        in_float32 = wanted(region, jaxpr, "float32", _INTO_FLOAT32)
        others = (e for e in jaxpr.eqns if e.primitive.name not in ADDITIONS)
        needed = frozenset(itertools.chain.from_iterable(map(variables_read, others)))
        in_half, sums = needed & wanted(region, jaxpr, "lower", _INTO_HALF), _sums_of_neighbors(jaxpr)
        return Readers(in_float32 | sums, in_half - sums, _only_added(region, jaxpr), _read_again(jaxpr))

    return region.remembered(("readers", region.settings), jaxpr, find)


def _read_again(jaxpr: Jaxpr) -> frozenset[Any]:
    """Returns the variables that are read more than once."""
    reads = itertools.chain(jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns))
    counts = Counter(atom for atom in reads if not isinstance(atom, jex.Literal))
    return frozenset(variable for variable, count in counts.items() if count > 1)


def _sums_of_neighbors(jaxpr: Jaxpr) -> frozenset[Any]:
    """Returns the sums that `lax.associative_scan(jnp.add, x)` begins with; later sums have their dtype."""
    slices = {e.outvars[0]: e for e in jaxpr.eqns if e.primitive.name == "slice" and 2 in (e.params["strides"] or ())}
    additions = [e for e in jaxpr.eqns if slices and e.primitive.name == "add"]
    return frozenset(e.outvars[0] for e in additions if _are_neighbors([slices.get(x) for x in variables_read(e)]))


def _are_neighbors(slices: Sequence[Any]) -> bool:
    """Returns whether two slices are the even and the odd places of an array along one axis."""
    if len(slices) < 2 or None in slices or slices[0].invars[0] is not slices[1].invars[0]:
        return False
    strides, others = (e.params["strides"] for e in slices)
    starts = zip(*(e.params["start_indices"] for e in slices), strict=True)
    differ = [(step, *sorted(pair)) for step, pair in zip(strides, starts, strict=True) if len(set(pair)) > 1]
    return strides == others and differ == [(2, 0, 1)]


def wanted(
    region: Region, jaxpr: Jaxpr, rule: Rule, through: frozenset[str], results: frozenset[Any] = frozenset()
) -> frozenset[Any]:
    """Returns the variables whose readers all compute by one rule, directly or through other operations.

    Args:
      region: the region, which caches the result.
      jaxpr: the program.
      rule: "float32" or "lower".
      through: the primitives whose inputs are wanted if their results are.
      results: the wanted results of the program.
    """
    region = noting_complements(region, jaxpr)

    def find() -> frozenset[Any]:
        found, read = set(results), set()
        if through >= PICKS:
            found |= _logarithms(region, jaxpr)
        added = _only_added(region, jaxpr)
        refused = {atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)} - results
        for equation in reversed(jaxpr.eqns):
            found.update(out for out in equation.outvars if out in read and out not in refused)
            variables = set(variables_read(equation))
            read |= variables
            follows = _follows(equation, through, added)
            refused |= variables - _wanted_by(region, equation, variables, found, rule, through, follows=follows)
        found.update(variable for variable in jaxpr.invars if variable in read - refused)
        return frozenset(found)

    return region.remembered(("wanted", rule, through, results, region.settings), jaxpr, find)


def _wanted_by(
    region: Region,
    reader: JaxprEqn,
    variables: set[Any],
    found: set[Any],
    rule: Rule,
    through: frozenset[str],
    *,
    follows: bool,
) -> set[Any]:
    """Returns the variables that an equation reads and wants by a rule."""
    name, scope = reader.primitive.name, str(reader.source_info.name_stack)
    if DECIDED in scope:
        return set()
    decided, _ = region.rule_of(reader)
    if decided is not None:
        return variables if decided == rule or (decided, rule) == ("fp8", "lower") else set()
    if name in CALLS:
        body = body_of(reader)
        inside = wanted(region.within(reader, scope), body, rule, through, results_inside(body, reader, found))
        return _except_for(variables, reader, [inner not in inside for inner in body.invars])
    if name in PLACEMENT & through:
        return _except_for(variables, reader, [result not in found for result in reader.outvars])
    return variables if follows and all(x in found for x in reader.outvars) else set()


def _except_for(variables: set[Any], reader: JaxprEqn, refused: Sequence[bool]) -> set[Any]:
    """Returns the variables without those at positions where an equation refuses them."""
    atoms = list(compress(reader.invars, refused))
    return variables.difference(atom for atom in atoms if not isinstance(atom, jex.Literal))


def _follows(reader: JaxprEqn, through: frozenset[str], added: frozenset[Any]) -> bool:
    """Returns whether an equation's inputs are wanted if its results, some only added, are wanted."""
    name = reader.primitive.name
    if name in PICKS:
        return name in through and not _repeats(reader)
    return name in through or (name in _SHAPES and through >= PICKS and reader.outvars[0] in added)


def _repeats(pick: Any) -> bool:
    """Returns whether an equation may pick more values than there are, which takes more memory in float32."""
    try:
        return pick.outvars[0].aval.size > pick.invars[0].aval.size
    except jax.errors.InconclusiveDimensionOperation:  # for symbolic shapes
        return True


def _only_added(region: Region, jaxpr: Jaxpr) -> frozenset[Any]:
    """Returns the variables that are only added, so that no gradient needs them."""

    def find() -> frozenset[Any]:
        readers = [e for e in jaxpr.eqns if e.primitive.name not in ADDITIONS | {"reduce_sum"}]
        read = itertools.chain.from_iterable(e.invars for e in readers)
        needed = {atom for atom in (*read, *jaxpr.outvars) if not isinstance(atom, jex.Literal)}
        return frozenset(out for e in jaxpr.eqns for out in e.outvars).difference(needed)

    return region.remembered("only added", jaxpr, find)


def _logarithms(region: Region, jaxpr: Jaxpr) -> set[Any]:
    """Returns the logarithms that a rule makes float32, and the sums with them, which become float32 too.

    A loss subtracts values of the same magnitude from the logarithm of a sum of exponentials.
    """
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        follows = name in ADDITIONS and not found.isdisjoint(variables_read(equation))
        is_logarithm = name in ("log", "log1p") and bool(variables_read(equation))
        if not (follows or is_logarithm) or DECIDED in str(equation.source_info.name_stack):
            continue
        rule, _ = region.rule_of(equation)
        if rule == ("float32" if is_logarithm else None):
            found.update(equation.outvars)
    return found


def logits_of(region: Region, jaxpr: Jaxpr) -> frozenset[Any]:
    """Returns the results of products that only a softmax in float32 reads."""

    def find() -> frozenset[Any]:
        asked = {e.outvars[0] for e in jaxpr.eqns if _asks_for_float32(e)}
        asked &= asked and _read_by(region, jaxpr, _maxima, _ONTO)
        through = _ONTO | {"reduce_max", "stop_gradient"}
        return frozenset(asked and asked & wanted(region, jaxpr, "float32", through))

    return region.remembered(("logits", region.settings), jaxpr, find)


def _asks_for_float32(equation: JaxprEqn) -> bool:
    """Returns whether a product with batch dimensions, as in attention, requests a float32 result."""
    if equation.primitive.name != "dot_general":
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return bool(batch) and equation.params["preferred_element_type"] == FLOAT32


def _maxima(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Returns the operations with which every softmax begins."""
    return [e for e in jaxpr.eqns if e.primitive.name == "reduce_max"]


def noting_complements(region: Region, jaxpr: Jaxpr) -> Region:
    """Returns the region for a program, some of whose results may be subtracted from a constant elsewhere."""
    results = frozenset(out for out in jaxpr.outvars if isinstance(out, Var) and out in region.complemented)
    found = _read_by(region, jaxpr, _differences, _INTO_DIFFERENCES, results)
    return dataclasses.replace(region, complemented=found) if found != region.complemented else region


def _differences(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Returns the equations that subtract a constant from a value, or the value from it."""
    constants = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "broadcast_in_dim" and not variables_read(e)}
    return [e for e in jaxpr.eqns if e.primitive.name in ("add", "sub") and _subtracts_constant(e, constants)]


def _subtracts_constant(equation: JaxprEqn, constants: set[Any]) -> bool:
    read = variables_read(equation)
    if equation.primitive.name == "sub":
        return len(read) == 1 or not constants.isdisjoint(read)
    numbers = [atom.val for atom in equation.invars if isinstance(atom, jex.Literal)]
    return len(read) == 1 and any(bool(np.all(np.real(number) < 0)) for number in numbers)


def _read_by(
    region: Region,
    jaxpr: Jaxpr,
    ends: Callable[[Jaxpr], list[JaxprEqn]],
    through: frozenset[str],
    results: frozenset[Any] = frozenset(),
) -> frozenset[Any]:
    """Returns the variables that some equations of a program read, directly or through other operations.

    Args:
      region: the region, which caches the result.
      jaxpr: the program.
      ends: returns these equations of a program.
      through: the primitives of the other operations.
      results: the results of the program that such equations read elsewhere.
    """

    def find() -> frozenset[Any]:
        found, last = set(results), set(map(id, ends(jaxpr)))
        for equation in reversed(jaxpr.eqns):
            name = equation.primitive.name
            operands = equation.invars[1:] if name == "cond" else equation.invars
            for body in map(opened, bodies_of(equation) if name in _LOOKED_INTO else ()):
                inside = _read_by(region, body, ends, through, results_inside(body, equation, found))
                pairs = zip(operands, body.invars, strict=True)
                found.update(x for x, inner in pairs if inner in inside and not isinstance(x, jex.Literal))
            if id(equation) in last or (name in through and not found.isdisjoint(equation.outvars)):
                found.update(variables_read(equation))
        return frozenset(found)

    return region.remembered((ends, results), jaxpr, find)
