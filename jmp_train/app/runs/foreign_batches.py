"""Converts batches of other libraries' loaders (torch tensors, grain iterators) to arrays, and checks them."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jmp_train.graphs.structure import GraphStack
from jmp_train.policies.pytrees import named_leaves

_BYTES = "base64"  # the key of bytes in JSON


BatchKind = tuple[Any, list[str]]
"""The tree structure of a batch, and path, dtype and number of axes of each array."""


def kind_of(batch: Any) -> BatchKind:
    """Returns what all batches of a run have in common."""
    arrays = [f"{path or 'the array'!r} {x.dtype} {x.ndim}D" for path, x in named_leaves(batch)]
    return jax.tree.structure(batch), arrays


def check_alike(found: BatchKind, first: BatchKind, where: str) -> None:
    """Raises ValueError unless a batch is of the kind of the first one.

    Args:
      found: the kind of the batch.
      first: the kind of the first batch.
      where: name of the batch.
    """
    if found != first:
        has, had = (str(kind[0]) if found[1] == first[1] else ", ".join(kind[1]) for kind in (found, first))
        raise ValueError(f"{where} has other arrays than the first batch: {has}; the first batch has {had}")


def as_arrays(batch: Any, where: str) -> Any:
    """Returns a batch with tensors of other libraries as arrays, without a copy if they are in the host's memory.

    Args:
      batch: tree of arrays or tensors.
      where: name of the batch.

    Raises:
      TypeError: a leaf is neither; the message names it.
    """
    paths = [path for path, _ in named_leaves(batch)]
    leaves, structure = jax.tree.flatten(batch)
    if not leaves:
        raise TypeError(f"{where} has no arrays: it is a {type(batch).__name__}")
    return structure.unflatten([_as_array(leaf, path, where) for path, leaf in zip(paths, leaves, strict=True)])


def _as_array(leaf: Any, path: str, where: str) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf
    wanted = f"{where}: {path or 'the batch'!r} must be an array of numbers"
    if not (hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__")):
        is_plain = isinstance(leaf, int | float | str | bytes)
        hint = "; a Hugging Face data set has them after with_format('numpy')" if is_plain else ""
        raise TypeError(f"{wanted}, got a {type(leaf).__name__}{hint}")
    try:
        array = np.asarray(leaf)
    except TypeError:  # for torch's bfloat16, which NumPy lacks
        return jax.numpy.from_dlpack(leaf)
    if array.dtype.kind in "OSUmM":
        raise TypeError(f"{wanted}, got an array of dtype {array.dtype}")
    return array


def placed(batch: Any, sharding: NamedSharding | None, where: str) -> Any:
    """Returns a batch on the devices.

    Args:
      batch: tree of arrays; each of several processes has the whole batch.
      sharding: sharding of the first axis; None for the first device.
      where: name of the batch.

    Raises:
      ValueError: an axis cannot be divided over the devices.
    """
    if sharding is None:
        return jax.device_put(batch)  # uncommitted, like a new state; otherwise a step would be compiled twice
    count = sharding.mesh.size
    for path, leaf in named_leaves(batch):
        if not leaf.ndim or leaf.shape[0] % count:
            raise ValueError(
                f"{where}: {path or 'the array'!r} has shape {leaf.shape}; devices={count} must divide its first axis"
            )
    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    hosts = jax.tree.map(np.asarray, batch)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), hosts)


def examples_in(batch: Any) -> int | None:
    """Returns the common length of the first axes of a batch; None if they differ, or the batch has graphs.

    Example:
      >>> examples_in({"x": np.ones((8, 3)), "y": np.ones(8)}), examples_in({"x": np.ones(8), "y": np.ones(7)})
      (8, None)
    """
    nodes = jax.tree.leaves(batch, is_leaf=lambda node: isinstance(node, GraphStack))
    if any(isinstance(node, GraphStack) for node in nodes):
        return None  # its first axis counts parts of a batch
    rows = {leaf.shape[:1] for leaf in nodes}
    return next(iter(rows))[0] if len(rows) == 1 and rows != {()} else None


def length_of(batches: Any) -> int | None:
    """Returns the number of batches of an iterable; None if it has no length."""
    try:
        return len(batches)
    except TypeError:
        return None


def iterator_state(iterator: Iterator[Any]) -> Any:
    """Returns the state of a grain iterator as JSON data; None for iterators without one."""
    get_state = getattr(iterator, "get_state", None)
    if get_state is None or not hasattr(iterator, "set_state"):
        return None
    state = get_state()
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError):
        return None


def restore_iterator(iterator: Iterator[Any], state: Any) -> bool:
    """Sets an iterator's state; returns False if there is none, so that the caller must skip batches.

    Args:
      iterator: a new iterator.
      state: from `iterator_state`.
    """
    if state is None or not hasattr(iterator, "set_state"):
        return False
    if isinstance(state, dict) and state.keys() == {_BYTES}:
        state = base64.b64decode(state[_BYTES])
    iterator.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]
    return True
