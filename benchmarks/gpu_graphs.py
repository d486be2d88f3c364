"""The graph workloads of `gpu.py`: the GAT step of the task `reddit`, and operations on a power-law graph.

Their graphs take long to make, so a process of its own makes them once a run, on the host, and all others
load them. PyTorch Geometric stores messages and may need more memory than there is: then its process
halves the edges until it fits, keeping the first nodes and what joins them, and says what was left.
"""

import functools
import gc
import importlib
import pickle
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpu_workloads import (
    OURS,
    PRECISIONS,
    JaxJob,
    Job,
    TorchJob,
    Variant,
    Workload,
    jax_version,
    policy_of,
)
from graph_cases import HEADS, ROWS, WIDTH, Case, JraphOps, Row, jax_program
from graph_peers import Torch

from jmp_train.graphs import edge_softmax, fn, from_edges, gat_attention, update_all
from jmp_train.graphs.graph import Graph
from jmp_train.graphs.message_passing import apply_edges
from jmp_train.memory import peak_memory
from jmp_train.reddit_files import CLASSES, FEATURES, TRAIN
from jmp_train.synthetic_reddit import synthetic_reddit
from jmp_train.tasks import reddit
from jmp_train.tasks.graph_models import GAT

SMALLEST_PART = 1 / 64
PREPARED = "data.pickle"  # in the folder that belongs to a run
GUIDE = "DGL's guide, on a V100-16GB: 15.2 GB in float32, 12.8 in float16, which is slower"

# The GAT step.


class RedditGraph(NamedTuple):
    """The task's data, or the part of it among its first nodes; all on the host.

    Attributes:
      graph: sorted edges, with a loop at each node.
      features: float32 [nodes, 602].
      nodes: int32 [labelled], those to train on.
      labels: int32 [labelled].
      params: what PyTorch Geometric's layers take of ours, by layer and name.
    """

    graph: Graph
    features: np.ndarray
    nodes: np.ndarray
    labels: np.ndarray
    params: list[dict[str, np.ndarray]]

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns senders and receivers, int32 [edges], sorted by receiver."""
        neighbors: Any = self.graph.connections.neighbors
        senders, degrees = neighbors.by_target.others, neighbors.by_target.degrees
        return senders, np.repeat(np.arange(len(degrees), dtype=np.int32), degrees)


def _gat(key: jax.Array) -> GAT:
    return GAT(FEATURES, reddit.HIDDEN, CLASSES, reddit.HEADS, rngs=nnx.Rngs(key))


def _prepare_gat(scale: float, folder: Path) -> None:
    data = synthetic_reddit(scale)
    graph = jax.tree.map(np.asarray, reddit.make_graph(data))
    nodes = np.flatnonzero(data.node_types == TRAIN).astype(np.int32)
    names = {"lin.weight": "weight", "att_src": "left", "att_dst": "right", "bias": "bias"}
    params = []
    for layer in _gat(jax.random.key(0)).layers:
        arrays = {name: np.asarray(getattr(layer, ours)[...]) for name, ours in names.items()}
        params.append(arrays | {"lin.weight": arrays["lin.weight"].T})
    _write(folder, RedditGraph(graph, data.features, nodes, data.labels[nodes], params))


def _part_of(data: RedditGraph, part: float) -> RedditGraph:
    """Returns the first nodes and the edges among them, which are about that part of all edges."""
    if part == 1:
        return data
    count = round(len(data.features) * part**0.5)
    senders, receivers = data.ends()
    is_kept = (senders < count) & (receivers < count)
    graph = from_edges(senders[is_kept], receivers[is_kept], count, formats=("csr",))
    is_labelled = data.nodes < count
    return data._replace(
        graph=graph,
        features=data.features[:count],
        nodes=data.nodes[is_labelled],
        labels=data.labels[is_labelled],
    )


class GatJob:
    """A job of some part of the data, which says so in its facts."""

    def __init__(self, job: Job, data: RedditGraph, part: float, too_large: dict[str, str]) -> None:
        self.job = job
        self.sizes = {
            "part": part,
            "nodes": len(data.features),
            "edges": data.graph.num_edges,
            "too_large": too_large,
        }

    def steps(self, count: int) -> float:
        """Makes so many steps and returns the seconds until the last was done."""
        return self.job.steps(count)

    def facts(self) -> dict[str, Any]:
        """Returns the job's facts, the size of the data, and why larger parts failed."""
        return self.job.facts() | self.sizes


def _gat_job(variant: Variant, scale: float, folder: Path) -> Job:
    del scale
    data: RedditGraph = _read(folder)
    if variant.way == OURS:
        data = _part_of(data, variant.part)
        return GatJob(_our_gat(data, variant.precision), data, variant.part, {})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch_geometric.nn")
    part, too_large = variant.part, {}
    while True:
        some = _part_of(data, part)
        try:
            job = pyg_gat(some, variant.precision, variant.way == "PyG compile")
            return GatJob(job, some, part, too_large)
        except RuntimeError as error:  # out of memory is one; so is too large an index
            if part <= SMALLEST_PART:
                raise
            too_large[f"{part:g}"] = _reason(error)
            print(f"{variant.label}: {_reason(error)}", file=sys.stderr)
        part /= 2
        _forget(importlib.import_module("torch"))


def _our_gat(data: RedditGraph, precision: str) -> Job:
    structure, _ = nnx.split(nnx.eval_shape(_gat, jax.random.key(0)))

    def init(key: jax.Array) -> tuple[Any, None]:
        return nnx.split(_gat(key))[1], None

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[jax.Array, Any]:
        del rng
        logits = nnx.merge(structure, params)(batch["graph"], batch["features"])
        logits = logits[batch["node"]].astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (model_state, None)

    batch = {
        "graph": data.graph,
        "features": policy_of(precision).cast_to_compute(data.features),
        "node": data.nodes,
        "label": data.labels,
    }
    return JaxJob(loss_fn, reddit.adam_with_l2(1e-3), init, batch, precision)


def pyg_gat(data: RedditGraph, precision: str, compiled: bool) -> Job:
    """Returns the step of PyTorch Geometric's layers, with our parameters."""
    torch: Any = importlib.import_module("torch")
    layers: Any = importlib.import_module("torch_geometric.nn")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, convolutions = FEATURES, []
            for params in data.params:
                heads, out = params["att_src"].shape[1:]
                layer = layers.GATConv(width, out, heads, add_self_loops=False)
                layer.load_state_dict({name: torch.tensor(x) for name, x in params.items()})
                convolutions.append(layer)
                width = heads * out
            self.layers = torch.nn.ModuleList(convolutions)

        def forward(self, x: Any, edge_index: Any, nodes: Any) -> Any:
            for i, layer in enumerate(self.layers):
                x = layer(torch.nn.functional.elu(x) if i else x, edge_index)
            return x[nodes]

    def adam(params: Any) -> Any:
        decay = reddit.WEIGHT_DECAY
        return torch.optim.Adam(params, lr=1e-3, weight_decay=decay, fused=True)

    half = precision if precision in ("float16", "bfloat16") else "float32"
    features = torch.from_numpy(data.features).to(getattr(torch, half))
    edge_index = torch.from_numpy(np.stack(data.ends()).astype(np.int64))
    nodes, labels = (torch.from_numpy(x.astype(np.int64)) for x in (data.nodes, data.labels))
    return TorchJob(Net(), adam, (features, edge_index, nodes), labels, precision, compiled)


def _forget(torch: Any) -> None:
    """Frees what a step left behind that did not fit."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# The operations.

NODE_SHARE = 40  # edges for each node
OPERATIONS = {
    **{
        title: ROWS[title]
        for title in ("copy+sum", "weighted sum, gradient", "edge softmax", "dot")
    },
    "attention, gradient": Row("gat", ("features", "left", "right"), "node_cotangent"),
}
Op = Callable[..., Any]
Started = tuple[Callable[[], Any], float | None]  # an operation, and the MB that it takes


class Operations:
    """Operations that are ready to be measured, each timed apart; a step is all of them, once.

    Args:
      make: makes an operation, of its row: how to start it, and the MB that it takes beside its inputs.
      wait: returns when a result is there.
      facts: what else the variant's facts have, called in the end.
    """

    def __init__(
        self,
        make: Callable[[Row], Started],
        wait: Callable[[Any], Any],
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        self.wait, self.more_facts = wait, facts
        self.rows: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, Callable[[], Any]] = {}
        start = time.perf_counter()
        for title, row in OPERATIONS.items():
            try:
                self.runs[title], megabytes = make(row)
            except Exception as error:  # noqa: BLE001  # each library has its own
                self.rows[title] = {"failed": _reason(error)}
                continue
            self.rows[title] = {"ms": [], "extra_mb": megabytes}
        if not self.runs:
            raise RuntimeError("; ".join(row["failed"] for row in self.rows.values()))
        self.compile_seconds = time.perf_counter() - start

    def steps(self, count: int) -> float:
        """Does each operation so many times and returns the seconds of all."""
        total = 0.0
        for title, run in self.runs.items():
            result = None
            start = time.perf_counter()
            for _ in range(count):
                result = run()
            self.wait(result)
            seconds = time.perf_counter() - start
            del result
            self.rows[title]["ms"].append(1e3 * seconds / count)
            total += seconds
        return total

    def facts(self) -> dict[str, Any]:
        """Returns medians and memory by operation, and the facts of the whole."""
        rows = {}
        for title, row in self.rows.items():
            rows[title] = dict(row)
            if "ms" in row:
                rows[title]["ms"] = statistics.median(row["ms"])
        extra = [row["extra_mb"] for row in rows.values() if row.get("extra_mb") is not None]
        return {
            "compile_seconds": self.compile_seconds,
            "program_mb": max(extra, default=None),
            "rows": rows,
            **self.more_facts(),
        }


def our_operations(implementation: str) -> dict[str, Op]:
    """Returns ours in an implementation; each takes the graph first."""

    def copy_sum(graph: Graph, x: jax.Array) -> jax.Array:
        graph = graph.with_nodes(x=x)
        message, total = fn.copy_u("x", "m"), fn.sum("m", "y")
        return update_all(graph, message, total, implementation=implementation).nodes["y"]

    def weighted_sum(graph: Graph, x: jax.Array, w: jax.Array) -> jax.Array:
        graph = graph.with_nodes(x=x).with_edges(w=w)
        message, total = fn.u_mul_e("x", "w", "m"), fn.sum("m", "y")
        return update_all(graph, message, total, implementation=implementation).nodes["y"]

    def dot(graph: Graph, x: jax.Array) -> jax.Array:
        graph, message = graph.with_nodes(x=x), fn.u_dot_v("x", "x", "y")
        return apply_edges(graph, message, implementation=implementation).edges["y"][..., 0]

    attend = functools.partial(gat_attention, implementation=implementation)
    return {
        "copy_sum": copy_sum,
        "weighted_sum": weighted_sum,
        "softmax": edge_softmax,
        "dot": dot,
        "gat": _on_rows(attend),
    }


def jraph_operations(case: Case) -> dict[str, Op]:
    """Returns the operations as users of jraph write them; each takes both ends first."""
    ops = JraphOps(case.num_nodes, is_sorted=False)
    names = ("copy_sum", "weighted_sum", "softmax", "dot")
    return {name: getattr(ops, name) for name in names} | {"gat": _on_rows(ops.attention)}


def _on_rows(attention: Op) -> Op:
    """Returns an attention of features [nodes, heads * width]."""

    def attend(graph: Any, x: jax.Array, left: jax.Array, right: jax.Array) -> jax.Array:
        result = attention(graph, x.reshape(-1, HEADS, WIDTH), left, right)
        return result.reshape(x.shape)

    return attend


def _prepare_operations(edges: float, folder: Path) -> None:
    case = Case(int(edges) // NODE_SHARE, int(edges))
    logits = case.arrays["logits"]
    case.arrays["left"], case.arrays["right"] = np.split(logits[: 2 * case.num_nodes], 2)
    _write(folder, case)


def _operations_job(variant: Variant, edges: float, folder: Path) -> Job:
    del edges
    case: Case = _read(folder)
    if variant.way.startswith("PyG"):
        return _pyg_operations(case, variant.precision)
    if variant.way == "jraph":
        graph: Any = (jnp.asarray(case.senders), jnp.asarray(case.receivers))
        ops = jraph_operations(case)
    else:
        graph = from_edges(case.senders, case.receivers, case.num_nodes)
        ops = our_operations(variant.way.split()[1])

    def make(row: Row) -> Started:
        program, arguments = jax_program(ops[row.op], graph, case, row, variant.precision)
        jax.block_until_ready(program(*arguments))
        sizes = program.memory_analysis()
        extra = (sizes.temp_size_in_bytes + sizes.output_size_in_bytes) / 1e6 if sizes else None
        return functools.partial(program, *arguments), extra

    def facts() -> dict[str, Any]:
        memory, memory_of = peak_memory()
        device = jax.local_devices()[0].device_kind
        where = {"device": device, "version": jax_version()}
        return where | {"memory_mb": memory, "memory_of": memory_of}

    return Operations(make, jax.block_until_ready, facts)


def _pyg_operations(case: Case, precision: str) -> Job:
    torch: Any = importlib.import_module("torch")
    is_cuda = torch.cuda.is_available()
    peer = Torch(case, "cuda" if is_cuda else "cpu")

    def wait(result: Any = None) -> None:
        del result
        if is_cuda:
            torch.cuda.synchronize()

    def make(row: Row) -> Started:
        if is_cuda:
            torch.cuda.empty_cache()
        run = peer.form(getattr(peer, f"scatter_{row.op}"), row, precision).run
        if not is_cuda:
            run()
            return run, None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        wait()
        return run, (torch.cuda.max_memory_allocated() - before) / 1e6

    def facts() -> dict[str, Any]:
        memory, memory_of = peak_memory() if not is_cuda else (0.0, "device")
        if is_cuda:
            memory = torch.cuda.max_memory_allocated() / 1e6
        device = torch.cuda.get_device_name() if is_cuda else "cpu"
        where = {"device": device, "version": f"torch {torch.__version__}"}
        return where | {"memory_mb": memory, "memory_of": memory_of}

    return Operations(make, wait, facts)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _write(folder: Path, data: Any) -> None:
    with (folder / PREPARED).open("wb") as file:
        pickle.dump(data, file, protocol=5)


def _read(folder: Path) -> Any:
    with (folder / PREPARED).open("rb") as file:
        return pickle.load(file)


def _first(way: str, precisions: tuple[str, ...]) -> tuple[Variant, ...]:
    return tuple(Variant(way, precision) for precision in precisions)


GAT_STEP = Workload(
    unit="scale",
    size=1.0,
    tiny_size=0.0005,
    variants=(
        *_first(OURS, ("float32", "float16")),  # should time run out, these are there
        *_first("PyG eager", ("float32", "float16")),
        *_first(OURS, ("tf32", "bfloat16")),
        *_first("PyG compile", ("float32", "float16")),
        *_first("PyG eager", ("tf32", "bfloat16")),
        *_first("PyG compile", ("tf32", "bfloat16")),
    ),
    job=_gat_job,
    prepare=_prepare_gat,
    is_together=False,
    note=GUIDE,
)
GRAPH_OPERATIONS = Workload(
    unit="edges",
    size=20_000_000,
    tiny_size=4_000,
    variants=tuple(
        Variant(way, precision)
        for precision in PRECISIONS
        if precision != "tf32"  # which is a matter of products of matrices
        for way in (f"{OURS} streaming", f"{OURS} xla", "PyG scatter", "jraph")
    ),
    job=_operations_job,
    prepare=_prepare_operations,
    is_together=False,
    note="a step is all operations, once; program is the largest one's; peers add half in half",
)
