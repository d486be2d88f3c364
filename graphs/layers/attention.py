"""Attention over the edges that enter a node, or leave it: in float32, without storing anything per edge."""

import jax
import jax.numpy as jnp
import jraph

from jmp_train.graphs.array_types import Floats, Ids
from jmp_train.graphs.kernels import ATTENTION, GAT, AttentionInputs, GATv2, edge_dropout
from jmp_train.graphs.layers.dense import check_dropout
from jmp_train.graphs.layers.layer_inputs import AnyEdges, as_edge_weight, as_floats, as_graph
from jmp_train.graphs.messages import checked_ids, frame_of, some_edges
from jmp_train.graphs.structure import (
    Adjacency,
    Block,
    EdgeType,
    Graph,
    HeteroGraph,
    checked_rows,
    checked_word,
    from_jraph,
    graph_storage,
    in_float32,
    upcast,
)
from jmp_train.policies.pytrees import check_number


def edge_softmax(
    graph: Graph | HeteroGraph | Block | jraph.GraphsTuple,
    logits: Floats,
    edges: Ids | None = None,
    *,
    norm_by: str = "dst",
    etype: str | EdgeType | None = None,
) -> jax.Array:
    """Returns the softmax of logits over the edges that enter the same node.

    Args:
      graph: a graph of ours or jraph's, or a block.
      logits: floating [edges, ...]; -inf masks an edge, and a node with only masked edges has 0.
      edges: int [some edges], the ids of the edges of the logits, to which the softmax is
        restricted; None for all.
      norm_by: "dst", or "src" for the edges that leave the same node.
      etype: the edge type; required if there are several.

    Returns:
      [edges, ...] in the logits' dtype; 0 for padding edges. Weights are computed in float32 and each is rounded once,
      so those of a node with `n` edges add up to 1 within `2**-11 + n * 2**-25` in float16 (0.002 for 50,000
      edges), and within `2**-8` in bfloat16. Float32 logits, or `gat_attention`, have no such rounding.

    Raises:
      ValueError: the logits have another number of rows, or `norm_by` is unknown.
      TypeError: the logits are not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3)
      >>> edge_softmax(graph, jnp.zeros((3, 1), jnp.float16)).tolist()
      [[0.5], [0.5], [1.0]]
    """
    checked_word("norm_by", norm_by, ("dst", "src"))
    graph = from_jraph(graph) if isinstance(graph, jraph.GraphsTuple) else graph
    graph = graph.graph() if isinstance(graph, Block) else graph
    frame = frame_of(graph, etype)
    if edges is not None:
        frame = some_edges(frame, checked_ids("edges", edges, frame.adjacency.receivers.num_edges))
    end = frame.adjacency.receivers if norm_by == "dst" else frame.adjacency.senders
    logits = _floats("logits", logits, end.num_edges, "edges")
    softmax = jax.checkpoint(lambda end, logits: end.softmax(upcast(logits)))
    return in_float32(lambda logits: softmax(end, logits), logits)


def gat_attention(
    graph: AnyEdges,
    features: Floats,
    left: Floats,
    right: Floats,
    *,
    edge_weight: Floats | None = None,
    negative_slope: float = 0.2,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns graph attention: the sum of the senders' features, weighted by a softmax over each node's edges.

    The weight of an edge is the softmax of `leaky_relu(left[sender] + right[receiver])`. The gradient
    recomputes weights and messages.

    Args:
      graph: a graph of ours or jraph's, or a block.
      features: floating [nodes, heads, width]; for a block those of its sources.
      left: floating [nodes, heads], the senders' part of the logits; float32 is best.
      right: floating [nodes, heads], the receivers' part; for a block that of its targets.
      edge_weight: floating [edges], factors of the weights after the softmax.
      negative_slope: slope of the leaky ReLU below 0.
      dropout_rate: the fraction of the weights to drop, separately for each head.
      dropout_key: random key for dropout; required if the rate is not 0.
      implementation: "chunked" runs over chunks of sorted edges, stores nothing per edge, and
        supports only reverse mode; "xla" computes with arrays of all edges, and supports every
        transform. None chooses "chunked" if the graph has `formats=("csr",)` and messages are large.

    Returns:
      [nodes, heads, width] in the features' dtype; 0 for nodes without edges.

    Raises:
      ValueError: shapes do not fit, the rate is not in [0, 1), the key is missing, or the graph does not support the
        implementation.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3)
      >>> features, zeros = jnp.arange(3.0).reshape(3, 1, 1), jnp.zeros((3, 1))
      >>> gat_attention(graph, features, zeros, zeros).ravel().tolist()
      [2.0, 0.0, 0.5]

    Reference: Velickovic et al., Graph Attention Networks, https://arxiv.org/abs/1710.10903.
    """
    graph = as_graph(graph, features)
    check_dropout("dropout_rate", dropout_rate, dropout_key)
    check_number("negative_slope", negative_slope)
    adjacency = graph.connections
    features = _floats("features", features, adjacency.num_senders, "nodes")
    ends = _ends(adjacency, left, right)
    for name, end in zip(("left", "right"), ends, strict=True):
        if features.ndim != 3 or end.shape[1:] != features.shape[1:2]:
            raise ValueError(
                f"features must be [nodes, heads, width] and {name} [nodes, heads], "
                f"got shapes {features.shape} and {end.shape}"
            )

    weight = as_edge_weight(graph, edge_weight)
    inputs = AttentionInputs((graph_storage(features), ends[0]), ends[1], weight=weight)
    dropout = edge_dropout(dropout_rate, dropout_key, features.shape[1])
    found = ATTENTION(implementation, adjacency, GAT(negative_slope), dropout, inputs)
    return graph_storage(found.totals[0])


def gatv2_attention(
    graph: AnyEdges,
    left: Floats,
    right: Floats,
    attention: Floats,
    *,
    edge_weight: Floats | None = None,
    negative_slope: float = 0.2,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns graph attention whose weights are a small network of both ends' features.

    The weight of an edge is the softmax of `sum(attention * leaky_relu(left[sender] + right[receiver]))`,
    in float32. The gradient recomputes weights and messages.

    Args:
      graph: a graph of ours or jraph's, or a block.
      left: floating [nodes, heads, width], the senders' features, which are also summed.
      right: floating [nodes, heads, width], the receivers' features; for a block those of its targets.
      attention: floating [heads, width].
      edge_weight: see `gat_attention`.
      negative_slope: see `gat_attention`.
      dropout_rate: see `gat_attention`.
      dropout_key: see `gat_attention`.
      implementation: see `gat_attention`.

    Returns:
      [nodes, heads, width] in the dtype of `left`; 0 for nodes without edges.

    Raises:
      ValueError: see `gat_attention`.
      TypeError: see `gat_attention`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3)
      >>> left, zeros = jnp.arange(3.0).reshape(3, 1, 1), jnp.zeros((3, 1, 1))
      >>> gatv2_attention(graph, left, zeros, jnp.zeros((1, 1))).ravel().tolist()
      [2.0, 0.0, 0.5]

    Reference: Brody et al., How Attentive are Graph Attention Networks?, https://arxiv.org/abs/2105.14491.
    """
    graph = as_graph(graph, left)
    check_dropout("dropout_rate", dropout_rate, dropout_key)
    check_number("negative_slope", negative_slope)
    ends = _ends(graph.connections, left, right)
    attention = jnp.asarray(attention)
    if ends[0].ndim != 3 or {x.shape[1:] for x in (*ends, attention[None])} != {ends[0].shape[1:]}:
        raise ValueError(
            "left and right must be [nodes, heads, width] and attention [heads, width], "
            f"got shapes {ends[0].shape}, {ends[1].shape} and {attention.shape}"
        )
    weight = as_edge_weight(graph, edge_weight)
    inputs = AttentionInputs(*map(graph_storage, ends), shared=attention, weight=weight)
    dropout = edge_dropout(dropout_rate, dropout_key, attention.shape[0])
    found = ATTENTION(implementation, graph.connections, GATv2(negative_slope), dropout, inputs)
    return graph_storage(found.totals[0])


def _ends(adjacency: Adjacency, left: Floats, right: Floats) -> list[jax.Array]:
    return [
        _floats("left", left, adjacency.num_senders, "nodes"),
        _floats("right", right, adjacency.num_receivers, "nodes"),
    ]


def _floats(name: str, array: Floats, rows: int, kind: str) -> jax.Array:
    return checked_rows(name, as_floats(name, array, ...), rows, kind)
