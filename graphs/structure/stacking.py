"""Stacks: graphs of one structure in arrays with one more axis, to distribute over devices and micro-batches."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.structure.adjacency import Adjacency
from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import change_nodes, find_nodes, named_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GraphStack:
    """Several graphs of the same structure and shapes, a pytree whose arrays are [count, ...].

    A batch that is sharded along its first axis is split between the graphs of a stack, and a train step passes single
    graphs to the loss function. Create it with `stack`. `jax.vmap` and `jax.lax.scan` run over
    `stack.graphs`.

    Args:
      graphs: the stacked graph or tree, with arrays [count, ...].

    Example:
      >>> import jax
      >>> from jmp_train.graphs import from_edges, stack
      >>> pair = stack([from_edges([0, 1], [1, 0], 2), from_edges([1, 0], [1, 0], 2)])
      >>> len(pair), jax.vmap(lambda graph: graph.in_degrees.sum())(pair.graphs).tolist()
      (2, [2, 2])
    """

    graphs: Any

    def __len__(self) -> int:
        """Number of graphs."""
        return jax.tree.leaves(self.graphs)[0].shape[0]

    def __getitem__(self, place: int) -> Any:
        """Returns one of the graphs.

        Args:
          place: index of the graph; negative ones count from the end.

        Raises:
          IndexError: there is none.
        """
        count = len(self)
        if not -count <= place < count:
            raise IndexError(f"graph {place} is out of range for a stack of {count} graphs")
        return jax.tree.map(lambda x: x[place], self.graphs)


def stack(graphs: Sequence[Any]) -> GraphStack:
    """Returns graphs as one stack, for the batch of a step on several devices or with micro-batches.

    Args:
      graphs: graphs of ours or jraph's, or any trees of arrays that contain graphs, such as dictionaries of a
        `Block` and the features of its nodes; all of the same structure, shapes and dtypes. Use `pad` for
        graphs of different sizes.

    Returns:
      The stack, in the order of the graphs; in the host's memory if all of them are.

    Raises:
      ValueError: there are no graphs, or one differs from the first; the message has the difference.

    Example:
      >>> from jmp_train.graphs import from_edges, pad
      >>> sizes = [([0, 1], [1, 1], 2), ([0], [1], 3)]
      >>> len(stack([pad(from_edges(*size), n_node=4, n_edge=8) for size in sizes]))
      2
    """
    if not isinstance(graphs, Sequence) or isinstance(graphs, str | bytes):
        raise TypeError(f"graphs must be a sequence of graphs, got {type(graphs).__name__}")
    if not len(graphs):
        raise ValueError("graphs is empty: a stack has at least one graph")
    graphs = _with_one_rule_on_zero_in_degree(graphs)
    for place, graph in enumerate(graphs[1:], 1):
        _check_alike(graphs[0], graph, f"graphs[{place}]")
    if not jax.tree.leaves(graphs[0]):
        raise ValueError("graphs have no arrays")
    return GraphStack(jax.tree.map(lambda *arrays: _stacked(arrays), *graphs))


def unstack(stack: GraphStack) -> list[Any]:
    """Returns the graphs of a stack.

    Args:
      stack: from `stack`.

    Raises:
      TypeError: the argument is not a stack.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> [graph.senders.tolist() for graph in unstack(stack([from_edges([1], [0], 2)] * 2))]
      [[1], [1]]
    """
    if not isinstance(stack, GraphStack):
        raise TypeError(f"stack must be a result of graphs.stack, got {type(stack).__name__}")
    return [stack[place] for place in range(len(stack))]


def _with_one_rule_on_zero_in_degree(graphs: Sequence[Any]) -> list[Any]:
    """Returns graphs that all claim a node without incoming edges if one of them does."""
    adjacencies = [[node for _, node in find_nodes(graph, Adjacency)] for graph in graphs]
    known = {node.has_zero_in_degree for nodes in adjacencies for node in nodes}
    if len(known) < 2:
        return list(graphs)
    common = True if True in known else None
    change = functools.partial(dataclasses.replace, has_zero_in_degree=common)
    return [change_nodes(graph, Adjacency, change) for graph in graphs]


def _stacked(arrays: Sequence[Any]) -> Any:
    on_host = all(isinstance(array, np.ndarray | np.generic) for array in arrays)
    return (np if on_host else jnp).stack(arrays)


def _check_alike(first: PyTree, other: PyTree, name: str) -> None:
    shapes, others = (
        {path: (jnp.shape(x), jnp.result_type(x)) for path, x in named_leaves(tree)} for tree in (first, other)
    )
    for path in [*shapes, *others]:
        wanted, came = (_described(found.get(path)) for found in (shapes, others))
        if wanted != came:
            raise ValueError(f"{name} differs from graphs[0]: {path!r} is {came}, not {wanted}; pad graphs to one size")
    wanted, came = jax.tree.structure(first), jax.tree.structure(other)
    if wanted != came:
        raise ValueError(
            f"{name} has another structure than graphs[0]; pad graphs to one size:\n  {came}\nnot\n  {wanted}"
        )


def _described(found: Any) -> str:
    return "missing" if found is None else f"{found[1]}{list(found[0])}"
