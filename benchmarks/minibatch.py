"""Measures how fast mini-batches of a large graph are sampled and loaded, and how fast a step takes them.

    python benchmarks/minibatch.py [--size 50000x2000000] [--models sage gat] [--json FILE]
    python benchmarks/minibatch.py --size 500x5000 --batch-size 32 --seconds 0.1    # small, to see that it runs

The graph's degrees follow a power law. A batch is 1,024 seeds, of each of which 15 neighbors are drawn, and 10
of each of these; its features, 256 a node, are gathered on the host, in the dtype of the model. Models have
two layers, hidden 256, GraphSAGE's mean or 4 heads of attention, and the step is loss, gradient and Adam.

Measured in one process, in turn, medians of batches per second: loading alone (sampling, padding, gathering,
putting on the device, by one thread that works ahead); the step alone, on a batch on the device; and both
together, as training has them, the threads sharing the processors with the step. The peer is PyTorch
Geometric's NeighborLoader with the same fanouts and features, by itself or with a worker that loads ahead, alone and
in the same rounds, where torch_geometric and pyg_lib or torch_sparse are there.

`--memory` compiles each step ahead of time for a target GPU, and prints its memory next to the size of the graph and
its features, which stay in host memory.
"""

import argparse
import importlib
import itertools
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Without it jaxlib 0.11 and 0.12 miscompile bfloat16 fusions on the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpu_builders import compile_for_gpu
from graph_cases import Case
from result_files import write_results

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data import neighbor_batches

WIDTH, HIDDEN, HEADS, CLASSES = 256, 256, 4, 16
FANOUTS = (10, 15)  # of the first layer, and of the last one, which the seeds are the targets of
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
AHEAD = 4  # batches that are loaded before they are wanted
PEERS: dict[str, dict[str, Any]] = {
    "PyG": {},
    "PyG, 1 worker": {"num_workers": 1, "persistent_workers": True},
}
Rates = dict[str, float]


class Data:
    """The graph on the host, with features and labels, and a sampler of it."""

    def __init__(self, num_nodes: int, num_edges: int, batch_size: int) -> None:
        case = Case(num_nodes, num_edges)
        self.senders, self.receivers = case.senders, case.receivers
        self.edges = graphs.host_edges(case.senders, case.receivers, num_nodes)
        random = np.random.default_rng(1)
        self.features = random.random((num_nodes, WIDTH), np.float32)
        self.labels = case.arrays["labels"]
        self.seeds = np.arange(num_nodes)
        self.sampler = graphs.neighbor_sampler(self.edges, FANOUTS, self.seeds, batch_size)

    @property
    def host_bytes(self) -> int:
        """The size of edges and features."""
        return self.edges.sources.nbytes + self.edges.starts.nbytes + self.features.nbytes

    def fetch(self, dtype: Any) -> Callable[[graphs.MiniBatch], Any]:
        """Returns what makes the step's batch of features that were cast beforehand."""
        features = self.features.astype(dtype)

        def fetch(batch: graphs.MiniBatch) -> Any:
            return {
                "blocks": batch.blocks,
                "features": graphs.take_rows(features, batch.inputs),
                "label": graphs.take_rows(self.labels, batch.seeds),
                "is_seed": batch.seeds >= 0,
            }

        return fetch

    def batches(self, dtype: Any) -> Iterator[Any]:
        """Returns batches without end."""
        return neighbor_batches(
            self.sampler,
            self.seeds,
            self.fetch(dtype),
            epochs=None,
            drop_remainder=True,
            prefetch=AHEAD,
        )


class Model(nnx.Module):
    """Two layers of GraphSAGE or of attention."""

    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        if kind == "sage":
            self.first = graphs.SAGEConv(WIDTH, HIDDEN, activation=nnx.relu, rngs=rngs)
            self.second = graphs.SAGEConv(HIDDEN, CLASSES, rngs=rngs)
        else:
            own: Any = {"allow_zero_in_degree": True, "rngs": rngs}
            self.first = graphs.GATConv(WIDTH, HIDDEN // HEADS, HEADS, activation=nnx.elu, **own)
            self.second = graphs.GATConv(HIDDEN, CLASSES, 1, **own)

    def __call__(self, blocks: Any, rows: jax.Array) -> jax.Array:
        """Returns logits [targets of the last block, classes]."""
        first, second = blocks
        rows = self.first(first, rows)
        rows = self.second(second, rows.reshape(first.num_targets, -1))
        return rows.reshape(second.num_targets, -1)


def make_step(kind: str, policy_name: str) -> tuple[Any, jt.TrainState]:
    """Returns the training step, not compiled, and its first state."""
    structure, params = nnx.split(Model(kind, nnx.Rngs(0)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["blocks"], batch["features"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
        return losses.mean(where=batch["is_seed"])

    has_half = policy_name == "mixed_float16"
    optimizer = jt.with_loss_scale(optax.adam(1e-3), jt.torch_loss_scale(2.0**10, enabled=has_half))
    policy = jt.get_policy(policy_name)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    return step, jt.TrainState.create(params, optimizer)


def rate(run: Callable[[], None], seconds: float) -> float:
    """Returns how often something runs in a second, measured for that many."""
    for _ in range(AHEAD + 1):  # what was loaded ahead of time is not counted
        run()
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < seconds:
        run()
        count += 1
    return count / (time.perf_counter() - start)


def our_rates(data: Data, kind: str, policy_name: str) -> dict[str, Callable[[], None]]:
    """Returns what is measured of ours: loading, stepping, and both."""
    dtype = jt.get_policy(policy_name).compute_dtype
    step, state = make_step(kind, policy_name)
    compiled = jax.jit(step)
    batches, both = data.batches(dtype), data.batches(dtype)
    batch = next(batches)
    state, _ = jax.block_until_ready(compiled(state, batch))
    held = [state]

    def load() -> None:
        jax.block_until_ready(next(batches))

    def run() -> None:
        held[0], _ = jax.block_until_ready(compiled(held[0], batch))

    def train() -> None:
        held[0], _ = jax.block_until_ready(compiled(held[0], next(both)))

    return {"loading": load, "step": run, "both": train}


def peer_loaders(data: Data, batch_size: int) -> dict[str, Callable[[], None]] | str:
    """Returns what loads a batch with PyTorch Geometric, or the reason why it does not run."""
    if find_spec("torch_geometric") is None:
        return "torch_geometric is not installed"
    if find_spec("pyg_lib") is None and find_spec("torch_sparse") is None:
        return "neither pyg_lib nor torch_sparse is installed, and it needs one of them"
    torch = importlib.import_module("torch")
    pyg_data = importlib.import_module("torch_geometric.data")
    loader = importlib.import_module("torch_geometric.loader")
    ends = torch.from_numpy(np.stack([data.senders, data.receivers]).astype(np.int64))
    whole = pyg_data.Data(x=torch.from_numpy(data.features), edge_index=ends, y=torch.from_numpy(data.labels))
    options = {"batch_size": batch_size, "shuffle": True, "drop_last": True}
    num_neighbors = list(reversed(FANOUTS))  # PyG counts from the seeds
    try:
        return {
            name: _next_of(loader.NeighborLoader(whole, num_neighbors, **options, **workers))
            for name, workers in PEERS.items()
        }
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _next_of(batches: Any) -> Callable[[], None]:
    """Returns what loads the next batch, from the start again after the last one."""
    iterator = iter(batches)
    next(iterator)

    def load() -> None:
        nonlocal iterator
        try:
            next(iterator)
        except StopIteration:
            iterator = iter(batches)
            next(iterator)

    return load


def measure(data: Data, kind: str, policy_name: str, peer: Any, args: Any) -> Rates:
    """Returns the medians of what is measured in turn, and prints them."""
    forms = our_rates(data, kind, policy_name)
    if not isinstance(peer, str):
        forms |= peer
    found: dict[str, list[float]] = {name: [] for name in forms}
    for round_number in range(args.rounds + 1):
        for name, run in forms.items():
            measured = rate(run, args.seconds)
            if round_number:  # the first is for warming up
                found[name].append(measured)
    rates = {name: statistics.median(values) for name, values in found.items()}
    verdict = "ahead" if rates["loading"] > rates["step"] else "BEHIND"
    cells = "".join(f"{value:15.2f}" for value in rates.values())
    print(f"{kind:6}{policy_name:16}{cells}  loading keeps {verdict}", flush=True)
    return rates


def target_step(kind: str, policy_name: str, file: str) -> Any:
    """Returns the step and its arguments' shapes, for `compile_for_gpu`; the batch's are in a file."""
    step, state = make_step(kind, policy_name)
    batch = pickle.loads(Path(file).read_bytes())
    return step, (jax.eval_shape(lambda: state), batch), {"donate_argnums": 0}


def print_memory(data: Data, args: Any) -> dict[str, int]:
    """Prints what the steps need on the GPU, and returns the bytes."""
    size = data.host_bytes / 1e6
    print(f"\nthe graph and its features, in the host's memory: {size:.0f} MB; a {args.gpu} needs")
    seeds, target = data.seeds[: args.batch_size], f"{Path(__file__).resolve()}:target_step"
    sampled = data.sampler.sample(seeds, np.random.default_rng(0))
    peaks = {}
    for kind, policy_name in itertools.product(args.models, args.policies):
        batch = data.fetch(jt.get_policy(policy_name).compute_dtype)(sampled)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        with tempfile.NamedTemporaryFile() as file:
            file.write(pickle.dumps(shapes))
            file.flush()
            options: Any = {"gpu": args.gpu, "python": args.python, "timeout": 1200}
            compiled = compile_for_gpu(target, kind, policy_name, file.name, **options)
        peaks[f"{kind} {policy_name}"] = compiled.peak_bytes
        print(f"{kind:6}{policy_name:16}{compiled.peak_bytes / 1e6:10.0f} MB", flush=True)
    return peaks


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="50000x2000000", help="NODESxEDGES")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--models", nargs="+", default=["sage", "gat"], choices=["sage", "gat"])
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--seconds", type=float, default=4.0, help="a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="compile for a target GPU too, ahead of time")
    parser.add_argument("--gpu", default="V100-16GB")
    parser.add_argument("--python", default=".venv-plan/bin/python", help="with jmp_train[plan]")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    num_nodes, num_edges = map(int, args.size.split("x"))
    data = Data(num_nodes, num_edges, args.batch_size)
    peer = peer_loaders(data, args.batch_size)
    shapes = ", ".join(
        f"{size.sources['node']:,} sources and {next(iter(size.edges.values())):,} edges"
        for size in data.sampler.sizes[0]
    )
    print(f"jax {jax.__version__}, {os.cpu_count()} CPUs; {args.batch_size} seeds; {shapes}")
    names = ["loading", "step", "both", *([] if isinstance(peer, str) else peer)]
    print(f"batches a second\n{'':22}{''.join(f'{name:>15}' for name in names)}")
    results = {
        f"{kind} {policy_name}": measure(data, kind, policy_name, peer, args)
        for kind in args.models
        for policy_name in args.policies
    }
    if isinstance(peer, str):
        print(f"PyG's NeighborLoader does not run: {peer}")
    report: dict[str, Any] = {"jax": jax.__version__, "size": args.size, "rates": results}
    if args.memory:
        report |= {"host_bytes": data.host_bytes, "peak_bytes": print_memory(data, args)}
    if args.json is not None:
        write_results(args.json, report)


if __name__ == "__main__":
    main()
