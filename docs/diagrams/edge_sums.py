"""The program of a function of one edge, and where the engine of edge sums cuts it."""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal
from parts import diagram, key, text

from jmp_train.graphs import from_edges
from jmp_train.graphs.kernels import BlockReduction, EdgeIds, Ends, size_of, traced

ROW, TOP, HEADS, WIDTH = 26, 92, 4, 64


def gated(fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
    """Returns the terms of what the picture shows: the sender's row times a gate for each head."""
    del fixed, ids
    row, score = inputs.senders
    gate = jnp.exp(score + inputs.receivers)
    return Ends(receivers=(gate, gate[:, None] * row))


def draw() -> str:
    """Returns the picture."""
    edges = from_edges([0], [1], 2).connections.neighbors
    assert edges is not None
    scores = jnp.zeros((2, HEADS))
    ends = Ends(), Ends((jnp.zeros((2, HEADS, WIDTH)), scores), scores)
    program, results = traced(gated, edges, *ends)
    reduction = BlockReduction.of(program, edges, "receivers", ends, results.receivers)
    names: dict[Any, str] = dict(zip(program.arguments, ("row[u]", "score[u]", "score[v]"), strict=False))
    lines, first = [], set(map(id, reduction.first.equations))
    for equation in program.closed.jaxpr.eqns:
        (result,) = equation.outvars
        names[result] = chr(ord("a") + len(lines))
        operands = " ".join(f"{x.val:g}" if isinstance(x, Literal) else names[x] for x in equation.invars)
        line = f"{names[result]} = {equation.primitive.name} {operands}"
        lines.append((line, size_of(result), id(equation) in first))
    alt = (
        "The program of exp(score[u] + score[v]) times row[u], operation by operation: those of 4 numbers an edge run "
        "for whole blocks of edges, those of 256 for one place of each block after the other."
    )
    heads = [
        key(20, 4, [("float32", "all places of a block at once"), ("half", "one place after the other")]),
        text(20, 62, "the function of one edge", "soft"),
        text(400, 62, "numbers of an edge", "soft"),
    ]
    return diagram(560, TOP + ROW * len(lines), alt, [*heads, *(_drawn(i, *x) for i, x in enumerate(lines))])


def _drawn(place: int, line: str, size: int, is_first: bool) -> str:
    y, kind = TOP + ROW * place, "float32" if is_first else "half"
    rect = f'<rect class="{kind}" x="12" y="{y - 13}" width="370" height="{ROW - 3}" rx="4"/>'
    return "\n".join([rect, text(20, y + 4, line, "code"), text(400, y + 4, str(size), "soft")])
