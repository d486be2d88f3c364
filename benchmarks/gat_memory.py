"""Prints the memory of the training step of DGL's guide, a GAT on Reddit's graph, on a V100-16GB.

    python benchmarks/gat_memory.py [--python .venv-plan/bin/python] [--gpu V100-16GB] [--json FILE]

No GPU is needed: the whole step (three layers, hidden 256, self-loops, Adam, weight decay, dynamic loss scale) is
compiled ahead of time for a target GPU, with the sizes of the real graph, and the compiler reports its allocations.
All data on the device are arguments of the step, and so they are counted: graph, features, parameters, optimizer
state. DGL's figures are from its guide, measured by its authors.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from example_tasks import models, reddit
from flax import nnx
from gpu_builders import compile_for_gpu
from result_files import write_results

import jmp_train as jt
from jmp_train.aot import CompiledProgram
from jmp_train.graphs.datasets import REDDIT_CLASSES, REDDIT_FEATURES, heavy_tailed
from jmp_train.graphs.structure import Adjacency, CSRAndCSC, Graph, from_degrees

NODES, EDGES = 232_965, 114_615_892  # without self-loops
POLICIES = ("float32", "mixed_float16", "autocast_float16")
DGL = {
    ("1 1 1", "float32"): "15.2",
    ("1 1 1", "mixed_float16"): "12.8",
    ("2 2 2", "float32"): "out of memory",
    ("2 2 2", "mixed_float16"): "15.7",
}
GOALS = {
    ("1 1 1", "float32"): 3.0,
    ("1 1 1", "mixed_float16"): 2.2,
    ("2 2 2", "float32"): 4.8,
    ("2 2 2", "mixed_float16"): 3.4,
}


def reddit_shapes(nodes: int = NODES, edges: int = EDGES) -> Graph:
    """Returns a symmetric graph with Reddit's counts, or others, and synthetic degrees; only the shapes are real."""
    degrees = heavy_tailed(nodes, edges / nodes, 21_657).astype(np.int64)
    degrees[: edges - degrees.sum()] += 1  # the fractions that were cut off
    total = edges + nodes
    small = from_degrees(degrees + 1, np.zeros(0, np.int32), None, total)
    others: Any = jax.ShapeDtypeStruct((total,), jnp.int32)
    neighbors = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), small)
    one_way = jax.tree.unflatten(jax.tree.structure(neighbors), [others, *jax.tree.leaves(neighbors)[1:]])
    one: Any = jax.ShapeDtypeStruct((1,), jnp.int32)
    adjacency = Adjacency(None, CSRAndCSC(None, one_way), None, has_zero_in_degree=False)
    return Graph({}, {}, adjacency, one, one)


def train_step(policy_name: str, *heads: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Returns the whole step, the shapes of its arguments, and that the state is donated."""
    policy = jt.get_policy(policy_name)
    has_half = policy_name != "float32"
    optimizer = jt.with_loss_scale(models.adam_with_l2(1e-3), jt.torch_loss_scale(enabled=has_half))

    def make(key: jax.Array) -> models.GAT:
        return models.GAT(
            REDDIT_FEATURES,
            reddit.HIDDEN,
            REDDIT_CLASSES,
            [int(count) for count in heads],
            rngs=nnx.Rngs(key),
        )

    structure, _ = nnx.split(nnx.eval_shape(make, jax.random.key(0)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["graph"], batch["features"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), batch["label"])
        return losses.mean(where=batch["train_mask"])

    def state() -> jt.TrainState:
        params = nnx.split(make(jax.random.key(0)))[1]
        return jt.TrainState.create(params, optimizer)

    batch = batch_of(reddit_shapes(), NODES, policy_name)
    step = jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy)
    return step, (jax.eval_shape(state), batch), {"donate_argnums": 0}


def batch_of(graph: Graph, nodes: int, policy_name: str) -> dict[str, Any]:
    """Returns the shapes of what a step takes of a graph."""
    dtype = jnp.float32 if policy_name == "float32" else jnp.float16
    return {
        "graph": graph,
        "features": jax.ShapeDtypeStruct((nodes, REDDIT_FEATURES), dtype),
        "label": jax.ShapeDtypeStruct((nodes,), jnp.int32),
        "train_mask": jax.ShapeDtypeStruct((nodes,), jnp.bool_),
    }


def compiled(policy: str, heads: str, gpu: str, python: str) -> CompiledProgram:
    """Returns what the step of a policy with these heads needs."""
    target = f"{Path(__file__).resolve()}:train_step"
    return compile_for_gpu(target, policy, *heads.split(), gpu=gpu, python=python, timeout=1200)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=_plan_python(), help="with jmp_train[plan]")
    parser.add_argument("--gpu", default="V100-16GB")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--heads", nargs="+", default=["1 1 1", "2 2 2"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()

    print(f"peak memory of a training step on a {args.gpu}, GB; jax {jax.__version__}")
    print(f"{'heads':8}{'policy':20}{'peak':>8}{'arguments':>11}{'goal':>7}  DGL")
    results = []
    for heads in args.heads:
        for policy in args.policies:
            sizes = compiled(policy, heads, args.gpu, args.python)
            peak, arguments = sizes.peak_bytes / 1e9, sizes.argument_bytes / 1e9
            goal = GOALS.get((heads, policy))
            text = "" if goal is None else f"{goal:.1f}"
            dgl = DGL.get((heads, policy), "")
            print(f"{heads:8}{policy:20}{peak:8.2f}{arguments:11.2f}{text:>7}  {dgl}", flush=True)
            results.append(
                {
                    "heads": heads,
                    "policy": policy,
                    "gpu": args.gpu,
                    "peak_bytes": sizes.peak_bytes,
                    "argument_bytes": sizes.argument_bytes,
                    "temp_bytes": sizes.temp_bytes,
                }
            )
    if args.json is not None:
        write_results(args.json, {"steps": results}, device=f"{args.gpu}, compiled for, not run")


def _plan_python() -> str:
    """Returns the interpreter that `make .venv-plan/.plan` makes, or this one."""
    path = Path(__file__).resolve().parents[1] / ".venv-plan/bin/python"
    return str(path) if path.exists() else sys.executable


if __name__ == "__main__":
    main()
