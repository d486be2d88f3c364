"""The functions of tasks that classify nodes or graphs: losses, an optimizer, and a graph partitioned over devices."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_train as jt
from jmp_train.graphs import NodeData, PartitionedGraph, partition
from jmp_train.graphs.sampling import HostEdges
from jmp_train.graphs.structure import Graph, GraphPart, GraphStack
from jmp_train.policies import Params
from jmp_train.steps import ModelState

WEIGHT_DECAY = 5e-4
Init = Callable[[jax.Array], tuple[Any, Any]]
LossFn = Callable[..., Any]
Predict = Callable[..., jax.Array]


def node_classifier(make: Callable[[jax.Array], nnx.Module]) -> tuple[Init, Predict, LossFn]:
    """Returns the functions of a task for a model that classifies nodes: `init`, `predict` and `loss_fn`.

    A batch has a "graph", the "features" of all its nodes, and "node", the nodes to classify. Or it has a
    device's part of a graph, the features of its own rows, and their labels, -1 for rows that are not
    classified; then there are logits of all own rows.

    Args:
      make: returns the model for a key; its call takes `(graph, features, rngs=None)`.
    """

    @functools.cache  # called later, because it starts the device
    def structure() -> Any:
        return nnx.split(nnx.eval_shape(make, jax.random.key(0)), nnx.Param, ...)

    def init(key: jax.Array) -> tuple[Any, None]:
        return nnx.state(make(key), nnx.Param), None

    def predict(
        params: Params, model_state: ModelState, batch: Mapping[str, Any], rng: jax.Array | None = None
    ) -> jax.Array:
        del model_state
        # The layers' own random streams stay shapes, because nothing draws from them.
        graphdef, _, streams = structure()
        model = nnx.merge(graphdef, params, streams)
        rngs = None if rng is None else nnx.Rngs(dropout=rng)
        logits = model(batch["graph"], batch["features"], rngs=rngs)
        return logits if isinstance(batch["graph"], GraphPart) else logits[batch["node"]]

    return init, predict, cross_entropy(predict)


def cross_entropy(predict: Predict) -> LossFn:
    """Returns a loss function: the mean cross-entropy of a batch's labels, or of all devices' labels of a split graph.

    Args:
      predict: `predict(params, model_state, batch, rng) -> logits [batch, classes]`; the key is for dropout,
        if there is any.
    """

    def loss_fn(
        params: Params, model_state: ModelState, batch: Mapping[str, Any], rng: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        logits, labels = predict(params, model_state, batch, rng).astype(jnp.float32), batch["label"]
        graph = batch.get("graph")
        if not isinstance(graph, GraphPart):
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (model_state, None)
        has_label = labels >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        count = jax.lax.pmean(has_label.sum().astype(jnp.float32), graph.axis_name)  # the mean over the devices
        return jnp.where(has_label, losses, 0).sum() / count, (model_state, None)

    return loss_fn


def graph_classifier(
    make: Callable[[jax.Array, str | None], nnx.Module], axis_name: str | None = None
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Returns the functions of a task for a model that classifies graphs: `init`, `predict` and `loss_fn`.

    A batch has a padded "graph" and the "label" of each of its first graphs; or, for several devices, a stack of such
    graphs, and the labels of all of them.

    Args:
      make: returns the model for a key and the axis of its batch norms; its call takes `(graph, train=False,
        rngs=None)`.
      axis_name: the axis of the batch norms in training.
    """

    @cache  # called later, because it starts the device
    def structure(axis: str | None) -> Any:
        return nnx.split(nnx.eval_shape(lambda key: make(key, axis), jax.random.key(0)), nnx.Param, nnx.BatchStat, ...)

    def init(key: jax.Array) -> tuple[Any, Any]:
        _, params, statistics, _ = nnx.split(make(key, None), nnx.Param, nnx.BatchStat, ...)
        return params, statistics

    def model_of(params: Params, model_state: ModelState, axis: str | None) -> Any:
        definition, _, _, streams = structure(axis)
        return nnx.merge(definition, params, model_state, streams)

    def loss_fn(
        params: Params, model_state: ModelState, batch: Mapping[str, Any], rng: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        model = model_of(params, model_state, axis_name)
        rngs = None if rng is None else nnx.Rngs(dropout=rng)
        labels = batch["label"]
        logits = model(batch["graph"], train=True, rngs=rngs)[: len(labels)].astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, (nnx.state(model, nnx.BatchStat), None)

    def predict(params: Params, model_state: ModelState, batch: Mapping[str, Any]) -> jax.Array:
        def of_graph(graph: Graph, count: int) -> jax.Array:
            return model_of(params, model_state, None)(graph)[:count]

        graph, count = batch["graph"], len(batch["label"])
        if not isinstance(graph, GraphStack):
            return of_graph(graph, count)
        logits = jax.lax.map(lambda one: of_graph(one, count // len(graph)), graph.graphs)
        return logits.reshape(count, -1)

    return init, predict, loss_fn


def adam_with_l2(
    learning_rate: optax.ScalarOrSchedule, decayed: str | None = None, weight_decay: float = WEIGHT_DECAY
) -> optax.GradientTransformation:
    """Returns torch's Adam with `weight_decay`, which is added to the gradient, not to the step.

    It equals Adam on the loss plus half of `weight_decay` times the parameters' squares.

    Args:
      learning_rate: a number or a schedule.
      decayed: the path of the only parameter that decays; None for all.
      weight_decay: the factor.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> optimizer, weights = adam_with_l2(0.5), jnp.array([3.0, -1.0])
      >>> with jax.numpy_dtype_promotion("standard"):  # optax's own code promotes
      ...     updates, _ = optimizer.update(jnp.zeros(2), optimizer.init(weights), weights)
      >>> updates.round(3).tolist()  # the decay went through Adam, which makes all the same size
      [-0.5, 0.5]
    """

    def is_decayed(params: Params) -> Any:
        def is_it(path: Any, _: object) -> bool:
            return jax.tree_util.keystr(path[:-1], simple=True, separator="/") == decayed  # the last key is "value"

        return jax.tree_util.tree_map_with_path(is_it, params)

    mask = None if decayed is None else is_decayed
    return optax.chain(optax.add_decayed_weights(weight_decay, mask), optax.adam(learning_rate))


def node_examples(data: NodeData, nodes: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a batch of some nodes, without the entries that all batches share.

    Args:
      data: has the labels.
      nodes: int32 [batch].
    """
    return {"node": nodes, "label": data.labels[nodes]}


def over_devices(
    task: jt.Task,
    graph: Callable[[], Graph | HostEdges],
    features: Callable[[], np.ndarray],
    devices: int,
    formats: Sequence[str],
) -> jt.Task:
    """Returns a task of node classification with its graph partitioned over devices.

    Args:
      task: the task, whose examples have "node" and "label".
      graph: returns the graph, or its edges in the host's memory.
      features: returns the features of all nodes.
      devices: number of devices; with 1, the task itself is returned.
      formats: see `partition`.
    """
    if devices == 1:
        return task

    @functools.cache  # called later, because it is slow
    def cut() -> PartitionedGraph:
        return partition(graph(), devices, axis="data", formats=formats)

    def prepare(examples: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        labels = np.full(cut().nodes.size, -1, np.int32)
        labels[cut().places[examples["node"]]] = examples["label"]
        return {"label": labels}

    def shared() -> dict[str, Any]:
        return {"graph": cut().parts, "features": cut().take(features())}

    return dataclasses.replace(task, prepare=prepare, shared=shared, shards_shared=True)
