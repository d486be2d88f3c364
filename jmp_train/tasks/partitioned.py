"""A task on one graph partitioned over devices: each has its rows of nodes, and exchanges those that others need."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmp_train.graphs.partitioning import PartitionedGraph, partition
from jmp_train.graphs.sampling import HostEdges
from jmp_train.graphs.structure import Graph
from jmp_train.task import DATA_AXIS, Arrays, Task


def over_devices(
    task: Task,
    graph: Callable[[], Graph | HostEdges],
    features: Callable[[], np.ndarray],
    devices: int,
    formats: Sequence[str],
) -> Task:
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
        return partition(graph(), devices, axis=DATA_AXIS, formats=formats)

    def prepare(examples: Arrays) -> Arrays:
        labels = np.full(cut().nodes.size, -1, np.int32)
        labels[cut().places[examples["node"]]] = examples["label"]
        return {"label": labels}

    def shared() -> dict[str, Any]:
        return {"graph": cut().parts, "features": cut().take(features())}

    return dataclasses.replace(task, prepare=prepare, shared=shared, shards_shared=True)
