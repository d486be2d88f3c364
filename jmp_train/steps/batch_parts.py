"""Splits batches into equal parts along their first axis: micro-batches, or parts of devices."""

import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.policies.pytrees import change_nodes, find_nodes, named_leaves, path_name
from jmp_train.types import Batch


def check_divides(batch: Batch, count: int, what: str) -> None:
    """Raises ValueError if a batch cannot be split into equal parts, and TypeError if that would split a graph.

    Args:
      batch: arrays [examples, ...], and stacks of graphs.
      count: number of parts.
      what: beginning of the message, names the source of that number.
    """
    check_no_graph(batch, what)
    for path, stack in find_nodes(batch, _stacks()):
        if len(stack) % count:
            raise ValueError(
                f"{what} must divide the graphs of every stack of the batch; {path or '(root)'!r} has {len(stack)}"
            )
    for path, x in named_leaves(batch):
        if jnp.shape(x)[:1] == (0,):
            raise ValueError(f"the batch has no examples: {path or '(root)'!r} has shape {jnp.shape(x)}")
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] % count:
            raise ValueError(
                f"{what} must divide the first axis of every leaf of the batch; "
                f"{path or '(root)'!r} has shape {jnp.shape(x)}"
            )


def warn_of_split(batch: Batch, count: int) -> None:
    """Warns if a batch looks as if it was already split over the devices: each would take its part as one example.

    There is no warning if all arrays have the same rank, because they may be sequences.

    Args:
      batch: arrays [examples, ...] that divide, as passed to the function that calls this one.
      count: number of devices.
    """
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    firsts = {shape[:2] for shape in shapes}
    if count == 1 or len(set(map(len, shapes))) == 1 or len(firsts) != 1 or find_nodes(batch, _stacks()):
        return
    ((rows, size),) = firsts
    if rows == count and size > 1:
        warnings.warn(
            f"all arrays of the batch are [{count}, {size}, ...], as if split over the {count} devices already: "
            "here a batch is whole, and split along its first axis. If it was split, "
            "jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch) makes it whole",
            stacklevel=3,
        )


def in_parts(batch: Batch, count: int) -> Any:
    """Returns arrays [count, examples / count, ...] of a batch that passed `check_divides`."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)


def without_shares(batch: Batch) -> Any:
    """Returns the part of a batch that is split into micro-batches, with None in place of `ShardedFeatures`.

    Args:
      batch: any tree.
    """
    return change_nodes(batch, _shares(), lambda shares: None)


def with_shares(part: Batch, batch: Batch) -> Any:
    """Returns a micro-batch with the `ShardedFeatures` of the batch, whole.

    Args:
      part: a part of `without_shares(batch)`.
      batch: the whole batch.
    """

    def is_shares(node: object) -> bool:
        return isinstance(node, _shares())

    return jax.tree.map(lambda node, x: node if is_shares(node) else x, batch, part, is_leaf=is_shares)


def check_no_graph(batch: Batch, what: str) -> None:
    """Raises TypeError if a batch has a graph outside a stack, for callers that split or draw examples.

    Args:
      batch: any tree.
      what: beginning of the message, names the caller.
    """
    kinds = _stacks()

    def is_end(node: object) -> bool:
        return isinstance(node, kinds) or _is_graph(node)

    for path, node in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_end):
        if _is_graph(node):
            raise TypeError(
                f"{what} would split the {type(node).__name__} at {path_name(path) or '(root)'!r} of the batch "
                "along its first axis; pass one whole graph for each device and micro-batch with "
                "jmp_train.graphs.stack([...])"
            )


def unstacked(batch: Batch, accumulate_steps: int) -> Any:
    """Returns a micro-batch with each stack replaced by its one graph.

    Args:
      batch: one micro-batch of one device.
      accumulate_steps: number of micro-batches, for the message.

    Raises:
      ValueError: a stack does not have exactly one graph.
    """
    for path, stack in find_nodes(batch, _stacks()):
        if len(stack) != 1:
            raise ValueError(
                f"{path or '(root)'!r} of the batch must have one graph for each micro-batch of a device, got "
                f"{len(stack)}; stack as many as devices times accumulate_steps={accumulate_steps}"
            )
    return change_nodes(batch, _stacks(), lambda stack: stack[0])


# A user with a graph has loaded its module already; `import jmp_train` waits neither for it nor for the layers.
def _stacks() -> Any:
    graphs = sys.modules.get("jmp_train.graphs")
    return () if graphs is None else (graphs.GraphStack,)


def _shares() -> Any:
    graphs = sys.modules.get("jmp_train.graphs")
    return () if graphs is None else (graphs.ShardedFeatures,)


def _is_graph(node: Any) -> bool:
    """Returns whether a node is one graph, ours or jraph's. The ids of graphs stacked by hand have one more axis."""
    if {"senders", "receivers", "n_node"} <= {*getattr(node, "_fields", ())}:
        return getattr(node.senders, "ndim", 0) < 2
    graphs = sys.modules.get("jmp_train.graphs")
    if graphs is None or not isinstance(node, graphs.Graph | graphs.HeteroGraph | graphs.Block):
        return False
    adjacency = node.connections
    each = list(adjacency.values()) if isinstance(node, graphs.HeteroGraph) else [adjacency]
    return all(jnp.ndim(one.in_degrees) < 2 for one in each)
