"""Collects the log-probabilities of two functions, leaf by leaf, and measures their differences."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.pytrees import named_leaves

_ABOVE_ZERO = 0.05  # half-precision rounding may raise a log-probability of 0 by this much
# Bands of p_train / p_infer; maxtext requires the first.
BANDS = ((0.999, 1.002), (0.99, 1.01), (0.95, 1.05))
QUANTILES = (0.5, 0.9, 0.99, 0.999)
_LEAST, _MOST = -8, 1  # the range of the histogram, as powers of ten
EDGES = tuple(10.0 ** (i / 2) for i in range(2 * _LEAST, 2 * _MOST + 1))
_WORST = 10


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
            "0, so they are not log-probabilities; apply jax.nn.log_softmax to logits, and exclude padding with `where`"
        )


def _at(path: str) -> str:
    return repr(path) if path else "the result"


@dataclasses.dataclass(frozen=True)
class TokenDifference:
    """A token with a large difference of its log-probabilities.

    Attributes:
      path: the path of its leaf; empty if the functions return an array.
      index: its index in the leaf.
      train: its log-probability in training.
      infer: its log-probability in inference.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> report = jt.parity(lambda x: x, lambda x: x.at[1].add(-2.0), -jnp.ones(3), operations=False)
      >>> report.worst
      (TokenDifference(path='', index=(1,), train=-1.0, infer=-3.0),)
    """

    path: str
    index: tuple[int, ...]
    train: float
    infer: float


@dataclasses.dataclass(frozen=True)
class Differences:
    """The distribution of |log p_train - log p_infer|.

    Tokens that are NaN, or -inf in only one function, are counted and lie outside of all bands. The other statistics
    leave them out. Tokens that are -inf in both functions do not differ.

    Attributes:
      n_tokens: the number of compared tokens.
      n_nan: the number of tokens for which at least one function returns NaN.
      n_infinite: the number of tokens for which only one function returns -inf.
      mean: the mean of the differences.
      median: the median of the differences.
      maximum: the maximum of the differences.
      quantiles: fraction of the tokens -> the difference that this fraction does not exceed.
      bands: bounds of the ratio of probabilities, p_train / p_infer -> the fraction of the tokens within them.
      kl: the estimate k3 of the KL divergence of training from inference, for tokens sampled in inference: the mean of
        r - 1 - log(r), where r is the ratio (J. Schulman, "Approximating KL Divergence", 2020).
      histogram: the number of differences below the first of the `EDGES`, then from each one to the next, and finally
        from the last one on.
      worst: the tokens with the largest differences, largest first; NaN and infinities precede all others.
    """

    n_tokens: int
    n_nan: int
    n_infinite: int
    mean: float
    median: float
    maximum: float
    quantiles: dict[float, float]
    bands: dict[tuple[float, float], float]
    kl: float
    histogram: tuple[int, ...]
    worst: tuple[TokenDifference, ...]


def differences_of(tokens: Tokens) -> Differences:
    """Returns the distribution of differences."""
    with np.errstate(invalid="ignore"):
        log_ratio = np.where(tokens.train == tokens.infer, 0.0, tokens.train - tokens.infer)  # two infinities are equal
    size = np.abs(log_ratio)
    finite = np.isfinite(size)
    kept, ratio = size[finite], log_ratio[finite]
    quantiles = np.quantile(kept, QUANTILES) if kept.size else np.full(len(QUANTILES), math.nan)
    order = np.argsort(-np.where(finite, size, np.inf), kind="stable")[:_WORST]
    return Differences(
        n_tokens=len(size),
        n_nan=int(np.isnan(size).sum()),
        n_infinite=int(np.isinf(size).sum()),
        mean=_of(np.mean, kept),
        median=_of(np.median, kept),
        maximum=_of(np.max, kept),
        quantiles={share: float(x) for share, x in zip(QUANTILES, quantiles, strict=True)},
        bands={band: _share_within(ratio, band, len(size)) for band in BANDS},
        kl=_of(np.mean, np.expm1(ratio) - ratio),
        histogram=tuple(int(n) for n in np.histogram(kept, (-1, *EDGES, np.inf))[0]),
        worst=tuple(_token(tokens, int(i)) for i in order if size[i] != 0),
    )


def _of(function: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    return float(function(values)) if values.size else math.nan


def _share_within(log_ratio: np.ndarray, band: tuple[float, float], count: int) -> float:
    low, high = np.log(band)
    return float(((log_ratio >= low) & (log_ratio <= high)).sum() / count)


def _token(tokens: Tokens, number: int) -> TokenDifference:
    return TokenDifference(*tokens.place(number), float(tokens.train[number]), float(tokens.infer[number]))
