"""A program before and after autocast: what jax traces, and what the rewritten function runs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var
from parts import diagram, key, text

import jmp_train as jt

ROW, TOP = 26, 116


class Operation(NamedTuple):
    """An equation of a program.

    Attributes:
      name: of the primitive.
      operands: variables and constants.
      result: the variable.
    """

    name: str
    operands: list[Var | Literal]
    result: Var


class Row(NamedTuple):
    """One operation of both programs.

    Attributes:
      before: as it was traced.
      result: its result's name and dtype after.
      name: of the operation.
      operands: of the operation after, each with the dtype that it is cast to, or None.
      rule: what autocast decided.
    """

    before: str
    result: tuple[str, str]
    name: str
    operands: list[tuple[str, str | None]]
    rule: str


def fn(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns what the picture shows the program of."""
    return jax.nn.softmax(x @ w) * 2


def rows() -> list[Row]:
    """Returns the operations of the function before and after.

    Raises:
      ValueError: autocast does not keep the operations, in their order, and adds casts alone.
    """
    x, w = jnp.ones((4, 8)), jnp.ones((8, 3))
    before, after = (jax.make_jaxpr(f)(x, w).jaxpr for f in (fn, jt.autocast(fn)))
    olds, news = operations(before), operations(after)
    names = {var: chr(ord("a") + i) for i, var in enumerate([*before.invars, *(old.result for old in olds)])}
    kept = [new for new in news if new.name != "convert_element_type"]
    if [new.name for new in kept] != [old.name for old in olds]:
        raise ValueError("autocast changed the operations")
    renamed = {new: names[old] for old, new in zip(before.invars, after.invars, strict=True)}
    renamed |= {new.result: names[old.result] for old, new in zip(olds, kept, strict=True)}
    cast_from = {new.result: new.operands[0] for new in news if new.name == "convert_element_type"}
    decided = [row["rule"] for row in jt.explain_autocast(fn, x, w).rows()]

    def operand(x: Var | Literal) -> tuple[str, str | None]:
        if isinstance(x, Literal):
            return f"{x.val:g}", None
        cast = None
        while x in cast_from:
            cast, x = cast or _dtype(x), cast_from[x]
        return renamed[x], cast

    def traced(old: Operation) -> str:
        operands = (f"{x.val:g}" if isinstance(x, Literal) else names[x] for x in old.operands)
        return f"{names[old.result]}:f32 = {old.name} {' '.join(operands)}"

    return [
        Row(
            traced(old),
            (names[old.result], _dtype(new.result)),
            old.name,
            [operand(x) for x in new.operands],
            rule,
        )
        for old, new, rule in zip(olds, kept, decided, strict=True)
    ]


def operations(program: Jaxpr) -> list[Operation]:
    """Returns a program's operations, where jax 0.12 has a jitted function of one primitive the primitive."""
    found = []
    for equation in program.eqns:
        inner, operands = equation, list(equation.invars)
        if equation.primitive.name == "jit":
            (inner,) = equation.params["jaxpr"].eqns
            outer = dict(zip(equation.params["jaxpr"].jaxpr.invars, equation.invars, strict=True))
            operands = [x if isinstance(x, Literal) else outer[x] for x in inner.invars]
        found.append(Operation(inner.primitive.name, operands, equation.outvars[0]))
    return found


def _dtype(x: Var | Literal) -> str:
    return x.aval.str_short(short_dtypes=True).partition("[")[0]


def draw() -> str:
    """Returns the picture."""
    alt = (
        "The traced program of softmax(x @ w) * 2, and beside it what autocast runs: the matrix product has float16 "
        "operands, and the exponential and its sum are float32."
    )
    found = rows()
    heads = [
        key(20, 4, [("half", "float16"), ("float32", "float32")]),
        text(20, 52, "jax.make_jaxpr(fn)(x, w)", "code"),
        text(340, 52, "after jt.autocast(fn)", "code"),
        text(650, 52, "rule", "soft"),
        text(20, 86, "a:f32 = x   b:f32 = w", "code"),
        text(340, 86, "a:f32 = x   b:f32 = w", "code"),
    ]
    return diagram(740, TOP + ROW * len(found) + 8, alt, [*heads, *(_drawn(row, i) for i, row in enumerate(found))])


def _drawn(row: Row, place: int) -> str:
    y = TOP + ROW * place
    name, dtype = row.result
    kind = "half" if dtype == "f16" else "float32"
    operands = " ".join(f"{cast}({name})" if cast else name for name, cast in row.operands)
    return "\n".join(
        [
            text(20, y + 4, row.before, "code"),
            f'<rect class="{kind}" x="332" y="{y - 13}" width="308" height="{ROW - 3}" rx="4"/>',
            text(340, y + 4, f"{name}:{dtype} = {row.name} {operands}", "code"),
            text(650, y + 4, row.rule, "soft"),
        ]
    )
