"""Graphs in safetensors files, with structure, features and labels.

The arrays of the graph with index 3 have the names "3/senders", "3/receivers", "3/n_node", "3/n_edge",
"3/nodes/<name>", "3/edges/<name>" and "3/globals/<name>". A graph with several types has "3/senders/<edge type>",
"3/nodes/<node type>/<name>" and so on, where a type is its index in the lists of the metadata. Labels are
"labels/<name>". The metadata have `format`, `format_version` and, as JSON, `graphs` with a description of each.

Reading does not trust the content of a file, and reads only the requested graphs.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, cast

import jax
import numpy as np
from flax.core import FrozenDict
from jax.typing import ArrayLike

from jmp_train.graphs.file_formats import check_bytes, most_bytes
from jmp_train.graphs.structure import (
    EdgeType,
    Graph,
    HeteroGraph,
    as_count,
    as_counts,
    check_known,
    formats_made,
    from_edges,
    hetero_from_edges,
    on_device,
)
from jmp_train.graphs.transforms import edges_on_host, ends_on_host
from jmp_train.policies.files import DTYPES, DamagedError, SafetensorsFile, parse_json, printable, write_safetensors
from jmp_train.policies.pytrees import checked_path

FORMAT, VERSION = "jmp_train.graphs", "1"
Arrays = dict[str, np.ndarray]

_BYTES_OF_A_NODE = 16  # degrees, and the start of each node's edges, in both directions


def load_graphs(
    path: str | os.PathLike[str],
    indices: SupportsIndex | Sequence[SupportsIndex] | None = None,
    *,
    max_bytes: int | None = None,
) -> tuple[list[Graph | HeteroGraph], Arrays]:
    """Returns the graphs of a file from `save_graphs`, and its labels.

    Args:
      path: the file.
      indices: indices of graphs, from 0; None for all. Only these are read.
      max_bytes: largest number of bytes for the indices of nodes; None for 100 times the file's size, and 256 MiB
        at least.

    Returns:
      The graphs, with their formats and with arrays on the default device; and the labels, NumPy arrays.

    Raises:
      ValueError: the file is damaged, of another kind or of a later version, or needs more memory than allowed; an
        array needs `jax_enable_x64`; or there is no such graph. The message names the file, the graph and the fault.
      OSError: the file cannot be read, or does not fit into memory.

    Example:
      >>> import tempfile
      >>> from jmp_train.graphs import rand_graph, save_graphs
      >>> file = tempfile.mkdtemp() + "/graphs.safetensors"
      >>> save_graphs(file, [rand_graph(3, 5), rand_graph(4, 8)])
      >>> [graph.num_edges for graph in load_graphs(file, [1])[0]]
      [8]
    """
    path = checked_path("path", path)
    with SafetensorsFile(path) as file:
        known = _known(path, file.metadata, file.names)
        places = range(len(known)) if indices is None else _places(path, indices, len(known))
        most = most_bytes(max_bytes, path)
        graphs = [
            _put_together(f"{path}: graph {place}", known[place], _read(file, f"{place}/"), most) for place in places
        ]
        return graphs, _read(file, "labels/")


def _read(file: SafetensorsFile, start: str) -> Arrays:
    """Returns the arrays whose names begin with `start`, by the rest of their names."""
    return {name.removeprefix(start): file.read(name) for name in file.names if name.startswith(start)}


def _known(path: Path, metadata: Mapping[str, str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the metadata of each graph, checked as far as possible without the arrays."""
    if metadata.get("format") != FORMAT:
        raise DamagedError(f"{path} is not a file of graphs: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if metadata.get("format_version") != VERSION:
        raise DamagedError(
            f"{path} has format_version {metadata.get('format_version')!r}, but this version of jmp_train reads "
            f"{VERSION!r}"
        )
    known = parse_json(f"{path}: its metadata on graphs", metadata.get("graphs", "").encode(errors="surrogatepass"))
    if not isinstance(known, list):
        raise DamagedError(f"{path}: its metadata on graphs is not a list")
    for place, what in enumerate(known):
        if fault := _fault(what):
            raise DamagedError(f"{path}: graph {place}: the metadata {fault}")
    starts = {"labels", *map(str, range(len(known)))}
    for name in names:
        if name.partition("/")[0] not in starts:
            raise DamagedError(f"{path}: the array {name[:200]!r} belongs to none of its {len(known)} graphs")
    return known


def _fault(what: object) -> str | None:
    """Returns the fault in the metadata of a graph, or None."""
    if not isinstance(what, dict) or what.get("kind") not in ("graph", "hetero"):
        return "name no kind of graph"
    formats = what.get("formats")
    if not isinstance(formats, list) or not all(isinstance(name, str) for name in formats):
        return "name no formats"
    if what["kind"] == "graph":
        return None if isinstance(what.get("globals"), bool) else "do not say whether there are globals"
    n_node, kinds = _lists(what.get("n_node"), 2), _lists(what.get("edge_types"), 3)
    if n_node is None or not all(isinstance(kind, str) and type(count) is int for kind, count in n_node):
        return "have no counts of nodes by type"
    if kinds is None or not all(isinstance(part, str) for kind in kinds for part in kind):
        return "have no types of edges"
    if len(dict(n_node)) < len(n_node) or len(set(map(tuple, kinds))) < len(kinds):
        return "name a type twice"
    return None


def _lists(value: object, length: int) -> list[list[Any]] | None:
    """Returns a list of lists of some length; None for other values."""
    is_one = isinstance(value, list) and all(isinstance(part, list) and len(part) == length for part in value)
    return cast(list[list[Any]], value) if is_one else None


def _places(path: Path, indices: SupportsIndex | Sequence[SupportsIndex], count: int) -> list[int]:
    several = indices if isinstance(indices, Sequence | np.ndarray) else [indices]
    places = [as_count("indices", place) for place in several]
    for place in places:
        if place >= count:
            raise ValueError(f"{path} has {count} graphs; indices={place} is out of range")
    return places


def _put_together(where: str, what: Mapping[str, Any], arrays: Arrays, most: int) -> Graph | HeteroGraph:
    """Returns a graph built from its arrays; it must use all of them."""
    try:
        graph = (_graph if what["kind"] == "graph" else _hetero_graph)(what, arrays, most)
        if arrays:
            raise ValueError(f"the array {min(arrays)[:200]!r} is not part of the graph")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {printable(error)}") from None
    return graph


def _graph(what: Mapping[str, Any], arrays: Arrays, most: int) -> Graph:
    n_node, n_edge = (as_counts(name, _pop(arrays, name)) for name in ("n_node", "n_edge"))
    total = int(n_node.sum())
    check_bytes(f"the indices of {total} nodes", _BYTES_OF_A_NODE * total, most)
    senders, receivers = _pop(arrays, "senders"), _pop(arrays, "receivers")
    nodes, edges, of_graphs = (_on_device(of, _pop_all(arrays, of)) for of in ("nodes", "edges", "globals"))
    graph = from_edges(senders, receivers, total, nodes, edges, formats=what["formats"])
    if n_edge.sum() != len(senders) or len(n_edge) != len(n_node):
        found, wanted = (len(n_edge), int(n_edge.sum())), (len(n_node), len(senders))
        raise ValueError(f"n_edge must have (graphs, edges) = {wanted}, got {found}")
    owners = np.repeat(np.arange(len(n_node)), n_node)
    expected = np.repeat(np.arange(len(n_edge)), n_edge)
    for name, ids in (("senders", senders), ("receivers", receivers)):
        if (wrong := owners[ids] != expected).any():
            edge = int(wrong.argmax())
            owner = owners[ids[edge]]
            raise ValueError(
                f"{name}[{edge}] = {ids[edge]} belongs to graph {owner} of the batch, but its edge to graph "
                f"{expected[edge]}"
            )
    counts = {"n_node": on_device(n_node, np.int32), "n_edge": on_device(n_edge, np.int32)}
    return dataclasses.replace(graph, **counts, globals=dict(of_graphs) if what["globals"] or of_graphs else None)


def _hetero_graph(what: Mapping[str, Any], arrays: Arrays, most: int) -> HeteroGraph:
    n_node = dict(what["n_node"])
    total = sum(as_count(f"n_node[{kind!r}]", count) for kind, count in n_node.items())
    check_bytes(f"the indices of {total} nodes", _BYTES_OF_A_NODE * total, most)
    kinds: list[EdgeType] = [(first, name, last) for first, name, last in what["edge_types"]]
    ends = {kind: (_pop(arrays, f"senders/{i}"), _pop(arrays, f"receivers/{i}")) for i, kind in enumerate(kinds)}
    nodes = {kind: _on_device("nodes", _pop_all(arrays, f"nodes/{place}")) for place, kind in enumerate(n_node)}
    edges = {kind: _on_device("edges", _pop_all(arrays, f"edges/{place}")) for place, kind in enumerate(kinds)}
    return hetero_from_edges(ends, n_node, nodes, edges, formats=what["formats"])


def _pop(arrays: Arrays, name: str) -> np.ndarray:
    """Returns ids or counts, int32 with one axis."""
    if name not in arrays:
        raise ValueError(f"the array {name!r} is missing")
    array = arrays.pop(name)
    if array.dtype != np.int32 or array.ndim != 1:
        raise ValueError(f"the array {name!r} must be int32 with one axis, got {array.dtype} {array.shape}")
    return array


def _pop_all(arrays: Arrays, of: str) -> Arrays:
    start = f"{of}/"
    return {name.removeprefix(start): arrays.pop(name) for name in sorted(arrays) if name.startswith(start)}


def _on_device(of: str, arrays: Arrays) -> Mapping[str, jax.Array]:
    """Returns jax arrays; raises ValueError if jax would change the dtype of one."""
    for name, array in arrays.items():
        if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise ValueError(f"{of}[{name!r}] is {array.dtype}, which needs jax_enable_x64")
    return FrozenDict({name: on_device(array) for name, array in arrays.items()})


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
