"""Where half precision goes wrong silently, elsewhere: products in between, and gradients under autocast."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import ONE_HALF

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs import fn

pytestmark = [pytest.mark.quick, pytest.mark.newest]

COPY, SUM = fn.copy_u("h", "m"), fn.sum("m", "x")


def test_products_beyond_float16_in_between() -> None:
    """Four products of 300 and 300 whose signs cancel; and ten of 6e4 and 0.1, each within the range."""
    feature, signs = jnp.array([300, 300, 300, 300], "float16"), jnp.array([1, -1, 1, -1], "float16")
    pair = graphs.from_edges([0], [1], 2, nodes={"h": jnp.stack([feature, feature * signs])})
    assert graphs.apply_edges(pair, fn.u_dot_v("h", "h", "s")).edges["s"].tolist() == [[0]]
    star = graphs.from_edges(range(1, 11), [0] * 10, 11, {"h": jnp.full(11, 6e4, "float16")})
    star = star.with_edges(w=jnp.full(10, 0.1, "float16"))
    summed = graphs.update_all(star, fn.u_mul_e("h", "w", "m"), SUM).nodes["x"]
    assert float(summed[0]) == pytest.approx(6e4, rel=float(jnp.finfo("float16").eps))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("which", [slice(n, None, 3) for n in range(3)])
@pytest.mark.parametrize("half", ONE_HALF)
def test_under_autocast_a_hub_of_float32_features_gets_its_gradient_unrounded(half: str, which: slice) -> None:
    """Each of 701 edges out of node 0 sends 300 back: together they are beyond float16, and no number of bfloat16."""
    rim = np.arange(1, 702)
    graph = graphs.from_edges(rim * 0, rim, 702)
    end, of_edges = jnp.zeros((702, 1)), jnp.ones((701, 2))

    def passed(reduce: Any, implementation: str, h: jax.Array) -> jax.Array:
        return graphs.update_all(graph.with_nodes(h=h), COPY, reduce, implementation=implementation).nodes["x"]

    def scores(h: jax.Array) -> jax.Array:
        whole = graph.with_nodes(h=h, one=jnp.ones_like(h))
        return graphs.apply_edges(whole, fn.u_dot_v("h", "one", "m"), implementation="chunked").edges["m"]

    def attended(implementation: str, h: jax.Array) -> jax.Array:
        return graphs.gat_attention(graph, h[:, None], end, end, implementation=implementation)

    exact = [
        *(functools.partial(passed, SUM, name) for name in ("xla", "chunked")),
        functools.partial(passed, fn.max("m", "x"), "chunked"),
        scores,
        *(functools.partial(attended, name) for name in ("xla", "chunked")),
        lambda h: graphs.propagate(graph, h, 2, norm="none", alpha=0.5),
        lambda h: graphs.gine_conv(graph, h, of_edges),
        functools.partial(graphs.GINConv(), graph),
    ]
    with_products = [
        graphs.GraphConv(2, 2, norm="none", allow_zero_in_degree=True, rngs=nnx.Rngs(0)),
        graphs.SAGEConv(2, 2, aggregator="gcn", rngs=nnx.Rngs(0)),
        graphs.EdgeConv(2, 2, nnx.tanh, rngs=nnx.Rngs(0)),
    ]
    bounds = [1e-6] * len(exact) + [2 * float(jnp.finfo(half).eps)] * len(with_products)
    cases = [*zip([*exact, *(functools.partial(layer, graph) for layer in with_products)], bounds, strict=True)][which]

    def run(each: list[jax.Array]) -> list[jax.Array]:
        return [function(h) for (function, _), h in zip(cases, each, strict=True)]

    def gradients(run: Any, each: list[jax.Array]) -> list[jax.Array]:
        found, pullback = jax.vjp(run, each)
        return pullback([jnp.full_like(x, 300) for x in found])[0]

    h = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, (702, 2)), half).astype("float32")
    wanted, found = (jax.jit(functools.partial(gradients, x))([h] * len(cases)) for x in (run, jt.autocast(run, half)))
    for place, (x, y, (_, bound)) in enumerate(zip(found, wanted, cases, strict=True)):
        assert np.abs(y[0]).max() > 30_000
        assert np.abs(x - y).max() <= bound * np.abs(y).max(), place
