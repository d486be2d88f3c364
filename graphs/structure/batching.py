"""Batches of graphs, and padding to fixed shapes, in jraph's conventions; everything runs on the host.

Stacks are graphs of one structure in arrays with one more axis, to distribute over devices and micro-batches.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from jmp_train.graphs.structure.adjacency import FORMATS, Adjacency, formats_made, formats_of_size
from jmp_train.graphs.structure.counts import as_count, check_int32, check_known
from jmp_train.graphs.structure.graph import Graph
from jmp_train.graphs.structure.jraph_conversion import first_padding, from_jraph, is_real, to_jraph
from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import change_nodes, find_nodes, named_leaves


def batch(graphs: Sequence[Graph], *, formats: Sequence[str] | None = None) -> Graph:
    """Returns several graphs as one; runs on the host.

    Args:
      graphs: unpadded graphs, or batches of them, with the same features.
      formats: see `from_edges`; None for the formats of any of the graphs, and "csr" for more than 16,384 edges.

    Returns:
      One graph with all of them, unconnected with each other, in their order.

    Raises:
      ValueError: there are no graphs, one is padded, or their features differ; the message has the difference. Or
        together they have more nodes or edges than int32 can number.
      TypeError: a graph is traced.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> batch([from_edges([0], [1], 2), from_edges([0], [0], 1)]).senders.tolist()
      [0, 2]
    """
    if not isinstance(graphs, Sequence):
        raise TypeError(f"graphs must be a sequence of graphs, got {type(graphs).__name__}")
    if not graphs:
        raise ValueError("graphs is empty")
    for place, graph in enumerate(graphs):
        _check_on_host(f"graphs[{place}]", graph)
        if graph.is_padded:
            raise ValueError(f"graphs[{place}] is padded: batch first, then pad")
        for name in ("nodes", "edges"):
            first, this = (sorted(getattr(g, name)) for g in (graphs[0], graph))
            if first != this:
                raise ValueError(f"graphs[{place}] has {name} {this}, graphs[0] has {first}")
    check_int32("graphs have", sum(graph.num_nodes for graph in graphs), "nodes together")
    check_int32("graphs have", sum(graph.num_edges for graph in graphs), "edges together")
    return _from_jraph(jraph.batch_np([_on_host(graph) for graph in graphs]), formats, graphs)


def unbatch(graph: Graph, *, formats: Sequence[str] | None = None) -> list[Graph]:
    """Returns the graphs of a batch, padding included; runs on the host.

    Args:
      graph: a batch.
      formats: see `from_edges`; None for the graph's formats, and "csr" for more
        than 16,384 edges.

    Returns:
      Each of its graphs.

    Raises:
      TypeError: the graph is traced.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graphs = [from_edges([0], [1], 2), from_edges([0], [0], 1)]
      >>> [part.num_nodes for part in unbatch(batch(graphs))]
      [2, 1]
    """
    _check_on_host("graph", graph)
    return [_from_jraph(part, formats, [graph]) for part in jraph.unbatch_np(_on_host(graph))]


def pad(
    graph: Graph,
    n_node: int,
    n_edge: int,
    n_graph: int | None = None,
    *,
    formats: Sequence[str] | None = None,
) -> Graph:
    """Returns a graph with padding, so that graphs of different sizes share compiled programs; runs on the host.

    Graphs of equal sizes, features and formats have one structure except for mailboxes, whatever their edges: they
    share a program, and `stack` accepts them. So layers cannot know under jit whether each node has an incoming edge,
    and only refuse one without outside of jit. Padding nodes and edges belong to one more graph,
    followed by empty graphs. Padding edges count nowhere: sums, means, softmax and degrees ignore them.

    Args:
      graph: a graph or batch without padding.
      n_node: number of nodes after padding; larger than before.
      n_edge: number of edges after padding.
      n_graph: number of graphs after padding, larger than before; None for one more.
      formats: see `from_edges`; None for the graph's formats, and "csr" for more
        than 16,384 edges.

    Returns:
      The graph, `is_padded`.

    Raises:
      ValueError: the graph is padded already, or too large; the message has the excess.
      TypeError: the graph is traced, or a number is not an integer.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> padded = pad(from_edges([0, 1], [1, 1], 2), 4, 1024)
      >>> padded.in_degrees.tolist(), padded.n_node.tolist()
      ([0, 2, 0, 0], [2, 2])
    """
    _check_on_host("graph", graph)
    if graph.is_padded:
        raise ValueError("graph is padded already: unpad it first")
    has = len(graph.n_node)
    n_graph = has + 1 if n_graph is None else n_graph
    for name, wanted, least in (
        ("n_node", n_node, graph.num_nodes + 1),
        ("n_edge", n_edge, graph.num_edges),
        ("n_graph", n_graph, has + 1),
    ):
        if as_count(name, wanted) < least:
            raise ValueError(f"{name}={wanted} is too small by {least - wanted}: at least {least} is needed")
    padded = jraph.pad_with_graphs(_on_host(graph), n_node, n_edge, n_graph)
    return _from_jraph(padded, formats, [graph], padded=True)


def unpad(graph: Graph, *, formats: Sequence[str] | None = None) -> Graph:
    """Returns the graph without its padding; runs on the host.

    Args:
      graph: a padded graph.
      formats: see `from_edges`; None for the graph's formats, and "csr" for more
        than 16,384 edges.

    Returns:
      The graph before padding.

    Raises:
      ValueError: the graph is not padded.
      TypeError: the graph is traced.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> unpad(pad(from_edges([0, 1], [1, 1], 2), 4, 8)).num_edges
      2
    """
    _check_on_host("graph", graph)
    if not graph.is_padded:
        raise ValueError("graph is not padded")
    return _from_jraph(jraph.unpad_with_graphs(_on_host(graph)), formats, [graph])


def node_mask(graph: Graph) -> jax.Array:
    """Returns a mask of the nodes that are not padding, bool [nodes]; also under jit.

    Args:
      graph: a graph.

    Returns:
      False for padding nodes, and for those that `drop_nodes` dropped.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> node_mask(pad(from_edges([0], [1], 2), 4, 8)).tolist()
      [True, True, False, False]
    """
    _check_graph("graph", graph)
    mask = _mask(graph, graph.num_nodes, graph.n_node)
    return mask if graph.kept_nodes is None else mask & graph.kept_nodes


def edge_mask(graph: Graph) -> jax.Array:
    """Returns a mask of the edges that are not padding, bool [edges]; also under jit.

    Args:
      graph: a graph.

    Returns:
      False for padding edges, and for those that `drop_edges` or `drop_nodes` dropped.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> edge_mask(pad(from_edges([0], [1], 2), 4, 3)).tolist()
      [True, False, False]
    """
    _check_graph("graph", graph)
    mask, ends = _mask(graph, graph.num_edges, graph.n_edge), graph.connections.ends
    return mask if ends is None or ends[1].all_count else mask & ends[1].is_counted


def graph_mask(graph: Graph) -> jax.Array:
    """Returns a mask of the graphs of a batch that are not padding, bool [graphs]; also under jit.

    Args:
      graph: a graph.

    Returns:
      False for padding graphs.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph_mask(pad(from_edges([0], [1], 2), 4, 3, n_graph=3)).tolist()
      [True, False, False]
    """
    _check_graph("graph", graph)
    places = jnp.arange(len(graph.n_node))
    return places < first_padding(graph.n_node) if graph.is_padded else places >= 0


def _mask(graph: Graph, count: int, counts: jax.Array, xp: Any = jnp) -> Any:
    """Returns which of `count` nodes or edges belong to a real graph, as an array of NumPy or of jax."""
    if not graph.is_padded:
        return xp.ones(count, bool)
    return is_real(xp.asarray(graph.n_node), xp.asarray(counts), count, xp)


def _from_jraph(
    graphs: jraph.GraphsTuple, formats: Sequence[str] | None, sources: Sequence[Graph], *, padded: bool = False
) -> Graph:
    """Returns jraph's graphs as ours, in the given formats, or in all formats of the sources if none are given."""
    if formats is None:
        made = {name for source in sources for name in formats_made(source.connections)}
        made |= {*formats_of_size(int(np.sum(graphs.n_edge)))}
        formats = [name for name in FORMATS if name in made]
    return from_jraph(graphs, padded=padded, formats=formats)


def _check_on_host(name: str, graph: Graph) -> None:
    _check_graph(name, graph)
    check_known(name, graph, "graphs are batched and padded outside of jit")


def _check_graph(name: str, graph: Graph) -> None:
    if not isinstance(graph, Graph):
        kind = type(graph).__name__
        raise TypeError(f"{name} must be a Graph, got {kind}; convert jraph's with from_jraph")


def _on_host(graph: Graph) -> jraph.GraphsTuple:
    ends, is_real = graph.connections.ends, _mask(graph, graph.num_edges, graph.n_edge, np)
    has_all = ends is None or ends[1].all_count or bool(np.asarray(ends[1].is_counted)[is_real].all())
    if graph.kept_nodes is not None or not has_all:
        raise ValueError("graph has dropped edges or nodes: batch, pad and unpad before dropping")
    return jax.tree.map(np.array, to_jraph(graph))  # copied, because jraph writes into its arguments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GraphStack:
    """Several graphs of the same structure and shapes, a pytree whose arrays are [count, ...].

    A batch that is sharded along its first axis is split between the graphs of a stack, and a train step passes single
    graphs to the loss function. Create it with `stack`. `jax.vmap` and `jax.lax.scan` run over
    `stack.graphs`.

    Args:
      graphs: the stacked graph or tree, with arrays [count, ...].

    Example:
      >>> import jax
      >>> from jmp_train.graphs import from_edges, stack
      >>> pair = stack([from_edges([0, 1], [1, 0], 2), from_edges([1, 0], [1, 0], 2)])
      >>> len(pair), jax.vmap(lambda graph: graph.in_degrees.sum())(pair.graphs).tolist()
      (2, [2, 2])
    """

    graphs: Any

    def __len__(self) -> int:
        """Number of graphs."""
        return jax.tree.leaves(self.graphs)[0].shape[0]

    def __getitem__(self, place: int) -> Any:
        """Returns one of the graphs.

        Args:
          place: index of the graph; negative ones count from the end.

        Raises:
          IndexError: there is none.
        """
        count = len(self)
        if not -count <= place < count:
            raise IndexError(f"graph {place} is out of range for a stack of {count} graphs")
        return jax.tree.map(lambda x: x[place], self.graphs)


def stack(graphs: Sequence[Any]) -> GraphStack:
    """Returns graphs as one stack, for the batch of a step on several devices or with micro-batches.

    Args:
      graphs: graphs of ours or jraph's, or any trees of arrays that contain graphs, such as dictionaries of a
        `Block` and the features of its nodes; all of the same structure, shapes and dtypes. Use `pad` for
        graphs of different sizes.

    Returns:
      The stack, in the order of the graphs; in the host's memory if all of them are.

    Raises:
      ValueError: there are no graphs, or one differs from the first; the message has the difference.

    Example:
      >>> from jmp_train.graphs import from_edges, pad
      >>> sizes = [([0, 1], [1, 1], 2), ([0], [1], 3)]
      >>> len(stack([pad(from_edges(*size), n_node=4, n_edge=8) for size in sizes]))
      2
    """
    if not isinstance(graphs, Sequence) or isinstance(graphs, str | bytes):
        raise TypeError(f"graphs must be a sequence of graphs, got {type(graphs).__name__}")
    if not len(graphs):
        raise ValueError("graphs is empty: a stack has at least one graph")
    graphs = _with_one_rule_on_zero_in_degree(graphs)
    for place, graph in enumerate(graphs[1:], 1):
        _check_alike(graphs[0], graph, f"graphs[{place}]")
    if not jax.tree.leaves(graphs[0]):
        raise ValueError("graphs have no arrays")
    return GraphStack(jax.tree.map(lambda *arrays: _stacked(arrays), *graphs))


def unstack(stack: GraphStack) -> list[Any]:
    """Returns the graphs of a stack.

    Args:
      stack: from `stack`.

    Raises:
      TypeError: the argument is not a stack.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> [graph.senders.tolist() for graph in unstack(stack([from_edges([1], [0], 2)] * 2))]
      [[1], [1]]
    """
    if not isinstance(stack, GraphStack):
        raise TypeError(f"stack must be a result of graphs.stack, got {type(stack).__name__}")
    return [stack[place] for place in range(len(stack))]


def _with_one_rule_on_zero_in_degree(graphs: Sequence[Any]) -> list[Any]:
    """Returns graphs that all claim a node without incoming edges if one of them does."""
    adjacencies = [[node for _, node in find_nodes(graph, Adjacency)] for graph in graphs]
    known = {node.has_zero_in_degree for nodes in adjacencies for node in nodes}
    if len(known) < 2:
        return list(graphs)
    common = True if True in known else None
    change = functools.partial(dataclasses.replace, has_zero_in_degree=common)
    return [change_nodes(graph, Adjacency, change) for graph in graphs]


def _stacked(arrays: Sequence[Any]) -> Any:
    on_host = all(isinstance(array, np.ndarray | np.generic) for array in arrays)
    return (np if on_host else jnp).stack(arrays)


def _check_alike(first: PyTree, other: PyTree, name: str) -> None:
    shapes, others = (
        {path: (jnp.shape(x), jnp.result_type(x)) for path, x in named_leaves(tree)} for tree in (first, other)
    )
    for path in [*shapes, *others]:
        wanted, came = (_described(found.get(path)) for found in (shapes, others))
        if wanted != came:
            raise ValueError(f"{name} differs from graphs[0]: {path!r} is {came}, not {wanted}; pad graphs to one size")
    wanted, came = jax.tree.structure(first), jax.tree.structure(other)
    if wanted != came:
        raise ValueError(
            f"{name} has another structure than graphs[0]; pad graphs to one size:\n  {came}\nnot\n  {wanted}"
        )


def _described(found: Any) -> str:
    return "missing" if found is None else f"{found[1]}{list(found[0])}"
