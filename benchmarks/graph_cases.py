"""The cases of `graphs.py`: a power-law graph, the operations, reference results, jmp_train's and jraph's forms."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax
import scipy.sparse
from flax import nnx

import jmp_train as jt
from jmp_train.graphs import GATConv, apply_edges, edge_softmax, fn, from_edges, native_kernels, update_all

HEADS, WIDTH, CLASSES = 4, 64, 16
LAYERS = ((HEADS, WIDTH), (HEADS, WIDTH), (1, CLASSES))
LEARNING_RATE = 0.1
EXPONENT = 2.5  # of the degrees' power law
SLOPE = 0.2
BLOCK = 2**16  # edges that the reference multiplies at a time

Arrays = dict[str, np.ndarray]
Op = Callable[..., Any]


class Row(NamedTuple):
    """An operation that is measured, forward alone or with its gradient.

    Attributes:
      op: one of "copy_sum", "weighted_sum", "softmax", "dot" and "step".
      inputs: the names of the arrays it is a function of.
      cotangent: the name of the array that its gradient is taken with; None for forward alone.
      is_plain_sum: whether a product with a sparse matrix does it, MKL's for one.
    """

    op: str
    inputs: tuple[str, ...] = ()
    cotangent: str | None = None
    is_plain_sum: bool = False


ROWS = {
    "copy+sum": Row("copy_sum", ("features",), is_plain_sum=True),
    "copy+sum, 64 features": Row("copy_sum", ("narrow",), is_plain_sum=True),
    "weighted sum": Row("weighted_sum", ("features", "weights"), is_plain_sum=True),
    "weighted sum, gradient": Row("weighted_sum", ("features", "weights"), "node_cotangent"),
    "edge softmax": Row("softmax", ("logits",)),
    "edge softmax, gradient": Row("softmax", ("logits",), "edge_cotangent"),
    "dot": Row("dot", ("features",)),
    "dot, gradient": Row("dot", ("features",), "edge_cotangent"),
    "GAT step": Row("step"),
}
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}


class Form(NamedTuple):
    """A way to compute a row, ready to run.

    Attributes:
      run: computes it once and returns when it is done, with results for `check`.
      check: makes numpy arrays of the results.
    """

    run: Callable[[], Any]
    check: Callable[[Any], list[np.ndarray]]


class Case:
    """A graph whose degrees follow a power law, with a self-loop at each node, and what it carries.

    Edges are drawn between nodes with probabilities by rank, none twice, and sorted by receiver, as all
    libraries like it.

    Args:
      num_nodes: how many nodes there are.
      num_edges: how many edges there are, self-loops included.
    """

    def __init__(self, num_nodes: int, num_edges: int) -> None:
        self.num_nodes, self.num_edges = num_nodes, num_edges
        random = np.random.default_rng(0)
        probabilities = np.arange(1, num_nodes + 1) ** (-1 / (EXPONENT - 1))
        probabilities /= probabilities.sum()
        names = random.permutation(num_nodes)
        self_loops = np.arange(num_nodes) * (num_nodes + 1)
        keys = np.empty(0, np.int64)
        while len(keys) < num_edges - num_nodes:
            ends = names[random.choice(num_nodes, (2, num_edges), p=probabilities)]
            keys = np.union1d(keys, np.setdiff1d(ends[0] * num_nodes + ends[1], self_loops))
        keys = random.choice(keys, num_edges - num_nodes, replace=False)
        keys = np.sort(np.concatenate([keys, self_loops]))
        self.receivers, self.senders = (x.astype(np.int32) for x in divmod(keys, num_nodes))
        self.starts = np.searchsorted(self.receivers, np.arange(num_nodes + 1)).astype(np.int32)

        def normal(*shape: int) -> np.ndarray:
            return random.standard_normal(shape, np.float32)

        self.arrays: Arrays = {
            "features": random.random((num_nodes, HEADS, WIDTH), np.float32),
            "weights": normal(num_edges),
            "logits": normal(num_edges, HEADS),
            "node_cotangent": normal(num_nodes, HEADS * WIDTH),
            "edge_cotangent": normal(num_edges, HEADS),
            "labels": random.integers(0, CLASSES, num_nodes, np.int32),
        }
        self.arrays["narrow"] = np.ascontiguousarray(self.arrays["features"][..., : WIDTH // 4])

    def inputs(self, row: Row) -> list[np.ndarray]:
        """Returns a row's float32 inputs; sums see features as [nodes, heads * width]."""
        arrays = [self.arrays[name] for name in row.inputs]
        return [x.reshape(self.num_nodes, -1) if x.ndim == 3 and row.op != "dot" else x for x in arrays]

    def wanted(self, row: Row) -> list[np.ndarray]:
        """Returns a row's right results, computed in float64: that of the operation, then gradients."""
        inputs = [x.astype(np.float64) for x in self.inputs(row)]
        cotangent = self.arrays[row.cotangent].astype(np.float64) if row.cotangent else None
        return list(getattr(self, f"_{row.op}")(*inputs, cotangent=cotangent))

    def _matrix(self, values: np.ndarray) -> Any:
        shape = (self.num_nodes, self.num_nodes)
        return scipy.sparse.csr_array((values, self.senders, self.starts), shape)

    def _edge_dots(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        blocks = (slice(i, i + BLOCK) for i in range(0, self.num_edges, BLOCK))
        pairs = ((left[self.senders[block]], right[self.receivers[block]]) for block in blocks)
        return np.concatenate([(x * y).sum(-1) for x, y in pairs])

    def _copy_sum(self, x: np.ndarray, cotangent: Any) -> Iterator[np.ndarray]:
        del cotangent
        yield self._matrix(np.ones(self.num_edges)) @ x

    def _weighted_sum(self, x: np.ndarray, w: np.ndarray, cotangent: Any) -> Iterator[np.ndarray]:
        yield self._matrix(w) @ x
        if cotangent is not None:
            yield self._matrix(w).T @ cotangent
            yield self._edge_dots(x, cotangent)

    def _softmax(self, logits: np.ndarray, cotangent: Any) -> Iterator[np.ndarray]:
        starts = self.starts[:-1]  # each node has an edge, its self-loop
        powers = np.exp(logits - np.maximum.reduceat(logits, starts)[self.receivers])
        weights = powers / np.add.reduceat(powers, starts)[self.receivers]
        yield weights
        if cotangent is not None:
            means = np.add.reduceat(weights * cotangent, starts)
            yield weights * (cotangent - means[self.receivers])

    def _dot(self, x: np.ndarray, cotangent: Any) -> Iterator[np.ndarray]:
        yield self._edge_dots(x, x)
        if cotangent is not None:
            matrices = [self._matrix(values) for values in cotangent.T]
            heads = [m @ x[:, i] + m.T @ x[:, i] for i, m in enumerate(matrices)]
            yield np.stack(heads, 1)


def differences(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Returns the largest relative difference of results, in the Euclidean norm of each."""
    errors = []
    for x, y in zip(found, wanted, strict=True):
        x, y = np.asarray(x, np.float64).ravel(), np.asarray(y, np.float64).ravel()
        errors.append(np.linalg.norm(x - y) / np.linalg.norm(y))
    return float(max(errors))


# Ours, of a graph that is passed as an argument.


def our_copy_sum(graph: Any, x: jax.Array) -> jax.Array:
    """Returns the sum over each node's senders."""
    return update_all(graph.with_nodes(x=x), fn.copy_u("x", "m"), fn.sum("m", "y")).nodes["y"]


def our_weighted_sum(graph: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns the weighted sum over each node's senders, with one weight per edge."""
    graph = graph.with_nodes(x=x).with_edges(w=w)
    return update_all(graph, fn.u_mul_e("x", "w", "m"), fn.sum("m", "y")).nodes["y"]


def our_dot(graph: Any, x: jax.Array) -> jax.Array:
    """Returns the scalar products of both ends of each edge, one per head."""
    graph = apply_edges(graph.with_nodes(x=x), fn.u_dot_v("x", "x", "y"))
    return graph.edges["y"][..., 0]


OURS: dict[str, Op] = {
    "copy_sum": our_copy_sum,
    "weighted_sum": our_weighted_sum,
    "softmax": edge_softmax,
    "dot": our_dot,
}


def gat_layers() -> list[GATConv]:
    """Returns the layers, newly drawn, from which all libraries take their parameters."""
    rngs, width, layers = nnx.Rngs(0), HEADS * WIDTH, []
    for heads, out in LAYERS:
        layers.append(GATConv(width, out, heads, rngs=rngs))
        width = heads * out
    return layers


def gat_params() -> list[Arrays]:
    """Returns weight [in, heads * out], left and right [1, heads, out] and bias of each layer."""
    names = ("weight", "left", "right", "bias")
    return [{n: np.asarray(getattr(layer, n)[...]) for n in names} for layer in gat_layers()]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# jraph's, of senders and receivers; its users write layers with these operations.


class JraphOps:
    """The operations as users of jraph write them.

    Args:
      num_nodes: how many nodes there are.
      is_sorted: whether to promise sorted receivers.
    """

    def __init__(self, num_nodes: int, is_sorted: bool) -> None:
        self.options: Any = {"num_segments": num_nodes, "indices_are_sorted": is_sorted}

    def copy_sum(self, ends: Any, x: jax.Array) -> jax.Array:
        """Returns the sum over each node's senders."""
        return jraph.segment_sum(x[ends[0]], ends[1], **self.options)

    def weighted_sum(self, ends: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        """Returns the weighted sum over each node's senders, with one weight per edge."""
        return jraph.segment_sum(x[ends[0]] * w[:, None], ends[1], **self.options)

    def softmax(self, ends: Any, logits: jax.Array) -> Any:
        """Returns the softmax over the edges that enter a node."""
        return jraph.segment_softmax(logits, ends[1], **self.options)

    def dot(self, ends: Any, x: jax.Array) -> jax.Array:
        """Returns the scalar products of both ends of each edge, one per head."""
        return (x[ends[0]] * x[ends[1]]).sum(-1)

    def attention(self, ends: Any, x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        """Returns the sum over each node's senders, weighted by the softmax of both ends' logits."""
        logits = jax.nn.leaky_relu(left[ends[0]] + right[ends[1]], SLOPE)
        messages = x[ends[0]] * self.softmax(ends, logits)[..., None]
        return jraph.segment_sum(messages, ends[1], **self.options)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Returns the loss of the layers."""
        ends, x = batch["graph"], batch["features"]
        for i, layer in enumerate(params):
            if i:
                x = jax.nn.elu(x)
            z = (x @ layer["weight"]).reshape(len(x), *layer["left"].shape[1:])
            left, right = (z * layer["left"]).sum(-1), (z * layer["right"]).sum(-1)
            x = self.attention(ends, z, left, right)
            x = x.reshape(len(x), -1) + layer["bias"]
        return cross_entropy(x, batch["labels"])


def jax_program(op: Op, graph: Any, case: Case, row: Row, dtype: str) -> tuple[Any, Any]:
    """Returns an operation in jax, compiled, and its arguments."""
    inputs = [jnp.asarray(x, dtype) for x in case.inputs(row)]
    cotangent = None if row.cotangent is None else jnp.asarray(case.arrays[row.cotangent], dtype)

    def compute(graph: Any, cotangent: Any, *inputs: jax.Array) -> Any:
        if cotangent is None:
            return [op(graph, *inputs)]
        result, pullback = jax.vjp(partial(op, graph), *inputs)
        return [result, *pullback(cotangent)]

    arguments = (graph, cotangent, *inputs)
    return jax.jit(compute).lower(*arguments).compile(), arguments


def jax_form(op: Op, graph: Any, case: Case, row: Row, dtype: str) -> Form:
    """Returns the compiled form of an operation in jax."""
    compiled, arguments = jax_program(op, graph, case, row, dtype)
    return Form(
        lambda: jax.block_until_ready(compiled(*arguments)),
        lambda results: [np.asarray(x.astype(jnp.float32)) for x in results],
    )


def jax_step_form(loss_fn: Any, params: Any, graph: Any, case: Case, dtype: str) -> Form:
    """Returns the compiled training step of a loss; jraph has none of its own, and takes ours."""
    policy = jt.get_policy("float32" if dtype == "float32" else f"mixed_{dtype}")
    optimizer = jt.with_loss_scale(optax.sgd(LEARNING_RATE), jt.torch_loss_scale(enabled=dtype == "float16"))
    batch = {
        "graph": graph,
        "features": jnp.asarray(case.arrays["features"].reshape(case.num_nodes, -1)),
        "labels": jnp.asarray(case.arrays["labels"]),
    }
    state = jt.TrainState.create(params, optimizer)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    return Form(*stepping(jax.jit(step).lower(state, batch).compile(), state, batch))


def stepping(step: Any, state: Any, batch: Any) -> tuple[Any, Any]:
    """Returns how to make one more step, and what of a first step is checked: loss and update."""
    first, last = jax.tree.leaves(state.params), [state]

    def run() -> Any:
        last[0], metrics = jax.block_until_ready(step(last[0], batch))
        return metrics["loss"], last[0]

    def check(results: Any) -> list[np.ndarray]:
        pairs = zip(jax.tree.leaves(results[1].params), first, strict=True)
        update = np.concatenate([np.ravel(np.asarray(new - old)) for new, old in pairs])
        return [np.asarray(results[0]), update]

    return run, check


def native_form(case: Case, row: Row, dtype: str) -> Form:
    """Returns our form of a row with kernels in C++."""
    with native_kernels():
        return our_form(case, row, dtype)  # which compiles it


def our_form(case: Case, row: Row, dtype: str) -> Form:
    """Returns our form of a row."""
    graph = from_edges(case.senders, case.receivers, case.num_nodes)
    if row.op != "step":
        return jax_form(OURS[row.op], graph, case, row, dtype)
    structure, params = nnx.split(nnx.List(gat_layers()))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["features"]
        for i, layer in enumerate(nnx.merge(structure, params)):
            x = layer(batch["graph"], jax.nn.elu(x) if i else x)
            x = x.reshape(len(x), -1)
        return cross_entropy(x, batch["labels"])

    return jax_step_form(loss, params, graph, case, dtype)


def jraph_form(case: Case, row: Row, dtype: str, *, is_sorted: bool) -> Form | None:
    """Returns jraph's form of a row, or None where nothing is to be sorted."""
    ops = JraphOps(case.num_nodes, is_sorted)
    ends = (jnp.asarray(case.senders), jnp.asarray(case.receivers))
    if row.op == "step":
        return jax_step_form(ops.loss, jax.tree.map(jnp.asarray, gat_params()), ends, case, dtype)
    if row.op == "dot" and is_sorted:
        return None
    return jax_form(getattr(ops, row.op), ends, case, row, dtype)


def timed(run: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
