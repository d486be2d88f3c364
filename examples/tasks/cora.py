"""Classifies the papers of Cora, Citeseer or Pubmed: `jmp-train compare examples/tasks/cora.py --synthetic`.

Of Cora, 140 papers are labeled, and 1,000 are evaluated. The models and their hyperparameters are those of the papers
on GCN and GAT, and of DGL's example of GraphSAGE. A step takes the whole graph, so it is an epoch; a batch is the
labeled nodes. `benchmarks/planetoid.py` reproduces the published accuracies.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from flax import nnx
from models import (
    GAT,
    GCN,
    SAGE,
    WEIGHT_DECAY,
    Accuracy,
    adam_with_l2,
    node_classifier,
    node_examples,
    over_devices,
)
from task_options import FileOptions

import jmp_train as jt
from jmp_train.graphs import NodeData, add_self_loop, normalize_rows, read_planetoid, sparse_features
from jmp_train.graphs.datasets import PLANETOID, PLANETOID_ADDRESS, synthetic_cora
from jmp_train.graphs.structure import Graph, from_edges


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A model and its paper's hyperparameters.

    Attributes:
      make: returns the model, given the features' width, the number of classes and random streams.
      learning_rate: Adam's learning rate.
      decayed: the path of the only parameter with an L2 term in the loss; None for all of them.
      weight_decay: the factor of that term.
    """

    make: Callable[..., nnx.Module]  # in_features, classes, rngs
    learning_rate: float
    decayed: str | None = None
    weight_decay: float = WEIGHT_DECAY


def gat(in_features: int, classes: int, rngs: nnx.Rngs, last_heads: int = 1) -> GAT:
    """Returns the GAT of Velickovic et al., https://arxiv.org/abs/1710.10903: 8 heads of 8, then 1; dropout 0.6.

    Its weights are initialized as in their code: Glorot uniform for each head. Their code also drops
    0.6 of the values that attention adds, and has a bias in each logit; the paper has neither.

    Args:
      in_features: the width of a node's features.
      classes: number of logits per node.
      rngs: flax's streams.
      last_heads: number of heads of the last layer.
    """
    model = GAT(in_features, 8, classes, (8, last_heads), feature_dropout=0.6, attention_dropout=0.6, rngs=rngs)
    for layer in model.layers:
        (fan_in, _), (_, _, width) = layer.weight.shape, layer.left.shape
        for param, fans in (
            (layer.weight, fan_in + width),
            (layer.left, width + 1),
            (layer.right, width + 1),
        ):
            bound = (6 / fans) ** 0.5
            param[...] = jax.random.uniform(rngs.params(), param.shape, param.dtype, -bound, bound)
    return model


RECIPES: Mapping[str, Recipe] = {
    # Kipf and Welling, https://arxiv.org/abs/1609.02907.
    "gcn": Recipe(partial(GCN, hidden=16, dropout=0.5, use_bias=False), learning_rate=0.01, decayed="first/weight"),
    "gat": Recipe(gat, learning_rate=0.005),
    # DGL's example of GraphSAGE, https://github.com/dmlc/dgl, examples/pytorch/graphsage/train_full.py.
    "sage": Recipe(partial(SAGE, hidden=16, aggregator="gcn", dropout=0.5), learning_rate=0.01),
}
OF_DATASETS: Mapping[tuple[str, str], Recipe] = {  # for which a paper has other hyperparameters
    ("gat", "pubmed"): Recipe(partial(gat, last_heads=8), learning_rate=0.01, weight_decay=1e-3),
}


@dataclasses.dataclass(frozen=True)
class Options(FileOptions):
    """Options of the job.

    Args:
      model: the model.
      dataset: the data set: Cora, Citeseer or Pubmed, in any case.
      sparse: sparse features, which are faster if there are many words: a paper of Citeseer has 32 of 3,703.
      devices: number of parts into which the graph is split, one per device.
    """

    model: Literal["gcn", "gat", "sage"] = "gcn"
    dataset: str = dataclasses.field(default="Cora", metadata={"identity": False})  # the data's digest identifies it
    sparse: bool = False
    devices: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset.lower() not in PLANETOID:
            raise ValueError(f"dataset={self.dataset!r} must be one of {', '.join(PLANETOID)}")
        if self.synthetic and self.dataset.lower() != "cora":
            raise ValueError(f"dataset={self.dataset!r} has no synthetic data; only cora does")


def task(options: Options) -> jt.Task:
    """Returns the task with the data of `options.data_dir`, or with synthetic data; moves nothing to a device."""
    name = options.dataset.lower()
    data = synthetic_cora() if options.synthetic else read_planetoid(_folder(options, name), name)
    whole = make_task(data, options.model, name, sparse=options.sparse)
    formats = ("coo", "csr")
    devices = 1 if options.sparse else options.devices  # sparse features cannot be split
    return over_devices(whole, lambda: make_graph(data), lambda: normalize_rows(data.features), devices, formats)


def make_task(data: NodeData, model: str, dataset: str = "cora", *, sparse: bool = False) -> jt.Task:
    """Returns the task of training one of the models on a graph.

    Args:
      data: the graph, with features that are not normalized.
      model: one of `RECIPES`.
      dataset: the data set's name: for Pubmed, the GAT's paper has another recipe.
      sparse: whether features are sparse, with the same results up to rounding.

    Example:
      >>> task = make_task(synthetic_cora(), "gcn")
      >>> len(task.train["label"]), task.test["label"].shape, sorted(task.shared())
      (140, (1000,), ['features', 'graph'])
    """
    recipe = OF_DATASETS.get((model, dataset), RECIPES[model])
    width = data.features.shape[1]

    def make(key: jax.Array) -> nnx.Module:
        return recipe.make(in_features=width, classes=data.num_classes, rngs=nnx.Rngs(key))

    def shared() -> dict[str, Any]:
        features = normalize_rows(data.features)
        return {"graph": make_graph(data), "features": sparse_features(features) if sparse else features}

    init, predict, loss_fn = node_classifier(make)
    return jt.Task(
        train=node_examples(data, data.train),
        test=node_examples(data, data.test),
        init=init,
        loss_fn=loss_fn,
        metrics=Accuracy(predict),
        learning_rate=recipe.learning_rate,
        optimizer=adam_with_l2(optax.constant_schedule(recipe.learning_rate), recipe.decayed, recipe.weight_decay),
        epochs=200,
        shared=shared,
    )


def make_graph(data: NodeData) -> Graph:
    """Returns the graph with a self-loop at each node.

    Args:
      data: the edges, with or without self-loops.
    """
    return add_self_loop(from_edges(data.senders, data.receivers, data.num_nodes))


def _folder(options: Options, name: str) -> Path:
    files = f"the folder of ind.{name}.x and the other seven files"
    return options.folder(files, f"; Planetoid's files are public in {PLANETOID_ADDRESS}")
