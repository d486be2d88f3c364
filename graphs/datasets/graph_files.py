"""Writes graphs to safetensors files, with structure, features and labels.

The arrays of the graph with index 3 have the names "3/senders", "3/receivers", "3/n_node", "3/n_edge",
"3/nodes/<name>", "3/edges/<name>" and "3/globals/<name>". A graph with several types has "3/senders/<edge type>",
"3/nodes/<node type>/<name>" and so on, where a type is its index in the lists of the metadata. Labels are
"labels/<name>". The metadata have `format`, `format_version` and, as JSON, `graphs` with a description of each.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.structure import Graph, HeteroGraph, check_known, formats_made
from jmp_train.graphs.transforms import edges_on_host, ends_on_host
from jmp_train.policies.files import DTYPES, write_safetensors
from jmp_train.policies.pytrees import checked_path

FORMAT, VERSION = "jmp_train.graphs", "1"
Arrays = dict[str, np.ndarray]


def save_graphs(
    path: str | os.PathLike[str],
    graphs: Graph | HeteroGraph | Sequence[Graph | HeteroGraph],
    labels: Mapping[str, ArrayLike] | None = None,
) -> None:
    """Writes graphs to a safetensors file atomically, so that a partial file never has its name.

    Args:
      path: the file, in a folder that exists. An existing file is replaced.
      graphs: one or several graphs or batches, without padding; `globals` are a dictionary of arrays, or None.
      labels: arrays by name that belong to all graphs.

    Raises:
      TypeError: a graph is of another kind, or traced; or a value is not an array, or has a dtype that the file
        cannot hold. The message names it.
      ValueError: a graph is padded.

    Example:
      >>> import tempfile
      >>> from jmp_train.graphs import from_edges, load_graphs
      >>> file = tempfile.mkdtemp() + "/graphs.safetensors"
      >>> save_graphs(file, from_edges([0, 1], [1, 2], 3, edges={"w": [0.5, 2.0]}), {"y": [1]})
      >>> (graph,), labels = load_graphs(file)
      >>> graph.senders.tolist(), graph.edges["w"].tolist(), labels["y"].tolist()
      ([0, 1], [0.5, 2.0], [1])

    Reference: save_graphs of Deep Graph Library, https://www.dgl.ai; the format, https://huggingface.co/docs/safetensors.
    """
    several = [graphs] if isinstance(graphs, Graph | HeteroGraph) else list(graphs)
    arrays, known = {}, []
    for place, graph in enumerate(several):
        found, what = _taken_apart(f"graphs[{place}]", graph)
        known.append(what)
        arrays |= {f"{place}/{name}": array for name, array in found.items()}
    if not isinstance(labels, Mapping | None):
        raise TypeError(f"labels must be a dictionary of arrays or None, got {type(labels).__name__}")
    arrays |= _named("labels", labels or {})
    metadata = {"format": FORMAT, "format_version": VERSION, "graphs": json.dumps(known)}
    write_safetensors(checked_path("path", path), arrays, metadata)


def _taken_apart(name: str, graph: object) -> tuple[Arrays, dict[str, Any]]:
    """Returns the arrays of a graph by their names in the file, and its metadata."""
    if isinstance(graph, HeteroGraph):
        return _hetero_taken_apart(name, graph)
    if not isinstance(graph, Graph):
        raise TypeError(f"{name} must be a Graph or a HeteroGraph, got {type(graph).__name__}")
    _check_values(name, graph)
    if graph.is_padded:
        raise ValueError(f"{name} is padded: unpad it first")
    edges = edges_on_host(graph)
    if not isinstance(graph.globals, Mapping | None):
        kind = type(graph.globals).__name__
        raise TypeError(f"{name}: globals must be a dictionary of arrays or None, got {kind}")
    arrays = {
        "senders": edges.senders.astype(np.int32),
        "receivers": edges.receivers.astype(np.int32),
        "n_node": np.asarray(graph.n_node, np.int32),
        "n_edge": np.asarray(graph.n_edge, np.int32),
    }
    for of, features in (("nodes", graph.nodes), ("edges", graph.edges), ("globals", graph.globals or {})):
        arrays |= _named(of, features, f"{name}: ")
    what = {"kind": "graph", "formats": list(formats_made(graph.connections)), "globals": graph.globals is not None}
    return arrays, what


def _hetero_taken_apart(name: str, graph: HeteroGraph) -> tuple[Arrays, dict[str, Any]]:
    _check_values(name, graph)
    arrays, formats = {}, ()
    for place, kind in enumerate(graph.edge_types):
        senders, receivers = ends_on_host(graph.connections[kind])
        arrays |= {f"senders/{place}": senders.astype(np.int32), f"receivers/{place}": receivers.astype(np.int32)}
        arrays |= _named(f"edges/{place}", graph.edges[kind], f"{name}: ")
        formats = formats_made(graph.connections[kind])
    for place, kind in enumerate(graph.node_types):
        arrays |= _named(f"nodes/{place}", graph.nodes[kind], f"{name}: ")
    what = {"kind": "hetero", "formats": list(formats), "n_node": graph.n_node, "edge_types": graph.edge_types}
    return arrays, what


def _check_values(name: str, graph: Graph | HeteroGraph) -> None:
    check_known(name, graph, "graphs are saved outside of jit")


def _named(of: str, features: Mapping[str, Any], where: str = "") -> Arrays:
    """Returns arrays by their names in the file; raises TypeError if the file cannot hold them."""
    arrays = {}
    for name, feature in features.items():
        if not isinstance(name, str) or not name.isprintable():
            raise TypeError(f"{where}{of}: names must be printable strings, got {name!r}")
        array = feature if isinstance(feature, jax.Array) else np.asarray(feature)  # random keys have no NumPy array
        if array.dtype.name not in DTYPES.values():
            raise TypeError(f"{where}{of}[{name!r}] is {array.dtype}, which safetensors files cannot store")
        arrays[f"{of}/{name}"] = np.asarray(array, order="C")
    return arrays
