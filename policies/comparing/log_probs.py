"""Collects the log-probabilities of two functions, leaf by leaf, and refuses results that cannot be compared."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.pytrees import named_leaves

_ABOVE_ZERO = 0.05  # half-precision rounding may raise a log-probability of 0 by this much


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Log-probabilities of the compared tokens.

    Attributes:
      train: float64 [tokens].
      infer: float64 [tokens].
      paths: the paths of the leaves.
      leaf: the number of each token's leaf.
      index: the index of each token in its flattened leaf.
      shapes: the shapes of the leaves.
    """

    train: np.ndarray
    infer: np.ndarray
    paths: tuple[str, ...]
    leaf: np.ndarray
    index: np.ndarray
    shapes: tuple[tuple[int, ...], ...]

    def place(self, token: int) -> tuple[str, tuple[int, ...]]:
        """Returns the path of a token's leaf and the token's index in it."""
        leaf = int(self.leaf[token])
        return self.paths[leaf], tuple(int(i) for i in np.unravel_index(self.index[token], self.shapes[leaf]))


def tokens_of(train: Any, infer: Any, where: Any) -> Tokens:
    """Returns the tokens to compare in the results of two functions.

    Args:
      train: a pytree of log-probabilities.
      infer: another one.
      where: None, an array of booleans that broadcasts to each leaf, or a pytree of such.

    Raises:
      TypeError: a leaf is not an array of floats, or a leaf of `where` is not an array of booleans.
      ValueError: structures or shapes differ, a log-probability is above 0, or `where` selects no token.
    """
    first, second = (_leaves(tree, name) for tree, name in ((train, "train_fn"), (infer, "infer_fn")))
    _check_same_paths(train, infer, {name for name, _ in first}, {name for name, _ in second})
    masks = _masks(where, train)
    kept: list[tuple[np.ndarray, ...]] = []
    for number, ((path, x), (_, y), mask) in enumerate(zip(first, second, masks, strict=True)):
        if x.shape != y.shape:
            raise ValueError(f"{_at(path)}: train_fn returns shape {x.shape}, infer_fn {y.shape}")
        seen = np.flatnonzero(_broadcast(mask, x.shape, path))
        for values, name in ((x, "train_fn"), (y, "infer_fn")):
            _check_not_positive(values, seen, path, name)
        kept.append((x.ravel()[seen], y.ravel()[seen], np.full(len(seen), number), seen))
    columns = [np.concatenate(column) for column in zip(*kept, strict=True)]
    if not columns or not len(columns[0]):
        raise ValueError("no token is left to compare: where is False everywhere, or the functions return no array")
    paths, shapes = tuple(path for path, _ in first), tuple(x.shape for _, x in first)
    return Tokens(columns[0], columns[1], paths, columns[2], columns[3], shapes)


def _leaves(tree: Any, name: str) -> list[tuple[str, np.ndarray]]:
    found = []
    for path, leaf in named_leaves(tree):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            got = type(leaf).__name__ if dtype is None else f"{dtype} {tuple(leaf.shape)}"
            raise TypeError(f"{name} must return log-probabilities as arrays of floats; {_at(path)} is {got}")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(f"{name}: {_at(path)} is spread over several processes; parity runs in one")
        found.append((path, np.asarray(leaf).astype(np.float64)))
    return found


def _check_same_paths(train: Any, infer: Any, first: set[str], second: set[str]) -> None:
    if jax.tree.structure(train) == jax.tree.structure(infer):
        return
    parts = [
        f"only {name} returns {', '.join(map(repr, sorted(paths)))}"
        for name, paths in (("train_fn", first - second), ("infer_fn", second - first))
        if paths
    ]
    shown = "; ".join(parts) or f"{jax.tree.structure(train)} and {jax.tree.structure(infer)}"
    raise ValueError(f"train_fn and infer_fn must return the same structure: {shown}")


def _masks(where: Any, like: Any) -> list[Any]:
    """Returns one mask per leaf, True for the tokens to compare."""
    count = len(jax.tree.leaves(like))
    if where is None:
        return [True] * count
    if isinstance(where, jax.Array | np.ndarray | np.bool_ | bool):
        return [where] * count
    if jax.tree.structure(where) != jax.tree.structure(like):
        raise ValueError(
            f"where must be an array, or a tree as the functions return: {jax.tree.structure(where)} is not "
            f"{jax.tree.structure(like)}"
        )
    return jax.tree.leaves(where)


def _broadcast(mask: Any, shape: tuple[int, ...], path: str) -> np.ndarray:
    mask = np.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"where must be boolean, True where a token counts; {_at(path)} has {mask.dtype}")
    try:
        return np.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(f"where of shape {mask.shape} does not broadcast to {_at(path)} {shape}") from None


def _check_not_positive(values: np.ndarray, seen: np.ndarray, path: str, name: str) -> None:
    positive = seen[values.ravel()[seen] > _ABOVE_ZERO]
    if positive.size:
        index = tuple(int(i) for i in np.unravel_index(positive[0], values.shape))
        raise ValueError(
            f"{name}: {_at(path)} at {index} is {values[index]:g}, and {positive.size} of {seen.size} tokens are above "
            "0: these are no log-probabilities; logits need jax.nn.log_softmax, and padding a where"
        )


def _at(path: str) -> str:
    return repr(path) if path else "the result"
