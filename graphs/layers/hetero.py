"""A layer for each edge type, with results aggregated at the nodes that the edges enter (HeteroGraphConv)."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.layer_inputs import as_floats, promoted
from jmp_train.graphs.structure import (
    Block,
    EdgeType,
    Graph,
    HeteroGraph,
    checked_word,
    extreme_of_two,
    find_edge_type,
    graph_storage,
    upcast,
)
from jmp_train.policies import autocast_as

Blocks = Mapping[EdgeType, Block]

Aggregate = str | Callable[[Sequence[jax.Array]], jax.Array]
# A function of a graph or a block, of the nodes' features, and of inputs for the edges.
EdgeLayer = Callable[..., jax.Array]
TypedFeatures = Mapping[str, Floats]
Kind = TypeVar("Kind", bound=str | EdgeType)
AGGREGATES = ("sum", "mean", "max", "min", "stack")


def checked_typed_edges(graph: Any) -> None:
    """Raises an error unless a layer of several types can take a graph.

    Args:
      graph: a graph of several types, or a block by edge type.

    Raises:
      TypeError: the graph is neither a HeteroGraph nor a block by edge type.
    """
    if isinstance(graph, HeteroGraph):
        return
    if not isinstance(graph, Mapping):
        raise TypeError(f"graph must be a HeteroGraph, or a Block by edge type, got {type(graph).__name__}")
    for kind, block in graph.items():
        if not isinstance(block, Block):
            raise TypeError(f"graph[{kind}] must be a Block, got {type(block).__name__}")


def of_edge_types(graph: HeteroGraph | Blocks, values: Mapping[Any, Any]) -> dict[EdgeType, Any]:
    """Returns values by edge type, as triples.

    Args:
      graph: a graph with these edge types.
      values: by the triple, or by the name in its middle if that is unique.
    """
    known = graph.edge_types if isinstance(graph, HeteroGraph) else tuple(graph)
    return {find_edge_type(kind, known): value for kind, value in values.items()}


def block_of(graph: HeteroGraph | Blocks, kind: EdgeType) -> Block:
    """Returns the edges of a type, also for a graph.

    Args:
      graph: see `checked_typed_edges`.
      kind: the type of the edges.
    """
    return Block(graph.connections[kind]) if isinstance(graph, HeteroGraph) else graph[kind]


def num_rows(graph: HeteroGraph | Blocks, node_type: str, kinds: Iterable[EdgeType]) -> int | str:
    """Returns the number of rows of the features of a node type; "nodes", any number, if blocks do not determine it.

    Args:
      graph: see `checked_typed_edges`.
      node_type: the type of the nodes.
      kinds: the types of the edges that are used.

    Raises:
      ValueError: blocks differ in it.
    """
    if isinstance(graph, HeteroGraph):
        return graph.num_nodes(node_type)
    counts = {graph[kind].num_sources for kind in kinds if kind[0] == node_type}
    if len(counts) > 1:
        raise ValueError(f"the blocks of one layer differ in their sources of type {node_type!r}: {sorted(counts)}")
    return counts.pop() if counts else "nodes"


def hetero_graph_conv(
    graph: HeteroGraph | Blocks,
    layers: Mapping[str, EdgeLayer] | Mapping[EdgeType, EdgeLayer],
    features: TypedFeatures | tuple[TypedFeatures, TypedFeatures],
    aggregate: Aggregate = "sum",
    *,
    edge_inputs: Mapping[str, Sequence[Any]] | Mapping[EdgeType, Sequence[Any]] | None = None,
) -> dict[str, jax.Array]:
    """Applies layers to the edges of each type, and aggregates their results at the nodes that the edges enter.

    Args:
      graph: a graph of several types; or one layer's entry of a mini-batch's `blocks`, with a block by edge type.
      layers: by edge type, a layer. For a graph's edges between nodes of one type, it gets a `Graph` and their
        features; otherwise, for blocks or pairs of features, a `Block` and a pair of features. Types without a
        layer are left out.
      features: by node type, floating [nodes, ...], for blocks [sources, ...]; or a pair of these, of the senders and
        of the receivers. Edges whose senders have no features are left out.
      aggregate: "sum", "mean", "max" or "min" of the results, in float32 and rounded once; "stack" along axis 1, by
        the sorted edge types; or a function of the list of results. A single result stays unchanged, except with
        "stack" and functions.
      edge_inputs: by edge type, further inputs of its layer, such as edge weights.

    Returns:
      By node type, the results for the types that edges with a result enter; for blocks, those of their targets.

    Raises:
      ValueError: `aggregate` or an edge type is unknown, receivers have no features, or results
        differ in shape.
      TypeError: the graph has one type, or the layer gets all blocks of a mini-batch.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import gin_conv, hetero_from_edges
      >>> plays, makes = ("user", "plays", "game"), ("firm", "makes", "game")
      >>> graph = hetero_from_edges({plays: ([0, 1], [0, 0]), makes: ([0], [0])}, {"user": 2, "firm": 1, "game": 1})
      >>> features = {"user": jnp.ones(2), "firm": jnp.full(1, 5.0), "game": jnp.zeros(1)}
      >>> hetero_graph_conv(graph, {"plays": gin_conv, "makes": gin_conv}, features, "max")
      {'game': Array([5.], dtype=float32)}

    Reference: DGL's HeteroGraphConv.
    """
    if not callable(aggregate):
        checked_word("aggregate", aggregate, AGGREGATES)
    checked_typed_edges(graph)
    by_type = of_edge_types(graph, layers)
    extra = of_edge_types(graph, edge_inputs or {})
    lost = [kind for kind in extra if kind not in by_type]
    if lost:
        raise ValueError(f"edge_inputs has {lost[0]}, but layers has no such edge type")
    results: dict[str, list[jax.Array]] = {}
    for kind in sorted(by_type):
        inputs = _inputs(graph, kind, features)
        if inputs is not None:
            result = by_type[kind](*inputs, *extra.get(kind, ()))
            results.setdefault(kind[2], []).append(result)
    return {node_type: _aggregated(node_type, aggregate, rows) for node_type, rows in results.items()}


def _inputs(
    graph: HeteroGraph | Blocks, kind: EdgeType, features: TypedFeatures | tuple[TypedFeatures, TypedFeatures]
) -> tuple[Any, Any] | None:
    """Returns the edges of a type, and the features at their ends; None if the senders have none."""
    of_senders, of_receivers = features if isinstance(features, tuple) else (features, features)
    sender_type, _, receiver_type = kind
    block, is_whole = block_of(graph, kind), isinstance(graph, HeteroGraph)
    if sender_type not in of_senders or (block.num_targets == 0 and not is_whole):
        return None
    if receiver_type not in of_receivers:
        known = ", ".join(map(repr, of_receivers)) or "none"
        raise ValueError(f"features of {receiver_type!r}, the receivers of {kind}, are missing; there are: {known}")
    senders = as_floats(f"features[{sender_type!r}]", of_senders[sender_type], block.num_sources, ...)
    receivers = of_receivers[receiver_type]
    if not is_whole and not isinstance(features, tuple):
        receivers = jnp.asarray(receivers)[: block.num_targets]  # targets are the first rows of the sources
    receivers = as_floats(f"features[{receiver_type!r}]", receivers, block.num_targets, ...)
    if sender_type != receiver_type or isinstance(features, tuple) or not is_whole:
        return block, (senders, receivers)
    counts = block.num_sources, block.num_edges
    n_node, n_edge = (jnp.array([count], jnp.int32) for count in counts)
    return Graph({}, {}, block.connections, n_node, n_edge), senders


def _aggregated(node_type: str, aggregate: Aggregate, results: Sequence[jax.Array]) -> jax.Array:
    if callable(aggregate):
        return aggregate(results)
    shapes = {result.shape for result in results}
    if len(shapes) > 1:
        raise ValueError(f"results of the edge types into {node_type!r} must have one shape, got {sorted(shapes)}")
    results = promoted(*results)
    if aggregate == "stack":
        return jnp.stack(results, axis=1)
    if len(results) == 1:
        return results[0]
    join = functools.partial(_joined, aggregate)
    stored = [graph_storage(result) for result in results]
    return graph_storage(autocast_as("float32")(join)(*stored).astype(results[0].dtype))


def _joined(aggregate: str, *results: jax.Array) -> jax.Array:
    join = jnp.add if aggregate in ("sum", "mean") else functools.partial(extreme_of_two, aggregate == "max")
    result = functools.reduce(join, map(upcast, results))
    return result / len(results) if aggregate == "mean" else result


class HeteroGraphConv(nnx.Module):
    """The layer of `hetero_graph_conv`: `layer(graph, features, edge_inputs=None)`.

    Args:
      layers: by edge type, an nnx module or a function. Parameters are stored under the type's name, or its three
        parts joined by "/".
      aggregate: see `hetero_graph_conv`.

    Raises:
      ValueError: `aggregate` is unknown, or two types have the same name.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import SAGEConv, hetero_from_edges
      >>> plays, follows = ("user", "plays", "game"), ("user", "follows", "user")
      >>> ends = {plays: ([0, 1], [0, 0]), follows: ([0], [1])}
      >>> graph, rngs = hetero_from_edges(ends, {"user": 2, "game": 1}), nnx.Rngs(0)
      >>> layer = HeteroGraphConv({name: SAGEConv(4, 8, rngs=rngs) for name in ("plays", "follows")}, "mean")
      >>> found = layer(graph, {"user": jnp.ones((2, 4)), "game": jnp.ones((1, 4))})
      >>> found["user"].shape, found["game"].shape
      ((2, 8), (1, 8))
    """

    def __init__(
        self, layers: Mapping[str, EdgeLayer] | Mapping[EdgeType, EdgeLayer], aggregate: Aggregate = "sum"
    ) -> None:
        if not callable(aggregate):
            checked_word("aggregate", aggregate, AGGREGATES)
        self.aggregate = aggregate
        self.edge_types = tuple(layers)
        names = parameter_names(layers)
        self.layers = nnx.Dict({names[kind]: layer for kind, layer in layers.items()})

    def __call__(
        self,
        graph: HeteroGraph | Blocks,
        features: TypedFeatures | tuple[TypedFeatures, TypedFeatures],
        edge_inputs: Mapping[str, Sequence[Any]] | Mapping[EdgeType, Sequence[Any]] | None = None,
    ) -> dict[str, jax.Array]:
        """Returns the results by node type, see `hetero_graph_conv`."""
        layers: Any = {kind: self.layers[name] for kind, name in parameter_names(self.edge_types).items()}
        return hetero_graph_conv(graph, layers, features, self.aggregate, edge_inputs=edge_inputs)


def parameter_names(kinds: Iterable[Kind]) -> dict[Kind, str]:
    """Returns the name under which each edge type's parameters are stored, its three parts joined by "/".

    Args:
      kinds: edge types, or their names.

    Raises:
      ValueError: two types have the same name, because parts of them contain slashes.
    """
    names: dict[Kind, str] = {}
    for kind in kinds:
        name = kind if isinstance(kind, str) else "/".join(kind)
        for other, taken in names.items():
            if taken == name and other != kind:
                raise ValueError(
                    f"edge types {other!r} and {kind!r} have the same name {name!r}: avoid slashes in names"
                )
        names[kind] = name
    return names
