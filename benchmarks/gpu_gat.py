"""The workload `gat` of `gpu.py`: the step of the task `reddit`, in jmp_train and in PyTorch Geometric.

Generating the graph takes long, so a separate process does it once per run, on the host, and all others load it.
PyTorch Geometric stores messages, which may not fit: its process then halves the edges until they fit, keeping the
first nodes and the edges between them, and reports the fraction.
"""

import gc
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from example_tasks import models, reddit
from flax import nnx
from gpu_workloads import (
    OURS,
    Job,
    TorchJob,
    Variant,
    Workload,
    first_line,
    policy_job,
    policy_of,
    read_prepared,
    write_prepared,
)

from jmp_train.graphs import Graph, from_edges
from jmp_train.graphs.datasets import REDDIT_CLASSES, REDDIT_FEATURES, synthetic_reddit

SMALLEST_PART = 1 / 64
GUIDE = "DGL's guide, on a V100-16GB: 15.2 GB in float32, 12.8 in float16, which is slower"


class RedditGraph(NamedTuple):
    """The task's data, or the part of it among its first nodes; all on the host.

    Attributes:
      graph: sorted edges, with a self-loop at each node.
      features: float32 [nodes, 602].
      nodes: int32 [labeled], those to train on.
      labels: int32 [labeled].
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


def _gat(key: jax.Array) -> models.GAT:
    return models.GAT(REDDIT_FEATURES, reddit.HIDDEN, REDDIT_CLASSES, reddit.HEADS, rngs=nnx.Rngs(key))


def _prepare_gat(scale: float, folder: Path) -> None:
    data = synthetic_reddit(scale)
    graph = jax.tree.map(np.asarray, reddit.make_graph(data))
    names = {"lin.weight": "weight", "att_src": "left", "att_dst": "right", "bias": "bias"}
    params = []
    for layer in _gat(jax.random.key(0)).layers:
        arrays = {name: np.asarray(getattr(layer, ours)[...]) for name, ours in names.items()}
        params.append(arrays | {"lin.weight": arrays["lin.weight"].T})
    write_prepared(folder, RedditGraph(graph, data.features, data.train, data.labels[data.train], params))


def _part_of(data: RedditGraph, part: float) -> RedditGraph:
    """Returns the first nodes and the edges among them, which are about that part of all edges."""
    if part == 1:
        return data
    count = round(len(data.features) * part**0.5)
    senders, receivers = data.ends()
    is_kept = (senders < count) & (receivers < count)
    graph = from_edges(senders[is_kept], receivers[is_kept], count, formats=("csr",))
    is_labeled = data.nodes < count
    return data._replace(
        graph=graph,
        features=data.features[:count],
        nodes=data.nodes[is_labeled],
        labels=data.labels[is_labeled],
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
        """Makes a number of steps and returns the seconds until the last is done."""
        return self.job.steps(count)

    def facts(self) -> dict[str, Any]:
        """Returns the job's facts, the size of the data, and why larger parts failed."""
        return self.job.facts() | self.sizes


def _gat_job(variant: Variant, scale: float, folder: Path) -> Job:
    del scale
    data: RedditGraph = read_prepared(folder)
    if variant.way == OURS:
        data = _part_of(data, variant.part)
        return GatJob(_our_gat(data, variant.precision), data, variant.part, {})

    jax.config.update("jax_platforms", "cpu")  # the device's memory is torch's
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
            too_large[f"{part:g}"] = first_line(error)
            print(f"{variant.label}: {first_line(error)}", file=sys.stderr)
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
    return policy_job(loss_fn, models.adam_with_l2(1e-3), init, batch, precision)


def pyg_gat(data: RedditGraph, precision: str, compiled: bool) -> Job:
    """Returns the step of PyTorch Geometric's layers, with our parameters."""
    torch: Any = importlib.import_module("torch")
    layers: Any = importlib.import_module("torch_geometric.nn")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, convolutions = REDDIT_FEATURES, []
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
        decay = models.WEIGHT_DECAY
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
