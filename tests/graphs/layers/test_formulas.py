"""Layers are their published formulas, written in float64 with dense incidences; over several features at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_cases import CASES, draw_inputs, in_float64, layer_call, parameters, small_graph, weights_of

pytestmark = pytest.mark.quick

QUICK = (
    *("graph both expanding, weighted", "sage lstm, weighted", "gat residual, weighted", "gatv2 residual, weighted"),
    *("gin max", "tag, weighted", "cheb", "relational bdd, weighted", "transformer gated, mean of heads"),
    *("edge network", "pna"),
)


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in CASES])
def test_layers_are_their_formulas(name: str) -> None:
    case = CASES[name]
    graph, edges, count = small_graph()
    _, state = parameters(case.make(rngs=nnx.Rngs(0)))
    x, w = draw_inputs(case, count, edges, "float32")
    batch = jnp.stack([x, -x, 2 * x])
    found = jax.jit(jax.vmap(layer_call(case, graph), (None, 0, None)))(state, batch, w)
    for x, result in zip(np.asarray(batch, np.float64), found, strict=True):
        wanted = case.exact(np, in_float64(state), edges, x, weights_of(w, edges))
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
