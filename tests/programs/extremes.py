"""Extremes of messages and their gradients against float64; as a program, under the XLA_FLAGS of its environment."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train import graphs
from jmp_train.graphs import fn

NODES, EDGES = 60, 3_000
OPERATIONS: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "dot": lambda x, y: (x * y).sum(-1, keepdims=True),
    "function": lambda x, y: x * y - x,  # which XLA may contract, or not
}


def of_reference(operation: str, ends: list[np.ndarray], places: list[np.ndarray], is_max: bool) -> Any:
    """Returns in float64 the extremes, edges that have them, and gradients of the sum of extremes times their index."""
    left, right = (np.asarray(x, "float64")[at] for x, at in zip(ends, places, strict=True))
    terms = OPERATIONS[operation](left, right)
    most = np.full((NODES, *terms.shape[1:]), -np.inf if is_max else np.inf)
    (np.maximum if is_max else np.minimum).at(most, places[-1], terms)
    is_most = terms == most[places[-1]]
    ties = np.zeros(most.shape)
    np.add.at(ties, places[-1], is_most)
    share = is_most * (factors(most) / np.maximum(ties, 1))[places[-1]]
    one = np.ones_like(left)
    slopes = {
        "add": (one, one),
        "sub": (one, -one),
        "div": (1 / right, -left / right**2),
        "function": (right - 1, left),
    }
    slopes = slopes.get(operation, (right, left))
    found = [np.zeros(np.shape(x)) for x in ends]
    for total, at, slope in zip(found, places, slopes, strict=True):
        np.add.at(total, at, share * slope)
    return most, is_most, found


def factors(most: Any) -> np.ndarray:
    """Returns factors of the extremes in the loss."""
    return np.cos(np.arange(most.size)).reshape(most.shape)


def check(operation: str, shape: tuple[int, ...], dtype: str = "float32", implementation: str = "chunked") -> None:
    """Asserts that extremes, the edges that have them, and gradients are those of float64."""
    random = np.random.default_rng(len(shape) + shape[-1])
    senders, receivers = random.integers(0, NODES, (2, EDGES))
    receivers[:200], senders[200:500] = 7, 3
    ends = [jnp.asarray(random.normal(size=(NODES, *shape)), dtype) for _ in range(2)]
    graph = graphs.from_edges(senders, receivers, NODES, formats=("coo", "csr"))
    message: Any = graphs.per_edge(lambda edge: {"m": edge.src["x"] * edge.dst["y"] - edge.src["x"]})
    if operation != "function":
        message = getattr(fn, f"u_{operation}_v")("x", "y", "m")

    def reduced(names: Any, x: jax.Array, y: jax.Array) -> Any:
        reductions = [getattr(fn, name)("m", name) for name in names]
        whole = graph.with_nodes(x=x, y=y)
        return graphs.update_all(whole, message, reductions, implementation=implementation).nodes

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(name: str, x: jax.Array, y: jax.Array) -> Any:
        return jax.grad(lambda *ends: (reduced([name], *ends)[name].astype("float32") * factors(wanted)).sum(), (0, 1))(
            x, y
        )

    places = [senders, receivers]
    found = jax.jit(functools.partial(reduced, ("max", "min", "argmax", "argmin")))(*ends)
    for name in ("max", "min"):
        wanted, is_most, gradients = of_reference(operation, [np.asarray(x) for x in ends], places, name == "max")
        bound = 1e-5 if dtype == "float32" else 0.01
        np.testing.assert_allclose(np.asarray(found[name], "float64"), wanted, rtol=bound, atol=bound)
        edge = np.asarray(found[f"arg{name}"])
        assert (edge >= 0).all()
        assert is_most[(edge, *np.indices(edge.shape)[1:])].all()
        for x, y in zip(gradient(name, *ends), gradients, strict=True):
            np.testing.assert_allclose(np.asarray(x, "float64"), y, rtol=0, atol=bound * np.abs(y).max())


if __name__ == "__main__":
    for choice in ("chunked", "xla"):
        check("dot", (2, 33), implementation=choice)
        check("function", (5,), implementation=choice)
