"""Batches cut into equal parts along their first axis: micro-batches, or what each device gets."""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.policies.nodes import change_nodes, find_nodes
from jmp_train.policies.paths import named_leaves, path_name


def check_divides(batch: Any, count: int, what: str) -> None:
    """Raises ValueError where a batch does not fall into equal parts, and TypeError where that cuts a graph.

    Args:
      batch: arrays [rows, ...], and stacks of graphs.
      count: how many parts there are to be.
      what: the beginning of the message, what gives that number.
    """
    check_no_graph(batch, what)
    for path, stack in find_nodes(batch, _stacks()):
        if len(stack) % count:
            raise ValueError(
                f"{what} must divide the graphs of every stack of the batch; {path or '(root)'!r} has {len(stack)}"
            )
    for path, x in named_leaves(batch):
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] % count:
            raise ValueError(
                f"{what} must divide the first axis of every leaf of the batch; "
                f"{path or '(root)'!r} has shape {jnp.shape(x)}"
            )


def in_parts(batch: Any, count: int) -> Any:
    """Returns arrays [count, rows / count, ...] of a batch that `check_divides` let pass."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)


def check_no_graph(batch: Any, what: str) -> None:
    """Raises TypeError where rows are cut, or drawn, and there is a graph among them that is none of a stack.

    Args:
      batch: any tree.
      what: the beginning of the message, what cuts it.
    """
    kinds = _stacks()

    def is_end(node: Any) -> bool:
        return isinstance(node, kinds) or _is_graph(node)

    for path, node in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_end):
        if _is_graph(node):
            raise TypeError(
                f"{what} would cut the {type(node).__name__} at {path_name(path) or '(root)'!r} of the batch through "
                "the middle, row by row: jmp_train.graphs.stack([...]) holds one whole graph for each device and "
                "micro-batch"
            )


def unstacked(batch: Any, accumulate_steps: int) -> Any:
    """Returns a micro-batch with the one graph of each stack in place of the stack.

    Args:
      batch: one micro-batch of one device.
      accumulate_steps: for the message.

    Raises:
      ValueError: a stack has another number of graphs than one.
    """
    for path, stack in find_nodes(batch, _stacks()):
        if len(stack) != 1:
            raise ValueError(
                f"{path or '(root)'!r} of the batch has {len(stack)} graphs for each micro-batch of a device, and "
                f"must have one: as many as there are devices, times accumulate_steps={accumulate_steps}"
            )
    return change_nodes(batch, _stacks(), lambda stack: stack[0])


# Who has a graph has loaded its module; `import jmp_train` does not wait for that, nor for the layers.
def _stacks() -> Any:
    graphs = sys.modules.get("jmp_train.graphs")
    return () if graphs is None else (graphs.GraphStack,)


def _is_graph(node: Any) -> bool:
    """Whether it is one graph, ours or jraph's: of several that are stacked by hand ids have a further axis."""
    if {"senders", "receivers", "n_node"} <= {*getattr(node, "_fields", ())}:
        return getattr(node.senders, "ndim", 0) < 2
    graphs = sys.modules.get("jmp_train.graphs")
    if graphs is None or not isinstance(node, graphs.Graph | graphs.HeteroGraph | graphs.Block):
        return False
    connections = node.connections
    each = list(connections.values()) if isinstance(node, graphs.HeteroGraph) else [connections]
    return all(jnp.ndim(one.in_degrees) < 2 for one in each)
