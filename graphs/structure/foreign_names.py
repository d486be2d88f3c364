"""Names from DGL and PyTorch Geometric: errors that name their counterpart here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_FUNCTIONS = (
    *("update_all", "multi_update_all", "apply_edges", "apply_nodes", "send_and_recv", "pull", "push"),
    *("prop_nodes", "prop_edges", "add_edges", "remove_edges", "in_subgraph", "out_subgraph", "edge_subgraph"),
)
_CAST = "jmp_train.cast_to_half(graph), cast_to_full(graph)"
_WHOLE = "nothing: a function returns a new graph, and the old one is still there"

# name there -> counterpart here, for a `Graph`
GRAPH_NAMES: Mapping[str, str] = MappingProxyType(
    {name: f"jmp_train.graphs.{name}(graph, ...)" for name in _FUNCTIONS}
    | {
        "ndata": 'graph.nodes["h"] to read, graph = graph.with_nodes(h=h) to write',
        "edata": 'graph.edges["w"] to read, graph = graph.with_edges(w=w) to write',
        "x": 'the name that the features were given, such as graph.nodes["x"]',
        "y": "labels, which are kept beside the graph",
        "edge_index": "graph.senders and graph.receivers",
        "edge_attr": 'the name that the features were given, such as graph.edges["w"]',
        "number_of_nodes": "graph.num_nodes",
        "number_of_edges": "graph.num_edges",
        "batch_size": "len(graph.n_node)",
        "num_graphs": "len(graph.n_node)",
        "batch_num_nodes": "graph.n_node",
        "batch_num_edges": "graph.n_edge",
        "subgraph": "jmp_train.graphs.node_subgraph(graph, ...)",
        "to": "jax.device_put(graph, device)",
        "to_half": _CAST,
        "half": _CAST,
        "to_float": _CAST,
        "float": _CAST,
        "to_bfloat16": 'jmp_train.get_policy("mixed_bfloat16").cast_to_compute(graph)',
        "local_scope": _WHOLE,
        "local_var": _WHOLE,
        "clone": _WHOLE,
    }
)

# the same for a `HeteroGraph`
HETERO_NAMES: Mapping[str, str] = MappingProxyType(
    {name: here for name, here in GRAPH_NAMES.items() if here.startswith("jmp_train") or here == _WHOLE}
    | {
        "ndata": 'graph.nodes["user"]["h"] to read, graph = graph.with_nodes("user", h=h) to write',
        "edata": 'graph.edges[graph.edge_type("plays")]["w"] to read, graph = graph.with_edges("plays", w=w) to write',
        "x_dict": 'graph.nodes["user"]["x"]',
        "edge_index_dict": 'graph.senders("plays") and graph.receivers("plays")',
        "ntypes": "graph.node_types",
        "etypes": "graph.edge_types",
        "canonical_etypes": "graph.edge_types",
        "to": "jax.device_put(graph, device)",
    }
)


def look_up(graph: object, name: str, names: Mapping[str, str]) -> Any:
    """Raises AttributeError for a missing attribute of a graph; for another library's name with the counterpart here.

    Args:
      graph: the graph.
      name: the name.
      names: `GRAPH_NAMES` or `HETERO_NAMES`.
    """
    if name in names:
        kind = type(graph).__name__
        raise AttributeError(f"a {kind} has no {name!r}, which is DGL's or PyTorch Geometric's name; use {names[name]}")
    return object.__getattribute__(graph, name)  # raises again if a property raised the AttributeError
