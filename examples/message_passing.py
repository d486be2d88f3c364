"""Message passing in float16, by built-in and by user-defined functions: the mixed-precision guide of DGL.

    python examples/message_passing.py

Arrays are stored in float16, and sums are computed in float32. Expected: both ways agree except for the last digits of
float16. The sum of 13,161 ones is 13160, the nearest float16; adding in float16 ends at 2048.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jmp_train import graphs
from jmp_train.graphs import EdgeBatch, Graph, NodeBatch, fn


def built_in(graph: Graph) -> Graph:
    """Returns the graph with weighted sums `x` at its nodes, and dot products `hx` on its edges."""
    graph = graphs.update_all(graph, fn.u_mul_e("h", "w", "m"), fn.sum("m", "x"))
    return graphs.apply_edges(graph, fn.u_dot_v("h", "x", "hx"))


def user_defined(graph: Graph) -> Graph:
    """Returns the same, by functions of edges and of nodes."""

    def send(edges: EdgeBatch) -> dict[str, jax.Array]:
        return {"m": edges.src["h"] * edges.data["w"]}

    def receive(nodes: NodeBatch) -> dict[str, jax.Array]:
        total = nodes.mailbox["m"].sum(axis=1, dtype=jnp.float32)  # [nodes, degree, 16]
        return {"x": total.astype(jnp.float16)}

    def dot(edges: EdgeBatch) -> dict[str, jax.Array]:
        products = edges.src["h"].astype(jnp.float32) * edges.dst["x"].astype(jnp.float32)
        return {"hx": products.sum(axis=-1, keepdims=True).astype(jnp.float16)}

    return graphs.apply_edges(graphs.update_all(graph, send, receive), dot)


def run(graph: Graph, function: Callable[[Graph], Graph]) -> dict[str, jax.Array]:
    """Returns the results, and the gradient that the sum of `x` has with respect to the weights."""

    def total(weights: jax.Array, graph: Graph) -> tuple[jax.Array, Graph]:
        graph = function(graph.with_edges(w=weights))
        return graph.nodes["x"].sum(dtype=jnp.float32), graph

    gradient, graph = jax.jit(jax.grad(total, has_aux=True))(graph.edges["w"], graph)
    return {"x": graph.nodes["x"], "hx": graph.edges["hx"], "gradient": gradient}


def main() -> None:
    """Prints shapes, dtypes and the largest differences."""
    keys = jax.random.split(jax.random.key(0))
    graph = graphs.rand_graph(30, 100, formats=("mailbox",))  # `receive` needs it under jit
    graph = graph.with_nodes(h=jax.random.uniform(keys[0], (30, 16), jnp.float16))
    graph = graph.with_edges(w=jax.random.uniform(keys[1], (100, 1), jnp.float16))
    left, right = run(graph, built_in), run(graph, user_defined)
    for name in left:
        difference = jnp.abs(left[name] - right[name]).max()
        print(f"{name:8} {left[name].shape} {left[name].dtype}, {right[name].dtype}", end="  ")
        print(f"largest {jnp.abs(left[name]).max():.3f}, difference {difference:.4f}")

    ones, hub = jnp.ones(13_161, jnp.float16), jnp.zeros(13_161, jnp.int32)
    star = graphs.from_edges(range(1, 13_162), hub, 13_162, edges={"w": ones})
    star = graphs.update_all(star, fn.copy_e("w", "m"), fn.sum("m", "x"))
    plain = jax.ops.segment_sum(ones, hub)
    print(f"hub {star.nodes['x'][0]:.0f}, by jax.ops.segment_sum {plain[0]:.0f}")


if __name__ == "__main__":
    main()
