"""DGL's message passing as pure functions: each takes a graph, and returns one with new features."""

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.fn import Message
from jmp_train.graphs.messages.frames import (
    Edges,
    checked_ids,
    edge_ids,
    frame_of,
    nodes_of,
    some_edges,
)
from jmp_train.graphs.messages.multi_update import update_over_types
from jmp_train.graphs.messages.segment import gather
from jmp_train.graphs.messages.send_receive import Reduction, receive, send
from jmp_train.graphs.messages.user_functions import (
    EdgeFunction,
    NodeFunction,
    call_node_function,
    placed,
    with_edge_features,
    with_node_features,
)
from jmp_train.graphs.structure import EdgeType, HeteroGraph, OurGraph, accepts_jraph


@accepts_jraph
def update_all(
    graph: OurGraph,
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
    implementation: str | None = None,
) -> OurGraph:
    """Returns the graph after each node has reduced the messages of all edges that enter it.

    Args:
      graph: a graph of ours or jraph's.
      message: a message of `fn`, a function of one edge marked by `per_edge`, or a function of `EdgeBatch`, all edges,
        to a dictionary of messages.
      reduce: a reduction of `fn`, or several of the same message, which is then computed once, or a function of
        `NodeBatch` to a dictionary of node features, which is called once for each in-degree; under jit the graph
        needs `formats=("mailbox",)` for it.
      apply: a function of `NodeBatch` to a dictionary of node features, called with all nodes in the end.
      etype: the edge type. Without it, a graph with several reduces over the edges of all.
      implementation: "chunked" goes over chunks of sorted edges, stores no message, and has reverse mode
        only; it takes built-in messages of floats of one precision, and functions of one edge. "xla" computes with
        arrays of all edges, which XLA may fuse, and goes through every transform. None for "chunked" where the graph
        has `formats=("csr",)` and messages are large.

    Returns:
      The graph with the result among its nodes' features, in the messages' features' dtype: computed in
      float32 and rounded once. Nodes without messages get 0, of every reduction but `argmax` and `argmin`, the
      places of edges as int32, of which they get -1; true infinities stay. Variances are those of all messages of
      a node, divided by their number; where all are equal, the gradient of their standard deviation is 0.

    Raises:
      ValueError: a feature is missing, or shapes or names do not fit; the message names them.
      TypeError: a user-defined reduction meets a graph under jit that has no mailboxes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
      >>> update_all(graph, fn.copy_u("h", "m"), fn.sum("m", "x")).nodes["x"].tolist()
      [2.0, 0.0, 1.0]
      >>> both = update_all(graph, fn.copy_u("h", "m"), [fn.std("m", "spread"), fn.argmax("m", "edge")])
      >>> both.nodes["spread"].tolist(), both.nodes["edge"].tolist()
      ([0.0, 0.0, 0.5], [2, -1, 1])

    Reference: Wang et al., Deep Graph Library, https://arxiv.org/abs/1909.01315.
    """
    if isinstance(graph, HeteroGraph) and etype is None and len(graph.connections) > 1:
        return update_over_types(graph, message, reduce, apply)
    frame = frame_of(graph, etype)
    results = receive(frame, message, reduce, implementation)
    return with_node_features(graph, frame.receiver_type, results, apply)


@accepts_jraph
def apply_edges(
    graph: OurGraph,
    message: Message | EdgeFunction,
    edges: Edges | None = None,
    *,
    etype: str | EdgeType | None = None,
    implementation: str | None = None,
) -> OurGraph:
    """Returns the graph with features of its edges computed.

    Args:
      graph: a graph of ours or jraph's.
      message: a message of `fn`, or a function of `EdgeBatch` to a dictionary of edge features.
      edges: int [some edges], or a pair of senders and receivers, all edges between which are meant; None
        for all edges. The others keep what they have, or get 0.
      etype: the edge type; needed where there are several.
      implementation: see `update_all`; `u_dot_v` can be chunked.

    Returns:
      The graph with the results among its edges' features, in the caller's order.

    Raises:
      ValueError: a feature or edge is missing, or shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1], [1, 1], 2, nodes={"h": jnp.full((2, 4), 90, "float16")})
      >>> apply_edges(graph, fn.u_dot_v("h", "h", "score")).edges["score"].tolist()
      [[32400.0], [32400.0]]
    """
    frame = frame_of(graph, etype)
    if edges is None:
        results = send(frame, message, implementation=implementation)
        return with_edge_features(graph, etype, results)
    ids = edge_ids(frame.adjacency, edges)
    results = send(some_edges(frame, ids), message, ids)
    count = frame.adjacency.receivers.num_edges
    return with_edge_features(graph, etype, placed(frame.data, results, ids, count))


@accepts_jraph
def apply_nodes(
    graph: OurGraph, function: NodeFunction, nodes: Ids | None = None, *, ntype: str | None = None
) -> OurGraph:
    """Returns the graph with features of its nodes computed.

    Args:
      graph: a graph of ours or jraph's.
      function: a function of `NodeBatch`, with an empty mailbox, to a dictionary of node features.
      nodes: int [some nodes], which; None for all. The others keep what they have, or get 0.
      ntype: the node type, of graphs with several.

    Returns:
      The graph with the results among its nodes' features.

    Raises:
      ValueError: a node or the node type is unknown.
      TypeError: the function returns no dictionary.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0], [1], 2, nodes={"h": jnp.arange(2.0)})
      >>> apply_nodes(graph, lambda nodes: {"h": 2 * nodes.data["h"]}).nodes["h"].tolist()
      [0.0, 2.0]
    """
    features, count = nodes_of(graph, ntype)
    if nodes is None:
        return with_node_features(graph, ntype, {}, function)
    ids = checked_ids("nodes", nodes, count)
    some = {name: gather(feature, ids) for name, feature in features.items()}
    results = call_node_function(function, some, ids.shape[0], ids)
    return with_node_features(graph, ntype, placed(features, results, ids, count))
