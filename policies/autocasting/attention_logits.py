"""Finds the matrix products that make attention logits, which keep float32's range and precision.

`jax.nn.dot_product_attention` asks for a float32 result of half queries and keys, as torch's attention computes
it: logits beyond 65504 are not rare, and all that reads them is float32. In a program traced for float32 that
wish looks like the default of `jnp.einsum` and `jnp.matmul`; those who write an attention by these mean the same.
A softmax saves its probabilities and not its logits for the gradient, so that this costs no memory there. The
logits of a classifier, which contract no batches, stay half: a loss saves them.
"""

from typing import Any

import jax.extend.core as jex
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_train.policies.autocasting.primitive_kinds import ARITHMETIC, CALLS, LAYOUT
from jmp_train.policies.autocasting.readers import wanted
from jmp_train.policies.autocasting.region import Region
from jmp_train.policies.autocasting.values import FLOAT32, variables_read

_ONTO = ARITHMETIC | LAYOUT | {"select_n", "max"}  # what scales, masks and shifts logits


def logits_of(region: Region, jaxpr: Jaxpr) -> frozenset[Any]:
    """Returns the results of a program's products that a softmax in float32 reads, and nothing else."""

    def find() -> frozenset[Any]:
        asked = {e.outvars[0] for e in jaxpr.eqns if _asks_for_float32(e)}
        asked &= asked and _read_by_maximum(region, jaxpr, frozenset())
        through = _ONTO | {"reduce_max", "stop_gradient"}
        return frozenset(asked and asked & wanted(region, jaxpr, "float32", through))

    return region.remembered(("logits", region.settings), jaxpr, find)


def _asks_for_float32(equation: JaxprEqn) -> bool:
    """Returns whether a product of batches, as attention's is and no layer's, names float32 as its result's type."""
    if equation.primitive.name != "dot_general":
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return bool(batch) and equation.params["preferred_element_type"] == FLOAT32


def _read_by_maximum(region: Region, jaxpr: Jaxpr, results: frozenset[Any]) -> frozenset[Any]:
    """Returns the variables of which a maximum is taken, as every softmax begins, given such results."""

    def find() -> frozenset[Any]:
        found = set(results)
        for equation in reversed(jaxpr.eqns):
            name = equation.primitive.name
            if name in CALLS:
                body = equation.params[CALLS[name]]
                body = getattr(body, "jaxpr", body)
                pairs = zip(body.outvars, equation.outvars, strict=True)
                outs = [x for x, out in pairs if out in found and not isinstance(x, jex.Literal)]
                inside = _read_by_maximum(region, body, frozenset(outs))
                pairs = zip(equation.invars, body.invars, strict=True)
                found.update(x for x, inner in pairs if inner in inside and not isinstance(x, jex.Literal))
            elif name == "reduce_max" or (name in _ONTO and any(out in found for out in equation.outvars)):
                found.update(variables_read(equation))
        return frozenset(found)

    return region.remembered(("read by a maximum", results), jaxpr, find)
