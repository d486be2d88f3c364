"""Finds the matrix products that compute attention logits, to keep their results in float32.

`jax.nn.dot_product_attention` requests a float32 result for half queries and keys, as torch's attention does: logits
often exceed 65504, and every operation that reads them runs in float32. In a program traced in float32, this request
looks the same as the default of `jnp.einsum` and `jnp.matmul`, so attention written with those is treated alike. A
softmax stores its probabilities for the gradient and not its logits, so float32 logits cost no memory. The logits of a
classifier have no batch dimensions and stay half, because a loss stores them.
"""

from typing import Any

import jax.extend.core as jex
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_train.policies.autocasting.primitive_kinds import ARITHMETIC, CALLS, LAYOUT
from jmp_train.policies.autocasting.readers import wanted
from jmp_train.policies.autocasting.region import Region
from jmp_train.policies.autocasting.values import FLOAT32, variables_read

_ONTO = ARITHMETIC | LAYOUT | {"select_n", "max"}  # operations that scale, mask and shift logits


def logits_of(region: Region, jaxpr: Jaxpr) -> frozenset[Any]:
    """Returns the results of products that only a softmax in float32 reads."""

    def find() -> frozenset[Any]:
        asked = {e.outvars[0] for e in jaxpr.eqns if _asks_for_float32(e)}
        asked &= asked and _read_by_maximum(region, jaxpr, frozenset())
        through = _ONTO | {"reduce_max", "stop_gradient"}
        return frozenset(asked and asked & wanted(region, jaxpr, "float32", through))

    return region.remembered(("logits", region.settings), jaxpr, find)


def _asks_for_float32(equation: JaxprEqn) -> bool:
    """Returns whether a product with batch dimensions, as in attention, requests a float32 result."""
    if equation.primitive.name != "dot_general":
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    return bool(batch) and equation.params["preferred_element_type"] == FLOAT32


def _read_by_maximum(region: Region, jaxpr: Jaxpr, results: frozenset[Any]) -> frozenset[Any]:
    """Returns the variables that a maximum reads, the first operation of every softmax; `results` are read by one."""

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
