"""The published accuracies of GCN, GAT and GraphSAGE on Cora, Citeseer and Pubmed, in float32 and in half precision.

    python benchmarks/planetoid.py [--data-dir ../shared/data/planetoid] [--datasets cora] [--seeds 10] [--json FILE]

The script prints tables for each data set with files in the folder. Models and training are the papers'
(`examples/tasks/cora.py`). They and the rule by which the validation nodes select the epoch were fixed before the
first run. Each seed evaluates the test nodes once, with the parameters of that epoch. A seed determines parameters and
dropout, the same in each policy, so that half precision is compared with float32 seed by seed. Features are sparse.

- GCN, https://arxiv.org/abs/1609.02907: 200 epochs. The paper stops by the validation loss; here the epoch
  with the lowest one is selected.
- GAT, https://arxiv.org/abs/1710.10903: until neither loss nor accuracy of the validation nodes was as good
  as ever before for 100 epochs. As in the authors' code, the last epoch in which both were is selected.
- GraphSAGE, DGL's example: 200 epochs, and the epoch with the lowest loss of the validation nodes. DGL
  states the accuracy of one training, at its last epoch.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from example_tasks import cora, models
from result_files import write_results

import jmp_train as jt
from jmp_train import Task
from jmp_train.app.runs import loss_scale_for
from jmp_train.graphs import NodeData, read_planetoid
from jmp_train.graphs.datasets import PLANETOID, synthetic_cora

DATA = Path(__file__).resolve().parents[2] / "shared/data/planetoid"
POLICIES = ("float32", "mixed_float16", "autocast_float16")
BAND = 0.7  # around the published mean, and around no difference to float32


@dataclasses.dataclass(frozen=True)
class Paper:
    """The results of a paper, and the length of its training.

    Attributes:
      accuracies: of the test nodes, in percent, by data set.
      epochs: at most.
      patience: how many epochs without an improvement end the training; None for no such end.
      by_accuracy: whether an epoch is selected by accuracy and loss, and not by the loss alone.
    """

    accuracies: Mapping[str, float]
    epochs: int
    patience: int | None
    by_accuracy: bool


def _by_name(*accuracies: float) -> dict[str, float]:
    return dict(zip(PLANETOID, accuracies, strict=True))


PAPERS = {
    "gcn": Paper(_by_name(81.5, 70.3, 79.0), epochs=200, patience=None, by_accuracy=False),
    "gat": Paper(_by_name(83.0, 72.5, 79.0), epochs=100_000, patience=100, by_accuracy=True),
    "sage": Paper(_by_name(83.3, 71.1, 78.3), epochs=200, patience=None, by_accuracy=False),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """A training and what it selected so far.

    Attributes:
      state: the training's.
      params: of the selected epoch.
      epoch: the selected one; from 1.
      accuracy: of the validation nodes, in that epoch.
      best_accuracy: of the validation nodes, in all epochs.
      best_loss: likewise.
      stale: how many epochs there were since one of these two was reached.
    """

    state: jt.TrainState
    params: Any
    epoch: jax.Array
    accuracy: jax.Array
    best_accuracy: jax.Array
    best_loss: jax.Array
    stale: jax.Array


def make_trainer(task: Task, policy: jt.Policy, paper: Paper) -> Callable[..., dict[str, Any]]:
    """Returns `train(key, batches) -> what is reported of a seed`, one program for a whole training."""
    loss_scale = loss_scale_for(policy)
    optimizer = jt.with_loss_scale(task.optimizer_for(paper.epochs), loss_scale)
    step = jt.train_step(task.loss_fn, optimizer, policy=policy)
    predict = jt.apply_policy(lambda params, batch: task.metrics.predict(params, None, batch), policy)

    def score(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = predict(params, batch).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(logits.argmax(-1) == batch["label"]), losses.mean()

    def start(key: jax.Array) -> Progress:
        init_key, step_key = jax.random.split(key)
        params, _ = task.init(init_key)
        state = jt.TrainState.create(params, optimizer, rng=step_key)
        nothing, none = jnp.float32(0), jnp.int32(0)
        return Progress(state, params, none, nothing, nothing, jnp.float32(jnp.inf), none)

    def epoch(progress: Progress, batches: dict[str, Any]) -> Progress:
        state, _ = step(progress.state, batches["train"])
        accuracy, loss = score(state.params, batches["validation"])
        is_accurate = accuracy >= progress.best_accuracy
        is_likely = loss <= progress.best_loss
        is_selected = is_likely & is_accurate if paper.by_accuracy else is_likely
        selected = (state.params, state.step, accuracy)
        before = (progress.params, progress.epoch, progress.accuracy)
        return Progress(
            state,
            *jax.tree.map(lambda new, old: jnp.where(is_selected, new, old), selected, before),
            best_accuracy=jnp.maximum(accuracy, progress.best_accuracy),
            best_loss=jnp.minimum(loss, progress.best_loss),
            stale=jnp.where(is_accurate | is_likely, 0, progress.stale + 1),
        )

    def goes_on(progress: Progress) -> jax.Array:
        has_time = progress.state.step < paper.epochs
        return has_time if paper.patience is None else has_time & (progress.stale < paper.patience)

    @jax.jit
    def train(key: jax.Array, batches: dict[str, Any]) -> dict[str, Any]:
        end = jax.lax.while_loop(goes_on, lambda x: epoch(x, batches), start(key))
        accuracy, _ = score(end.params, batches["test"])
        return {
            "accuracy": 100 * accuracy,
            "validation_accuracy": 100 * end.accuracy,
            "epoch": end.epoch,
            "epochs": end.state.step,
            "skipped_steps": end.state.opt_state.skipped_steps,
        }

    return train


def run_seeds(data: NodeData, name: str, model: str, policy_name: str, seeds: int, paper: Paper) -> list[Any]:
    """Returns what each seed of a data set came to in one policy, numbers by name."""
    task, policy = cora.make_task(data, model, name, sparse=True), jt.get_policy(policy_name)
    shared = jax.device_put(policy.cast_to_compute(task.shared()))
    nodes = {"train": data.train, "validation": data.validation, "test": data.test}
    batches = {name: models.node_examples(data, chosen) | shared for name, chosen in nodes.items()}
    train = make_trainer(task, policy, paper)
    results = []
    for seed in range(seeds):
        start = time.perf_counter()
        result = jax.device_get(train(jax.random.key(seed), batches))
        result = {name: round(value.item(), 4) for name, value in result.items()}
        result |= {"seed": seed, "seconds": round(time.perf_counter() - start, 1)}
        results.append(result)
        print(f"  {policy_name:18}", *(f"{k} {v:g}" for k, v in result.items()), flush=True)
    return results


def interval_of_mean(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of two values or more, by Student's t."""
    import scipy.stats

    half = scipy.stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return float(np.mean(values) - half), float(np.mean(values) + half)


def summarize(results: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """Returns of each policy mean and standard deviation, and how it compares with the paper and with float32."""
    summary = {}
    for policy, seeds in results.items():
        accuracies = [seed["accuracy"] for seed in seeds]
        summary[policy] = {
            "mean": float(np.mean(accuracies)),
            "deviation": float(np.std(accuracies, ddof=1)),
            "skipped_steps": [seed["skipped_steps"] for seed in seeds],
        }
        if policy != "float32" and "float32" in results:
            full = [seed["accuracy"] for seed in results["float32"]]
            differences = np.subtract(accuracies, full).tolist()
            summary[policy]["difference"] = float(np.mean(differences))
            summary[policy]["interval"] = interval_of_mean(differences)
    return summary


def print_summary(published: float, summary: dict[str, dict[str, Any]]) -> None:
    """Prints a line for each policy."""
    low, high = published - BAND, published + BAND
    print(f"published {published}, band {low:.1f} to {high:.1f}; differences within {BAND}")
    print(f"{'policy':18}{'mean':>7}{'std':>6}{'':9}{'minus float32, 95 %':26}{'':9}skipped steps")
    for policy, row in summary.items():
        line = f"{policy:18}{row['mean']:7.2f}{row['deviation']:6.2f}"
        line += _verdict(low <= row["mean"] <= high)
        text, verdict = "", ""
        if "interval" in row:
            below, above = row["interval"]
            text = f"{row['difference']:+.2f} [{below:+.2f}, {above:+.2f}]"
            verdict = _verdict(-BAND <= below <= above <= BAND)
        skipped = row["skipped_steps"]
        print(f"{line:40}{text:26}{verdict:9}{min(skipped)} to {max(skipped)}", flush=True)


def _verdict(is_within: bool) -> str:
    return " within" if is_within else " OUTSIDE"


def read_data(folder: Path, names: Sequence[str] | None) -> dict[str, NodeData]:
    """Returns data sets by name: those that are named, or those whose files are there.

    Raises:
      FileNotFoundError: files of one that is named are missing, or of all.
    """
    found, faults = {}, []
    for name in PLANETOID if names is None else names:
        try:
            found[name] = read_planetoid(folder, name)
        except FileNotFoundError as fault:
            if names is not None:
                raise
            faults.append(fault)
    if not found:
        raise faults[0]
    for fault in faults:
        print(f"left out: {fault}", flush=True)
    return found


def main() -> None:
    """Prints each seed and the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=DATA, help="of Planetoid's files")
    parser.add_argument("--datasets", nargs="+", choices=PLANETOID, help="default: those whose files are there")
    parser.add_argument("--synthetic", action="store_true", help="synthetic data, to try the program")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, help="upper limit, to try the program")
    parser.add_argument("--models", nargs="+", default=list(PAPERS), choices=list(PAPERS))
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds {args.seeds}: an interval needs 2 at least")
    try:
        found = {"cora": synthetic_cora()} if args.synthetic else read_data(args.data_dir, args.datasets)
    except FileNotFoundError as error:
        parser.error(str(error))

    jax.config.update("jax_threefry_partitionable", False)  # half of an epoch would draw dropout
    report: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    for name, data in found.items():
        report[name] = {}
        for model in args.models:
            paper = PAPERS[model]
            if args.epochs is not None:
                paper = dataclasses.replace(paper, epochs=args.epochs)
            print(f"{name}, {model}", flush=True)
            results = {policy: run_seeds(data, name, model, policy, args.seeds, paper) for policy in args.policies}
            summary, published = summarize(results), paper.accuracies[name]
            print_summary(published, summary)
            report[name][model] = {"published": published, "summary": summary, "seeds": results}
            if args.json is not None:
                write_results(args.json, report)


if __name__ == "__main__":
    main()
