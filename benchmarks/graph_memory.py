"""Temporary memory of message passing and of layers, in units of one float32 array of edges by features.

    python benchmarks/graph_memory.py [--only built_in functions layers structures] [--dtype float16] [--json FILE]
    python benchmarks/graph_memory.py --gpu V100-16GB [--python .venv-plan/bin/python]     # compiled, no GPU needed

Rows are every built-in message and every reduction of it, user-defined messages, each layer of `jmp_train.graphs`, and
graphs as batches, padded graphs and sampled blocks. "forward" is the compiled program's allocation in addition to its
arguments and results; "gradient" is the same for forward and backward, with respect to all floating inputs. Nothing
runs. A program that stores the messages needs one unit or more; a chunk of edges, and some arrays as long as the
nodes, take a few hundredths. On a CPU the graph has 20,000 nodes and 520,000 edges; for a GPU, with larger chunks,
100,000 and 4,000,000.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpu_builders import compile_here, target_mesh
from result_files import write_results

import jmp_train.graphs
from jmp_train.graphs import (
    GATConv,
    GINEConv,
    Graph,
    HeteroGraphConv,
    HGTConv,
    SAGEConv,
    batch,
    fn,
    from_edges,
    hetero_from_edges,
    host_edges,
    neighbor_sampler,
    pad,
    per_edge,
    update_all,
)

FEATURES, HEADS = 128, 4
CPU_SIZE, GPU_SIZE = (20_000, 520_000), (100_000, 4_000_000)
REDUCERS = ("sum", "mean", "max", "min", "var", "std", "softmax", "argmax", "argmin")
PAIRS = [(a, b) for a in "uve" for b in "uve" if a != b]
MESSAGES = ("copy_u", "copy_e", *(f"{a}_{op}_{b}" for op in ("add", "sub", "mul", "div", "dot") for a, b in PAIRS))
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SAGEConv": [{"aggregator": name} for name in ("mean", "gcn", "pool")],
    "GINConv": [{"aggregator": name} for name in ("sum", "mean", "max")],
    "RelGraphConv": [{"regularizer": name} for name in ("none", "basis", "bdd")],
    "EdgeConv": [{}, {"apply": "network"}],
}
EDGE_TYPES, EDGE_WIDTH = 8, 4
TYPED = ("HGTConv", "HeteroGraphConv")  # of graphs of several types
OF_CLOUDS = ("DynamicEdgeConv",)  # which take no graph
BOUND = 0.3
# Of a process that compiles for a GPU: jax needs no CUDA then, and nothing is timed.
COMPILING = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"}
Shape = jax.ShapeDtypeStruct
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def graph_of(nodes: int, edges: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends of edges between nodes drawn with probabilities by a power law, sorted by receiver."""
    random = np.random.default_rng(0)
    probabilities = np.arange(1, nodes + 1) ** (-1 / 1.5)
    ends = random.choice(nodes, (2, edges), p=probabilities / probabilities.sum())
    senders, receivers = random.permutation(nodes)[ends].astype(np.int32)
    order = np.argsort(receivers, kind="stable")
    return senders[order], receivers[order]


def shapes_of(tree: Any) -> Any:
    """Returns a tree of the shapes of arrays."""
    return jax.tree.map(lambda x: Shape(np.shape(x), x.dtype), tree)


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function's result and its gradients in all arguments but the first, the graph."""

    def run(graph: Any, *arrays: Any) -> Any:
        out, pullback = jax.vjp(lambda *arrays: function(graph, *arrays), *arrays)
        return out, pullback(out)

    return run


def built_in(graph: Any, dtype: str, messages: tuple[str, ...]) -> Iterator[tuple[str, Program]]:
    """Yields every message and reduction, of features as wide at the edges as at the nodes; and by one weight."""
    widths = [(name, (FEATURES,)) for name in messages] + [("u_mul_e", ())]
    for name, of_edge in widths:
        ends = [end for end in name.split("_")[::2] if end in "uve"] if "copy" not in name else [name[-1]]
        shapes = [Shape((graph.num_edges, *of_edge) if e == "e" else (graph.num_nodes, FEATURES), dtype) for e in ends]
        title = name if of_edge else f"{name}, one weight"
        for reducer in REDUCERS:
            yield f"{title}, {reducer}", (_built_in(name, ends, reducer), (graph, *shapes))


def _built_in(name: str, ends: list[str], reducer: str) -> Callable[..., Any]:
    def run(graph: Graph, *arrays: jax.Array) -> jax.Array:
        names = [f"{end}{i}" for i, end in enumerate(ends)]
        for field, end, array in zip(names, ends, arrays, strict=True):
            graph = graph.with_edges(**{field: array}) if end == "e" else graph.with_nodes(**{field: array})
        message = getattr(fn, name)(*names, "m")
        return update_all(graph, message, getattr(fn, reducer)("m", "x")).nodes["x"]

    return run


def functions(graph: Any, dtype: str) -> Iterator[tuple[str, Program]]:
    """Yields user-defined messages, as functions of all edges and as those of one edge."""
    h, e = Shape((graph.num_nodes, FEATURES), dtype), Shape((graph.num_edges, FEATURES), dtype)
    w, a = Shape((2 * FEATURES, FEATURES), dtype), Shape((FEATURES,), dtype)

    def edge_conv(edges: Any, w: jax.Array) -> dict[str, jax.Array]:
        here, there = edges.dst["h"], edges.src["h"]
        return {"m": jax.nn.relu(jnp.concatenate([here, there - here], -1) @ w)}

    def gine(edges: Any, w: jax.Array) -> dict[str, jax.Array]:
        return {"m": jax.nn.relu(edges.src["h"] + edges.data["e"]) * w}

    def gated(edges: Any, w: jax.Array) -> dict[str, jax.Array]:
        return {"m": jax.nn.sigmoid((edges.src["h"] * w + edges.dst["h"]).sum(-1, keepdims=True)) * edges.src["h"]}

    for message, arrays in ((edge_conv, (h, w)), (gine, (h, a, e)), (gated, (h, a))):
        for reducer in ("sum", "mean", "max", "std", "softmax"):
            title = f"{message.__name__}, {reducer}"
            yield title, (_function(message, reducer, lambda function: function), (graph, *arrays))
            yield f"per_edge {title}", (_function(message, reducer, per_edge), (graph, *arrays))


def _function(message: Callable[..., Any], reducer: str, mark: Callable[..., Any]) -> Callable[..., Any]:
    def run(graph: Graph, h: jax.Array, w: jax.Array, e: jax.Array | None = None) -> jax.Array:
        graph = graph.with_nodes(h=h) if e is None else graph.with_nodes(h=h).with_edges(e=e)
        return update_all(graph, mark(lambda edges: message(edges, w)), getattr(fn, reducer)("m", "x")).nodes["x"]

    return run


def layers(graph: Any, dtype: str) -> Iterator[tuple[str, Program]]:
    """Yields each layer of `jmp_train.graphs` whose name ends in "Conv", with features and what it needs of edges."""
    names = [name for name in dir(jmp_train.graphs) if name.endswith("Conv") and name not in TYPED + OF_CLOUDS]
    for name in names:
        for options in OPTIONS.get(name, [{}]):
            layer = getattr(jmp_train.graphs, name)
            known = {"in_features": FEATURES, "out_features": FEATURES, "rngs": nnx.Rngs(0)}
            known |= {"num_types": EDGE_TYPES if name == "RelGraphConv" else 1, "num_bases": 4, "num_steps": 2}
            known |= {"num_heads": HEADS, "heads": HEADS, "k": 2, "alpha": 0.1, "delta": 1.0} | options
            if options.get("apply") == "network":
                known["apply"] = nnx.Sequential(nnx.relu, nnx.Linear(FEATURES, FEATURES, rngs=nnx.Rngs(0)))
            if name == "NNConv":
                known["network"] = nnx.Linear(EDGE_WIDTH, FEATURES**2, rngs=nnx.Rngs(0))
            wanted = inspect.signature(layer.__init__).parameters
            if "num_heads" in wanted or "heads" in wanted:
                known["out_features"] = FEATURES // HEADS
            arguments = {key: value for key, value in known.items() if key in wanted}
            title = " ".join([name, *options.values()])
            of_edges = _of_edges(layer, graph.num_edges, dtype)
            yield title, _layer((graph, *of_edges), lambda layer=layer, some=arguments: layer(**some), dtype)


def _of_edges(layer: type, edges: int, dtype: str) -> list[Shape]:
    """Returns the shapes of the edge data that a layer takes."""
    width = FEATURES if layer is GINEConv else EDGE_WIDTH
    known = {"edge_types": Shape((edges,), "int32"), "edge_features": Shape((edges, width), dtype)}
    wanted = inspect.signature(layer.__call__).parameters.values()
    return [known[x.name] for x in wanted if x.name in known and x.default is inspect.Parameter.empty]


def typed_layers(size: tuple[int, int], dtype: str) -> Iterator[tuple[str, Program]]:
    """Yields the layers of graphs of several types, of half of the edges each."""
    nodes, edges = size
    halves = {("node", name, "node"): graph_of(nodes, edges // 2) for name in "ab"}
    graph = shapes_of(hetero_from_edges(halves, {"node": nodes}))

    def attention() -> nnx.Module:
        return HGTConv(FEATURES, FEATURES, graph.node_types, graph.edge_types, HEADS, rngs=nnx.Rngs(0))

    def layer_of_each() -> nnx.Module:
        return HeteroGraphConv({name: SAGEConv(FEATURES, FEATURES, rngs=nnx.Rngs(0)) for name in "ab"})

    for name, make in (("HGTConv", attention), ("HeteroGraphConv", layer_of_each)):
        structure, params = nnx.split(make())
        params = jax.tree.map(lambda x: Shape(x.shape, dtype), shapes_of(params))

        def run(graph: Any, params: Any, h: jax.Array, structure: Any = structure) -> jax.Array:
            return nnx.merge(structure, params)(graph, {"node": h})["node"]

        yield name, (run, (graph, params, Shape((nodes, FEATURES), dtype)))


def _layer(graph: Any, make: Callable[[], nnx.Module], dtype: str) -> Program:
    """Returns a layer's program, of a graph or of a graph and of what the edges have."""
    structure, params = nnx.split(make())
    params = jax.tree.map(lambda x: Shape(x.shape, dtype), shapes_of(params))
    whole = graph[0] if isinstance(graph, tuple) else graph
    nodes = getattr(whole, "num_sources", None) or whole.num_nodes

    def run(graph: Any, params: Any, h: jax.Array) -> jax.Array:
        graph, *of_edges = graph if isinstance(graph, tuple) else (graph,)
        return nnx.merge(structure, params)(graph, h, *of_edges)

    return run, (graph, params, Shape((nodes, FEATURES), dtype))


def structures(size: tuple[int, int], dtype: str) -> Iterator[tuple[str, int, Program]]:
    """Yields layers on batches, padded graphs and sampled blocks, as they come without options, with their edges."""
    nodes, edges = size
    senders, receivers = graph_of(nodes, edges)
    half = [from_edges(*graph_of(nodes // 2, edges // 2), nodes // 2) for _ in range(2)]
    sampler = neighbor_sampler(host_edges(senders, receivers, nodes), (26,), np.arange(nodes), nodes // 2)
    block = sampler.sample(np.arange(nodes // 2), np.random.default_rng(0)).blocks[0]
    pairs = {"batch": batch(half), "pad": pad(half[0], nodes // 2 + 8, edges // 2 + 8), "block": block}
    for title, graph in pairs.items():
        shapes = shapes_of(graph)
        gat = GATConv(FEATURES, FEATURES // HEADS, HEADS, allow_zero_in_degree=True, rngs=nnx.Rngs(0))
        sage = SAGEConv(FEATURES, FEATURES, aggregator="pool", rngs=nnx.Rngs(0))
        for layer in (gat, sage):
            name = f"{title}, {type(layer).__name__}"
            yield name, graph.num_edges, _layer(shapes, lambda layer=layer: layer, dtype)


def temp_bytes(program: Program, mesh: Any) -> int:
    """Returns what a program allocates in addition to arguments and results."""
    function, arguments = program
    if mesh is not None:
        return compile_here(function, arguments, mesh=mesh).temp_bytes
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Prints and returns the table."""
    nodes, edges = map(int, args.size.split("x")) if args.size else GPU_SIZE if args.gpu else CPU_SIZE
    size = nodes, edges
    mesh = target_mesh(args.gpu) if args.gpu else None
    graph = shapes_of(from_edges(*graph_of(*size), size[0]))
    programs: list[tuple[str, int, Program]] = []
    if "built_in" in args.only:
        programs += [(n, size[1], p) for n, p in built_in(graph, args.dtype, tuple(args.messages))]
    if "functions" in args.only:
        programs += [(n, size[1], p) for n, p in functions(graph, args.dtype)]
    if "layers" in args.only:
        programs += [(n, size[1], p) for n, p in layers(graph, args.dtype)]
        programs += [(n, size[1], p) for n, p in typed_layers(size, args.dtype)]
    if "structures" in args.only:
        programs += list(structures(size, args.dtype))
    print(f"{args.gpu or 'CPU'}, {size[0]} nodes, {size[1]} edges, {args.dtype}; jax {jax.__version__}")
    print(f"{'':34}{'forward':>9}{'gradient':>9}   units")
    rows = {}
    for title, edges, (function, arguments) in programs:
        unit = edges * FEATURES * 4
        try:
            found = [temp_bytes((f, arguments), mesh) / unit for f in (function, gradient(function))]
        except (TypeError, ValueError) as error:  # of what a layer of another signature lacks
            lines = str(error).strip().splitlines() or [type(error).__name__]
            print(f"{title:34}{'':18}   raises {lines[0][:80]}", flush=True)
            continue
        rows[title] = {"forward": found[0], "gradient": found[1]}
        note = "" if max(found) <= BOUND else "  *"
        print(f"{title:34}{found[0]:9.3f}{found[1]:9.3f}{note}", flush=True)
    return {"size": list(size), "dtype": args.dtype, "features": FEATURES, "jax": jax.__version__, "units": rows}


def main() -> None:
    """Prints the table, of a GPU from a process that has the compiler for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kinds = ("built_in", "functions", "layers", "structures")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--messages", nargs="+", choices=MESSAGES, default=MESSAGES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size", metavar="NODESxEDGES")
    parser.add_argument("--gpu", help="compile for it, such as V100-16GB")
    parser.add_argument("--python", default=_plan_python(), help="with jmp_train[plan]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results are added to it")
    args = parser.parse_args()
    if args.gpu and any(os.environ.get(name) != value for name, value in COMPILING.items()):
        command = [args.python, *sys.argv]
        sys.exit(subprocess.run(command, env=os.environ | COMPILING, check=False).returncode)
    found = measured(args)
    if args.json is not None:
        report = json.loads(args.json.read_text()) if args.json.exists() else {}
        report.setdefault(f"{args.gpu or 'CPU'}, {args.dtype}", {}).update(
            found | {"units": report.get(f"{args.gpu or 'CPU'}, {args.dtype}", {}).get("units", {}) | found["units"]}
        )
        write_results(args.json, report, device=f"{args.gpu or 'CPU'}, compiled for, not run")


def _plan_python() -> str:
    """Returns the interpreter that `make .venv-plan/.plan` makes, or this one."""
    path = Path(__file__).resolve().parents[1] / ".venv-plan/bin/python"
    return str(path) if path.exists() else sys.executable


if __name__ == "__main__":
    main()
