"""Remedies of problems: entries of autocast's rules, a loss scale, an epsilon, a mask, another state."""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from jmp_train.policies.autocasting import HALVES, PRODUCTS, AutocastRules, Rule, replace_arguments
from jmp_train.tools.diagnosing.arithmetic import SUMS, TO_FEW_BITS, rounding_of
from jmp_train.tools.diagnosing.evidence import Evidence
from jmp_train.tools.diagnosing.measures import is_float, is_low
from jmp_train.tools.diagnosing.operation_numerics import function_called, is_by_policy, is_of_graphs

Action = Literal["rules", "argument", "loss scale", "epsilon", "mask", "reduction", "state", "mathematics"]

NO_RULES = AutocastRules()
# What passes the errors of its operands on as they are.
LINEAR = SUMS | {"mul", "div", "neg", "integer_pow", "square", "convert_element_type"}
_TO_WHOLE = frozenset(("floor", "ceil", "round", "rem"))
_GRAPH_STORAGE = "graph_storage"  # the function by which operations on graphs keep their rows in half
_OF_NOBODY = ("_where", "clip", "where")  # jitted functions of jax's that do not say what a line is about


@dataclasses.dataclass(frozen=True)
class Remedy:
    """The remedy of a problem.

    Attributes:
      action: "rules": entries of `AutocastRules`; "argument": keep an argument in float32; "loss scale": another one;
        "epsilon": a larger one; "mask": a smaller fill value; "reduction": gradients that are averaged in float32;
        "state": master weights, stochastic rounding or float32; "mathematics": float32 has it too.
      advice: description of the action.
      rules: the entries to add to `AutocastRules`; empty if rules do not help.
      value: the proposed loss scale, epsilon or fill value, or None.

    Example:
      >>> print(Remedy("loss scale", "a loss scale of 1024", value=1024.0))
      a loss scale of 1024
    """

    action: Action
    advice: str
    rules: AutocastRules = NO_RULES
    value: float | None = None

    @property
    def text(self) -> str:
        """The advice, with the entries as code."""
        return self.advice + (f": rules.replace({replace_arguments(self.rules)})" if self.rules != NO_RULES else "")

    def __str__(self) -> str:
        return self.text


def in_float32(evidence: Evidence, row: int, advice: str = "float32 here") -> Remedy:
    """Returns the entries that put a row's operation and related ones into float32.

    Args:
      evidence: the evidence of a diagnosis.
      row: number of the row.
      advice: description of the action.
    """
    return _together(evidence, [row], advice)


def operands_in_float32(evidence: Evidence, row: int, *, shared: bool = False, products: bool = False) -> Remedy:
    """Returns the entries that put a row's operation and the sources of its operands into float32.

    An operation that amplifies its operands' errors needs exact operands. Their sources are linear operations and the
    first others before these, except sources that several operands share, whose error is the same in all.

    Args:
      evidence: the evidence of a diagnosis.
      row: number of the row.
      shared: True to include shared sources.
      products: True to include the operands of products.
    """
    together = _operands(evidence, row, shared=shared)
    if products:
        of_products = [i for i in together if i != row and evidence.rows[i].primitive in PRODUCTS]
        together = together.union(*(_operands(evidence, i, shared=shared) for i in of_products))
    return _together(evidence, sorted(together), "float32 here, and for what it is computed from")


def everything_before(evidence: Evidence, row: int) -> Remedy:
    """Returns the entries that put a row's operation and all of the forward pass before it into float32.

    Args:
      evidence: the evidence of a diagnosis.
      row: number of the row.
    """
    before = [i for i in sorted(evidence.before(row)) if evidence.direction(i) == "forward" and _is_half(evidence, i)]
    return _together(evidence, before, "float32 here, and for all that it is computed from")


def in_half(evidence: Evidence, row: int) -> Remedy:
    """Returns the entry that puts a product in 8 bits into half precision.

    Args:
      evidence: the evidence of a diagnosis.
      row: row of the product.
    """
    name, line = _of_line(evidence, row), evidence.sites[row].line
    rules = NO_RULES.replace(operations={name: "lower"}) if line else NO_RULES.replace(primitives={name: "lower"})
    return Remedy("rules", "half precision here", rules)


def _operands(evidence: Evidence, row: int, *, shared: bool) -> set[int]:
    together = {row} if is_float(evidence.rows[row].dtype) else set[int]()
    reached, new, common = {row}, [row], set[int]()
    while new:
        sources = [evidence.sources(reader) for reader in new]
        if not shared:
            counts = collections.Counter((n, i) for n, of in enumerate(sources) for x in of for i in evidence.before(x))
            common.update(i for (_, i), count in counts.items() if count > 1)
        new = list({i for of in sources for i in of} - reached - common)
        reached.update(new)
        together.update(i for i in new if _is_half(evidence, i) and not _is_cast_by_policy(evidence, i))
        new = [i for i in new if evidence.rows[i].primitive in LINEAR | _TO_WHOLE]
    return together


def _is_cast_by_policy(evidence: Evidence, row: int) -> bool:
    """Returns whether a policy casts an argument here, which it no longer does where rules take its place."""
    return bool(evidence.argument(row)) and is_by_policy(evidence.sites[row])


def _is_half(evidence: Evidence, row: int) -> bool:
    """Returns whether an operation takes or returns numbers in lower precision, as products with float32 results do."""
    found = evidence.rows[row]
    is_rounded = rounding_of(evidence.sites[row].equation) is not None
    return is_rounded or is_low(found.dtype) or (found.primitive in PRODUCTS and any(map(is_low, found.dtypes_in)))


def _together(evidence: Evidence, rows: Sequence[int], advice: str) -> Remedy:
    """Returns the entries for several operations."""
    rules = NO_RULES
    for row in rows:
        table, names = _entry(evidence, row)
        entries: dict[str, Rule] = dict.fromkeys(names, "float32")
        rules = rules.replace(**{table: entries})
    return Remedy("rules", advice, rules)


def larger_epsilon(evidence: Evidence, row: int) -> Remedy:
    """Returns the least epsilon that a row's dtype has among its normal numbers."""
    least = float(jnp.finfo(evidence.rows[row].dtype).tiny)
    whole = f"jax.nn.log_{name} in place of the logarithm, or " if (name := _inside_logarithm(evidence, row)) else ""
    rest = in_float32(evidence, row, f"{whole}an epsilon of at least {least:.2g}, or float32 here")
    return dataclasses.replace(rest, action="epsilon", value=least)


def _inside_logarithm(evidence: Evidence, row: int) -> str:
    """Returns "softmax" or "sigmoid" if an epsilon is added to one inside a logarithm; otherwise empty."""
    if not any(evidence.rows[reader].primitive == "log" for reader in evidence.readers(row)):
        return ""
    names = [
        "sigmoid" if evidence.rows[i].primitive == "logistic" else function_called(evidence.sites[i])
        for i in evidence.sources(row)
    ]
    return next((name for name in names if name in ("sigmoid", "softmax")), "")


def float32_argument(path: str, dtype: str, *, is_parameter: bool, is_whole: bool) -> Remedy:
    """Returns the remedy that keeps an argument in float32 under a policy.

    Args:
      path: path of the argument.
      dtype: the dtype to which it is cast.
      is_parameter: True if it belongs to the first argument, to which a `policy_by_path` applies.
      is_whole: True if it has whole numbers.
    """
    ways = [f'policy="autocast_{dtype}", which casts nothing before it is used'] if dtype in HALVES else []
    if is_parameter:
        leaf = re.escape(path.removeprefix("0/").removeprefix("params/"))
        ways.append(
            f'jt.policy_by_path({{"{leaf}$": "float32"}}, default=policy), with precision="highest" in products'
        )
    else:
        ways.append(f"jt.apply_policy(model, policy) on the model alone, in a loss_fn that reads {path!r} as it is")
    integers = "pass it as integers, or " if is_whole else ""
    return Remedy("argument", f"{integers}keep {path!r} in float32: {', or '.join(ways)}")


def float32_feature(path: str) -> Remedy:
    """Returns the remedy that keeps a feature of a graph in float32.

    Args:
      path: path of the argument.
    """
    by_rules = "keep it in float32 by AutocastPolicy(..., rules=report.rules) in place of this policy"
    rules = NO_RULES.replace(functions={_GRAPH_STORAGE: "float32"})
    return Remedy("argument", f"normalize {path!r} before it is cast, or {by_rules}", rules)


def wide_reduction() -> Remedy:
    """Returns the remedy that averages gradients over devices in float32."""
    return Remedy("reduction", "average the gradients in float32: a policy with reduce_dtype=jnp.float32")


def float32_sum(by_rules: Remedy | None) -> Remedy:
    """Returns the remedy that computes a user's own sum over devices in float32.

    Args:
      by_rules: an alternative remedy; None if autocast rules do not reach it, as for gradients.
    """
    text = "add up in float32: jax.lax.psum(x.astype(jnp.float32), axis)"
    if by_rules is not None:
        return dataclasses.replace(by_rules, advice=f"{text}, or {by_rules.advice}")
    return Remedy("reduction", f"{text}, or jt.reduce_gradients(grads, (axis,)), which averages gradients so")


def full_gradients() -> Remedy:
    """Returns the remedy for the path from gradients to an update of a state in float32."""
    return Remedy("state", "float32 from the gradients on: grads = jt.cast_to_full(grads) before this line")


def full_state(dtype: str, *, is_number: bool = False) -> Remedy:
    """Returns the remedy for an update, which autocast rules do not reach.

    Args:
      dtype: dtype of the state; parameters in float16 are not rounded stochastically.
      is_number: True if it is a single number, such as a counter, outside of the optimizer.
    """
    if is_number:
        return Remedy("state", "float32 for it, or an integer if it counts")
    rounding = ", or with_stochastic_rounding(optimizer, key)" if dtype == "bfloat16" else ""
    return Remedy("state", f"float32 for it: of an optimizer by with_master_weights(optimizer){rounding}")


def smaller_fill(dtype: str, *, is_added: bool = True) -> Remedy:
    """Returns a fill value for masks of a dtype: the lowest, or half of it to leave room for additions.

    Args:
      dtype: dtype of the mask.
      is_added: True if the fill value takes part in an addition.
    """
    half = " / 2" if is_added else ""
    fill = float(jnp.finfo(dtype).min) / (2 if is_added else 1)
    text = f"fill with jnp.finfo(x.dtype).min{half}, {fill:.5g} in {dtype}: a row of masks alone is finite"
    return Remedy("mask", text, value=fill)


def smaller_scale(evidence: Evidence, advice: str = "") -> Remedy:
    """Returns the power of two at which the largest gradient is at most half of its dtype's maximum.

    Args:
      evidence: the evidence of a diagnosis.
      advice: description of a better remedy.
    """
    scale = evidence.loss_scale * 2.0 ** math.floor(math.log2(_room_for_gradients(evidence)) - 1)
    rest = ", to which the dynamic one falls by itself" if evidence.dynamic else ""
    return Remedy("loss scale", f"{advice}a loss scale of {scale:g}{rest}", value=scale)


def larger_scale(evidence: Evidence) -> Remedy | None:
    """Returns a loss scale at which the largest gradient is a sixteenth of its dtype's maximum; None if it is."""
    room = _room_for_gradients(evidence) / 16
    if room < 2:
        return None
    scale = evidence.loss_scale * 2.0 ** min(math.floor(math.log2(room)), 24)
    return Remedy("loss scale", f"a loss scale of {scale:g} (it is {evidence.loss_scale:g})", value=scale)


def _room_for_gradients(evidence: Evidence) -> float:
    """Returns the factor by which gradients in lower precision can grow before one of them overflows."""
    in_low = (row for row in evidence.rows if row.direction == "backward" and is_low(row.dtype) and row.largest)
    return min((float(jnp.finfo(row.dtype).max) / row.largest for row in in_low), default=1.0)


def merged(*tables: AutocastRules) -> AutocastRules:
    """Returns rules with the entries of others; later ones replace earlier ones.

    Args:
      *tables: the rules to extend, and the others.
    """
    rules, *others = tables
    for other in others:
        rules = rules.replace(**{name: dict(entries) for name, entries in vars(other).items()})
    return rules


def lacks(rules: AutocastRules, others: AutocastRules) -> bool:
    """Returns whether some entry of other rules is missing in `rules`."""
    return any(not set(entries) <= set(getattr(rules, name)) for name, entries in vars(others).items())


def _entry(
    evidence: Evidence, row: int
) -> tuple[Literal["paths", "functions", "primitives", "operations"], tuple[str, ...]]:
    """Returns the best table of the rules for an operation: path, function, line or primitive."""
    row = product_of_cast(evidence, row)
    site, found = evidence.sites[row], evidence.rows[row]
    if found.primitive == "convert_element_type" and is_of_graphs(site):
        return "functions", (_GRAPH_STORAGE,)
    if site.path:
        return "paths", (re.escape(site.path) + "$",)
    if site.function and site.function not in _OF_NOBODY:
        return "functions", (site.function,)
    if found.primitive in PRODUCTS and site.line:  # as a primitive it would be those of the whole model
        return "operations", (_of_line(evidence, row),)
    same_line = {
        other.primitive
        for other in evidence.rows
        if (other.file, other.line, other.direction) == (found.file, found.line, "forward")
    }
    apart = {*PRODUCTS, "convert_element_type", TO_FEW_BITS.name} - {found.primitive}
    return "primitives", tuple(sorted((same_line | {found.primitive}) - apart - {"add_any"}))


def _of_line(evidence: Evidence, row: int) -> str:
    """Returns the expression for the operations of a row's name at its line; without a line the name."""
    found, line = evidence.rows[row], evidence.sites[row].line
    return f":{found.primitive}@.*{line_expression(line)}( |$)" if found.line else found.primitive


def line_expression(line: str) -> str:
    """Returns an expression for a file and line that also matches on other machines: folder, file and line number."""
    return re.escape("/".join(line.replace("\\", "/").split("/")[-2:]))


def product_of_cast(evidence: Evidence, row: int) -> int:
    """Returns the matrix product for which autocast casts a value, whose rule determines the cast; otherwise the row.

    Args:
      evidence: the evidence of a diagnosis.
      row: row of the cast.
    """
    if evidence.rows[row].primitive == TO_FEW_BITS.name:
        return next(i for i in evidence.after(row) if evidence.rows[i].primitive in PRODUCTS)
    readers = evidence.readers(row)
    is_cast = evidence.rows[row].primitive == "convert_element_type" and evidence.sites[row].under_autocast
    products = [i for i in readers if evidence.rows[i].primitive in PRODUCTS]
    return products[0] if is_cast and products and len(products) == len(readers) else row
